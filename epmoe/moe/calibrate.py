"""How long the stages of a layer take here: a few steps of made-up tokens at start-up, timed by `moe.timeline`.

All ranks take part in every step, and the slowest rank's time of each stage counts, so that all have the same table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch

from epmoe.model.decoder import Batch, Decoder
from epmoe.moe.lane_cost import StageTimes
from epmoe.moe.makespan import LAYER
from epmoe.moe.timeline import Span, Timeline
from epmoe.ops.attention import AttentionBatch

SIZES = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192)


def measure_stages(decoder: Decoder, cache_HBSd: torch.Tensor, most: int, longest: int) -> StageTimes | None:
    """Stage times at sizes up to ``most`` tokens a rank, in prompts of up to ``longest``; overwrites the cache.

    ``None`` where no rank can have two tokens, and so no two lanes.
    """
    comm = decoder.exchange.comm
    blocks, block_size = cache_HBSd.shape[-3:-1]
    fitting = blocks // -(-longest // block_size) * longest
    most = int(comm.all_gather_headers(np.array([min(most, fitting)])).min())
    if most < 2:
        return None
    sizes = sorted({*(size for size in SIZES if size < most), most})
    measured = np.zeros((len(sizes), len(LAYER)), np.int64)
    for row, tokens in zip(measured, sizes):
        batch = _prompts(tokens, min(longest, tokens), block_size, decoder)
        for _ in range(2):  # the first compiles kernels and fills pools
            decoder.exchange.begin_step(tokens)
            decoder.timeline = timeline = Timeline(comm)
            decoder.forward([batch], cache_HBSd)
        spans = timeline.read()
        row[:] = [1e3 * value for value in stage_us(spans).values()]
    decoder.timeline = comm.on_work = None
    slowest = comm.all_gather_headers(measured.ravel()).max(0).reshape(measured.shape) / 1e3
    return StageTimes.of(sizes, {stage: times.tolist() for stage, times in zip(LAYER, slowest.T)})


def stage_us(spans: Iterable[Span]) -> dict[str, float]:
    """Mean microseconds of each stage of a layer, without waiting for rows (a sum starts when they are there)."""
    total: dict[str, float] = defaultdict(float)
    layers = set()
    landed: dict[tuple, float] = {}
    for span in sorted(spans, key=lambda span: span.begin):
        key = (span.step, span.lane, span.layer)
        begin = span.begin
        if span.stage == "combine":
            landed[key] = span.end
        if span.stage == "sum":
            begin = max(begin, landed.get(key, begin))
        stage = "dispatch" if span.stage == "send" else span.stage
        total[stage] += max(span.end - begin, 0.0)
        if stage == "experts":
            layers.add(key)
    return {stage: total[stage] / max(len(layers), 1) for stage in LAYER}


def _prompts(tokens: int, longest: int, block_size: int, decoder: Decoder) -> Batch:
    """``tokens`` tokens as prompts of ``longest``, in the cache's first blocks; as many short ones as fit into them."""
    device = decoder.weights.embed.device
    lens = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
    position_T = torch.cat([torch.arange(count) for count in lens])
    width = -(-longest // block_size)
    start_T = torch.repeat_interleave(torch.arange(len(lens)) * width * block_size, torch.tensor(lens))
    table_NP = torch.arange(len(lens) * width, dtype=torch.int32).view(len(lens), width)
    generator = torch.Generator().manual_seed(decoder.exchange.comm.rank)
    token_T = torch.randint(decoder.config.vocab_size, (tokens,), generator=generator)
    attention = AttentionBatch(
        query_lens=lens,
        kv_lens=lens,
        block_table_NP=table_NP.to(device),
        position_T=position_T.to(device),
        slot_T=(start_T + position_T).to(device),
        block_size=block_size,
    )
    return Batch(token_T.to(device), attention, torch.tensor([tokens - 1], device=device))
