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
    largest_TB = run_TB.abs().amax(-1).clamp(min=SMALLEST.value)
    # One factor for all: half-precision values often lie half-way between two stored ones, and a quotient's last bit
    # would then decide.
    return (run_TB * (LARGEST.value / largest_TB)[..., None]).flatten(1).to(FP8), largest_TB / LARGEST.value


@triton.jit
def to_fp8(value, largest):
    """(stored values, scale) of values whose largest magnitude is ``largest``, of a shape that broadcasts."""
    largest = tl.maximum(largest, SMALLEST)
    full = tl.full(largest.shape, LARGEST, tl.float32)
    return (value * tl.div_rn(full, largest)).to(tl.float8e4nv), tl.div_rn(largest, full)


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, D, RUNS: tl.constexpr, PDL: tl.constexpr):
    """RUNS runs of one row."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    at = row * D + run[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = run * 128 < D
    x = tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    stored, scale = to_fp8(x, tl.max(tl.abs(x), 1)[:, None])
    tl.store(out_ptr + at, stored, mask=inside[:, None])
    tl.store(scale_ptr + row * (D // 128) + run, scale.reshape(RUNS), mask=inside)


def quantize_rows_triton(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows_ref` in one kernel."""
    tokens, hidden = x_TD.shape
    out_TD = torch.empty_like(x_TD, dtype=FP8)
    scale_TB = x_TD.new_empty((tokens, hidden // BLOCK), dtype=torch.float32)
    if tokens:
        runs = min(triton.next_power_of_2(hidden // BLOCK), 16)
        grid = (tokens, triton.cdiv(hidden // BLOCK, runs))
        _quantize_kernel[grid](x_TD, out_TD, scale_TB, hidden, RUNS=runs, num_warps=4, **pdl_options(x_TD))
    return out_TD, scale_TB
