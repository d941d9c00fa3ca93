"""Linear layers, ordinary and row-invariant.

BLAS picks its kernel by the number of rows, so a row's last bits depend on how many rows travel with it.  The tiled
form multiplies exactly ``TILE_ROWS`` rows at a time (the last tile padded with zeros): every row then has the same
bits whatever else is in the batch, which is what deterministic mode promises.
"""

from __future__ import annotations

import torch
from torch.nn import functional

TILE_ROWS = 16


def linear(x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None, *, tiled: bool = False):
    """``x @ weight.T + bias``: ``[T, D]`` -> ``[T, N]`` in the dtype of ``x``; T = 0 is legal.

    Args:
        tiled: compute in tiles of exactly 16 rows, so that each row's bits are independent of the batch.
    """
    if not tiled or x_TD.shape[0] == 0:
        return functional.linear(x_TD, weight_ND, bias_N)
    out = [functional.linear(tile, weight_ND, bias_N) for tile in row_tiles(x_TD)]
    return (torch.cat(out) if len(out) > 1 else out[0])[: x_TD.shape[0]]


def row_tiles(x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split ``[T, D]`` into tiles of exactly 16 rows, the last one padded with zeros."""
    rows = x_TD.shape[0]
    if tail := rows % TILE_ROWS:
        x_TD = functional.pad(x_TD, (0, 0, 0, TILE_ROWS - tail))
    return x_TD.split(TILE_ROWS)
