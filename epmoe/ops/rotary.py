"""Rotary position embedding (Su et al. 2021), in the half-split form of the Hugging Face checkpoints."""

from __future__ import annotations

import torch


def rotary_table(max_positions: int, rotary_dim: int, theta: float, dtype: torch.dtype) -> torch.Tensor:
    """cos and sin of every position: ``[positions, 2, rotary_dim / 2]``, computed in float32, stored as ``dtype``."""
    inv_freq = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim))
    angle = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.stack((angle.cos(), angle.sin()), 1).to(dtype)


def rotate_ref(x_THd: torch.Tensor, cos_sin_T2h: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``2 * h`` of each head's d dimensions: pair (i, i + h) by the angle of (token, i).

    Args:
        x_THd: queries or keys ``[T, heads, d]``.
        cos_sin_T2h: the rows of :func:`rotary_table` at the tokens' positions, ``[T, 2, h]``.
    """
    cos, sin = cos_sin_T2h[:, None, 0], cos_sin_T2h[:, None, 1]
    half = cos.shape[-1]
    first, second, rest = x_THd[..., :half], x_THd[..., half : 2 * half], x_THd[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


rotate = rotate_ref
