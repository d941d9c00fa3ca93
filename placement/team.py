"""Annealing of all layers on several cores, with the same result on any number of them.

Layers are bound to their neighbours only, so those of one parity are searched at the same time while the others stand
still.  Each worker process owns some layers and keeps their :class:`LayerSearch`; what it draws depends on (seed,
round, layer) alone.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from placement.heat import Heat, Noise
from placement.moves import LayerData, LayerSearch
from placement.threads import end_with_parent


@dataclass(frozen=True, eq=False)
class ChainData:
    """All layers and what binds them.

    Args:
        layers: one :class:`LayerData` each.
        cross: float32 ``[L - 1][S, S']``, cost of an item of layer l and one of layer l + 1 being on one rank
            (negative where that is good); empty arrays where nothing binds.
        base_LSW: float32 ``[L][S, W]``, cost of an item on a rank, or ``None``.
        seed: of the noise.
    """

    layers: list[LayerData]
    cross: list[np.ndarray]
    base: list[np.ndarray] | None
    seed: int

    def linear_SW(self, layer: int, rank_LS: list[np.ndarray]) -> np.ndarray:
        """float32 ``[S, W]``: what an item of this layer costs on each rank, the neighbours standing still."""
        data = self.layers[layer]
        total_SW = np.zeros((len(data.expert_S), data.ranks), np.float32)
        if self.base is not None:
            total_SW += self.base[layer]
        if layer and self.cross:
            total_SW += self.cross[layer - 1].T @ one_hot(rank_LS[layer - 1], data.ranks)
        if layer < len(self.layers) - 1 and self.cross:
            total_SW += self.cross[layer] @ one_hot(rank_LS[layer + 1], data.ranks)
        return total_SW

    def linear_cost(self, rank_LS: list[np.ndarray]) -> float:
        """The part of the objective that is not rows."""
        total = 0.0
        if self.base is not None:
            total += sum(float(b[np.arange(len(r)), r].sum(dtype=np.float64)) for b, r in zip(self.base, rank_LS))
        for cross, low, high in zip(self.cross, rank_LS, rank_LS[1:]):
            total += float(cross[low[:, None] == high].sum(dtype=np.float64))
        return total


def one_hot(rank_S: np.ndarray, ranks: int) -> np.ndarray:
    return (rank_S[:, None] == np.arange(ranks)).astype(np.float32)


@dataclass(frozen=True)
class Order:
    """Work on some layers: anneal by ``heat``, or descend at most ``heat.steps`` exchanges where ``cold``."""

    layers: tuple[int, ...]
    heat: Heat
    cold: bool
    round: int


class _Bench:
    """The layers one process works on."""

    def __init__(self, chain: ChainData) -> None:
        self.chain, self.noise = chain, Noise(chain.seed)
        self.states: dict[int, LayerSearch] = {}

    def work(self, order: Order, rank_LS: list[np.ndarray]) -> list[tuple[np.ndarray, float, int]]:
        """(rank of each item, row cost, exchanges made) of each layer of the order."""
        return [self._layer(layer, order, rank_LS) for layer in order.layers]

    def _layer(self, layer: int, order: Order, rank_LS: list[np.ndarray]) -> tuple[np.ndarray, float, int]:
        state = self.states.get(layer)
        alike = self.chain.layers[layer].weight_WT is None  # relabelling ranks then changes no row's cost
        if state is None or not (
            np.array_equal(state.rank_S, rank_LS[layer]) or (alike and state.follow(rank_LS[layer]))
        ):
            state = self.states[layer] = LayerSearch(self.chain.layers[layer], rank_LS[layer])
        linear_SW = self.chain.linear_SW(layer, rank_LS)
        if order.cold:
            made = state.descend(linear_SW, order.heat.steps)
        else:
            self.noise.reseed(self.chain.seed, order.round, layer)
            made = state.anneal(linear_SW, order.heat, self.noise)
        return state.rank_S.copy(), state.row_cost() * self.chain.layers[layer].scale, made


_bench: _Bench | None = None  # of a worker process; the parent's own bench is an attribute of its team


def _open_bench(chain: ChainData) -> None:
    global _bench
    end_with_parent()
    _bench = _Bench(chain)


def _work(order: Order, rank_LS: list[np.ndarray]) -> list[tuple[np.ndarray, float, int]]:
    assert _bench is not None
    return _bench.work(order, rank_LS)


class Team:
    """Worker processes, one executor each so that a layer always meets its own worker; use as a context manager."""

    def __init__(self, chain: ChainData, workers: int) -> None:
        self.chain = chain
        self.rows_L = np.zeros(len(chain.layers))
        workers = min(workers, (len(chain.layers) + 1) // 2)
        self._own = _Bench(chain) if workers <= 1 else None
        self._pools = [
            ProcessPoolExecutor(1, None, _open_bench, (chain,)) for _ in range(workers if workers > 1 else 0)
        ]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *error) -> None:
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)

    def sweep(self, rank_LS: list[np.ndarray], heat: Heat, round: int, *, cold: bool = False) -> int:
        """One round over even, then odd layers; changes the entries of ``rank_LS``; returns the exchanges made."""
        made = 0
        for parity in (0, 1):
            chosen = range(parity, len(rank_LS), 2)
            shares = [tuple(chosen[i :: max(1, len(self._pools))]) for i in range(max(1, len(self._pools)))]
            orders = [Order(share, heat, cold, round) for share in shares]
            if self._own is not None:
                results = [self._own.work(orders[0], rank_LS)]
            else:
                waiting = [pool.submit(_work, order, rank_LS) for pool, order in zip(self._pools, orders)]
                results = [future.result() for future in waiting]
            for share, result in zip(shares, results):
                for layer, (rank_S, rows, count) in zip(share, result):
                    rank_LS[layer], self.rows_L[layer] = rank_S, rows
                    made += count
        return made

    def cost(self, rank_LS: list[np.ndarray]) -> float:
        """The objective in counts, after a sweep."""
        return float(self.rows_L.sum()) + self.chain.linear_cost(rank_LS)
