"""Experts of a single row: matrix times vector, each active slot's weights read once by all SMs together.

With one row every active slot has exactly one pair, so block b of the index is pair b whatever the block size; where
the outputs are summed the pairs may stay in the order of the choices: nothing needs sorting (`choices_of_one`).  The
weights stream through registers (no tensor core has work to do here); programs are many and small, several per SM,
so that enough loads are in flight to fill the memory bus.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from epmoe.ops.block_schedule import BlockSchedule
from epmoe.ops.gate_up_gemm import activate
from epmoe.ops.grouped_gemm import GATE_BLOCK
from epmoe.ops.launch import gdc_launch_dependents, gdc_wait, pdl_options, wait_for_inputs
from epmoe.ops.moe_index import MoEIndex


@triton.jit(do_not_specialize=["L"])
def vector_gate_up_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    block_slot_ptr,
    L,
    D,
    F,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[m, f]`` for COLS features of pair ``program_id(1)``."""
    feature = tl.program_id(0) * COLS + tl.arange(0, COLS)
    block = feature // GATE_BLOCK
    run = tl.minimum(F - block * GATE_BLOCK, GATE_BLOCK)
    k = tl.arange(0, DEPTH)
    wait_for_inputs(PDL)
    pair = tl.program_id(1)
    slot = tl.load(block_slot_ptr + pair)
    if (slot >= 0) & (slot < L):
        gate_row = slot.to(tl.int64) * 2 * F + block * 2 * GATE_BLOCK + feature % GATE_BLOCK
        gate_ptrs = weight_ptr + gate_row[:, None] * D + k[None, :]
        up_ptrs = gate_ptrs + (run * D)[:, None]
        gate, up = tl.zeros([COLS, DEPTH], tl.float32), tl.zeros([COLS, DEPTH], tl.float32)
        for at in range(0, D, DEPTH):
            inside = at + k < D
            mask = None if EVEN else inside[None, :] & (feature < F)[:, None]
            other = None if EVEN else 0.0
            x = tl.load(x_ptr + at + k, mask=inside, other=0.0).to(tl.float32)[None, :]
            gate += tl.load(gate_ptrs + at, mask=mask, other=other, eviction_policy="evict_first").to(tl.float32) * x
            up += tl.load(up_ptrs + at, mask=mask, other=other, eviction_policy="evict_first").to(tl.float32) * x
        value = activate(tl.sum(gate, 1), tl.sum(up, 1), ACT)
        out_ptrs = out_ptr + pair.to(tl.int64) * F + feature
        tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=feature < F)


@triton.jit
def _step_weights(weight_ptr, block_slot_ptr, pos_ptr, step, steps, column, at, D, F, REDUCE: tl.constexpr, PAIR):
    """Weights of one step and where its activations are: pair (-1: none) and columns."""
    pair = PAIR
    if REDUCE:
        pair = tl.load(pos_ptr + step // steps)
    slot = tl.load(block_slot_ptr + tl.maximum(pair, 0)).to(tl.int64)
    pair = tl.where(slot >= 0, pair, -1)
    f = (step % steps) * at.shape[0] + at
    width = tl.where(pair >= 0, F, 0)
    ptrs = weight_ptr + (slot * D + column)[:, None] * F + f[None, :]
    mask = (column < D)[:, None] & (f < width)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first"), pair, f


@triton.jit(do_not_specialize=["L"])
def vector_down_kernel(
    act_ptr,
    weight_ptr,
    out_ptr,
    block_slot_ptr,
    pos_ptr,
    mix_ptr,
    L,
    D,
    F,
    K: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    REDUCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """COLS columns of ``out[m]``, or (REDUCE) of ``y = sum_j mix[j] * out[pos[j]]`` without rounding in between.

    The index was written two kernels ahead, so the first weights are fetched before this kernel's wait: the kernel
    between, `vector_gate_up_kernel`, lets this one start only when the index is complete.
    """
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, DEPTH)
    steps = tl.cdiv(F, DEPTH)
    total = steps * K if REDUCE else steps
    own = tl.program_id(1)
    if not REDUCE:
        own = tl.where(tl.load(block_slot_ptr + own) < L, own, -1)
    weights, pair, f = _step_weights(weight_ptr, block_slot_ptr, pos_ptr, 0, steps, column, k, D, F, REDUCE, own)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([COLS, DEPTH], tl.float32)
    for step in range(total):
        act = tl.load(act_ptr + pair.to(tl.int64) * F + f, mask=f < tl.where(pair >= 0, F, 0), other=0.0)
        act = act.to(tl.float32)
        if REDUCE:
            act *= tl.where(pair >= 0, tl.load(mix_ptr + step // steps), 0.0)
        now = weights
        ahead = tl.minimum(step + 1, total - 1)
        weights, pair, f = _step_weights(
            weight_ptr, block_slot_ptr, pos_ptr, ahead, steps, column, k, D, F, REDUCE, own
        )
        acc += now.to(tl.float32) * act[None, :]
    value = tl.sum(acc, 1).to(out_ptr.dtype.element_ty)
    if REDUCE:
        tl.store(out_ptr + column, value, mask=column < D)
    else:
        tl.store(out_ptr + own.to(tl.int64) * D + column, value, mask=column < tl.where(own >= 0, D, 0))


def choices_of_one(slot_1K: torch.Tensor) -> MoEIndex:
    """One row's choices as they are, int32 local slots or -1, for `vector_gate_up` and the sum of `vector_down`."""
    pos_1K = _ascending(slot_1K.shape[1], slot_1K.device)
    return MoEIndex(slot_1K[0], pos_1K[0], pos_1K, BlockSchedule(1, slot_1K[0], slot_1K[0]))


@lru_cache
def _ascending(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)[None]


def vector_gate_up(x_1D: torch.Tensor, index: MoEIndex, weights, act: str, tile: tuple) -> torch.Tensor:
    """Activated features ``[K, F]`` of one row; ``tile`` = (features, depth, warps) of a program."""
    slots, hidden, features = weights.down.shape
    cols, depth, warps = tile
    out_KF = x_1D.new_empty((index.row_M.numel(), features))
    vector_gate_up_kernel[(triton.cdiv(features, cols), out_KF.shape[0])](
        x_1D,
        weights.gate_up,
        out_KF,
        index.blocks.slot_B,
        slots,
        hidden,
        features,
        COLS=cols,
        DEPTH=depth,
        EVEN=hidden % depth == 0 and features % cols == 0,
        ACT=act,
        num_warps=warps,
        **pdl_options(x_1D),
    )
    return out_KF


def vector_down(act_KF, index: MoEIndex, weights, mix_1K: torch.Tensor | None, tile: tuple) -> torch.Tensor:
    """Unweighted outputs ``[K, D]``, or with weights ``mix_1K`` their sum ``[1, D]`` in ascending choice order."""
    slots, hidden, features = weights.down.shape
    cols, depth, warps = tile
    pairs = act_KF.shape[0]
    reduce = mix_1K is not None
    out = act_KF.new_empty((1 if reduce else pairs, hidden))
    vector_down_kernel[(triton.cdiv(hidden, cols), 1 if reduce else pairs)](
        act_KF,
        weights.down,
        out,
        index.blocks.slot_B,
        index.pos_RK,
        mix_1K,
        slots,
        hidden,
        features,
        K=pairs,
        COLS=cols,
        DEPTH=depth,
        REDUCE=reduce,
        num_warps=warps,
        **pdl_options(act_KF),
    )
    return out
