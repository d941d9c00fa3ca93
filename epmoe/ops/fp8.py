"""Block-scaled 8-bit floats: weights in blocks of 128 x 128, activations in runs of 128 columns of a row.

A stored value is ``float8_e4m3fn`` (largest 448); the value meant is the stored one times its block's float32 scale.
This is the form of DeepSeek-V3 and Qwen3 FP8 checkpoints, which call the scales ``weight_scale_inv``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, wait_for_inputs

FP8 = torch.float8_e4m3fn
BLOCK = 128
SCALE_SUFFIX = "_scale_inv"  # of a stored matrix's name
LARGEST = tl.constexpr(448.0)
SMALLEST = tl.constexpr(1e-12)  # of a run's largest magnitude: zeros then have a scale above 0


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of a ``[rows, columns]`` matrix; the last blocks may be short."""
    return triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK)


def fits_blocks(*sizes: int) -> bool:
    """Whether the kernels take matrices of these sizes: no block is short."""
    return not any(size % BLOCK for size in sizes)


def dequantize(weight_OC: torch.Tensor, scale_BB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[..., O, C]`` float8 and ``[..., ceil(O / 128), ceil(C / 128)]`` scales -> the values in ``dtype``."""
    rows, columns = weight_OC.shape[-2:]
    scale = scale_BB.float().repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return (weight_OC.float() * scale).to(dtype)


def quantize_rows_ref(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[T, D]`` -> float8 ``[T, D]`` and float32 scales ``[T, D / 128]``: a run's largest magnitude becomes 448."""
    run_TB = x_TD.float().unflatten(1, (-1, BLOCK))
    scale_TB = run_TB.abs().amax(-1).clamp(min=SMALLEST.value) / LARGEST.value
    return (run_TB / scale_TB[..., None]).flatten(1).to(FP8), scale_TB


@triton.jit
def to_fp8(value, largest):
    """(stored values, scale) of values whose largest magnitude is ``largest``, of a shape that broadcasts."""
    largest = tl.maximum(largest, SMALLEST)
    return (value * (LARGEST / largest)).to(tl.float8e4nv), largest / LARGEST


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, row_ptr, count_ptr, D, RUNS: tl.constexpr, PDL: tl.constexpr):
    """RUNS runs of one row, or, with ``row_ptr``, of the row of one pair, if there are so many."""
    wait_for_inputs(PDL)
    into = tl.program_id(0).to(tl.int64)
    row = into
    width = D
    if row_ptr is not None:
        width = tl.where(into < tl.load(count_ptr), D, 0)
        row = tl.load(row_ptr + into, mask=width > 0, other=0).to(tl.int64)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    at = run[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = run * 128 < width
    x = tl.load(x_ptr + row * D + at, mask=inside[:, None], other=0.0).to(tl.float32)
    stored, scale = to_fp8(x, tl.max(tl.abs(x), 1)[:, None])
    tl.store(out_ptr + into * D + at, stored, mask=inside[:, None])
    tl.store(scale_ptr + into * (D // 128) + run, scale.reshape(RUNS), mask=inside)


def quantize_rows_triton(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows_ref` in one kernel."""
    return _quantize(x_TD, x_TD.shape[0], None, None)


def quantize_pairs(x_TD: torch.Tensor, index) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantised rows of all pairs, ``[M, D]`` and ``[M, D / 128]``; undefined beyond the pairs of the index."""
    return _quantize(x_TD, index.row_M.numel(), index.row_M, index.offset_L1[-1:])


def _quantize(x_TD: torch.Tensor, rows: int, row_M, count) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x_TD.shape[1]
    out_MD = x_TD.new_empty((rows, hidden), dtype=FP8)
    scale_MB = x_TD.new_empty((rows, hidden // BLOCK), dtype=torch.float32)
    if rows:
        runs = min(triton.next_power_of_2(hidden // BLOCK), 16)
        grid = (rows, triton.cdiv(hidden // BLOCK, runs))
        operands = (x_TD, out_MD, scale_MB, row_M, count, hidden)
        _quantize_kernel[grid](*operands, RUNS=runs, num_warps=4, **pdl_options(x_TD))
    return out_MD, scale_MB


def quantize_rows(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows_ref`; the kernel on CUDA."""
    return (quantize_rows_triton if x_TD.is_cuda else quantize_rows_ref)(x_TD)
