"""What the two grouped GEMMs of the MoE layer share: tiles over blocks of pairs, weights by TMA or by pointers.

A persistent grid walks tiles (block of pairs, block of weight rows).  Within a slot the tiles of ``GROUP`` pair blocks
run side by side, so that they read a tile of weights from memory once and from L2 after that.  Everything that
depends on counts is read on the device from the `BlockSchedule`.  Two forms of the weight load: tensor descriptors
(TMA; needs ``F % 64 == 0`` and 16-byte rows) and plain pointers, which take any shape.  ``SWAP`` makes the weights the
left operand, so that a tile may have as few as 16 pairs and still use the wide tensor-core instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from epmoe.ops.launch import has_hopper_features, pdl_options, sm_count
from epmoe.ops.moe_index import MoEIndex

GATE_BLOCK: tl.constexpr = tl.constexpr(64)


@dataclass(frozen=True)
class TileConfig:
    """Shape of one grouped GEMM's tiles: ``cols`` counts weight rows (for gate and up together, at least 128)."""

    cols: int
    depth: int
    warps: int
    stages: int
    per_sm: int = 1
    """Programs per SM of the persistent grid."""
    swap: bool = False
    group: int = 8
    """Pair blocks whose tiles run side by side."""
    flatten: bool = False
    """Let the loads of the next tile start under the end of this one."""
    specialised: bool = False
    """The kernel of specialised_gemm.py, for blocks of 128 pairs; of the rest only ``group`` counts."""


@triton.jit
def locate(tile, n_tiles, schedule, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Tile number -> (slot, first pair, end of the slot's pairs, column block)."""
    offset_ptr, block_offset_ptr, block_slot_ptr = schedule
    slot = tl.load(block_slot_ptr + tile // n_tiles)
    block = tl.load(block_offset_ptr + slot)
    blocks = tl.load(block_offset_ptr + slot + 1) - block
    local = tile - block * n_tiles
    group = local // (GROUP * n_tiles)
    height = min(blocks - group * GROUP, GROUP)
    local -= group * GROUP * n_tiles
    first = tl.load(offset_ptr + slot) + (group * GROUP + local % height) * ROWS
    return slot, first, tl.load(offset_ptr + slot + 1), local // height


@triton.jit
def mma(rows, weights, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc += rows @ weights.T, or its transpose."""
    if SWAP:
        return tl.dot(weights, rows.T, acc, input_precision=PRECISION)
    else:
        return tl.dot(rows, weights.T, acc, input_precision=PRECISION)


@triton.jit
def zeros(ROWS: tl.constexpr, COLS: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        return tl.zeros([COLS, ROWS], tl.float32)
    else:
        return tl.zeros([ROWS, COLS], tl.float32)


def takes_descriptors(weights, device: torch.device) -> bool:
    """Whether both weights can be loaded by TMA: full gate blocks, 16-byte rows, Hopper or the interpreter."""
    hidden, features = weights.down.shape[1:]
    lanes = 16 // weights.down.element_size()
    aligned = features % GATE_BLOCK.value == 0 and hidden % lanes == 0
    return aligned and (device.type == "cpu" or has_hopper_features(device))


def rows_descriptor(matrix: torch.Tensor, rows: int, depth: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, depth])


def launch(kernel, operands: tuple, index: MoEIndex, out: torch.Tensor, config: TileConfig, num_sms: int, **more):
    """Run ``kernel`` with a persistent grid: ``out`` has a column per feature or hidden dimension.

    Where SMs are to stay free (``num_sms``) the launch is an ordinary one: the programs of a dependent launch would
    start early and wait on just those SMs.
    """
    blocks, device = index.blocks, out.device
    assert not blocks.tail, blocks
    width = out.shape[1] * more.pop("rows_per_column", 1)
    sms = min(num_sms, sm_count(device)) if num_sms else sm_count(device)
    grid = min(sms * config.per_sm, blocks.slot_B.numel() * triton.cdiv(width, config.cols))
    kernel[(grid,)](
        *operands,
        ROWS=blocks.rows,
        COLS=config.cols,
        DEPTH=config.depth,
        GROUP=config.group,
        SWAP=config.swap,
        FLATTEN=config.flatten,
        PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        **({"PDL": False} if num_sms else pdl_options(out)),
        **more,
    )
