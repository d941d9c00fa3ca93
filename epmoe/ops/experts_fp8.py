"""The experts' MLP on block-scaled 8-bit weights, with activations quantised on the way.

Weights of a layer: ``gate_up`` float8 ``[L, 2F, D]``, interleaved as everywhere, with ``gate_up_scale`` float32
``[L, 2, F / 128, D / 128]`` (gate, then up); ``down`` float8 ``[L, D, F]`` with ``down_scale`` float32
``[L, D / 128, F / 128]``.  D and F are multiples of 128.

The arithmetic: rows are quantised in runs of 128 columns; each step of 128 along the reduction is summed by the tensor
cores, scaled, and added in float32; the activated values are quantised in runs of 128 features straight from the
accumulators, never rounded to the model dtype.

A tile has 128 weight rows, in two parts of 64 with accumulators of their own: the tensor cores' sum of one step then
needs registers for one part only, and of ``gate_up`` one part is gate and one is up.  The 128 features of a run are two
such tiles, which one program makes one after the other: several programs then fit on an SM, and while one of them
scales, another one multiplies.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from epmoe.ops.experts import ExpertOptions, activate_ref
from epmoe.ops.fp8 import BLOCK, dequantize, quantize_rows_ref, quantize_rows_triton, to_fp8
from epmoe.ops.gate_up_gemm import activate
from epmoe.ops.grouped_gemm import TileConfig, locate, rows_descriptor, zeros
from epmoe.ops.launch import pdl_options, sm_count, wait_for_inputs
from epmoe.ops.moe_index import MoEIndex, with_block_rows
from epmoe.ops.tiles import PINNED_ROWS, Choice

DEFAULT = ExpertOptions()
PART = 64
REGISTERS = 65536  # of an SM


class Fp8ExpertWeights(Protocol):
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor
    down_scale: torch.Tensor


def dequantize_gate_up(weights: Fp8ExpertWeights, slot: int) -> torch.Tensor:
    """Interleaved float32 ``[2F, D]`` of one slot."""
    features, hidden = weights.down.shape[2], weights.down.shape[1]
    sides = weights.gate_up[slot].view(features // 64, 2, 64, hidden).transpose(0, 1).reshape(2, features, hidden)
    whole = dequantize(sides, weights.gate_up_scale[slot], torch.float32)
    return whole.view(2, features // 64, 64, hidden).transpose(0, 1).reshape(2 * features, hidden)


def expert_mlp_fp8_ref(
    rows_RD: torch.Tensor, index: MoEIndex, weights: Fp8ExpertWeights, options: ExpertOptions = DEFAULT
) -> torch.Tensor:
    """Unweighted expert outputs ``[M, D]`` in pair order, by float32 products of dequantised values."""
    bounds = index.offset_L1.tolist()
    x_MD = _meant(*quantize_rows_ref(rows_RD.index_select(0, index.row_M[: bounds[-1]])))
    out_MD = rows_RD.new_empty(index.row_M.shape[0], rows_RD.shape[1])
    for slot, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        if start < stop:
            act_MF = activate_ref(x_MD[start:stop] @ dequantize_gate_up(weights, slot).T, options.act)
            down_DF = dequantize(weights.down[slot], weights.down_scale[slot], torch.float32)
            out_MD[start:stop] = _meant(*quantize_rows_ref(act_MF)) @ down_DF.T
    return out_MD


def _meant(stored_TC: torch.Tensor, scale_TB: torch.Tensor) -> torch.Tensor:
    return stored_TC.float() * scale_TB.repeat_interleave(BLOCK, 1)


@triton.jit
def _step(rows, weights, acc, scale, SWAP: tl.constexpr):
    """acc += one step's product, scaled; ``scale`` has a value per row."""
    if SWAP:
        return acc + tl.dot(weights, rows.T) * scale[None, :]
    else:
        return acc + tl.dot(rows, weights.T) * scale[:, None]


