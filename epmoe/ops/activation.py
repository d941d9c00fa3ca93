"""Activations, ordinary and place-invariant.

On CPU torch's own sigmoid and silu round the tail of an array (of each thread's share of it) otherwise than its body,
so that a value's bits depend on its place.  exp and arithmetic do not; the tiled forms are made of them.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def silu(x: torch.Tensor, *, tiled: bool = False) -> torch.Tensor:
    """``x * sigmoid(x)``; ``tiled``: computed in float32, each value's bits independent of its place."""
    return (x.float() / _one_plus_exp_neg(x)).to(x.dtype) if tiled else functional.silu(x)


def sigmoid(x: torch.Tensor, *, tiled: bool = False) -> torch.Tensor:
    """``1 / (1 + exp(-x))``; ``tiled`` as in :func:`silu`."""
    return (1 / _one_plus_exp_neg(x)).to(x.dtype) if tiled else torch.sigmoid(x)


def _one_plus_exp_neg(x: torch.Tensor) -> torch.Tensor:
    return 1 + torch.exp(-x.float())
