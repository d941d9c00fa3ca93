"""Linear layers, ordinary and row-invariant.

BLAS picks its kernel by the number of rows, so a row's last bits depend on how many rows travel with it.  The tiled
form does the same arithmetic for every row whatever else is in the batch, which is what deterministic mode promises:
on CPU exactly ``TILE_ROWS`` rows at a time (the last tile padded with zeros), on the device one pinned Triton tile
without split-K.  The ordinary form is cuBLAS but for a single row, which streams the weights (`ops.linear_vector`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from epmoe.ops.linear_vector import linear_vector_triton

TILE_ROWS = 16


def linear(x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None, *, tiled: bool = False):
    """``x @ weight.T + bias``: ``[T, D]`` -> ``[T, N]`` in the dtype of ``x``; T = 0 is legal.

    Args:
        tiled: make each row's bits independent of the batch.
    """
    if not tiled or x_TD.shape[0] == 0:
        if x_TD.is_cuda and x_TD.shape[0] == 1 and x_TD.is_contiguous() and weight_ND.is_contiguous():
            return linear_vector_triton(x_TD, weight_ND, bias_N)
        return functional.linear(x_TD, weight_ND, bias_N)
    return (linear_tiled_triton if x_TD.is_cuda else linear_tiled_ref)(x_TD, weight_ND, bias_N)


def linear_tiled_ref(x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """``linear`` in tiles of exactly 16 rows; at least one row."""
    out = [functional.linear(tile, weight_ND, bias_N) for tile in row_tiles(x_TD)]
    return (torch.cat(out) if len(out) > 1 else out[0])[: x_TD.shape[0]]


def row_tiles(x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split ``[T, D]`` into tiles of exactly 16 rows, the last one padded with zeros."""
    rows = x_TD.shape[0]
    if tail := rows % TILE_ROWS:
        x_TD = functional.pad(x_TD, (0, 0, 0, TILE_ROWS - tail))
    return x_TD.split(TILE_ROWS)


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    T,
    N,
    D,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program (i, j): tile of rows i and columns j, the whole reduction in order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    x_at = x_ptr + row.to(tl.int64)[:, None] * D + depth[None, :]
    w_at = weight_ptr + col.to(tl.int64)[:, None] * D + depth[None, :]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, D, DEPTH):
        inside = (depth < D - start)[None, :]
        x = tl.load(x_at + start, mask=(row < T)[:, None] & inside, other=0.0)
        w = tl.load(w_at + start, mask=(col < N)[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * N + col[None, :], acc, mask=(row < T)[:, None] & (col < N)[None, :])


def linear_tiled_triton(
    x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """``linear`` with one pinned tile on the device; accumulates and adds the bias in float32."""
    x_TD = x_TD.contiguous()
    T, N = x_TD.shape[0], weight_ND.shape[0]
    out_TN = torch.empty((T, N), dtype=x_TD.dtype, device=x_TD.device)
    rows, cols, depth = 64, 64, 64
    grid = (triton.cdiv(T, rows), triton.cdiv(N, cols))
    _linear_kernel[grid](
        x_TD, weight_ND, bias_N, out_TN, T, N, x_TD.shape[1], ROWS=rows, COLS=cols, DEPTH=depth, num_warps=4
    )
    return out_TN
