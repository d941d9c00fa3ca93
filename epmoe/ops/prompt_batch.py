"""The attention batch of a captured step of any mix: prompt chunks and decodes of up to T tokens.

As `ops.decode_batch`: tensors that stay in place and are refilled before each replay, and as much work whatever the
step, of which what is left over names no sequence.  Rows behind the step's tokens are padding: their slot is -1
(nothing is written), their position 0, and their attention output is whatever lay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from epmoe.ops.attention_work import FIELDS, PART, SEQUENCE, Heads, Scratch, Work, cut, item_limit
from epmoe.ops.launch import sm_count


@dataclass(frozen=True)
class PromptShape:
    """Tokens T, sequences N, longest sequence in tokens, tokens of a cache block, key heads, query heads of each."""

    tokens: int
    sequences: int
    max_kv_len: int
    block_size: int
    kv_heads: int
    group: int

    @property
    def heads(self) -> Heads:
        return Heads(self.kv_heads, self.group)

    @property
    def blocks(self) -> int:
        return -(-self.max_kv_len // self.block_size)


class PromptBatch:
    """Takes the place of `ops.attention.AttentionBatch`; `arrays` says what its tensors are to hold, in the order in
    which `take` is given them."""

    def __init__(self, shape: PromptShape, device: torch.device) -> None:
        self.shape, self.block_size = shape, shape.block_size
        heads = shape.heads
        self._single_tiles = shape.sequences * -(-shape.group // heads.decode.rows)
        self._single_items = item_limit(self._single_tiles, shape.kv_heads, sm_count(device))
        self._chunk_items = shape.tokens * shape.group // heads.chunk.rows + shape.sequences
        self._scratch = Scratch(self._single_items, min(shape.group, heads.decode.rows), device)
        self._unsplit = Scratch(0, heads.chunk.rows, device)

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        self.block_table_NP, self.position_T, self.slot_T, single_XF, first_Y, chunk_XF = tensors
        heads = self.shape.heads
        self._work = [
            Work(heads.decode, single_XF, first_Y, split=True, scratch=self._scratch),
            Work(heads.chunk, chunk_XF, first_Y[:0], split=False, scratch=self._unsplit),
        ]

    def work(self, kv_heads: int, group: int, fixed: bool, latent: bool = False) -> list[Work]:
        """As `AttentionBatch.work`; a batch serves the one shape it was made for."""
        asked = Heads(kv_heads, group, fixed, latent)
        assert asked == self.shape.heads, f"made for {self.shape.heads}, asked for {asked}"
        return self._work

    def arrays(
        self, lens_N3: np.ndarray, table_NP: np.ndarray, position_T: np.ndarray, slot_T: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Args: (first token, queries, cached tokens) of each sequence; the rest as in `AttentionBatch`."""
        shape, heads = self.shape, self.shape.heads
        n, total = len(lens_N3), len(position_T)
        assert n <= shape.sequences and total <= shape.tokens, f"{n} sequences, {total} tokens in {shape}"
        table = np.zeros((shape.sequences, shape.blocks), np.int32)
        table[:n, : table_NP.shape[1]] = table_NP
        position, slot = np.zeros(shape.tokens, np.int64), np.full(shape.tokens, -1)
        position[:total], slot[:total] = position_T, slot_T
        single_N = lens_N3[:, 1] == 1
        single_XF = _cut(lens_N3, single_N, shape.group, (heads.decode, self._single_items))
        chunk_XF = _cut(lens_N3, ~single_N, shape.group, (heads.chunk, None))
        first_Y = np.full(self._single_tiles, -1, np.int32)
        first = np.flatnonzero(single_XF[:, PART] == 0)
        first_Y[: len(first)] = first
        return (
            table,
            position,
            slot,
            _filled(single_XF, self._single_items),
            first_Y,
            _filled(chunk_XF, self._chunk_items),
        )


def _cut(lens_N3: np.ndarray, chosen_N: np.ndarray, group: int, how: tuple) -> np.ndarray:
    """Items of the chosen sequences, by their numbers among all."""
    if not chosen_N.any():
        return np.empty((0, FIELDS), np.int32)
    item_XF = cut(lens_N3[chosen_N], group, *how)
    item_XF[:, SEQUENCE] = np.flatnonzero(chosen_N)[item_XF[:, SEQUENCE]]
    return item_XF


def _filled(item_XF: np.ndarray, items: int) -> np.ndarray:
    assert len(item_XF) <= items, f"{len(item_XF)} items, {items} were planned"
    filled = np.full((items, FIELDS), -1, np.int32)
    filled[: len(item_XF)] = item_XF
    return filled
