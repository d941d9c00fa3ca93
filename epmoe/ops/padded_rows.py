"""Rows into blocks of fixed size, one per destination, and answers into blocks on the way back.

A block is ``H + C`` rows of the model dtype: H header rows that hold int32 words (see `BlockLayout`), then room for C
hidden rows.  A rank takes the ``W * (H + C)`` rows it receives as they lie; choices of header rows, and of rows past
the count, have no local slot, so nothing reads those rows.  Answers return in blocks of ``A`` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from epmoe.ops.launch import pdl_options, wait_for_inputs

COUNT, OVERFLOW, WORDS = 0, 1, 4
"""Words 0 and 1 of a header: rows for this rank as routed (may exceed C); whether any block of the source overflows."""


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of a step's blocks.

    Args:
        rows: C, capacity of a block.
        answers: A, capacity of a block of answers: (row, choice) pairs in exact mode, C in reduce mode.
    """

    world: int
    rows: int
    answers: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    slots_per_rank: int
    reduce: bool

    @property
    def header_rows(self) -> int:
        """H: rows that hold four words, the local slots ``[C, K]`` and, in reduce mode, the weights ``[C, K]``."""
        words = WORDS + self.rows * self.top_k * (2 if self.reduce else 1)
        return -(-words * 4 // (self.hidden * self.dtype.itemsize))

    @property
    def block_rows(self) -> int:
        return self.header_rows + self.rows

    def header(self, blocks_WBD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Views of blocks ``[W, H + C, D]``: words ``[W, 4]``, slots ``[W, C * K]``, weights ``[W, C * K]`` or None."""
        words = blocks_WBD.view(self.world, -1).view(torch.int32)
        size = self.rows * self.top_k
        weight = words[:, WORDS + size : WORDS + 2 * size].view(torch.float32) if self.reduce else None
        return words[:, :WORDS], words[:, WORDS : WORDS + size], weight


@dataclass(frozen=True)
class Placed:
    """Where a home rank's rows went; W by destination.

    ``here_TKW`` choice k of token t is served there; ``row_TW`` place of t's row in the block, where ``sent_TW``;
    ``rows_W`` as routed and ``pairs_W`` as sent, int64.
    """

    here_TKW: torch.Tensor
    row_TW: torch.Tensor
    sent_TW: torch.Tensor
    rows_W: torch.Tensor
    pairs_W: torch.Tensor


@dataclass(frozen=True)
class Packed:
    """What a home rank knows of its dispatch.

    ``index_TJ`` int32: where each answer will lie in the ``[W * A]`` rows that return, -1: nowhere (J = K in exact
    mode, W in reduce mode).  ``count_5W`` int64, by destination: rows as routed, pairs as sent, tokens of this rank
    with a choice (the same for all), rows of a block, answers of a block.
    """

    index_TJ: torch.Tensor
    count_5W: torch.Tensor


def fill_blocks(
    x_TD: torch.Tensor, slot_TK: torch.Tensor, weight_TK: torch.Tensor, layout: BlockLayout, blocks_WBD: torch.Tensor
) -> Placed:
    """Fill ``blocks_WBD`` (``[W, H + C, D]``) with the rows, local slots and weights for each rank; T = 0 is legal."""
    W, C, T = layout.world, layout.rows, len(x_TD)
    each_W, token_T = torch.arange(W, device=x_TD.device), torch.arange(T, device=x_TD.device)
    rank_TK = torch.div(slot_TK, layout.slots_per_rank, rounding_mode="floor")
    here_TKW = rank_TK[..., None] == each_W
    hit_TW = here_TKW.any(1)
    row_TW = hit_TW.cumsum(0) - 1
    sent_TW = hit_TW & (row_TW < C)
    rows_W, pairs_W = hit_TW.sum(0), (here_TKW & sent_TW[:, None]).sum((0, 1))
    over = (rows_W > C).any() if layout.reduce else (rows_W > C).any() | (pairs_W > layout.answers).any()

    words_W4, slot_WN, weight_WN = layout.header(blocks_WBD)
    words_W4[:, COUNT] = rows_W
    words_W4[:, OVERFLOW] = over
    token_WC = torch.full((W, C + 1), T, device=x_TD.device)  # T: no row; column C takes what does not fit
    token_WC.scatter_(1, row_TW.where(sent_TW, C).T, token_T.expand(W, T))
    token_WC = token_WC[:, :C]
    local_WTK = (slot_TK[..., None] % layout.slots_per_rank).where(here_TKW, -1).permute(2, 0, 1)
    slot_WN.view(W, C, -1).copy_(pad(local_WTK, (0, 0, 0, 1), value=-1)[each_W[:, None], token_WC])
    if T:
        token_WC = token_WC.clamp(max=T - 1)
        blocks_WBD[:, layout.header_rows :] = x_TD[token_WC]
        if weight_WN is not None:
            weight_WN.view(W, C, -1).copy_(weight_TK[token_WC])
    return Placed(here_TKW, row_TW, sent_TW, rows_W, pairs_W)


def pack_rows_ref(
    x_TD: torch.Tensor, slot_TK: torch.Tensor, weight_TK: torch.Tensor, layout: BlockLayout, blocks_WBD: torch.Tensor
) -> Packed:
    """`fill_blocks`, and where the answers will lie."""
    placed = fill_blocks(x_TD, slot_TK, weight_TK, layout, blocks_WBD)
    count_5W = torch.empty((5, layout.world), dtype=torch.int64, device=x_TD.device)
    count_5W[0], count_5W[1] = placed.rows_W, placed.pairs_W
    count_5W[2] = placed.here_TKW.any(2).any(1).sum()
    count_5W[3], count_5W[4] = layout.block_rows, layout.answers
    return Packed(answer_index(placed, layout), count_5W)


def answer_index(placed: Placed, layout: BlockLayout) -> torch.Tensor:
    """A rank's answers come in (token, choice) order, or in token order in reduce mode: see ``Packed.index_TJ``."""
    sent_TW = placed.sent_TW
    first_W = torch.arange(layout.world, device=sent_TW.device) * layout.answers
    if layout.reduce:
        return (first_W + placed.row_TW).where(sent_TW, -1).int()
    pair_TKW = placed.here_TKW & sent_TW[:, None]
    number_TKW = pair_TKW.flatten(0, 1).cumsum(0).view(pair_TKW.shape) - 1
    fits_TKW = pair_TKW & (number_TKW < layout.answers)
    return ((first_W + number_TKW + 1) * fits_TKW).sum(-1, dtype=torch.int32) - 1


@triton.jit
def _place_kernel(
    slot_ptr,
    token_ptr,
    index_ptr,
    count_ptr,
    T,
    C,
    A,
    K,
    W,
    block_rows,
    slots_per_rank,
    K2: tl.constexpr,
    BT: tl.constexpr,
    REDUCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program w numbers the rows and pairs for rank w; count_ptr int64 [5, W]: see `Packed`."""
    wait_for_inputs(PDL)
    w = tl.program_id(0)
    k = tl.arange(0, K2)
    rows, pairs, tokens = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        at = t[:, None] * K + k[None, :]
        inside = (t < T)[:, None] & (k < K)[None, :]
        slot = tl.load(slot_ptr + at, mask=inside, other=-1)
        here = ((slot // slots_per_rank == w) & (slot >= 0)).to(tl.int32)
        hit = tl.max(here, 1)
        row = rows + tl.cumsum(hit, 0) - 1
        sent = hit * (row < C).to(tl.int32)
        tl.store(token_ptr + w * C + row, t, mask=sent > 0)
        count = tl.sum(here, 1) * sent
        if REDUCE:
            tl.store(index_ptr + t * W + w, tl.where(sent > 0, w * A + row, -1), mask=t < T)
        else:
            number = (pairs + tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(here, 1) - 1
            fits = (here * sent[:, None] > 0) & (number < A)
            mine = here + tl.where(w == 0, 1, 0) * (slot < 0).to(tl.int32) > 0
            tl.store(index_ptr + at, tl.where(fits, w * A + number, -1), mask=inside & mine)
        rows += tl.sum(hit, 0)
        pairs += tl.sum(count, 0)
        tokens += tl.sum(tl.max((slot >= 0).to(tl.int32), 1), 0)
    tl.store(count_ptr + w, rows.to(tl.int64))
    tl.store(count_ptr + W + w, pairs.to(tl.int64))
    tl.store(count_ptr + 2 * W + w, tokens.to(tl.int64))
    tl.store(count_ptr + 3 * W + w, block_rows)
    tl.store(count_ptr + 4 * W + w, A)


@triton.jit
def _fill_kernel(
    x_ptr,
    slot_ptr,
    weight_ptr,
    token_ptr,
    count_ptr,
    block_ptr,
    word_ptr,
    C,
    A,
    D,
    K,
    W,
    H,
    block_words,
    slots_per_rank,
    K2: tl.constexpr,
    W2: tl.constexpr,
    BD: tl.constexpr,
    REDUCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (w * C + c, column chunk) copies row c of the block for rank w; chunk 0 also its slots and weights."""
    wait_for_inputs(PDL)
    w, c = tl.program_id(0) // C, tl.program_id(0) % C
    rows = tl.load(count_ptr + w)
    here = c < rows
    t = tl.load(token_ptr + w * C + c).to(tl.int64)  # anything where no row is here
    if here:
        d = tl.program_id(1) * BD + tl.arange(0, BD)
        row = tl.load(x_ptr + t * D + d, mask=d < D, other=0.0)
        into = (w * (H + C) + H + c).to(tl.int64) * D
        tl.store(block_ptr + into + d, row, mask=d < D)
    if tl.program_id(1) == 0:
        words = word_ptr + w.to(tl.int64) * block_words
        k = tl.arange(0, K2)
        present = k < tl.where(here, K, 0)
        slot = tl.load(slot_ptr + t * K + k, mask=present, other=-1)
        local = tl.where((slot >= 0) & (slot // slots_per_rank == w), slot % slots_per_rank, -1)
        tl.store(words + 4 + c * K + k, local, mask=k < K)
        if REDUCE:
            weight = tl.load(weight_ptr + t * K + k, mask=present, other=0.0)
            tl.store(words + 4 + C * K + c * K + k, weight.to(tl.int32, bitcast=True), mask=k < K)
        if c == 0:
            each = tl.arange(0, W2)
            over = tl.max((tl.load(count_ptr + each, mask=each < W, other=0) > C).to(tl.int32), 0)
            if not REDUCE:
                pairs = tl.load(count_ptr + W + each, mask=each < W, other=0)
                over = tl.maximum(over, tl.max((pairs > A).to(tl.int32), 0))
            tl.store(words, rows.to(tl.int32))
            tl.store(words + 1, over)


def pack_rows_triton(
    x_TD: torch.Tensor, slot_TK: torch.Tensor, weight_TK: torch.Tensor, layout: BlockLayout, blocks_WBD: torch.Tensor
) -> Packed:
    """`pack_rows_ref` in two kernels."""
    (T, K), W, C, D, device = slot_TK.shape, layout.world, layout.rows, layout.hidden, x_TD.device
    token_WC = torch.empty((W, C), dtype=torch.int32, device=device)
    index_TJ = torch.empty((T, W if layout.reduce else K), dtype=torch.int32, device=device)
    count_5W = torch.empty((5, W), dtype=torch.int64, device=device)
    slot_TK, weight_TK = slot_TK.contiguous(), weight_TK.contiguous()
    K2, options = triton.next_power_of_2(K), {"REDUCE": layout.reduce, **pdl_options(x_TD)}
    _place_kernel[(W,)](
        slot_TK, token_WC, index_TJ, count_5W, T, C, layout.answers, K, W, layout.block_rows, layout.slots_per_rank,
        K2=K2, BT=256, num_warps=4, **options,
    )  # fmt: skip
    columns = min(triton.next_power_of_2(D), 2048)
    words = blocks_WBD.view(W, -1).view(torch.int32)
    _fill_kernel[(W * C, triton.cdiv(D, columns))](
        x_TD.contiguous(), slot_TK, weight_TK, token_WC, count_5W, blocks_WBD, words, C, layout.answers, D, K, W,
        layout.header_rows, words.shape[1], layout.slots_per_rank,
        K2=K2, W2=triton.next_power_of_2(W), BD=columns, num_warps=max(1, min(8, columns // 256)), **options,
    )  # fmt: skip
    return Packed(index_TJ, count_5W)


def pack_rows(
    x_TD: torch.Tensor, slot_TK: torch.Tensor, weight_TK: torch.Tensor, layout: BlockLayout, blocks_WBD: torch.Tensor
) -> Packed:
    """`pack_rows_ref`; the kernels on CUDA."""
    return (pack_rows_triton if x_TD.is_cuda else pack_rows_ref)(x_TD, slot_TK, weight_TK, layout, blocks_WBD)
