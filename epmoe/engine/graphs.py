"""Decode steps as CUDA graphs, one for each padded number of sequences.

A graph reads its inputs from buffers that stay in place and are refilled before each replay; everything between the
refill and the drawn tokens runs without the host.  A size runs once eagerly on those buffers (kernels are compiled,
libraries set up), then it is captured, and every step from there on is a replay: same kernels, same tokens.  With
``capture_at_start`` that is done for all sizes, at most some thirty, before the first request; else in the first two
steps of a size.

Rows beyond the step's sequences are padding: they choose no expert, write no key and draw into a spare row of
``last_token``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from epmoe.config import EngineConfig
from epmoe.engine.agreement import MOST_IN_GRAPH, graph_sizes
from epmoe.engine.drawing import draw_arrays
from epmoe.engine.scheduler import Chunk
from epmoe.engine.staging import Staging, buffer_bytes, views
from epmoe.model.decoder import Batch, Decoder, RoutingObserver
from epmoe.moe.timeline import Marks
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


@dataclass
class Captured:
    """A graph's inputs and, once there is one, the graph and its outputs."""

    attention: DecodeBatch
    buffer: torch.Tensor  # uint8, holds known_N, row_N and draws
    known_N: torch.Tensor  # int64 token ids, -1 where the token is the row's last draw
    row_N: torch.Tensor  # int64 device rows of the requests; padding has the spare row
    draws: Draws
    warm: bool = False
    graph: torch.cuda.CUDAGraph | None = None
    outputs: Ran | None = None
    marks: Marks | None = None  # of its stages, where a timeline is kept


class DecodeGraphs:
    """The graphs of one rank. ``last_token``: int64 ``[max_requests + 1]``, the newest draw of each device row."""

    def __init__(
        self,
        decoder: Decoder,
        cache: torch.Tensor,
        engine: EngineConfig,
        observe: RoutingObserver,
        last_token: torch.Tensor,
        staging: Staging,
    ) -> None:
        self.decoder, self.cache, self.engine, self.observe = decoder, cache, engine, observe
        self.last_token, self.staging = last_token, staging
        self.sizes = graph_sizes(min(engine.max_requests, MOST_IN_GRAPH))
        self.replays = 0
        self.late = 0  # captures that a step waited for
        self.at_start = {"graphs": 0, "seconds": 0.0, "bytes": 0}  # of the device, besides the weights and the cache
        self._captured: dict[int, Captured] = {}
        self._pool: tuple[int, int] | None = None

    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Capture every size, on every rank together; the largest first, whose memory the others share."""
        began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        for done, size in enumerate(reversed(self.sizes)):
            progress(done, len(self.sizes))
            at = self._open(size)
            self.decoder.exchange.begin_step(size)
            self._fill(at, ())
            self._step(at)
            self._capture(at)
        progress(len(self.sizes), len(self.sizes))
        torch.cuda.synchronize()
        spent = time.perf_counter() - began, free - torch.cuda.mem_get_info()[0]
        self.at_start = dict(zip(self.at_start, (len(self.sizes), *spent)))

    def run(self, chunks: Sequence[Chunk], size: int) -> Ran:
        """One decode step of ``chunks`` padded to ``size``; ``last_token`` takes what was drawn."""
        at = self._captured.get(size) or self._open(size)
        self._fill(at, chunks)
        if not at.warm and at.graph is None:
            at.warm = True
            return self._step(at)
        timeline = self.decoder.timeline
        if at.graph is None or (timeline is not None and at.marks is None):
            self.late += 1
            self._capture(at)
        if timeline is not None:
            timeline.before(at.marks)
        self.decoder.exchange.comm.at.stage = "graph"
        at.graph.replay()
        if timeline is not None:
            timeline.ran(at.marks)
        self.replays += 1
        return at.outputs

    def _open(self, size: int) -> Captured:
        config, engine, device = self.decoder.config, self.engine, self.cache.device
        shape = DecodeShape(
            sequences=size,
            max_kv_len=engine.max_model_len,
            block_size=engine.block_size,
            kv_heads=config.num_kv_heads,
            group=config.num_heads // config.num_kv_heads,
            fixed=engine.deterministic,
        )
        arrays = self._inputs((), size)
        buffer = torch.zeros(buffer_bytes(arrays), dtype=torch.uint8, device=device)
        known_N, row_N, *draws = views(buffer, arrays)
        self._captured[size] = Captured(decode_batch(shape, device), buffer, known_N, row_N, Draws(*draws))
        return self._captured[size]

    def _inputs(self, chunks: Sequence[Chunk], size: int) -> tuple[np.ndarray, ...]:
        known_N, row_N = np.zeros(size, np.int64), np.full(size, len(self.last_token) - 1)
        known_N[: len(chunks)] = [chunk.request.token_at(chunk.start) for chunk in chunks]
        row_N[: len(chunks)] = [chunk.request.row for chunk in chunks]
        return known_N, row_N, *draw_arrays(chunks, size)

    def _fill(self, at: Captured, chunks: Sequence[Chunk]) -> None:
        at.attention.fill([chunk.start + 1 for chunk in chunks], [chunk.request.blocks for chunk in chunks])
        self.staging.refill(at.buffer, self._inputs(chunks, len(at.row_N)))

    def _step(self, at: Captured) -> Ran:
        token_N = at.known_N.where(at.known_N >= 0, self.last_token[at.row_N])
        valid_N = at.attention.slot_T >= 0
        logits_NV = self.decoder.forward([Batch(token_N, at.attention, None, valid_N)], self.cache, self.observe)
        drawn_N = draw(logits_NV, at.draws)
        self.last_token.index_copy_(0, at.row_N, drawn_N.clamp(min=0))  # of a request that ends: some token
        return Ran(logits_NV, token_N, drawn_N)

    def _capture(self, at: Captured) -> None:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        timeline = self.decoder.timeline
        captured = nullcontext() if timeline is None else timeline.captured()
        gc.disable()  # freeing another graph meanwhile would spoil this one
        try:
            with captured as at.marks, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                at.outputs = self._step(at)
        finally:
            gc.enable()
        at.graph = graph
