"""Answers into blocks of fixed size on the way back: exact mode of the padded exchange (see `ops.padded_rows`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, wait_for_inputs
from epmoe.ops.padded_rows import BlockLayout


def pack_answers_ref(out_MD: torch.Tensor, pos_RK: torch.Tensor, layout: BlockLayout, blocks_WAD: torch.Tensor) -> None:
    """Exact mode: fill ``blocks_WAD`` (``[W, A, D]``) with the pairs of each source's rows, in (row, choice) order.

    Args:
        pos_RK: int32 place in ``out_MD`` of each choice of the received rows ``[W * (H + C), K]``, or -1.
    """
    W, A = layout.world, layout.answers
    pos_WN = pos_RK.view(W, -1)
    number_WN = (pos_WN >= 0).cumsum(1) - 1
    fits_WN = (pos_WN >= 0) & (number_WN < A)
    pair_WA = torch.zeros((W, A + 1), dtype=torch.int64, device=pos_RK.device)
    pair_WA.scatter_(1, number_WN.where(fits_WN, A), pos_WN.clamp(min=0).long())
    blocks_WAD.copy_(out_MD[pair_WA[:, :A]])


@triton.jit
def _number_kernel(pos_ptr, pair_ptr, count_ptr, N, A, BN: tl.constexpr, PDL: tl.constexpr):
    """Program s lists the pairs of source s; count_ptr int32 [W]: how many they are."""
    wait_for_inputs(PDL)
    s = tl.program_id(0)
    pairs = tl.zeros([], tl.int32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        pos = tl.load(pos_ptr + s * N + n, mask=n < N, other=-1)
        here = (pos >= 0).to(tl.int32)
        number = pairs + tl.cumsum(here, 0) - 1
        tl.store(pair_ptr + s * A + number, pos, mask=(here > 0) & (number < A))
        pairs += tl.sum(here, 0)
    tl.store(count_ptr + s, pairs)


@triton.jit
def _answer_kernel(out_ptr, pair_ptr, count_ptr, block_ptr, A, D, BD: tl.constexpr, PDL: tl.constexpr):
    """Program (s * A + a, column chunk) copies answer a of source s."""
    wait_for_inputs(PDL)
    n = tl.program_id(0)
    if n % A < tl.load(count_ptr + n // A):
        pair = tl.load(pair_ptr + n).to(tl.int64)
        d = tl.program_id(1) * BD + tl.arange(0, BD)
        row = tl.load(out_ptr + pair * D + d, mask=d < D, other=0.0)
        tl.store(block_ptr + n.to(tl.int64) * D + d, row, mask=d < D)


def pack_answers_triton(
    out_MD: torch.Tensor, pos_RK: torch.Tensor, layout: BlockLayout, blocks_WAD: torch.Tensor
) -> None:
    """`pack_answers_ref` in two kernels; places past the last pair are left as they are."""
    W, A, D = layout.world, layout.answers, layout.hidden
    pair_WA = torch.empty((W, A), dtype=torch.int32, device=out_MD.device)
    count_W = torch.empty(W, dtype=torch.int32, device=out_MD.device)
    options = pdl_options(out_MD)
    _number_kernel[(W,)](
        pos_RK.contiguous(), pair_WA, count_W, pos_RK.numel() // W, A, BN=1024, num_warps=4, **options
    )  # fmt: skip
    columns = min(triton.next_power_of_2(D), 2048)
    _answer_kernel[(W * A, triton.cdiv(D, columns))](
        out_MD, pair_WA, count_W, blocks_WAD, A, D, BD=columns, num_warps=max(1, min(8, columns // 256)), **options
    )  # fmt: skip


def pack_answers(out_MD: torch.Tensor, pos_RK: torch.Tensor, layout: BlockLayout, blocks_WAD: torch.Tensor) -> None:
    """`pack_answers_ref`; the kernels on CUDA."""
    (pack_answers_triton if out_MD.is_cuda else pack_answers_ref)(out_MD, pos_RK, layout, blocks_WAD)
