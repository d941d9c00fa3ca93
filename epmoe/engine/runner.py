"""From a step's chunks to tensors, through the model, to drawn tokens that stay on the device until asked for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from epmoe.config import EngineConfig
from epmoe.engine.agreement import Kind
from epmoe.engine.drawing import Logprobs, draw_arrays, logprobs, sample_row
from epmoe.engine.graphs import DecodeGraphs, Ran
from epmoe.engine.scheduler import Chunk, split_lanes
from epmoe.engine.staging import HostCopy, Staging
from epmoe.model.decoder import Batch, Decoder, RoutingObserver
from epmoe.ops.attention import AttentionBatch
from epmoe.ops.draw import Draws, draw
from epmoe.ops.sampling import sample


@dataclass(frozen=True)
class Launched:
    """A step under way: the draws of its sampling chunks, in order, are on their way to the host."""

    token_N: HostCopy
    logprobs: Logprobs | None = None

    def tokens(self) -> list[int]:
        """The drawn tokens; waits for this step."""
        return self.token_N.numpy().tolist()

    def extra(self) -> dict[int, dict]:
        """Log-probabilities by request id, for the requests that asked for them."""
        return self.logprobs.by_request() if self.logprobs is not None else {}


class Runner:
    """Builds batches and launches steps. ``last_token`` holds the newest draw of each running request's row, and a
    spare row that padding draws into."""

    def __init__(self, decoder: Decoder, cache: torch.Tensor, engine: EngineConfig, observe: RoutingObserver) -> None:
        self.decoder, self.cache, self.engine, self.observe = decoder, cache, engine, observe
        self.last_token = torch.zeros(engine.max_requests + 1, dtype=torch.int64, device=cache.device)
        self.staging = Staging(cache.device)
        self.graphs: DecodeGraphs | None = None
        if cache.is_cuda and engine.graphs and decoder.exchange.capturable:
            self.graphs = DecodeGraphs(decoder, cache, engine, observe, self.last_token, self.staging)

    def launch(self, chunks: list[Chunk], kind: Kind) -> Launched:
        """Start a step of the kind that all ranks agreed on."""
        drawing = [chunk for chunk in chunks if chunk.samples]
        ran = self.forward(chunks, kind)
        if not drawing:
            return Launched(HostCopy(torch.empty(0, dtype=torch.int64)))
        penalised = any(chunk.request.params.penalised for chunk in drawing)
        token_N = self._draw(ran, drawing, penalised) if ran.drawn_N is None or penalised else ran.drawn_N
        return Launched(HostCopy(token_N), logprobs(ran.logits_NV, token_N, drawing, self.staging))

    def forward(self, chunks: list[Chunk], kind: Kind) -> Ran:
        """Run the model; logits of the sampling chunks, in order."""
        if kind.padded:
            return self.graphs.run(chunks, kind.padded).first(len(chunks))
        parts = split_lanes(chunks) if kind.lanes == 2 else (chunks,)
        return Ran(self.decoder.forward([self._build(part) for part in parts], self.cache, self.observe))

    def _draw(self, ran: Ran, drawing: list[Chunk], penalised: bool) -> torch.Tensor:
        """Draw by each request's parameters; ``last_token`` takes the tokens."""
        logits_NV = ran.logits_NV
        row_N = np.array([chunk.request.row for chunk in drawing])
        if logits_NV.is_cuda and not penalised:
            rows, *draws = self.staging.upload([row_N, *draw_arrays(drawing, len(drawing))])
            token_N = draw(logits_NV, Draws(*draws))
        else:
            unknown_N = np.array([chunk.position > chunk.request.known for chunk in drawing])
            rows, unknown = self.staging.upload([row_N, unknown_N])
            newest_N = self.last_token[rows] if ran.fed_N is None else ran.fed_N  # a graph has drawn over them
            pending_N = torch.where(unknown, newest_N, -1)
            token_N = sample(logits_NV, [sample_row(chunk) for chunk in drawing], pending_N, self.staging.upload)
        self.last_token[rows] = token_N
        return token_N

    def _build(self, chunks: list[Chunk]) -> Batch:
        """The step's tensors, from lengths and known tokens; a token still on the device is taken from there."""
        size = self.engine.block_size
        count_N = np.array([chunk.count for chunk in chunks], np.int64)
        start_N = np.array([chunk.start for chunk in chunks], np.int64)
        end_N = np.cumsum(count_N)
        seq_T = np.repeat(np.arange(len(chunks)), count_N)
        position_T = np.arange(len(seq_T)) + np.repeat(start_N - end_N + count_N, count_N)
        table_NP = _block_table(chunks)
        slot_T = table_NP[seq_T, position_T // size] * np.int64(size) + position_T % size
        known_T = np.fromiter(chain.from_iterable(map(_tokens, chunks)), np.int64, len(seq_T))
        row_N = np.array([chunk.request.row for chunk in chunks], np.int64)
        sample_rows = end_N[[chunk.samples for chunk in chunks]] - 1 if chunks else end_N
        arrays = (table_NP, position_T, slot_T, known_T, row_N[seq_T], sample_rows)
        table, position, slot, known, rows, sample_rows = self.staging.upload(arrays)
        attention = AttentionBatch(
            query_lens=count_N.tolist(),
            kv_lens=(start_N + count_N).tolist(),
            block_table_NP=table,
            position_T=position,
            slot_T=slot,
            block_size=size,
        )
        return Batch(known.where(known >= 0, self.last_token[rows]), attention, sample_rows)


def _tokens(chunk: Chunk) -> list[int]:
    """The chunk's token ids; -1 in place of a last one that is still on the device."""
    request, stop = chunk.request, chunk.start + chunk.count
    known = request.tokens(chunk.start, min(stop, request.known))
    late = chunk.count - len(known)
    assert late <= 1, f"request {request.id}: {late} unknown tokens"
    return [*known, -1] if late else known


def _block_table(chunks: list[Chunk]) -> np.ndarray:
    """int32 ``[N, P]``, zero past a sequence's blocks."""
    table_NP = np.zeros((len(chunks), max((len(chunk.request.blocks) for chunk in chunks), default=0)), np.int32)
    for row, chunk in zip(table_NP, chunks):
        row[: len(chunk.request.blocks)] = chunk.request.blocks
    return table_NP
