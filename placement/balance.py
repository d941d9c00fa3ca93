"""Load alone, with replicas: which experts get the spare slots and which rank holds what, searched together.

Copies of an expert are taken to share its tokens evenly (EPLB's and FlashLB's assumption).  EPLB chooses the copies
first and packs them after; here a layer starts there, and two moves lower ``sum over ranks (time / fair time) ** 16``,
a smooth stand-in for the slowest rank: a slot of a replicated expert takes another expert, or two slots change places.
Where neither helps, some slots are replaced at random and the descent starts again; the best layer met is kept.
"""

from __future__ import annotations

import time

import numpy as np

from placement.cost import compute_tail_L
from placement.eplb import eplb_node
from placement.greedy import lpt_swap, plan_of_ranks, swap_pairs
from placement.plan import make_plan
from placement.solution import Problem, Solution, finish

_POWER = 16
_SLOW_RANKS = 2  # whose slots are tried
_KICKED = 3  # slots replaced at random between descents
_CELLS_PER_SECOND = 1e8  # slot pairs looked at, on one core; turns the time budget into a number of descents
_CELLS_OF_A_MOVE = 3e4  # what a move costs at any size
_MOVES_PER_DESCENT = 12


def solve_balance(problem: Problem) -> Solution:
    """The evenest load that is found, layer by layer; without spare slots LPT with pair swaps."""
    started = time.perf_counter()
    load_LE, slots_W, speed_W = problem.profile.load_LE, problem.slots_W, problem.topology.speed_W
    if not problem.spare_slots:
        return finish(problem, plan_of_ranks(problem, lpt_swap(load_LE, slots_W, speed_W)), "balance", started)
    per_move = _CELLS_OF_A_MOVE + float(slots_W.sum()) * (slots_W.max() * _SLOW_RANKS + 500)
    cells = len(load_LE) * _MOVES_PER_DESCENT * per_move
    descents = int(np.clip(problem.seconds * _CELLS_PER_SECOND / cells, 1, 300))
    rng = np.random.default_rng(problem.seed)
    slots = [balance_layer(load_E, slots_W, speed_W, descents, rng) for load_E in load_LE]
    return finish(problem, make_plan(problem.shape, problem.ranks, slots), "balance", started)


def balance_layer(
    load_E: np.ndarray, slots_W: np.ndarray, speed_W: np.ndarray, descents: int, rng: np.random.Generator
) -> list[list[int]]:
    """``[rank][experts]`` of one layer, at least as even as EPLB's packing with pair swaps."""
    held = eplb_node(load_E, slots_W, speed_W)
    rank_S, expert_S = np.repeat(np.arange(len(slots_W)), slots_W), np.concatenate(held).astype(np.int64)
    best_S = expert_S = _swap(expert_S, rank_S, load_E, speed_W)
    best_tail = _tail(best_S, rank_S, load_E, speed_W)
    for _ in range(descents):
        if best_tail <= 1 + 1e-9:
            break
        expert_S = _descend(expert_S, rank_S, load_E, speed_W)
        tail = _tail(expert_S, rank_S, load_E, speed_W)
        if tail < best_tail - 1e-12:
            best_S, best_tail = expert_S, tail
        expert_S = _kick(best_S, rank_S, len(load_E), rng)
    return [best_S[rank_S == rank].tolist() for rank in range(len(slots_W))]


def _descend(expert_S: np.ndarray, rank_S: np.ndarray, load_E: np.ndarray, speed_W: np.ndarray) -> np.ndarray:
    """Pair swaps of the slowest rank, then the best replacement or exchange, until neither lowers the power sum."""
    expert_S = _swap(expert_S, rank_S, load_E, speed_W)
    while True:
        state = _State(expert_S, rank_S, load_E, speed_W)
        moves = [state.best_replacement(), state.best_exchange()]
        value, move = min(moves, key=lambda pair: pair[0])
        if value >= state.value * (1 - 1e-9):
            return _swap(expert_S, rank_S, load_E, speed_W)
        expert_S = expert_S.copy()
        expert_S[move[0]] = move[1]