@triton.jit
def _features(x_ptrs, x_scale_ptrs, live, weight, at_row, scale_ptrs, steps, SWAP: tl.constexpr, ACT: tl.constexpr):
    """``act(x @ gate.T) * (x @ up.T)`` for 64 features, float32, transposed where SWAP."""
    gate_scale_ptr, up_scale_ptr = scale_ptrs
    ROWS: tl.constexpr = x_ptrs.shape[0]
    gate, up = zeros(ROWS, 64, SWAP), zeros(ROWS, 64, SWAP)
    x_scale = tl.load(x_scale_ptrs, mask=live, other=0.0)
    gate_scale, up_scale = tl.load(gate_scale_ptr), tl.load(up_scale_ptr)
    for step in range(steps):
        rows = tl.load(x_ptrs, mask=live[:, None], other=0.0)
        # The next step's scales are under way while this step multiplies.
        ahead = tl.minimum(step + 1, steps - 1)
        next_x_scale = tl.load(x_scale_ptrs + ahead, mask=live, other=0.0)
        next_gate_scale, next_up_scale = tl.load(gate_scale_ptr + ahead), tl.load(up_scale_ptr + ahead)
        gate = _step(rows, weight.load([at_row, step * 128]), gate, x_scale * gate_scale, SWAP)
        up = _step(rows, weight.load([at_row + 64, step * 128]), up, x_scale * up_scale, SWAP)
        x_scale, gate_scale, up_scale = next_x_scale, next_gate_scale, next_up_scale
        x_ptrs += 128
    return activate(gate, up, ACT)


