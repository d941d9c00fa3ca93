"""Baselines that look at one layer at a time: linear, round-robin, random, LPT, and LPT improved by pair swaps.

LPT (longest processing time first, Graham 1969) places experts in descending load, each on the rank that would then
finish first, among ranks with a free slot.  Pair swaps then lower the fullest rank
until no exchange of two experts does.
A baseline places one copy of each expert; slots that remain are filled with replicas of the hottest experts.
"""

from __future__ import annotations

import time

import numpy as np

from placement.plan import MoEShape, Plan, make_plan
from placement.solution import Problem, Solution, finish


def solve_linear(problem: Problem) -> Solution:
    """Contiguous runs of experts: what engines do without a plan."""
    started = time.perf_counter()
    row = np.repeat(np.arange(problem.ranks), single_slots_W(problem))
    return _finish_single(problem, np.tile(row, (problem.shape.num_layers, 1)), "linear", started)


def solve_round_robin(problem: Problem) -> Solution:
    """Experts dealt to the ranks in turn, skipping full ones."""
    started = time.perf_counter()
    slots_W = single_slots_W(problem)
    turns = [rank for turn in range(slots_W.max()) for rank in np.flatnonzero(slots_W > turn)]
    return _finish_single(problem, np.tile(turns, (problem.shape.num_layers, 1)), "round-robin", started)


def solve_random(problem: Problem) -> Solution:
    """A random deal in every layer, from the problem's seed."""
    started = time.perf_counter()
    row = np.repeat(np.arange(problem.ranks), single_slots_W(problem))
    rng = np.random.default_rng(problem.seed)
    rank_LE = rng.permuted(np.tile(row, (problem.shape.num_layers, 1)), axis=1)
    return _finish_single(problem, rank_LE, "random", started)


def solve_lpt(problem: Problem) -> Solution:
    started = time.perf_counter()
    rank_LE = lpt(problem.profile.load_LE, single_slots_W(problem), problem.topology.speed_W)
    return _finish_single(problem, rank_LE, "lpt", started)


def solve_lpt_swap(problem: Problem) -> Solution:
    started = time.perf_counter()
    rank_LE = lpt_swap(problem.profile.load_LE, single_slots_W(problem), problem.topology.speed_W)
    return _finish_single(problem, rank_LE, "lpt-swap", started)


# -- on arrays --------------------------------------------------------------------------------------------------------


def lpt(load_LE: np.ndarray, slots_W: np.ndarray, speed_W: np.ndarray) -> np.ndarray:
    """int64 ``[L, E]``: expert -> rank, at most ``slots_W`` experts on each rank of each layer."""
    L, E = load_LE.shape
    assert slots_W.sum() >= E, f"{slots_W.sum()} slots for {E} experts"
    order_LE = np.argsort(-load_LE, axis=1, kind="stable")
    rank_LE = np.empty((L, E), np.int64)
    total_LW, free_LW = np.zeros((L, len(slots_W))), np.tile(slots_W, (L, 1))
    layer_L = np.arange(L)
    for expert_L in order_LE.T:
        load_L = load_LE[layer_L, expert_L]
        done_LW = np.where(free_LW > 0, (total_LW + load_L[:, None]) / speed_W, np.inf)
        rank_L = done_LW.argmin(1)
        rank_LE[layer_L, expert_L] = rank_L
        total_LW[layer_L, rank_L] += load_L
        free_LW[layer_L, rank_L] -= 1
    return rank_LE


def lpt_swap(load_LE: np.ndarray, slots_W: np.ndarray, speed_W: np.ndarray) -> np.ndarray:
    """int64 ``[L, E]``: LPT, then pair swaps in each layer."""
    rank_LE = lpt(load_LE, slots_W, speed_W)
    experts = np.arange(load_LE.shape[1])
    return np.stack([swap_pairs(load_E, rank_E, experts, speed_W) for load_E, rank_E in zip(load_LE, rank_LE)])


