"""RMSNorm (Zhang & Sennrich 2019), computed in float32, and the residual add that precedes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, start_next_and_wait


def rms_norm_ref(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps)`` in float32, rounded to the dtype of ``x``, then times ``weight``.

    The last dimension is normalised; any leading shape (also empty).
    """
    wide = x_TD.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_D * wide.to(x_TD.dtype)


def add_rms_norm_ref(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual), x + residual)``; the sum is rounded to the model dtype before it is normalised."""
    residual_TD = residual_TD + x_TD
    return rms_norm_ref(residual_TD, weight_D, eps), residual_TD


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, eps, stride, D: tl.constexpr, D2: tl.constexpr, PDL: tl.constexpr
):
    """Program t: row t, whole; with ``residual_ptr`` the sum is stored too."""
    start_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D2)
    x = tl.load(x_ptr + row * stride + d, mask=d < D, other=0.0)
    if residual_ptr is not None:
        x = (x.to(tl.float32) + tl.load(residual_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * D + d, x, mask=d < D)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
    tl.store(out_ptr + row * D + d, (wide * scale).to(x.dtype) * weight, mask=d < D)


def _launch(x_TD, residual_TD, weight_D, eps, out_TD, sum_TD) -> None:
    rows, D = x_TD.shape
    if rows:
        size = triton.next_power_of_2(D)
        _norm_kernel[rows,](
            x_TD,
            residual_TD,
            weight_D,
            out_TD,
            sum_TD,
            eps,
            x_TD.stride(0),
            D=D,
            D2=size,
            num_warps=min(8, max(1, size // 512)),
            **pdl_options(x_TD),
        )


def rms_norm_triton(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_ref` on the device; rows may be views of wider ones."""
    flat = x_TD.reshape(-1, x_TD.shape[-1])
    out = torch.empty(flat.shape, dtype=x_TD.dtype, device=x_TD.device)
    _launch(flat, None, weight_D, eps, out, None)
    return out.view(x_TD.shape)


def add_rms_norm_triton(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm_ref` on the device, in one pass."""
    out_TD, sum_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    _launch(x_TD, residual_TD, weight_D, eps, out_TD, sum_TD)
    return out_TD, sum_TD


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_ref`; the kernel on CUDA."""
    return (rms_norm_triton if x_TD.is_cuda else rms_norm_ref)(x_TD, weight_D, eps)


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm_ref`; the kernel on CUDA."""
    return (add_rms_norm_triton if x_TD.is_cuda else add_rms_norm_ref)(x_TD, residual_TD, weight_D, eps)
