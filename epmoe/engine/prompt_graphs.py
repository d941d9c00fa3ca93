"""Steps with prompt chunks as CUDA graphs, one for each number of lanes and padded number of tokens a lane.

Launched from the host such a step takes some twenty launches a layer and lane, which last longer than the kernels of
some thousand tokens do; then nothing hides behind anything.  A graph's kernels follow each other at once, and one
lane's rows travel under the other's compute.

Rows behind a lane's tokens are padding that no expert works for and that writes no key.  Tokens are drawn behind the
graph, from one buffer of logits that all graphs share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from epmoe.engine.agreement import Kind
from epmoe.engine.graphs import Captured, Parts, StepGraphs
from epmoe.engine.lane_arrays import LaneArrays, lane_arrays
from epmoe.engine.scheduler import Chunk, split_at
from epmoe.model.decoder import Batch
from epmoe.moe.exchange import can_capture
from epmoe.ops.prompt_batch import PromptBatch, PromptShape

MOST_DRAWS = 256  # rows of a lane that a graph makes logits for


@dataclass(frozen=True)
class LaneInputs:
    """Of one lane: attention, token ids or -1, rows of ``last_token``, rows to draw from."""

    attention: PromptBatch
    known_T: torch.Tensor
    row_T: torch.Tensor
    sample_rows: torch.Tensor


class PromptGraphs(StepGraphs[list[LaneInputs]]):
    """By number of lanes and padded tokens of each; a step leaves its logits in the common buffer."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.draws = min(self.engine.max_requests, MOST_DRAWS)
        head_VD = self.decoder.weights.head
        self._logits_NV = torch.empty((2 * self.draws, len(head_VD)), dtype=head_VD.dtype, device=self.cache.device)

    def run(self, chunks: list[Chunk], kind: Kind) -> torch.Tensor | None:
        """One step; logits of the sampling chunks, in order.  ``None``: this step's exchange cannot be captured, or it
        draws more than a graph does."""
        if not can_capture(self.decoder.exchange) or sum(chunk.samples for chunk in chunks) > self.draws:
            return None
        key = (kind.lanes, kind.tokens)
        at = self._captured.get(key) or self._open(*key)
        parts = self._fill(at, chunks)
        self._run(at)
        return self._drawn_from(parts)

    def _open(self, lanes: int, tokens: int) -> Captured[list[LaneInputs]]:
        config, engine = self.decoder.config, self.engine
        shape = PromptShape(
            tokens=tokens,
            sequences=engine.max_requests,
            max_kv_len=engine.max_model_len,
            block_size=engine.block_size,
            kv_heads=config.num_kv_heads,
            group=config.num_heads // config.num_kv_heads,
        )
        batches = [PromptBatch(shape, self.cache.device) for _ in range(lanes)]
        arrays = [array for batch in batches for array in self._arrays(batch, lane_arrays((), engine.block_size))]
        each = len(arrays) // lanes

        def inputs(views: list[torch.Tensor]) -> list[LaneInputs]:
            found = []
            for n, batch in enumerate(batches):
                *attention, known_T, row_T, sample_rows = views[n * each : (n + 1) * each]
                batch.take(attention)
                found.append(LaneInputs(batch, known_T, row_T, sample_rows))
            return found

        return self._keep((lanes, tokens), arrays, inputs)

    def _arrays(self, batch: PromptBatch, lane: LaneArrays) -> list[np.ndarray]:
        tokens, n = batch.shape.tokens, len(lane.known_T)
        known_T, row_T = np.zeros(tokens, np.int64), np.full(tokens, len(self.last_token) - 1)
        known_T[:n], row_T[:n] = lane.known_T, lane.row_T
        sample_rows = np.zeros(self.draws, np.int64)
        sample_rows[: len(lane.sample_rows)] = lane.sample_rows
        attention = batch.arrays(lane.lens_N3, lane.table_NP, lane.position_T, lane.slot_T)
        return [*attention, known_T, row_T, sample_rows]

    def _fill(self, at: Captured[list[LaneInputs]], chunks: list[Chunk]) -> list[int]:
        """The step's inputs on their way; how many tokens each lane draws."""
        parts = halves(chunks) if len(at.inputs) == 2 else (chunks,)
        lanes = [lane_arrays(part, self.engine.block_size) for part in parts]
        arrays = [a for inputs, lane in zip(at.inputs, lanes) for a in self._arrays(inputs.attention, lane)]
        self.staging.refill(at.buffer, arrays)
        return [len(lane.sample_rows) for lane in lanes]

    def _step(self, at: Captured[list[LaneInputs]]) -> None:
        batches = []
        for lane in at.inputs:
            token_T = lane.known_T.where(lane.known_T >= 0, self.last_token[lane.row_T])
            batches.append(Batch(token_T, lane.attention, lane.sample_rows, lane.attention.slot_T >= 0))
        logits_NV = self.decoder.forward(batches, self.cache, self.observe)
        self._logits_NV[: len(logits_NV)].copy_(logits_NV)

    def _drawn_from(self, parts: Sequence[int]) -> torch.Tensor:
        """Logits without those of padding."""
        rows = [self._logits_NV[n * self.draws : n * self.draws + count] for n, count in enumerate(parts)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


def halves(chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    """Two lanes of the same number of tokens, or one more in the first."""
    total = sum(chunk.count for chunk in chunks)
    return split_at(chunks, total - total // 2)
