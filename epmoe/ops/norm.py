"""RMSNorm (Zhang & Sennrich 2019), computed in float32, and the residual add that precedes it."""

from __future__ import annotations

import torch


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


rms_norm = rms_norm_ref
add_rms_norm = add_rms_norm_ref
