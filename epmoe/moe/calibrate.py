"""How long the stages of a layer take here: a few steps of made-up tokens at start-up, timed by `moe.timeline`.

All ranks take part in every step, and the slowest rank's time of each stage counts, so that all have the same table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch

from epmoe.model.decoder import Batch, Decoder
from epmoe.moe.exchange import can_capture
from epmoe.moe.lane_cost import LaneTimes, StageTimes
from epmoe.moe.makespan import LAYER
from epmoe.moe.timeline import Span, Timeline
from epmoe.ops.attention import AttentionBatch

BELONGS = {"send": "dispatch", "arrive": "experts"}
AWAITS = {"arrive": "dispatch", "sum": "combine"}
SIZES = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192)


def measure_stages(
    decoder: Decoder, cache_HBSd: torch.Tensor, most: int, longest: int, graphs: bool
) -> LaneTimes | None:
    """Stage times at sizes up to ``most`` tokens a rank, in prompts of up to ``longest``; overwrites the cache.

    ``None`` where no rank can have two tokens, and so no two lanes.

    Args:
        graphs: steps run as graphs where their exchange can be captured.
    """
    comm = decoder.exchange.comm
    blocks, block_size = cache_HBSd.shape[-3:-1]
    fitting = blocks // -(-longest // block_size) * longest
    most = int(comm.all_gather_headers(np.array([min(most, fitting)])).min())
    if most < 2:
        return None
    sizes = sorted({*(size for size in SIZES if size < most), most})
    one = two = _measured(decoder, cache_HBSd, sizes, (longest, 1, graphs))
    if cache_HBSd.is_cuda:  # CPU kernels leave nothing to the exchange
        two = _measured(decoder, cache_HBSd, sizes, (longest, 2, graphs))
    return LaneTimes(one, two)


def _measured(decoder: Decoder, cache_HBSd: torch.Tensor, sizes: list[int], how: tuple[int, int, bool]) -> StageTimes:
    """With a second lane, it is empty: what shows is how the first one's kernels run where there are two."""
    comm, (longest, lanes, graphs) = decoder.exchange.comm, how
    block_size = cache_HBSd.shape[-2]
    measured = np.zeros((len(sizes), len(LAYER)), np.int64)
    for row, tokens in zip(measured, sizes):
        batches = [_prompts(count, longest, block_size, decoder) for count in (tokens, 0)[:lanes]]
        decoder.exchange.begin_step(tokens)
        decoder.forward(batches, cache_HBSd)  # compiles kernels and fills pools
        run = _replayed if graphs and can_capture(decoder.exchange) else _launched
        spans = run(decoder, batches, cache_HBSd, tokens)
        decoder.timeline = comm.on_work = None
        row[:] = [1e3 * value for value in stage_us(span for span in spans if span.lane == 0).values()]
    slowest = comm.all_gather_headers(measured.ravel()).max(0).reshape(measured.shape) / 1e3
    return StageTimes.of(sizes, {stage: times.tolist() for stage, times in zip(LAYER, slowest.T)})


def _launched(decoder: Decoder, batches: list[Batch], cache_HBSd: torch.Tensor, tokens: int) -> list[Span]:
    """A step's stages as the host launches them."""
    decoder.exchange.begin_step(tokens)
    decoder.timeline = timeline = Timeline(decoder.exchange.comm)
    decoder.forward(batches, cache_HBSd)
    return timeline.read()


def _replayed(decoder: Decoder, batches: list[Batch], cache_HBSd: torch.Tensor, tokens: int) -> list[Span]:
    """A step's stages in a graph, of its second replay."""
    decoder.timeline = timeline = Timeline(decoder.exchange.comm)
    graph = torch.cuda.CUDAGraph()
    with timeline.captured() as marks, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        decoder.forward(batches, cache_HBSd)
    for _ in range(2):
        timeline.spans.clear()
        decoder.exchange.begin_step(tokens)
        graph.replay()
        timeline.ran(marks)
        timeline.read()
    return timeline.spans


def stage_us(spans: Iterable[Span]) -> dict[str, float]:
    """Mean microseconds of each stage of a layer, without waiting for rows (an arrival or a sum starts when they are
    there). What follows an arrival, such as the index of the rows, counts with the experts."""
    total: dict[str, float] = defaultdict(float)
    layers = set()
    landed: dict[tuple, float] = {}  # when the rows were there
    spans = list(spans)
    for span in spans:
        key = (span.step, span.lane, span.layer, BELONGS.get(span.stage, span.stage))
        landed[key] = max(span.end, landed.get(key, span.end))
    for span in spans:
        key = (span.step, span.lane, span.layer)
        begin = span.begin
        if span.stage in AWAITS:
            begin = max(begin, landed.get((*key, AWAITS[span.stage]), begin))
        total[BELONGS.get(span.stage, span.stage)] += max(span.end - begin, 0.0)
        if span.stage == "experts":
            layers.add(key)
    return {stage: total[stage] / max(len(layers), 1) for stage in LAYER}


def _prompts(tokens: int, longest: int, block_size: int, decoder: Decoder) -> Batch:
    """``tokens`` tokens as prompts of ``longest``, in the cache's first blocks; as many short ones as fit into them."""
    device = decoder.weights.embed.device
    longest = max(min(longest, tokens), 1)
    lens = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
    lens_N = torch.tensor(lens, dtype=torch.int64)
    width = -(-longest // block_size)
    start_T = torch.repeat_interleave(torch.arange(len(lens)) * width * block_size, lens_N)
    position_T = torch.arange(tokens) - torch.repeat_interleave(lens_N.cumsum(0) - lens_N, lens_N)
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
    return Batch(token_T.to(device), attention, torch.arange(tokens, device=device)[-1:])
