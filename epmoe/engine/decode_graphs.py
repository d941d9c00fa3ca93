"""Decode steps as CUDA graphs, one for each padded number of sequences.

With ``capture_at_start`` all sizes, at most some thirty, are captured before the first request; else in the first two
steps of a size.  Rows beyond the step's sequences are padding: they choose no expert, write no key and draw into a
spare row of ``last_token``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from epmoe.engine.agreement import MOST_IN_GRAPH, graph_sizes
from epmoe.engine.drawing import draw_arrays
from epmoe.engine.graphs import Captured, Parts, StepGraphs
from epmoe.engine.scheduler import Chunk
from epmoe.model.decoder import Batch
from epmoe.ops.decode_batch import DecodeBatch, DecodeShape, decode_batch
from epmoe.ops.draw import Draws, draw


def is_decode(chunk: Chunk) -> bool:
    """One token, whose successor is drawn, of a request that stays on this rank."""
    return chunk.count == 1 and chunk.samples and not chunk.request.probe


@dataclass(frozen=True)
class Ran:
    """What a step of N sampling sequences left on the device.

    ``logits_NV``; where a graph ran (its tensors are overwritten by the next step) also the tokens it was fed and those
    that it drew, penalties left out, int64 ``[N]``.
    """

    logits_NV: torch.Tensor
    fed_N: torch.Tensor | None = None
    drawn_N: torch.Tensor | None = None

    def first(self, count: int) -> Ran:
        """Without the padding."""
        return Ran(self.logits_NV[:count], self.fed_N[:count], self.drawn_N[:count])


@dataclass(frozen=True)
class Decodes:
    """The inputs of N sequences."""

    attention: DecodeBatch
    known_N: torch.Tensor  # int64 token ids, -1 where the token is the row's last draw
    row_N: torch.Tensor  # int64 device rows of the requests; padding has the spare row
    draws: Draws


class DecodeGraphs(StepGraphs[Decodes]):
    """By padded number of sequences; a step returns `Ran`."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.sizes = graph_sizes(min(self.engine.max_requests, MOST_IN_GRAPH))
        self.at_start = {"graphs": 0, "seconds": 0.0, "bytes": 0}  # of the device, besides the weights and the cache

    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Capture every size, on every rank together; the largest first, whose memory the others share."""
        began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        for done, size in enumerate(reversed(self.sizes)):
            progress(done, len(self.sizes))
            at = self._open(size)
            self.decoder.exchange.begin_step(size)
            self._fill(at, ())
            self._run(at)
            self._capture(at)
        progress(len(self.sizes), len(self.sizes))
        torch.cuda.synchronize()
        spent = time.perf_counter() - began, free - torch.cuda.mem_get_info()[0]
        self.at_start = dict(zip(self.at_start, (len(self.sizes), *spent)))

    def run(self, chunks: Sequence[Chunk], size: int) -> Ran:
        """One decode step of ``chunks`` padded to ``size``; ``last_token`` takes what was drawn."""
        at = self._captured.get(size) or self._open(size)
        self._fill(at, chunks)
        return self._run(at)

    def _open(self, size: int) -> Captured[Decodes]:
        config, engine = self.decoder.config, self.engine
        shape = DecodeShape(
            sequences=size,
            max_kv_len=engine.max_model_len,
            block_size=engine.block_size,
            kv_heads=config.num_kv_heads,
            group=config.num_heads // config.num_kv_heads,
            fixed=engine.deterministic,
        )
        batch = decode_batch(shape, self.cache.device)
        arrays = self._arrays((), size)
        return self._keep(size, arrays, lambda views: Decodes(batch, views[0], views[1], Draws(*views[2:])))

    def _arrays(self, chunks: Sequence[Chunk], size: int) -> tuple[np.ndarray, ...]:
        known_N, row_N = np.zeros(size, np.int64), np.full(size, len(self.last_token) - 1)
        known_N[: len(chunks)] = [chunk.request.token_at(chunk.start) for chunk in chunks]
        row_N[: len(chunks)] = [chunk.request.row for chunk in chunks]
        return known_N, row_N, *draw_arrays(chunks, size)

    def _fill(self, at: Captured[Decodes], chunks: Sequence[Chunk]) -> None:
        inputs = at.inputs
        inputs.attention.fill([chunk.start + 1 for chunk in chunks], [chunk.request.blocks for chunk in chunks])
        self.staging.refill(at.buffer, self._arrays(chunks, len(inputs.row_N)))

    def _step(self, at: Captured[Decodes]) -> Ran:
        inputs = at.inputs
        token_N = inputs.known_N.where(inputs.known_N >= 0, self.last_token[inputs.row_N])
        valid_N = inputs.attention.slot_T >= 0
        logits_NV = self.decoder.forward([Batch(token_N, inputs.attention, None, valid_N)], self.cache, self.observe)
        drawn_N = draw(logits_NV, inputs.draws)
        self.last_token.index_copy_(0, inputs.row_N, drawn_N.clamp(min=0))  # of a request that ends: some token
        return Ran(logits_NV, token_N, drawn_N)
