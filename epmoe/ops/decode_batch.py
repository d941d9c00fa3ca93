"""The attention batch of a captured decode step: buffers that stay in place and are refilled before each replay.

Sequence n of N has one query, token n of the step.  Whatever the lengths, the number of items of work is the same, so
a graph captured with one filling is right for every other.  Sequences that pad the batch have no cached token: their
slot is -1 (nothing is written), their position 0 and their attention output 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from epmoe.ops.attention_work import FIELDS, PART, SEQUENCE, Heads, Scratch, Work, cut, item_limit
from epmoe.ops.launch import sm_count


@dataclass(frozen=True)
class DecodeShape:
    """Sequences N, longest sequence in tokens, tokens of a cache block, key heads, query heads of each key head.

    ``fixed``: deterministic mode.  ``latent``: for `ops.latent`.
    """

    sequences: int
    max_kv_len: int
    block_size: int
    kv_heads: int
    group: int
    fixed: bool = False
    latent: bool = False

    @property
    def heads(self) -> Heads:
        return Heads(self.kv_heads, self.group, self.fixed, self.latent)


class DecodeBatch:
    """Takes the place of `ops.attention.AttentionBatch` where every sequence has one query.

    One int32 buffer holds all that a step changes, so that `fill` is one copy to the device: items, positions, slots,
    and last the block table, of which only the columns in use are sent (it lies transposed: block after block).
    """

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self.shape, self.block_size = shape, shape.block_size
        self._tiling = shape.heads.decode_of(shape.sequences, shape.max_kv_len)
        tiles = shape.sequences * -(-shape.group // self._tiling.rows)
        if shape.fixed:
            self._items = tiles * -(-shape.max_kv_len // self._tiling.run)
        else:
            self._items = item_limit(tiles, shape.kv_heads, sm_count(device), self._tiling.products)
        N, width = shape.sequences, -(-shape.max_kv_len // shape.block_size)
        self._sizes = 2 * N, 2 * N, tiles, self._items * FIELDS, N * width
        aligned = [-(-size // 4) * 4 for size in self._sizes]  # 16 bytes
        *self._starts, total = accumulate(aligned, initial=0)
        self._device_buffer = torch.zeros(total, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staging = [torch.zeros(total, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._sent = [torch.cuda.Event() if pinned else None for _ in range(2)]
        self._host = [tuple(view.numpy() for view in self._views(staging)) for staging in self._staging]
        self._columns: list[list[Sequence[int]]] = [[()] * N for _ in range(2)]  # what each table's columns hold
        self._turn = 0
        self.position_T, self.slot_T, first_Y, item_XF, table_PN = self._views(self._device_buffer)
        self.block_table_NP = table_PN.T
        scratch = Scratch(self._items, min(shape.group, self._tiling.rows), device)
        self._work = [Work(self._tiling, item_XF, first_Y, True, scratch, shape.max_kv_len)]
        self.fill([], [])

    def _views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Positions and slots int64 ``[N]``, first items ``[Y]``, items ``[X, FIELDS]``, table ``[P, N]``."""
        parts = [flat[start : start + size] for start, size in zip(self._starts, self._sizes)]
        position_N, slot_N, first_Y, item_XF, table_PN = parts
        N = self.shape.sequences
        return (
            position_N.view(torch.int64),
            slot_N.view(torch.int64),
            first_Y,
            item_XF.view(-1, FIELDS),
            table_PN.view(-1, N),
        )

    def work(self, kv_heads: int, group: int, fixed: bool, latent: bool = False) -> list[Work]:
        """As `AttentionBatch.work`; a batch serves the one shape it was made for."""
        asked = Heads(kv_heads, group, fixed, latent)
        assert asked == self.shape.heads, f"made for {self.shape.heads}, asked for {asked}"
        return self._work

    def fill(self, kv_lens: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """Set the step: cached tokens of each sequence with this step's (1 or more), and its cache blocks.

        Fewer sequences than N are padded.  One asynchronous copy on the current stream; returns at once unless the
        fill before the last one is still under way.
        """
        shape, n = self.shape, len(kv_lens)
        assert n <= shape.sequences and max(kv_lens, default=0) <= shape.max_kv_len, f"{n} sequences, {max(kv_lens)}"
        self._turn ^= 1
        staging, sent = self._staging[self._turn], self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        position_N, slot_N, first_Y, item_XF, table_PN = self._host[self._turn]
        columns = self._columns[self._turn]
        for i, (row, held) in enumerate(zip(blocks, columns)):
            if row != held:
                table_PN[: len(row), i] = row
                columns[i] = row[:]
        last_n = np.asarray(kv_lens, dtype=np.int64) - 1
        position_N[:n], position_N[n:] = last_n, 0
        slot_N[n:] = -1
        slot_N[:n] = table_PN[last_n // shape.block_size, np.arange(n)].astype(np.int64) * shape.block_size
        slot_N[:n] += last_n % shape.block_size
        lens_N3 = np.zeros((shape.sequences, 3), dtype=np.int64)
        lens_N3[:, 0], lens_N3[:, 1], lens_N3[:n, 2] = np.arange(shape.sequences), 1, kv_lens
        items = cut(lens_N3, shape.group, self._tiling, self._items)
        item_XF[: len(items)] = items
        item_XF[len(items) :, SEQUENCE] = -1
        first_Y[:] = np.flatnonzero(items[:, PART] == 0)
        used = self._starts[-1] + max(map(len, blocks), default=0) * shape.sequences
        self._device_buffer[:used].copy_(staging[:used], non_blocking=True)
        if sent is not None:
            sent.record()


def decode_batch(shape: DecodeShape, device: torch.device) -> DecodeBatch:
    """Buffers for decode steps of up to ``shape.sequences`` sequences, padded to that."""
    return DecodeBatch(shape, device)
