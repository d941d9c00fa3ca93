"""What the ranks agree on before a step: their headers, and the kind of step that follows from them on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from epmoe.config import EngineConfig
from epmoe.engine.scheduler import most_in_lane
from epmoe.moe.lane_cost import LaneTimes, choose_lanes

HEADER_FIELDS = 32
HEADER_NUMBERS = 8  # fields ahead of the homes
HEADER_MOVES = (HEADER_FIELDS - HEADER_NUMBERS) // 2  # homes that one rank can announce in one step
SMALL = (1, 2, 4)
MOST_IN_GRAPH = 512  # sequences; larger decode steps last longer than their launches take
SMALLEST_PROMPT = 16  # tokens of the smallest graph of a step with prompts
EVERY = ((64, 8), (256, 16), (1 << 16, 64))  # (up to, step between sizes)


@dataclass(frozen=True)
class Header:
    """What a rank tells the others at the start of a step; travels as int64[32].

    ``decodes``: 1 if all its tokens are decodes (also if it has none), which a graph can run.
    """

    step: int
    tokens: int
    decodes: int
    unfinished: int
    queued_tokens: int
    free_blocks: int
    payload_bytes: int
    homes: tuple[tuple[int, int], ...] = ()  # (request id, its home) as a probe decided

    def pack(self) -> np.ndarray:
        packed = np.zeros(HEADER_FIELDS, np.int64)
        packed[:HEADER_NUMBERS] = (*(getattr(self, name) for name in _NUMBERS), len(self.homes))
        if self.homes:
            packed[HEADER_NUMBERS : HEADER_NUMBERS + 2 * len(self.homes)] = np.array(self.homes, np.int64).ravel()
        return packed

    @staticmethod
    def unpack(packed: np.ndarray) -> Header:
        *numbers, count = packed[:HEADER_NUMBERS].tolist()
        homes = packed[HEADER_NUMBERS : HEADER_NUMBERS + 2 * count].reshape(-1, 2).tolist()
        return Header(*numbers, tuple(map(tuple, homes)))


_NUMBERS = [item.name for item in fields(Header)][: HEADER_NUMBERS - 1]


@dataclass(frozen=True)
class Kind:
    """What sort of step it is, the same on every rank: one or two lanes, or (``padded`` > 0) decodes only, run as the
    graph of that many sequences. ``tokens``: no lane of any rank has more; with ``prompt`` a size of which there may be
    a graph, whose two lanes are halves."""

    lanes: int
    tokens: int
    padded: int = 0
    prompt: bool = False


def agreed_kind(
    headers: list[Header], engine: EngineConfig, graphs: bool, times: LaneTimes | None = None
) -> Kind | None:
    """What sort of step it is on every rank; ``None`` if no rank has a token.

    A graph if all tokens are decodes and not too many, padded to the busiest rank; two lanes if some rank can split its
    own tokens and, with ``overlap`` "auto", the slowest rank gains by it as stages take ``times`` (None: not known, one
    lane).
    """
    most = max(header.tokens for header in headers)
    if most == 0:
        return None
    if graphs and most <= MOST_IN_GRAPH and all(header.decodes for header in headers):
        size = padded_size(most, graph_sizes(min(engine.max_requests, MOST_IN_GRAPH)))
        return Kind(1, size, size)
    lanes = 1
    if engine.overlap == "on" and most > 1 and len(headers) > 1:
        lanes = 2
    elif engine.overlap == "auto" and times is not None:
        lanes = choose_lanes(tuple(header.tokens for header in headers), times)
    if graphs and prompts_in_graphs(engine):
        size = padded_size(most, prompt_sizes(engine.max_batch_tokens))
        return Kind(lanes, -(-size // lanes), prompt=True)
    return Kind(lanes, most if lanes == 1 else most_in_lane(most))


def prompts_in_graphs(engine: EngineConfig) -> bool:
    """Whether steps with prompts may be graphs, where decodes are: not where rows of a step must lie without padding
    between them, nor in deterministic mode, whose attention takes as many launches as the lengths ask for."""
    return not (engine.deterministic or engine.record_tokens or engine.probe_tokens)


@lru_cache
def prompt_sizes(budget: int) -> tuple[int, ...]:
    """Padded tokens of a step: eighths of the budget, and powers of two below the first of them."""
    eighth = -(-budget // 8)
    small, size = [], SMALLEST_PROMPT
    while size < eighth:
        small.append(size)
        size *= 2
    return (*small, *(min(n * eighth, budget) for n in range(1, 9) if (n - 1) * eighth < budget))


@lru_cache
def graph_sizes(most: int) -> tuple[int, ...]:
    """Padded sizes for up to ``most`` sequences, ascending: close enough that padding wastes little."""
    sizes, size = [n for n in SMALL if n < most], 0
    while size < most:
        size += next(step for limit, step in EVERY if size < limit)
        sizes.append(min(size, most))
    return tuple(sizes)


def padded_size(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds ``count`` sequences."""
    return next(size for size in sizes if size >= count)
