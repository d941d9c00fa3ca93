"""Which rank becomes a new request's home: a pure function of what every rank said in the last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epmoe.engine.agreement import Header


@dataclass(frozen=True)
class RankLoad:
    """What one rank has on its hands, from its header."""

    queued_tokens: int
    free_blocks: int


def rank_loads(headers: Sequence[Header]) -> list[RankLoad]:
    return [RankLoad(header.queued_tokens, header.free_blocks) for header in headers]


def assign_home(
    tokens: int, loads: list[RankLoad], block_size: int, affinity_W: np.ndarray | None = None, slack: float = 0.1
) -> int:
    """The home rank for a request of ``tokens`` tokens (prompt and longest output).

    Ranks with room for the request's KV go first; among them the one with the fewest queued tokens.  With an affinity
    score per rank (higher: more of the request's experts live there) the best-scoring rank among those whose queue,
    with this request, stays within ``1 + slack`` of the even share.  Ties go to the lowest rank.
    """
    queued_W = np.array([load.queued_tokens for load in loads], np.int64)
    blocks = -(-tokens // block_size)
    roomy_W = np.array([load.free_blocks >= blocks for load in loads])
    allowed_W = roomy_W if roomy_W.any() else np.ones(len(loads), bool)
    if affinity_W is not None:
        share = (queued_W.sum() + tokens) / len(loads)
        even_W = allowed_W & (queued_W + tokens <= (1 + slack) * share + tokens)
        if even_W.any():
            return int(np.argmax(np.where(even_W, affinity_W, -np.inf)))
    return int(np.argmin(np.where(allowed_W, queued_W, np.iinfo(np.int64).max)))
