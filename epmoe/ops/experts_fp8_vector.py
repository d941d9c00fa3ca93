"""8-bit experts of a single row: matrix times vector, each active slot's weights read once by all SMs together.

With one row every active slot has exactly one pair, so block b of the index is pair b whatever the block size.  The
row, and the activated values between the two products, are rounded to 8 bits in runs of 128 as everywhere, by every
program for itself: that costs less than a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.fp8 import BLOCK, to_fp8
from epmoe.ops.gate_up_gemm import activate
from epmoe.ops.launch import pdl_options, wait_for_inputs
from epmoe.ops.moe_index import MoEIndex


@triton.jit
def _rounded_runs(ptr, run, runs):
    """Runs of 128 values from ``ptr``, as 8-bit floats mean them: float32 ``[RUNS, 128]``, zeros beyond ``runs``."""
    k = tl.arange(0, 128)
    x = tl.load(ptr + run[:, None] * 128 + k[None, :], mask=(run < runs)[:, None], other=0.0).to(tl.float32)
    stored, scale = to_fp8(x, tl.max(tl.abs(x), 1)[:, None])
    return stored.to(tl.float32) * scale


@triton.jit(do_not_specialize=["L"])
def vector_gate_up_fp8_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    block_slot_ptr,
    L,
    D,
    F,
    COLS: tl.constexpr,
    RUNS: tl.constexpr,
    EVEN: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[m, f]`` float32 for COLS features of pair ``program_id(1)``; COLS divides 64."""
    first = tl.program_id(0) * COLS
    gate_row = first // 64 * 128 + first % 64 + tl.arange(0, COLS)
    runs = D // 128
    each, k = tl.arange(0, RUNS), tl.arange(0, 128)
    wait_for_inputs(PDL)
    pair = tl.program_id(1)
    slot = tl.load(block_slot_ptr + pair).to(tl.int64)
    if slot < L:
        gate_ptrs = weight_ptr + (slot * 2 * F + gate_row)[:, None, None] * D
        gate_ptrs += each[None, :, None] * 128 + k[None, None, :]
        gate_scale_ptrs = scale_ptr + (slot * 2 * (F // 128) + first // 128) * runs + each
        up_scale_ptrs = gate_scale_ptrs + (F // 128) * runs
        gate, up = tl.zeros([COLS, RUNS, 128], tl.float32), tl.zeros([COLS, RUNS, 128], tl.float32)
        for at in range(0, runs, RUNS):
            inside = at + each < runs
            mask = None if EVEN else inside[None, :, None]
            other = None if EVEN else 0.0
            gate_weights = tl.load(gate_ptrs + at * 128, mask=mask, other=other, eviction_policy="evict_first")
            up_weights = tl.load(gate_ptrs + 64 * D + at * 128, mask=mask, other=other, eviction_policy="evict_first")
            gate_scale = tl.load(gate_scale_ptrs + at, mask=inside, other=0.0)
            up_scale = tl.load(up_scale_ptrs + at, mask=inside, other=0.0)
            x = _rounded_runs(x_ptr, at + each, runs)
            gate += gate_weights.to(tl.float32) * (x * gate_scale[:, None])[None, :, :]
            up += up_weights.to(tl.float32) * (x * up_scale[:, None])[None, :, :]
        value = activate(tl.sum(tl.sum(gate, 2), 1), tl.sum(tl.sum(up, 2), 1), ACT)
        tl.store(out_ptr + pair.to(tl.int64) * F + first + tl.arange(0, COLS), value)


@triton.jit(do_not_specialize=["L"])
def vector_down_fp8_kernel(
    act_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    block_slot_ptr,
    L,
    D,
    F,
    COLS: tl.constexpr,
    RUNS: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """COLS columns of ``out[m]``, m = ``program_id(1)``; COLS divides 128."""
    first = tl.program_id(0) * COLS
    column = first + tl.arange(0, COLS)
    runs = F // 128
    each, k = tl.arange(0, RUNS), tl.arange(0, 128)
    wait_for_inputs(PDL)
    pair = tl.program_id(1).to(tl.int64)
    slot = tl.load(block_slot_ptr + pair).to(tl.int64)
    if slot < L:
        ptrs = weight_ptr + (slot * D + column)[:, None, None] * F + each[None, :, None] * 128 + k[None, None, :]
        scale_ptrs = scale_ptr + (slot * (D // 128) + first // 128) * runs + each
        acc = tl.zeros([COLS, RUNS, 128], tl.float32)
        for at in range(0, runs, RUNS):
            inside = at + each < runs
            mask = None if EVEN else inside[None, :, None]
            other = None if EVEN else 0.0
            weights = tl.load(ptrs + at * 128, mask=mask, other=other, eviction_policy="evict_first")
            scale = tl.load(scale_ptrs + at, mask=inside, other=0.0)
            act = _rounded_runs(act_ptr + pair * F, at + each, runs)
            acc += weights.to(tl.float32) * (act * scale[:, None])[None, :, :]
        value = tl.sum(tl.sum(acc, 2), 1)
        tl.store(out_ptr + pair * D + column, value.to(out_ptr.dtype.element_ty))


def vector_gate_up_fp8(x_1D: torch.Tensor, index: MoEIndex, weights, act: str, tile: tuple) -> torch.Tensor:
    """Activated features, float32 ``[K, F]``, of one row; ``tile`` = (features, runs of 128, warps) of a program."""
    slots, hidden, features = weights.down.shape
    cols, runs, warps = tile
    out_KF = x_1D.new_empty((index.row_M.numel(), features), dtype=torch.float32)
    vector_gate_up_fp8_kernel[(features // cols, out_KF.shape[0])](
        x_1D,
        weights.gate_up,
        weights.gate_up_scale,
        out_KF,
        index.blocks.slot_B,
        slots,
        hidden,
        features,
        COLS=cols,
        RUNS=runs,
        EVEN=hidden // BLOCK % runs == 0,
        ACT=act,
        num_warps=warps,
        **pdl_options(x_1D),
    )
    return out_KF


def vector_down_fp8(act_KF: torch.Tensor, index: MoEIndex, weights, tile: tuple, dtype: torch.dtype) -> torch.Tensor:
    """Unweighted outputs ``[K, D]``."""
    slots, hidden, features = weights.down.shape
    cols, runs, warps = tile
    out_KD = act_KF.new_empty((act_KF.shape[0], hidden), dtype=dtype)
    vector_down_fp8_kernel[(hidden // cols, act_KF.shape[0])](
        act_KF,
        weights.down,
        weights.down_scale,
        out_KD,
        index.blocks.slot_B,
        slots,
        hidden,
        features,
        COLS=cols,
        RUNS=runs,
        EVEN=features // BLOCK % runs == 0,
        num_warps=warps,
        **pdl_options(act_KF),
    )
    return out_KD