def swap_pairs(weight_S: np.ndarray, rank_S: np.ndarray, expert_S: np.ndarray, speed_W: np.ndarray) -> np.ndarray:
    """Exchange slots of the slowest rank with others while that lowers it; returns the new slot -> rank, int64 ``[S]``.

    Never puts two copies of an expert on one rank. Each step takes the exchange whose slower side is fastest and stays
    below the present maximum, so the sorted times fall and the loop ends.
    """
    W, rank_S = len(speed_W), rank_S.astype(np.int64)
    held_WE = np.zeros((W, int(expert_S.max()) + 1), bool)
    held_WE[rank_S, expert_S] = True
    while True:
        total_W = np.bincount(rank_S, weight_S, W)
        slow = int((total_W / speed_W).argmax())
        mine, other = np.flatnonzero(rank_S == slow), np.flatnonzero(rank_S != slow)
        if not other.size:
            return rank_S
        to = rank_S[other]
        gain = weight_S[mine][:, None] - weight_S[other]
        worse = np.maximum((total_W[slow] - gain) / speed_W[slow], (total_W[to] + gain) / speed_W[to])
        same = expert_S[mine][:, None] == expert_S[other]
        legal = same | ~(held_WE[to[None, :], expert_S[mine][:, None]] | held_WE[slow, expert_S[other]][None, :])
        worse[~legal] = np.inf
        i, j = np.unravel_index(worse.argmin(), worse.shape)
        if worse[i, j] >= total_W[slow] / speed_W[slow] * (1 - 1e-12):
            return rank_S
        a, b = mine[i], other[j]
        held_WE[slow, expert_S[a]] = held_WE[rank_S[b], expert_S[b]] = False
        rank_S[a], rank_S[b] = rank_S[b], slow
        held_WE[rank_S[a], expert_S[a]] = held_WE[slow, expert_S[b]] = True


def single_slots_W(problem: Problem) -> np.ndarray:
    """int64 ``[W]``: the slots of each rank that take one copy of each expert; the others are spare. Sums to E."""
    slots_W, E = problem.slots_W, problem.shape.num_experts
    exact_W = slots_W * (E / slots_W.sum())
    count_W = np.floor(exact_W + 1e-9).astype(np.int64)
    for rank in np.argsort(count_W - exact_W, kind="stable")[: E - count_W.sum()]:
        count_W[rank] += 1
    return count_W


def plan_of_ranks(problem: Problem, rank_LE: np.ndarray) -> Plan:
    """A plan from expert -> rank, with a replica in each spare slot.

    A rank's spare slots are those beyond its share of single copies, also where ``rank_LE`` gives it another number.
    """
    spare_W, E = problem.slots_W - single_slots_W(problem), problem.shape.num_experts
    slots = []
    for rank_E, load_E in zip(rank_LE, problem.profile.load_LE):
        slots_W = np.minimum(np.bincount(rank_E, minlength=problem.ranks) + spare_W, E)
        slots.append(fill_spare(problem.shape, slots_W, rank_E, load_E))
    return make_plan(problem.shape, problem.ranks, slots)


def fill_spare(shape: MoEShape, slots_W: np.ndarray, rank_E: np.ndarray, load_E: np.ndarray) -> list[list[int]]:
    """Experts per rank of one layer: the single copies, then for each spare slot one more copy.

    Each copy is of the expert with the most load per copy that some rank with a free slot lacks, on the rank of those
    whose load (in equal shares of each expert's copies) is lowest.
    """
    held_WE = np.zeros((len(slots_W), shape.num_experts), bool)
    held_WE[rank_E, np.arange(shape.num_experts)] = True
    while (open_W := held_WE.sum(1) < slots_W).any():
        share_E = load_E / held_WE.sum(0)
        can_E = (~held_WE[open_W]).any(0)
        expert = int(np.where(can_E, share_E, -1.0).argmax())
        busy_W = held_WE @ share_E
        rank = int(np.where(open_W & ~held_WE[:, expert], busy_W, np.inf).argmin())
        held_WE[rank, expert] = True
    return [np.flatnonzero(held_E).tolist() for held_E in held_WE]


def _finish_single(problem: Problem, rank_LE: np.ndarray, method: str, started: float) -> Solution:
    return finish(problem, plan_of_ranks(problem, rank_LE), method, started)
