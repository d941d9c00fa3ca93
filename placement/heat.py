"""How an anneal cools, what it draws, and how much of it at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def picks_of(ranks: int) -> int:
    """How many exchanges an anneal draws from one table of changes."""
    return min(8, max(1, ranks // 4))


@dataclass(frozen=True)
class Heat:
    """A stretch of annealing: ``steps`` exchanges, temperature ``start`` to ``stop``, ``rows`` items tried at each."""

    start: float
    stop: float
    steps: int
    rows: int


class Noise:
    """Gumbel noise from a table of fixed seed, read from random places: drawing it anew costs more than a step."""

    SIZE = 1 << 20

    def __init__(self, seed: int) -> None:
        self._table = np.random.default_rng(seed).gumbel(size=self.SIZE).astype(np.float32)
        self._rng = np.random.default_rng(seed)

    def reseed(self, *key: int) -> None:
        """What follows depends on ``key`` alone (and the table's seed)."""
        self._rng = np.random.default_rng(key)

    def gumbel(self, count: int) -> np.ndarray:
        assert count <= self.SIZE // 2, f"{count} exchanges at once"
        start = int(self._rng.integers(self.SIZE - count))
        return self._table[start : start + count]

    def some(self, count: int, size: int) -> np.ndarray:
        """``size`` distinct random numbers below ``count``."""
        return self._rng.permutation(count)[:size]