@triton.jit(do_not_specialize=["L"])
def gate_up_fp8_kernel(
    x_ptr,
    x_scale_ptr,
    weight,
    weight_scale_ptr,
    out_ptr,
    out_scale_ptr,
    row_ptr,
    schedule,
    L,
    D,
    F,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    FLATTEN: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[m] = act(x[row[m]] @ gate.T) * (x[row[m]] @ up.T)``, quantised: a tile makes one run of 128 features."""
    runs, steps = F // 128, D // 128
    wait_for_inputs(PDL)
    tiles = tl.load(schedule[1] + L) * runs
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        slot, first, stop, n = locate(tile, runs, schedule, ROWS, GROUP)
        pair = first + tl.arange(0, ROWS)
        live = pair < stop
        row = tl.load(row_ptr + pair, mask=live, other=0).to(tl.int64)
        x_ptrs = x_ptr + row[:, None] * D + tl.arange(0, 128)[None, :]
        x_scale_ptrs = x_scale_ptr + row * steps
        gate_scale_ptr = weight_scale_ptr + (slot.to(tl.int64) * 2 * runs + n) * steps
        scale_ptrs = gate_scale_ptr, gate_scale_ptr + runs * steps
        at_row = slot * 2 * F + n * 256
        low = _features(x_ptrs, x_scale_ptrs, live, weight, at_row, scale_ptrs, steps, SWAP, ACT)
        high = _features(x_ptrs, x_scale_ptrs, live, weight, at_row + 128, scale_ptrs, steps, SWAP, ACT)
        axis: tl.constexpr = 0 if SWAP else 1
        largest = tl.maximum(tl.max(tl.abs(low), axis), tl.max(tl.abs(high), axis))
        low_stored, out_scale = to_fp8(low, tl.expand_dims(largest, axis))
        high_stored, out_scale = to_fp8(high, tl.expand_dims(largest, axis))
        if SWAP:
            low_stored, high_stored = low_stored.T, high_stored.T
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * F + n * 128 + tl.arange(0, 64)[None, :]
        tl.store(out_ptrs, low_stored, mask=live[:, None])
        tl.store(out_ptrs + 64, high_stored, mask=live[:, None])
        tl.store(out_scale_ptr + pair.to(tl.int64) * runs + n, out_scale.reshape(ROWS), mask=live)


@triton.jit(do_not_specialize=["L"])
def down_fp8_kernel(
    act,
    act_scale_ptr,
    weight,
    weight_scale_ptr,
    out_ptr,
    schedule,
    L,
    D,
    F,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[m] = act[m] @ down.T``, rounded to the model dtype; rows of other slots are multiplied, never stored."""
    n_tiles, steps = D // 128, F // 128
    wait_for_inputs(PDL)
    tiles = tl.load(schedule[1] + L) * n_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        slot, first, stop, n = locate(tile, n_tiles, schedule, ROWS, GROUP)
        pair = first + tl.arange(0, ROWS)
        live = pair < stop
        act_scale_ptrs = act_scale_ptr + pair.to(tl.int64) * steps
        scale_ptr = weight_scale_ptr + (slot.to(tl.int64) * n_tiles + n) * steps
        at_row = slot * D + n * 128
        low, high = zeros(ROWS, 64, SWAP), zeros(ROWS, 64, SWAP)
        scale = tl.load(act_scale_ptrs, mask=live, other=0.0) * tl.load(scale_ptr)
        for step in range(steps):
            rows = act.load([first, step * 128])
            ahead = tl.minimum(step + 1, steps - 1)
            next_act_scale, next_scale = (
                tl.load(act_scale_ptrs + ahead, mask=live, other=0.0),
                tl.load(scale_ptr + ahead),
            )
            low = _step(rows, weight.load([at_row, step * 128]), low, scale, SWAP)
            high = _step(rows, weight.load([at_row + 64, step * 128]), high, scale, SWAP)
            scale = next_act_scale * next_scale
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * D + n * 128 + tl.arange(0, 64)[None, :]
        low, high = low.to(out_ptr.dtype.element_ty), high.to(out_ptr.dtype.element_ty)
        if SWAP:
            low, high = low.T, high.T
        tl.store(out_ptrs, low, mask=live[:, None])
        tl.store(out_ptrs + 64, high, mask=live[:, None])


STREAM = TileConfig(cols=BLOCK, depth=BLOCK, warps=4, stages=4, per_sm=3, swap=True)
STREAM_FOUR = TileConfig(cols=BLOCK, depth=BLOCK, warps=4, stages=3, per_sm=4, swap=True)
STREAM_32 = TileConfig(cols=BLOCK, depth=BLOCK, warps=4, stages=3, per_sm=3, swap=True)
BLOCKED = TileConfig(cols=BLOCK, depth=BLOCK, warps=4, stages=3, per_sm=2)
BLOCKED_THREE = TileConfig(cols=BLOCK, depth=BLOCK, warps=4, stages=3, per_sm=3)
# By mean pairs per slot, up to: block rows, gate_up, down.
BY_MEAN = (
    (12, 16, STREAM, STREAM_FOUR),
    (40, 32, STREAM_32, STREAM_32),
    (160, 64, BLOCKED_THREE, BLOCKED_THREE),
    (float("inf"), 64, BLOCKED, BLOCKED),
)


def choose_fp8(rows_RD: torch.Tensor, pairs: int, weights: Fp8ExpertWeights, deterministic: bool = False) -> Choice:
    """Tiles for ``pairs`` pairs over the slots of ``weights``; one and the same in deterministic mode."""
    if deterministic:
        return Choice(PINNED_ROWS, BLOCKED, BLOCKED)
    slots, hidden, features = weights.down.shape
    _, rows, gate_up, down = next(row for row in BY_MEAN if pairs <= row[0] * slots)
    if down is STREAM_FOUR and min(pairs, slots) * (hidden // BLOCK) < 2 * sm_count(rows_RD.device):
        down = STREAM  # few tiles: more steps of each in flight
    if down is BLOCKED and features <= 1024:  # few steps: more programs hide the ends of tiles
        down = BLOCKED_THREE
    return Choice(rows, gate_up, down)


def _launch(kernel, operands: tuple, index: MoEIndex, tiles: int, config: TileConfig, num_sms: int, **more) -> None:
    """A persistent grid; ``tiles`` counts the tiles of one block of pairs."""
    device = operands[0].device if isinstance(operands[0], torch.Tensor) else operands[0].base.device
    sms = min(num_sms, sm_count(device)) if num_sms else sm_count(device)
    registers = min(REGISTERS // (config.per_sm * config.warps * 32) // 8 * 8, 255)  # that many programs fit an SM
    kernel[(min(sms * config.per_sm, index.blocks.slot_B.numel() * tiles),)](
        *operands,
        ROWS=index.blocks.rows,
        GROUP=config.group,
        SWAP=config.swap,
        FLATTEN=config.flatten,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=registers,
        **({"PDL": False} if num_sms else pdl_options(index.row_M)),  # see grouped_gemm.launch
        **more,
    )


def gate_up_fp8_triton(rows_RD, index: MoEIndex, weights, config: TileConfig, act: str, num_sms: int = 0) -> tuple:
    """Activated features of each pair, float8 ``[M, F]`` and scales ``[M, F / 128]``; undefined beyond the pairs."""
    slots, hidden, features = weights.down.shape
    x_RD, x_scale_RB = quantize_rows_triton(rows_RD)
    out_MF = x_RD.new_empty((index.row_M.numel(), features))
    out_scale_MB = x_scale_RB.new_empty((index.row_M.numel(), features // BLOCK))
    weight = rows_descriptor(weights.gate_up.view(-1, hidden), PART, BLOCK)
    schedule = (index.offset_L1, index.blocks.offset_L1, index.blocks.slot_B)
    operands = (x_RD, x_scale_RB, weight, weights.gate_up_scale, out_MF, out_scale_MB, index.row_M, schedule)
    sizes = (slots, hidden, features)
    _launch(gate_up_fp8_kernel, (*operands, *sizes), index, features // BLOCK, config, num_sms, ACT=act)
    return out_MF, out_scale_MB


def down_fp8_triton(act: tuple, index: MoEIndex, weights, config: TileConfig, num_sms: int, dtype) -> torch.Tensor:
    """Unweighted outputs ``[M, D]`` in pair order; rows from the number of pairs on are undefined."""
    act_MF, act_scale_MB = act
    slots, hidden, features = weights.down.shape
    out_MD = act_MF.new_empty((act_MF.shape[0], hidden), dtype=dtype)
    rows = rows_descriptor(act_MF, index.blocks.rows, BLOCK)
    weight = rows_descriptor(weights.down.view(-1, features), PART, BLOCK)
    schedule = (index.offset_L1, index.blocks.offset_L1, index.blocks.slot_B)
    operands = (rows, act_scale_MB, weight, weights.down_scale, out_MD, schedule, slots, hidden, features)
    _launch(down_fp8_kernel, operands, index, hidden // BLOCK, config, num_sms)
    return out_MD


def expert_mlp_fp8_triton(
    rows_RD: torch.Tensor,
    index: MoEIndex,
    weights: Fp8ExpertWeights,
    options: ExpertOptions = DEFAULT,
    choice: Choice | None = None,
) -> torch.Tensor:
    """`expert_mlp_fp8_ref` in two or three kernels, without a host synchronisation."""
    pairs = index.row_M.numel()
    if not pairs:
        return torch.empty_like(rows_RD[:0])
    choice = choice or options.tiles(rows_RD, pairs, weights, choose_fp8)
    index = with_block_rows(index, choice.rows)
    act = gate_up_fp8_triton(rows_RD.contiguous(), index, weights, choice.gate_up, options.act, options.num_sms)
    return down_fp8_triton(act, index, weights, choice.down, options.num_sms, rows_RD.dtype)


def expert_mlp_fp8(
    rows_RD: torch.Tensor, index: MoEIndex, weights: Fp8ExpertWeights, options: ExpertOptions = DEFAULT
) -> torch.Tensor:
    """`expert_mlp_fp8_ref`; the kernels on CUDA."""
    return (expert_mlp_fp8_triton if rows_RD.is_cuda else expert_mlp_fp8_ref)(rows_RD, index, weights, options)
