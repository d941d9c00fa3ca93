"""Grouped GEMMs of the MoE layer over blocks of pairs: gather | gate, up, activation, and down.

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

from epmoe.ops.gluon_gemm import gluon_gemm
from epmoe.ops.launch import has_hopper_features, is_hopper, pdl_options, sm_count, wait_for_inputs
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
    tail: int = 0
    """Tile rows of a slot's last block where they are enough; 0 = no such tiles."""
    flatten: bool = False
    """Let the loads of the next tile start under the end of this one."""
    specialised: bool = False
    """Use the warp-specialised kernel of gluon_gemm.py (blocks of 128; ``stages`` and ``group`` count)."""


@triton.jit
def _locate(tile, n_tiles, schedule, ROWS: tl.constexpr, GROUP: tl.constexpr):
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
def _mma(rows, weights, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc += rows @ weights.T, or its transpose."""
    if SWAP:
        return tl.dot(weights, rows.T, acc, input_precision=PRECISION)
    else:
        return tl.dot(rows, weights.T, acc, input_precision=PRECISION)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLS: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        return tl.zeros([COLS, ROWS], tl.float32)
    else:
        return tl.zeros([ROWS, COLS], tl.float32)


@triton.jit
def _activate(gate, up, ACT: tl.constexpr):
    if ACT == "silu":
        return gate * tl.sigmoid(gate) * up
    if ACT == "relu":
        return tl.maximum(gate, 0.0) * up
    if ACT == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(2.0 * inner) * up


@triton.jit
def _split(acc, ROWS: tl.constexpr, COLS: tl.constexpr, SWAP: tl.constexpr):
    """Accumulators of interleaved gate and up columns -> gate, up, ``[pairs, features]``."""
    if SWAP:
        gate, up = acc.reshape(COLS // 128, 2, 64, ROWS).permute(0, 2, 3, 1).split()
        return gate.reshape(COLS // 2, ROWS).T, up.reshape(COLS // 2, ROWS).T
    else:
        gate, up = acc.reshape(ROWS, COLS // 128, 2, 64).permute(0, 1, 3, 2).split()
        return gate.reshape(ROWS, COLS // 2), up.reshape(ROWS, COLS // 2)


@triton.jit
def _gate_up_tile(
    x_ptr,
    weight,
    out_ptr,
    row_ptr,
    place,
    D,
    F,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slot, first, stop, n = place
    FEATURES: tl.constexpr = COLS // 2
    k = tl.arange(0, DEPTH)
    pair = first + tl.arange(0, ROWS)
    row = tl.load(row_ptr + pair, mask=pair < stop, other=0).to(tl.int64)
    x_ptrs = x_ptr + row[:, None] * D + k[None, :]
    feature = n * FEATURES + tl.arange(0, FEATURES)
    if TMA:
        acc = _zeros(ROWS, COLS, SWAP)
        # Rows beyond the slot's pairs are zeros: they cost no traffic, and multiplying zeros costs less power.
        live = (pair < stop)[:, None]
        for at in range(0, D, DEPTH):
            if EVEN:
                rows = tl.load(x_ptrs, mask=live, other=0.0)
            else:
                rows = tl.load(x_ptrs, mask=live & (at + k < D)[None, :], other=0.0)
            acc = _mma(rows, weight.load([slot * 2 * F + n * COLS, at]), acc, SWAP, PRECISION)
            x_ptrs += DEPTH
        gate, up = _split(acc, ROWS, COLS, SWAP)
    else:
        # Feature f's gate row follows the 2 * 64 rows of each full block before it; its up row follows the run.
        block = feature // GATE_BLOCK
        run = tl.minimum(F - block * GATE_BLOCK, GATE_BLOCK)
        gate_row = slot.to(tl.int64) * 2 * F + block * 2 * GATE_BLOCK + feature % GATE_BLOCK
        gate_ptrs = weight + gate_row[:, None] * D + k[None, :]
        up_ptrs = gate_ptrs + (run * D)[:, None]
        gate, up = _zeros(ROWS, FEATURES, SWAP), _zeros(ROWS, FEATURES, SWAP)
        for at in range(0, D, DEPTH):
            inside = (at + k < D)[None, :]
            rows = tl.load(x_ptrs, mask=inside, other=0.0)
            mask = inside & (feature < F)[:, None]
            gate = _mma(rows, tl.load(gate_ptrs, mask=mask, other=0.0), gate, SWAP, PRECISION)
            up = _mma(rows, tl.load(up_ptrs, mask=mask, other=0.0), up, SWAP, PRECISION)
            x_ptrs += DEPTH
            gate_ptrs += DEPTH
            up_ptrs += DEPTH
        if SWAP:
            gate, up = gate.T, up.T
    value = _activate(gate, up, ACT).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * F + feature[None, :]
    tl.store(out_ptrs, value, mask=(pair < stop)[:, None] & (feature < F)[None, :])


@triton.jit(do_not_specialize=["L"])
def gate_up_kernel(
    x_ptr,
    weight,
    out_ptr,
    row_ptr,
    schedule,
    L,
    D,
    F,
    ROWS: tl.constexpr,
    TAIL: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    EVEN: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[m] = act(x[row[m]] @ gate.T) * (x[row[m]] @ up.T)``, rounded to the model dtype.

    A slot's last block takes tiles of TAIL pairs where that is enough (TAIL = ROWS: never).
    """
    n_tiles = tl.cdiv(F, COLS // 2)
    wait_for_inputs(PDL)
    tiles = tl.load(schedule[1] + L) * n_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        place = _locate(tile, n_tiles, schedule, ROWS, GROUP)
        if TAIL == ROWS or place[2] - place[1] > TAIL:
            _gate_up_tile(
                x_ptr, weight, out_ptr, row_ptr, place, D, F, ROWS, COLS, DEPTH, SWAP, TMA, EVEN, ACT, PRECISION
            )
        else:
            _gate_up_tile(
                x_ptr, weight, out_ptr, row_ptr, place, D, F, TAIL, COLS, DEPTH, SWAP, TMA, EVEN, ACT, PRECISION
            )


@triton.jit
def _down_tile(
    act,
    weight,
    out_ptr,
    place,
    D,
    F,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slot, first, stop, n = place
    k = tl.arange(0, DEPTH)
    pair = first + tl.arange(0, ROWS)
    column = n * COLS + tl.arange(0, COLS)
    acc = _zeros(ROWS, COLS, SWAP)
    if TMA:
        for at in range(0, F, DEPTH):
            acc = _mma(act.load([first, at]), weight.load([slot * D + n * COLS, at]), acc, SWAP, PRECISION)
    else:
        act_ptrs = act + pair.to(tl.int64)[:, None] * F + k[None, :]
        weight_ptrs = weight + (slot.to(tl.int64) * D + column)[:, None] * F + k[None, :]
        for at in range(0, F, DEPTH):
            inside = (at + k < F)[None, :]
            rows = tl.load(act_ptrs, mask=inside & (pair < stop)[:, None], other=0.0)
            weights = tl.load(weight_ptrs, mask=inside & (column < D)[:, None], other=0.0)
            acc = _mma(rows, weights, acc, SWAP, PRECISION)
            act_ptrs += DEPTH
            weight_ptrs += DEPTH
    out = acc.to(out_ptr.dtype.element_ty)
    if SWAP:
        out = out.T
    out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(out_ptrs, out, mask=(pair < stop)[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=["L"])
def down_kernel(
    act,
    act_tail,
    weight,
    out_ptr,
    schedule,
    L,
    D,
    F,
    ROWS: tl.constexpr,
    TAIL: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[m] = act[m] @ down.T``, unweighted, rounded to the model dtype.

    A short block multiplies rows of the next slot, or garbage, beyond its own: those results are never stored.
    """
    n_tiles = tl.cdiv(D, COLS)
    wait_for_inputs(PDL)
    tiles = tl.load(schedule[1] + L) * n_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        place = _locate(tile, n_tiles, schedule, ROWS, GROUP)
        if TAIL == ROWS or place[2] - place[1] > TAIL:
            _down_tile(act, weight, out_ptr, place, D, F, ROWS, COLS, DEPTH, SWAP, TMA, PRECISION)
        else:
            _down_tile(act_tail, weight, out_ptr, place, D, F, TAIL, COLS, DEPTH, SWAP, TMA, PRECISION)


def takes_descriptors(weights, device: torch.device) -> bool:
    """Whether both weights can be loaded by TMA: full gate blocks, 16-byte rows, Hopper or the interpreter."""
    hidden, features = weights.down.shape[1:]
    lanes = 16 // weights.down.element_size()
    aligned = features % GATE_BLOCK.value == 0 and hidden % lanes == 0
    return aligned and (device.type == "cpu" or has_hopper_features(device))


def takes_specialised(weights, device: torch.device, act: str) -> bool:
    """Whether the warp-specialised kernels apply: Hopper itself, SiLU, sizes that are multiples of 64."""
    hidden, features = weights.down.shape[1:]
    half = weights.down.dtype in (torch.bfloat16, torch.float16)
    return act == "silu" and half and hidden % 64 == 0 and features % 64 == 0 and is_hopper(device)


def _rows_descriptor(matrix: torch.Tensor, rows: int, depth: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, depth])


def _launch(kernel, operands: tuple, out: torch.Tensor, index: MoEIndex, config: TileConfig, num_sms: int, **more):
    blocks, device = index.blocks, out.device
    width = out.shape[1] * (2 if kernel is gate_up_kernel else 1)
    sms = min(num_sms, sm_count(device)) if num_sms else sm_count(device)
    grid = min(sms * config.per_sm, blocks.slot_B.numel() * triton.cdiv(width, config.cols))
    kernel[(grid,)](
        *operands,
        ROWS=blocks.rows,
        TAIL=config.tail or blocks.rows,
        COLS=config.cols,
        DEPTH=config.depth,
        GROUP=config.group,
        SWAP=config.swap,
        FLATTEN=config.flatten,
        PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        **pdl_options(out),
        **more,
    )


def gate_up_triton(rows_RD, index: MoEIndex, weights, config: TileConfig, act: str, num_sms: int = 0) -> torch.Tensor:
    """Activated features ``[M, F]`` in pair order; rows from the number of pairs on are undefined."""
    if config.specialised:
        return gluon_gemm(rows_RD, index, weights.gate_up, True, (config.stages, config.group), num_sms)
    slots, hidden, features = weights.down.shape
    out_MF = rows_RD.new_empty((index.row_M.numel(), features))
    tma = takes_descriptors(weights, rows_RD.device)
    weight = weights.gate_up.view(-1, hidden)
    weight = _rows_descriptor(weight, config.cols, config.depth) if tma else weight
    schedule = (index.offset_L1, index.blocks.offset_L1, index.blocks.slot_B)
    operands = (rows_RD, weight, out_MF, index.row_M, schedule, slots, hidden, features)
    more = {"TMA": tma, "EVEN": hidden % config.depth == 0, "ACT": act}
    _launch(gate_up_kernel, operands, out_MF, index, config, num_sms, **more)
    return out_MF


def down_triton(act_MF, index: MoEIndex, weights, config: TileConfig, num_sms: int = 0) -> torch.Tensor:
    """Unweighted expert outputs ``[M, D]`` in pair order; rows from the number of pairs on are undefined."""
    if config.specialised:
        return gluon_gemm(act_MF, index, weights.down, False, (config.stages, config.group), num_sms)
    slots, hidden, features = weights.down.shape
    out_MD = act_MF.new_empty((act_MF.shape[0], hidden))
    tma = takes_descriptors(weights, act_MF.device)
    weight, act, act_tail = weights.down.view(-1, features), act_MF, act_MF
    if tma:
        weight = _rows_descriptor(weight, config.cols, config.depth)
        act = _rows_descriptor(act_MF, index.blocks.rows, config.depth)
        act_tail = _rows_descriptor(act_MF, config.tail or index.blocks.rows, config.depth)
    schedule = (index.offset_L1, index.blocks.offset_L1, index.blocks.slot_B)
    operands = (act, act_tail, weight, out_MD, schedule, slots, hidden, features)
    _launch(down_kernel, operands, out_MD, index, config, num_sms, TMA=tma)
    return out_MD
