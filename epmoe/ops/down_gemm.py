"""Second grouped GEMM: activated features times down, unweighted rows in pair order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.grouped_gemm import TileConfig, launch, locate, mma, rows_descriptor, takes_descriptors, zeros
from epmoe.ops.launch import wait_for_inputs
from epmoe.ops.moe_index import MoEIndex
from epmoe.ops.specialised_gemm import specialised_gemm


@triton.jit(do_not_specialize=["L"])
def down_kernel(
    act,
    weight,
    out_ptr,
    schedule,
    L,
    D,
    F,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[m] = act[m] @ down.T``, rounded to the model dtype.

    A short block multiplies rows of the next slot, or garbage, beyond its own: those results are never stored.
    """
    n_tiles = tl.cdiv(D, COLS)
    k = tl.arange(0, DEPTH)
    wait_for_inputs(PDL)
    tiles = tl.load(schedule[1] + L) * n_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        slot, first, stop, n = locate(tile, n_tiles, schedule, ROWS, GROUP)
        pair = first + tl.arange(0, ROWS)
        column = n * COLS + tl.arange(0, COLS)
        acc = zeros(ROWS, COLS, SWAP)
        if TMA:
            for at in range(0, F, DEPTH):
                acc = mma(act.load([first, at]), weight.load([slot * D + n * COLS, at]), acc, SWAP, PRECISION)
        else:
            act_ptrs = act + pair.to(tl.int64)[:, None] * F + k[None, :]
            weight_ptrs = weight + (slot.to(tl.int64) * D + column)[:, None] * F + k[None, :]
            for at in range(0, F, DEPTH):
                inside = (at + k < F)[None, :]
                rows = tl.load(act_ptrs, mask=inside & (pair < stop)[:, None], other=0.0)
                weights = tl.load(weight_ptrs, mask=inside & (column < D)[:, None], other=0.0)
                acc = mma(rows, weights, acc, SWAP, PRECISION)
                act_ptrs += DEPTH
                weight_ptrs += DEPTH
        out = acc.to(out_ptr.dtype.element_ty)
        if SWAP:
            out = out.T
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * D + column[None, :]
        tl.store(out_ptrs, out, mask=(pair < stop)[:, None] & (column < D)[None, :])


def down_triton(act_MF, index: MoEIndex, weights, config: TileConfig, num_sms: int = 0) -> torch.Tensor:
    """Unweighted expert outputs ``[M, D]`` in pair order; rows from the number of pairs on are undefined."""
    if config.specialised:
        return specialised_gemm(act_MF, index, weights.down, None, config.group, num_sms)
    slots, hidden, features = weights.down.shape
    out_MD = act_MF.new_empty((act_MF.shape[0], hidden))
    tma = takes_descriptors(weights, act_MF.device)
    weight = weights.down.view(-1, features)
    if tma:
        act_MF = rows_descriptor(act_MF, index.blocks.rows, config.depth)
        weight = rows_descriptor(weight, config.cols, config.depth)
    schedule = (index.offset_L1, index.blocks.offset_L1, index.blocks.slot_B)
    operands = (act_MF, weight, out_MD, schedule, slots, hidden, features)
    launch(down_kernel, operands, index, out_MD, config, num_sms, TMA=tma)
    return out_MD
