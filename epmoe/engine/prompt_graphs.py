"""Steps with prompt chunks as CUDA graphs, one for each padded number of tokens a lane.

Launched from the host such a step takes some twenty launches a layer and lane, which last longer than the kernels of
some thousand tokens do; then nothing hides behind anything.  A graph's kernels follow each other at once, and one
lane's rows travel under the other's compute.

As `engine.graphs`: inputs lie in buffers that stay in place; the first step of a size runs eagerly on them, the second
is captured, every later one is a replay.  Rows behind a lane's tokens are padding that no expert works for and that
writes no key.  Tokens are drawn behind the graph, from one buffer of logits that all graphs share.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from epmoe.config import EngineConfig
from epmoe.engine.agreement import Kind
from epmoe.engine.lane_arrays import LaneArrays, lane_arrays
from epmoe.engine.scheduler import Chunk, split_at
from epmoe.engine.staging import Staging, buffer_bytes, views
from epmoe.model.decoder import Batch, Decoder, RoutingObserver
from epmoe.moe.exchange import can_capture
from epmoe.moe.timeline import Marks
from epmoe.ops.prompt_batch import PromptBatch, PromptShape

MOST_DRAWS = 256  # rows of a lane that a graph makes logits for


@dataclass
class _Lane:
    """A lane's inputs: attention, token ids or -1, rows of ``last_token``, rows to draw from."""

    attention: PromptBatch
    known_T: torch.Tensor
    row_T: torch.Tensor
    sample_rows: torch.Tensor


@dataclass
class _Captured:
    """The inputs of all lanes in one buffer and, once there is one, the graph."""

    lanes: list[_Lane]
    buffer: torch.Tensor
    warm: bool = False
    graph: torch.cuda.CUDAGraph | None = None
    marks: Marks | None = None  # of its stages, where a timeline is kept


class PromptGraphs:
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
        self.replays = self.captures = 0
        self.draws = min(engine.max_requests, MOST_DRAWS)
        size = (2 * self.draws, decoder.weights.head.shape[0])
        self._logits_NV = torch.empty(size, dtype=decoder.weights.head.dtype, device=cache.device)
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool: tuple[int, int] | None = None

    def run(self, chunks: list[Chunk], kind: Kind) -> torch.Tensor | None:
        """One step; logits of the sampling chunks, in order.  ``None``: this step's exchange cannot be captured, or it
        draws more than a graph does."""
        if not can_capture(self.decoder.exchange) or sum(chunk.samples for chunk in chunks) > self.draws:
            return None
        key = (kind.lanes, kind.tokens)
        at = self._captured.get(key) or self._open(*key)
        parts = self._fill(at, chunks)
        if not at.warm:
            at.warm = True
            self._step(at)
            return self._drawn_from(parts)
        timeline = self.decoder.timeline
        if at.graph is None or (timeline is not None and at.marks is None):
            self._capture(at)
        if timeline is not None:
            timeline.before(at.marks)
        self.decoder.exchange.comm.at.stage = "graph"
        at.graph.replay()
        if timeline is not None:
            timeline.ran(at.marks)
        self.replays += 1
        return self._drawn_from(parts)

    def _open(self, lanes: int, tokens: int) -> _Captured:
        config, engine, device = self.decoder.config, self.engine, self.cache.device
        shape = PromptShape(
            tokens=tokens,
            sequences=engine.max_requests,
            max_kv_len=engine.max_model_len,
            block_size=engine.block_size,
            kv_heads=config.num_kv_heads,
            group=config.num_heads // config.num_kv_heads,
        )
        batches = [PromptBatch(shape, device) for _ in range(lanes)]
        arrays = [array for batch in batches for array in self._inputs(batch, lane_arrays((), engine.block_size))]
        buffer = torch.zeros(buffer_bytes(arrays), dtype=torch.uint8, device=device)
        tensors, each = views(buffer, arrays), len(arrays) // lanes
        found = []
        for n, batch in enumerate(batches):
            *attention, known_T, row_T, sample_rows = tensors[n * each : (n + 1) * each]
            batch.take(attention)
            found.append(_Lane(batch, known_T, row_T, sample_rows))
        self._captured[lanes, tokens] = _Captured(found, buffer)
        return self._captured[lanes, tokens]

    def _inputs(self, batch: PromptBatch, lane: LaneArrays) -> list[np.ndarray]:
        tokens, n = batch.shape.tokens, len(lane.known_T)
        known_T, row_T = np.zeros(tokens, np.int64), np.full(tokens, len(self.last_token) - 1)
        known_T[:n], row_T[:n] = lane.known_T, lane.row_T
        sample_rows = np.zeros(self.draws, np.int64)
        sample_rows[: len(lane.sample_rows)] = lane.sample_rows
        attention = batch.arrays(lane.lens_N3, lane.table_NP, lane.position_T, lane.slot_T)
        return [*attention, known_T, row_T, sample_rows]

    def _fill(self, at: _Captured, chunks: list[Chunk]) -> list[int]:
        """The step's inputs on their way; how many tokens each lane draws."""
        parts = halves(chunks) if len(at.lanes) == 2 else (chunks,)
        lanes = [lane_arrays(part, self.engine.block_size) for part in parts]
        arrays = [a for at_lane, lane in zip(at.lanes, lanes) for a in self._inputs(at_lane.attention, lane)]
        self.staging.refill(at.buffer, arrays)
        return [len(lane.sample_rows) for lane in lanes]

    def _step(self, at: _Captured) -> None:
        batches = []
        for lane in at.lanes:
            token_T = lane.known_T.where(lane.known_T >= 0, self.last_token[lane.row_T])
            batches.append(Batch(token_T, lane.attention, lane.sample_rows, lane.attention.slot_T >= 0))
        logits_NV = self.decoder.forward(batches, self.cache, self.observe)
        self._logits_NV[: len(logits_NV)].copy_(logits_NV)

    def _drawn_from(self, parts: Sequence[int]) -> torch.Tensor:
        """Logits without those of padding."""
        rows = [self._logits_NV[n * self.draws : n * self.draws + count] for n, count in enumerate(parts)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _capture(self, at: _Captured) -> None:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        timeline = self.decoder.timeline
        captured = nullcontext() if timeline is None else timeline.captured()
        gc.disable()  # freeing another graph meanwhile would spoil this one
        try:
            with captured as at.marks, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(at)
        finally:
            gc.enable()
        at.graph = graph
        self.captures += 1


def halves(chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    """Two lanes of the same number of tokens, or one more in the first."""
    total = sum(chunk.count for chunk in chunks)
    return split_at(chunks, total - total // 2)
