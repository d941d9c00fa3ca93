"""A lane's chunks as flat arrays, from lengths and known tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from epmoe.engine.scheduler import Chunk


@dataclass(frozen=True)
class LaneArrays:
    """N chunks, T tokens: chunk N's first token, count and cached tokens with this step's (``lens_N3``); its cache
    blocks; of each token its position, cache slot, id (-1: its row's last draw) and request's row; the rows among them
    whose next token is wanted."""

    lens_N3: np.ndarray
    table_NP: np.ndarray
    position_T: np.ndarray
    slot_T: np.ndarray
    known_T: np.ndarray
    row_T: np.ndarray
    sample_rows: np.ndarray


def lane_arrays(chunks: Sequence[Chunk], block_size: int) -> LaneArrays:
    count_N = np.array([chunk.count for chunk in chunks], np.int64)
    start_N = np.array([chunk.start for chunk in chunks], np.int64)
    row_N = np.array([chunk.request.row for chunk in chunks], np.int64)
    end_N = np.cumsum(count_N)
    seq_T = np.repeat(np.arange(len(chunks)), count_N)
    position_T = np.arange(len(seq_T)) + np.repeat(start_N - end_N + count_N, count_N)
    table_NP = _block_table(chunks)
    return LaneArrays(
        lens_N3=np.stack((end_N - count_N, count_N, start_N + count_N), 1),
        table_NP=table_NP,
        position_T=position_T,
        slot_T=table_NP[seq_T, position_T // block_size] * np.int64(block_size) + position_T % block_size,
        known_T=np.fromiter(chain.from_iterable(map(_tokens, chunks)), np.int64, len(seq_T)),
        row_T=row_N[seq_T],
        sample_rows=end_N[[chunk.samples for chunk in chunks]] - 1 if chunks else end_N,
    )


def _tokens(chunk: Chunk) -> list[int]:
    """The chunk's token ids; -1 in place of a last one that is still on the device."""
    request, stop = chunk.request, chunk.start + chunk.count
    known = request.tokens(chunk.start, min(stop, request.known))
    late = chunk.count - len(known)
    assert late <= 1, f"request {request.id}: {late} unknown tokens"
    return [*known, -1] if late else known


def _block_table(chunks: Sequence[Chunk]) -> np.ndarray:
    """int32 ``[N, P]``, zero past a sequence's blocks."""
    table_NP = np.zeros((len(chunks), max((len(chunk.request.blocks) for chunk in chunks), default=0)), np.int32)
    for row, chunk in zip(table_NP, chunks):
        row[: len(chunk.request.blocks)] = chunk.request.blocks
    return table_NP
