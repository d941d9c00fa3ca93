"""A linear layer of one token: matrix times vector, the weights read once by all SMs together.

There is no work for tensor cores; what counts is bytes in flight.  Weights do not depend on the kernel ahead, so every
program has its first ones under way before it waits for its input: the stream starts under the end of that kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, start_next_and_wait

VALUES = 8192
"""Weights of a program at a time: 64 for each of 128 threads."""


@triton.jit
def _vector_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, N, D, COLS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i: columns ``i * COLS ...`` of the result; ``WHOLE``: D is DEPTH."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    at = weight_ptr + col.to(tl.int64)[:, None] * D + depth[None, :]
    live = (col < N)[:, None]
    inside = live if WHOLE else live & (depth < D)[None, :]
    weight = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    start_next_and_wait(PDL)
    x = tl.load(x_ptr + depth, mask=depth < D, other=0.0)
    acc = weight.to(tl.float32) * x.to(tl.float32)[None, :]
    if not WHOLE:
        for start in range(DEPTH, D, DEPTH):
            weight = tl.load(
                at + start, mask=live & (depth < D - start)[None, :], other=0.0, eviction_policy="evict_first"
            )
            x = tl.load(x_ptr + start + depth, mask=depth < D - start, other=0.0)
            acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    result = tl.sum(acc, 1)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + col, result, mask=col < N)


def linear_vector_triton(
    x_1D: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` for exactly one row; accumulates in float32.

    ``weight_ND`` is read before the kernels ahead have ended: if it was computed just now, a kernel of an ordinary
    launch must lie between.
    """
    (rows, D), N = x_1D.shape, weight_ND.shape[0]
    assert rows == 1 and x_1D.is_contiguous() and weight_ND.is_contiguous(), f"{x_1D.shape}, {weight_ND.stride()}"
    out_1N = torch.empty((1, N), dtype=x_1D.dtype, device=x_1D.device)
    depth = min(4096, triton.next_power_of_2(D))
    cols = max(1, min(VALUES // depth, triton.next_power_of_2(triton.cdiv(N, 512))))
    _vector_kernel[triton.cdiv(N, cols),](
        x_1D, weight_ND, bias_N, out_1N, N, D, COLS=cols, DEPTH=depth, WHOLE=depth == D, num_warps=4,
        **pdl_options(x_1D),
    )  # fmt: skip
    return out_1N
