"""Every way to place one layer's experts, where there are few, and the load cap each layer can keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import factorial, prod

import numpy as np

from placement.cost import compute_tail_L, equal_split_LW
from placement.eplb import eplb_node
from placement.greedy import lpt_swap
from placement.plan import make_plan
from placement.solution import Problem

MAX_STATES = 200_000


@dataclass(frozen=True, eq=False)
class States:
    """All placements of E experts on W ranks with exactly ``slots_W`` experts each.

    Args:
        rank_NE: int8 ``[N, E]``, expert -> rank of each state, in lexicographic order.
        canonical_C: int64, the states that stand for their class under exchanges of like ranks (the same slots and
            speed): within like ranks, first experts ascend.
        class_N: int64, the class of each state, an index into ``canonical_C``.
    """

    rank_NE: np.ndarray
    canonical_C: np.ndarray
    class_N: np.ndarray

    def one_hot(self, which: slice | np.ndarray, ranks: int) -> np.ndarray:
        """float64 ``[n, E, W]``."""
        return (self.rank_NE[which][..., None] == np.arange(ranks)).astype(np.float64)

    def tail_N(self, load_E: np.ndarray, speed_W: np.ndarray) -> np.ndarray:
        """float64 ``[N]``: the compute tail of each state."""
        load_NW = np.stack([(self.rank_NE == rank) @ load_E for rank in range(len(speed_W))], axis=1)
        return compute_tail_L(load_NW, speed_W)


def count_states(slots_W: np.ndarray) -> int:
    """``E! / prod(slots!)``."""
    return factorial(int(slots_W.sum())) // prod(factorial(int(n)) for n in slots_W)


def all_states(slots_W: np.ndarray, speed_W: np.ndarray) -> States:
    return _all_states(tuple(slots_W.tolist()), tuple(speed_W.tolist()))


@lru_cache(maxsize=2)
def _all_states(slots_W: tuple[int, ...], speed_W: tuple[float, ...]) -> States:
    W, E = len(slots_W), sum(slots_W)
    rank_NE, free_NW = np.zeros((1, 0), np.int8), np.array([slots_W], np.int16)
    for _ in range(E):
        state_X, rank_X = np.nonzero(free_NW)
        free_NW = free_NW[state_X] - np.eye(W, dtype=np.int16)[rank_X]
        rank_NE = np.concatenate([rank_NE[state_X], rank_X[:, None].astype(np.int8)], axis=1)
    first_NW = np.stack([(rank_NE == rank).argmax(1) for rank in range(W)], axis=1)
    relabel_NW = np.empty_like(first_NW)  # rank -> rank of the class's representative
    for kind in set(zip(slots_W, speed_W)):
        like = np.flatnonzero([pair == kind for pair in zip(slots_W, speed_W)])
        order = np.argsort(first_NW[:, like], axis=1)
        np.put_along_axis(relabel_NW, like[order], np.broadcast_to(like, order.shape), axis=1)
    key_E = W ** np.arange(E - 1, -1, -1, dtype=object)  # exact: W ** E may exceed 64 bits only beyond MAX_STATES
    key_E = key_E.astype(np.int64) if W**E < 2**62 else key_E
    represented_NE = np.take_along_axis(relabel_NW, rank_NE.astype(np.int64), axis=1)
    own_N, class_key_N = rank_NE.astype(np.int64) @ key_E, represented_NE @ key_E
    canonical_C = np.flatnonzero(own_N == class_key_N)
    return States(rank_NE, canonical_C, np.searchsorted(own_N[canonical_C], class_key_N))


def layer_caps(problem: Problem) -> np.ndarray:
    """float64 ``[L]``: the compute tail each layer may reach, ``max(cap, smallest achievable)``; inf without a cap.

    The smallest achievable is exact where the states of a layer can be listed, else the best found by pair swaps.
    """
    load_LE, slots_W, speed_W = problem.profile.load_LE, problem.slots_W, problem.topology.speed_W
    if problem.cap is None:
        return np.full(len(load_LE), np.inf)
    if problem.spare_slots:
        tail_L = _replicated_tail_L(problem)
    elif count_states(slots_W) <= MAX_STATES:
        states = all_states(slots_W, speed_W)
        tail_L = np.array([states.tail_N(load_E, speed_W).min() for load_E in load_LE])
    else:
        rank_LE = lpt_swap(load_LE, slots_W, speed_W)
        load_LW = np.stack([np.bincount(r, load, problem.ranks) for r, load in zip(rank_LE, load_LE)])
        tail_L = compute_tail_L(load_LW, speed_W)
    return np.maximum(problem.cap, tail_L)


def _replicated_tail_L(problem: Problem) -> np.ndarray:
    slots = [eplb_node(load_E, problem.slots_W, problem.topology.speed_W) for load_E in problem.profile.load_LE]
    plan = make_plan(problem.shape, problem.ranks, slots)
    return compute_tail_L(equal_split_LW(problem.profile.load_LE, plan), problem.topology.speed_W)
