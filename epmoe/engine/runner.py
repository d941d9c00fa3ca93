"""From a step's chunks to tensors, through the model, to drawn tokens that stay on the device until asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epmoe.config import EngineConfig
from epmoe.engine.scheduler import Chunk, split_lanes
from epmoe.model.decoder import Batch, Decoder, RoutingObserver
from epmoe.ops.attention import AttentionBatch
from epmoe.ops.sampling import SampleRow, noise_key, sample


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities by the model (before temperature and penalties) for J drawn tokens, on the device.

    ``rank_J`` counts from 1 for the likeliest token; ``top_JC`` and ``top_id_JC`` are the likeliest ones in order, of
    which request ``ids[j]`` asked for ``counts[j]``.
    """

    ids: list[int]
    counts: list[int]
    chosen_J: torch.Tensor
    rank_J: torch.Tensor
    top_JC: torch.Tensor
    top_id_JC: torch.Tensor

    def by_request(self) -> dict[int, dict]:
        """``{"logprob", "rank", "top": [[id, log-probability], ...]}`` by request id; waits for the device."""
        columns = (self.chosen_J, self.rank_J, self.top_JC, self.top_id_JC)
        rows = zip(self.ids, self.counts, *(column.tolist() for column in columns))
        return {
            number: {"logprob": chosen, "rank": rank, "top": list(zip(top_ids[:count], top[:count]))}
            for number, count, chosen, rank, top, top_ids in rows
        }


@dataclass(frozen=True)
class Launched:
    """A step under way: ``token_N`` are the draws of its sampling chunks, in order, on the device."""

    token_N: torch.Tensor
    logprobs: Logprobs | None = None

    def tokens(self) -> list[int]:
        """The drawn tokens; waits for the device."""
        return self.token_N.tolist()

    def extra(self) -> dict[int, dict]:
        """Log-probabilities by request id, for the requests that asked for them."""
        return self.logprobs.by_request() if self.logprobs is not None else {}


class Runner:
    """Builds batches and launches steps. ``last_token`` holds the newest draw of each running request's row."""

    def __init__(self, decoder: Decoder, cache: torch.Tensor, engine: EngineConfig, observe: RoutingObserver) -> None:
        self.decoder, self.cache, self.engine, self.observe = decoder, cache, engine, observe
        self.last_token = torch.zeros(engine.max_requests, dtype=torch.int64, device=cache.device)

    def launch(self, chunks: list[Chunk], lanes: int = 1) -> Launched:
        """Start a step, in one or two lanes as all ranks agreed."""
        parts = split_lanes(chunks) if lanes == 2 else (chunks,)
        logits_NV = self.decoder.forward([self._build(part) for part in parts], self.cache, self.observe)
        drawing = [chunk for chunk in chunks if chunk.samples]
        if not drawing:
            return Launched(torch.empty(0, dtype=torch.int64))
        device = self.cache.device
        rows = torch.tensor([chunk.request.row for chunk in drawing], device=device)
        unknown = torch.tensor([_unknown_output(chunk) for chunk in drawing], device=device)
        pending_N = torch.where(unknown, self.last_token[rows], -1)
        token_N = sample(logits_NV, [_sample_row(chunk) for chunk in drawing], pending_N)
        self.last_token[rows] = token_N
        return Launched(token_N, _logprobs(logits_NV, token_N, drawing))

    def _build(self, chunks: list[Chunk]) -> Batch:
        """The step's tensors, from lengths and known tokens; a token still on the device is taken from there."""
        size, device = self.engine.block_size, self.cache.device
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sample_rows: list[int] = []
        late: list[tuple[int, int]] = []  # (row of the batch, row of last_token)
        width = max((len(chunk.request.blocks) for chunk in chunks), default=0)
        table = torch.zeros((len(chunks), width), dtype=torch.int32)
        for n, chunk in enumerate(chunks):
            request, stop = chunk.request, chunk.start + chunk.count
            known = request.tokens(chunk.start, min(stop, request.known))
            tokens += known
            if len(known) < chunk.count:
                assert chunk.count == len(known) + 1, f"request {request.id}: {chunk.count - len(known)} unknown tokens"
                late.append((len(tokens), request.row))
                tokens.append(0)
            positions += range(chunk.start, stop)
            slots += [request.blocks[p // size] * size + p % size for p in range(chunk.start, stop)]
            if chunk.samples:
                sample_rows.append(len(tokens) - 1)
            table[n, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        token_T = torch.tensor(tokens, dtype=torch.int64, device=device)
        if late:
            at, rows = torch.tensor(late, device=device).T
            token_T[at] = self.last_token[rows]
        attention = AttentionBatch(
            query_lens=[chunk.count for chunk in chunks],
            kv_lens=[chunk.start + chunk.count for chunk in chunks],
            block_table_NP=table.to(device),
            position_T=torch.tensor(positions, dtype=torch.int64, device=device),
            slot_T=torch.tensor(slots, dtype=torch.int64, device=device),
            block_size=size,
        )
        return Batch(token_T, attention, torch.tensor(sample_rows, dtype=torch.int64, device=device))


def _unknown_output(chunk: Chunk) -> bool:
    """Whether the token before the one being drawn is still on the device."""
    return chunk.position > chunk.request.known


def _sample_row(chunk: Chunk) -> SampleRow:
    request, params = chunk.request, chunk.request.params
    counted = params.penalised
    return SampleRow(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        prompt=request.prompt if counted else (),
        output=request.output if counted else (),
        key=noise_key(request.seed, request.sample_index, chunk.position),
    )


def _logprobs(logits_NV: torch.Tensor, token_N: torch.Tensor, drawing: list[Chunk]) -> Logprobs | None:
    """For the requests that ask, on the device; ``None`` if nobody does."""
    asked = {n: chunk.request.params.logprobs for n, chunk in enumerate(drawing)}
    asked = {n: count for n, count in asked.items() if count is not None}
    if not asked:
        return None
    row_J = torch.tensor(list(asked), device=logits_NV.device)
    logprob_JV = logits_NV[row_J].float().log_softmax(-1)
    chosen_J1 = logprob_JV.gather(1, token_N[row_J, None])
    rank_J = (logprob_JV > chosen_J1).sum(-1) + 1
    top = logprob_JV.topk(min(max(asked.values()), logprob_JV.shape[1]))
    return Logprobs([drawing[n].request.id for n in asked], list(asked.values()), chosen_J1[:, 0], rank_J, *top)
