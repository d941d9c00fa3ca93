"""Rows into blocks of fixed size, one per destination, and answers into blocks on the way back.

A block is ``H + C`` rows of the model dtype: H header rows that hold int32 words (see `BlockLayout`), then room for C
hidden rows.  A rank takes the ``W * (H + C)`` rows it receives as they lie; choices of header rows, and of rows past
the count, have no local slot, so nothing reads those rows.  Answers return in blocks of ``A`` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

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
    mode, W in reduce mode).  ``rows_W``, ``pairs_W`` int64: rows as routed and pairs as sent.  ``tokens`` int64 ``[]``:
    tokens with a choice.
    """

    index_TJ: torch.Tensor
    rows_W: torch.Tensor
    pairs_W: torch.Tensor
    tokens: torch.Tensor


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
    return Packed(answer_index(placed, layout), placed.rows_W, placed.pairs_W, placed.here_TKW.any(2).any(1).sum())


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


def pack_rows(
    x_TD: torch.Tensor, slot_TK: torch.Tensor, weight_TK: torch.Tensor, layout: BlockLayout, blocks_WBD: torch.Tensor
) -> Packed:
    """`pack_rows_ref`."""
    return pack_rows_ref(x_TD, slot_TK, weight_TK, layout, blocks_WBD)


def pack_answers(out_MD: torch.Tensor, pos_RK: torch.Tensor, layout: BlockLayout, blocks_WAD: torch.Tensor) -> None:
    """`pack_answers_ref`."""
    pack_answers_ref(out_MD, pos_RK, layout, blocks_WAD)
