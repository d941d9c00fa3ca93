"""From a step's chunks to tensors, through the model, to drawn tokens that stay on the device until asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from epmoe.config import EngineConfig
from epmoe.engine.agreement import Kind, prompts_in_graphs
from epmoe.engine.decode_graphs import DecodeGraphs, Ran
from epmoe.engine.drawing import Logprobs, draw_arrays, logprobs, sample_row
from epmoe.engine.graphs import Parts
from epmoe.engine.lane_arrays import lane_arrays
from epmoe.engine.prompt_graphs import PromptGraphs, halves
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
        """The drawn tokens, `UNDRAWN` where there is none; waits for this step."""
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
        self.prompts: PromptGraphs | None = None
        if cache.is_cuda and engine.graphs and decoder.exchange.capturable:
            parts = Parts(decoder, cache, engine, observe, self.last_token, self.staging)
            self.graphs = DecodeGraphs(parts)
            self.prompts = PromptGraphs(parts) if prompts_in_graphs(engine) else None

    def close(self) -> None:
        for graphs in (self.graphs, self.prompts):
            if graphs is not None:
                torch.cuda.synchronize(self.cache.device)
                graphs.close()

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
        if kind.prompt and self.prompts is not None and (logits_NV := self.prompts.run(chunks, kind)) is not None:
            return Ran(logits_NV)
        cut = halves if kind.prompt else split_lanes
        parts = cut(chunks) if kind.lanes == 2 else (chunks,)
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
        self.last_token[rows] = token_N.clamp(min=0)  # of a request that ends undrawn: some token
        return token_N

    def _build(self, chunks: list[Chunk]) -> Batch:
        """The step's tensors, from lengths and known tokens; a token still on the device is taken from there."""
        lane = lane_arrays(chunks, self.engine.block_size)
        arrays = (lane.table_NP, lane.position_T, lane.slot_T, lane.known_T, lane.row_T, lane.sample_rows)
        table, position, slot, known, rows, sample_rows = self.staging.upload(arrays)
        attention = AttentionBatch(
            query_lens=lane.lens_N3[:, 1].tolist(),
            kv_lens=lane.lens_N3[:, 2].tolist(),
            block_table_NP=table,
            position_T=position,
            slot_T=slot,
            block_size=self.engine.block_size,
        )
        return Batch(known.where(known >= 0, self.last_token[rows]), attention, sample_rows)
