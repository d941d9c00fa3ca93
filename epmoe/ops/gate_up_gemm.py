"""First grouped GEMM: gather hidden rows by index, multiply by gate and up, activate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.grouped_gemm import (
    GATE_BLOCK,
    TileConfig,
    launch,
    locate,
    mma,
    rows_descriptor,
    takes_descriptors,
    zeros,
)
from epmoe.ops.launch import wait_for_inputs
from epmoe.ops.moe_index import MoEIndex
from epmoe.ops.specialised_gemm import specialised_gemm


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
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

    Rows beyond the slot's pairs are zeros: they cost no traffic, and multiplying zeros costs less power, which is what
    limits a large product.
    """
    FEATURES: tl.constexpr = COLS // 2
    n_tiles = tl.cdiv(F, FEATURES)
    k = tl.arange(0, DEPTH)
    wait_for_inputs(PDL)
    tiles = tl.load(schedule[1] + L) * n_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        slot, first, stop, n = locate(tile, n_tiles, schedule, ROWS, GROUP)
        pair = first + tl.arange(0, ROWS)
        live = (pair < stop)[:, None]
        row = tl.load(row_ptr + pair, mask=pair < stop, other=0).to(tl.int64)
        x_ptrs = x_ptr + row[:, None] * D + k[None, :]
        feature = n * FEATURES + tl.arange(0, FEATURES)
        if TMA:
            acc = zeros(ROWS, COLS, SWAP)
            for at in range(0, D, DEPTH):
                if EVEN:
                    rows = tl.load(x_ptrs, mask=live, other=0.0)
                else:
                    rows = tl.load(x_ptrs, mask=live & (at + k < D)[None, :], other=0.0)
                acc = mma(rows, weight.load([slot * 2 * F + n * COLS, at]), acc, SWAP, PRECISION)
                x_ptrs += DEPTH
            gate, up = _split(acc, ROWS, COLS, SWAP)
        else:
            # Feature f's gate row follows the 2 * 64 rows of each full block before it; its up row follows the run.
            block = feature // GATE_BLOCK
            run = tl.minimum(F - block * GATE_BLOCK, GATE_BLOCK)
            gate_row = slot.to(tl.int64) * 2 * F + block * 2 * GATE_BLOCK + feature % GATE_BLOCK
            gate_ptrs = weight + gate_row[:, None] * D + k[None, :]
            up_ptrs = gate_ptrs + (run * D)[:, None]
            gate, up = zeros(ROWS, FEATURES, SWAP), zeros(ROWS, FEATURES, SWAP)
            for at in range(0, D, DEPTH):
                inside = (at + k < D)[None, :]
                rows = tl.load(x_ptrs, mask=live & inside, other=0.0)
                mask = inside & (feature < F)[:, None]
                gate = mma(rows, tl.load(gate_ptrs, mask=mask, other=0.0), gate, SWAP, PRECISION)
                up = mma(rows, tl.load(up_ptrs, mask=mask, other=0.0), up, SWAP, PRECISION)
                x_ptrs += DEPTH
                gate_ptrs += DEPTH
                up_ptrs += DEPTH
            if SWAP:
                gate, up = gate.T, up.T
        value = activate(gate, up, ACT).to(out_ptr.dtype.element_ty)
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * F + feature[None, :]
        tl.store(out_ptrs, value, mask=live & (feature < F)[None, :])


def gate_up_triton(rows_RD, index: MoEIndex, weights, config: TileConfig, act: str, num_sms: int = 0) -> torch.Tensor:
    """Activated features ``[M, F]`` in pair order; rows from the number of pairs on are undefined."""
    if config.specialised:
        return specialised_gemm(rows_RD, index, weights.gate_up, act, config.group, num_sms)
    slots, hidden, features = weights.down.shape
    out_MF = rows_RD.new_empty((index.row_M.numel(), features))
    tma = takes_descriptors(weights, rows_RD.device)
    weight = weights.gate_up.view(-1, hidden)
    weight = rows_descriptor(weight, config.cols, config.depth) if tma else weight
    schedule = (index.offset_L1, index.blocks.offset_L1, index.blocks.slot_B)
    operands = (rows_RD, weight, out_MF, index.row_M, schedule, slots, hidden, features)
    more = {"TMA": tma, "EVEN": hidden % config.depth == 0, "ACT": act, "rows_per_column": 2}
    launch(gate_up_kernel, operands, index, out_MF, config, num_sms, **more)
    return out_MF