class _State:
    """One layer's slots and, for every slot, what the power sum becomes by each move."""

    def __init__(self, expert_S: np.ndarray, rank_S: np.ndarray, load_E: np.ndarray, speed_W: np.ndarray) -> None:
        self.expert_S, self.rank_S, self.load_E = expert_S, rank_S, load_E
        self.fair_W = speed_W * (load_E.sum() / speed_W.sum() or 1.0)
        self.copies_E = np.bincount(expert_S, minlength=len(load_E))
        self.share_E = load_E / self.copies_E
        self.held_WE = np.zeros((len(speed_W), len(load_E)), bool)
        self.held_WE[rank_S, expert_S] = True
        self.time_W = (self.held_WE @ self.share_E) / self.fair_W
        self.value = float((self.time_W**_POWER).sum())

    def best_replacement(self) -> tuple[float, tuple]:
        """A slot of a replicated expert takes an expert of one of the slowest ranks: (value, (slot, expert))."""
        slot_X = np.flatnonzero(self.copies_E[self.expert_S] > 1)
        slowest = np.argsort(-self.time_W, kind="stable")[:_SLOW_RANKS]
        wanted_Y = np.flatnonzero(self.held_WE[slowest].any(0))
        x, y = np.nonzero(~self.held_WE[self.rank_S[slot_X]][:, wanted_Y])
        if not x.size:
            return np.inf, ()
        slot, new = slot_X[x], wanted_Y[y]
        old, rank = self.expert_S[slot], self.rank_S[slot]
        old_after = self.load_E[old] / (self.copies_E[old] - 1)
        new_after = self.load_E[new] / (self.copies_E[new] + 1)
        change_MW = self.held_WE[:, old].T * (old_after - self.share_E[old])[:, None]
        change_MW = change_MW + self.held_WE[:, new].T * (new_after - self.share_E[new])[:, None]
        change_MW[np.arange(len(slot)), rank] += new_after - old_after
        value_M = ((self.time_W + change_MW / self.fair_W) ** _POWER).sum(1)
        best = int(value_M.argmin())
        return float(value_M[best]), (slot[best], new[best])

    def best_exchange(self) -> tuple[float, tuple]:
        """A slot of one of the slowest ranks and one elsewhere change places; (value, (slots, their new experts))."""
        expert_S, rank_S = self.expert_S, self.rank_S
        slow_A = np.flatnonzero(np.isin(rank_S, np.argsort(-self.time_W, kind="stable")[:_SLOW_RANKS]))
        share_S, power_S, time_S = self.share_E[expert_S], self.time_W[rank_S] ** _POWER, self.time_W[rank_S]
        gain_AS = share_S - share_S[slow_A][:, None]  # what the slow rank gains and the other loses
        slow_AS = time_S[slow_A][:, None] + gain_AS / self.fair_W[rank_S[slow_A]][:, None]
        other_AS = time_S - gain_AS / self.fair_W[rank_S]
        value_AS = self.value + slow_AS**_POWER + other_AS**_POWER - power_S[slow_A][:, None] - power_S
        value_AS[self.held_WE[rank_S[slow_A]][:, expert_S]] = np.inf  # the slow rank has the other's expert
        value_AS[self.held_WE[:, expert_S[slow_A]].T[:, rank_S]] = np.inf
        a, b = np.unravel_index(value_AS.argmin(), value_AS.shape)
        pair = np.array([slow_A[a], b])
        return float(value_AS[a, b]), (pair, expert_S[pair[::-1]])


def _kick(expert_S: np.ndarray, rank_S: np.ndarray, num_experts: int, rng: np.random.Generator) -> np.ndarray:
    """Random replacements of slots whose expert keeps another copy, by experts their rank lacks."""
    expert_S = expert_S.copy()
    for _ in range(_KICKED):
        slots = np.flatnonzero(np.bincount(expert_S, minlength=num_experts)[expert_S] > 1)
        if not slots.size:
            break
        slot = rng.choice(slots)
        absent = np.setdiff1d(np.arange(num_experts), expert_S[rank_S == rank_S[slot]])
        if absent.size:
            expert_S[slot] = rng.choice(absent)
    return expert_S


def _swap(expert_S: np.ndarray, rank_S: np.ndarray, load_E: np.ndarray, speed_W: np.ndarray) -> np.ndarray:
    share_S = (load_E / np.bincount(expert_S, minlength=len(load_E)))[expert_S]
    order = np.argsort(swap_pairs(share_S, rank_S, expert_S, speed_W), kind="stable")
    return expert_S[order]  # slots of a rank are consecutive, as in rank_S


def _tail(expert_S: np.ndarray, rank_S: np.ndarray, load_E: np.ndarray, speed_W: np.ndarray) -> float:
    share_S = (load_E / np.bincount(expert_S, minlength=len(load_E)))[expert_S]
    return float(compute_tail_L(np.bincount(rank_S, share_S, len(speed_W))[None], speed_W)[0])
