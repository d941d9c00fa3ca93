"""What the sampler needs of a step's requests, and the log-probabilities that they asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from epmoe.engine.scheduler import Chunk
from epmoe.engine.staging import HostCopy, Staging
from epmoe.ops.sampling import LARGEST_TOP_K, SampleRow, noise_key, noise_keys


def sample_row(chunk: Chunk) -> SampleRow:
    """The draw that ends a chunk, as `ops.sampling.sample` takes it."""
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


def draw_arrays(chunks: Sequence[Chunk], size: int) -> tuple[np.ndarray, ...]:
    """The draws that end the chunks, without penalties: the fields of `ops.draw.Draws` ``[size]``, greedy padding."""
    temperature_N, min_p_N = np.zeros((2, size), np.float32)
    top_k_N, top_p_N = np.zeros(size, np.int32), np.ones(size, np.float32)
    key_N = np.zeros(size, np.uint64)
    if not all(chunk.request.params.temperature == 0 for chunk in chunks):
        n = len(chunks)
        params = [chunk.request.params for chunk in chunks]
        temperature_N[:n] = [each.temperature for each in params]
        top_k_N[:n] = [min(each.top_k, LARGEST_TOP_K) for each in params]
        top_p_N[:n] = [each.top_p for each in params]
        min_p_N[:n] = [each.min_p for each in params]
        stem_n = np.array([chunk.request.noise_stem for chunk in chunks], np.uint64)
        key_N[:n] = noise_keys(stem_n, np.array([chunk.position for chunk in chunks]))
    return temperature_N, top_k_N, top_p_N, min_p_N, key_N.view(np.int64)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities by the model (before temperature and penalties) for J drawn tokens, on their way to the host.

    ``rank_J`` counts from 1 for the likeliest token; ``top_JC`` and ``top_id_JC`` are the likeliest ones in order, of
    which request ``ids[j]`` asked for ``counts[j]``.
    """

    ids: list[int]
    counts: list[int]
    chosen_J: HostCopy
    rank_J: HostCopy
    top_JC: HostCopy
    top_id_JC: HostCopy

    def by_request(self) -> dict[int, dict]:
        """``{"logprob", "rank", "top": [[id, log-probability], ...]}`` by request id; waits for this step."""
        columns = (self.chosen_J, self.rank_J, self.top_JC, self.top_id_JC)
        rows = zip(self.ids, self.counts, *(column.numpy().tolist() for column in columns))
        return {
            number: {"logprob": chosen, "rank": rank, "top": list(zip(top_ids[:count], top[:count]))}
            for number, count, chosen, rank, top, top_ids in rows
        }


def logprobs(
    logits_NV: torch.Tensor, token_N: torch.Tensor, drawing: Sequence[Chunk], staging: Staging
) -> Logprobs | None:
    """For the requests that ask; ``None`` if nobody does."""
    asked = {n: chunk.request.params.logprobs for n, chunk in enumerate(drawing)}
    asked = {n: count for n, count in asked.items() if count is not None}
    if not asked:
        return None
    (row_J,) = staging.upload([np.array(list(asked))])
    logprob_JV = logits_NV[row_J].float().log_softmax(-1)
    chosen_J1 = logprob_JV.gather(1, token_N[row_J, None].clamp(min=0))
    rank_J = (logprob_JV > chosen_J1).sum(-1) + 1
    top = logprob_JV.topk(min(max(asked.values()), logprob_JV.shape[1]))
    columns = map(HostCopy, (chosen_J1[:, 0], rank_J, *top))
    return Logprobs([drawing[n].request.id for n in asked], list(asked.values()), *columns)
