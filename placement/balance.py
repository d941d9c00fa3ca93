"""Load alone: how many copies each expert gets and where they go, decided together.

EPLB fixes the copies first (most load per copy gets the next) and packs them afterwards; the packing may then need
other counts.  Here a copy of one expert is exchanged for a copy of another, everything is packed anew (longest first,
pair swaps), and the best exchange is kept while it helps: judged by a high power mean of the ranks' times, which also
sees progress below the slowest rank.  Starts: EPLB's counts, and the fewest copies that bring every share under a
threshold, the rest dealt to the hottest experts that the threshold left whole.  Load splits equally over copies.
"""

from __future__ import annotations

import time

import numpy as np

from placement.eplb import eplb_node
from placement.greedy import swap_pairs
from placement.plan import make_plan
from placement.solution import Problem, Solution, finish

SMALL = 32  # slots of a layer up to which every start is tried
CANDIDATES = 8  # experts that may give a copy, and that may take one, in each step
POWER = 16


def solve_balance(problem: Problem) -> Solution:
    """The evenest load that is found, layer by layer."""
    started = time.perf_counter()
    speed_W, slots_W = problem.topology.speed_W, problem.slots_W
    effort = {} if int(slots_W.sum()) <= SMALL else {"steps": 0}  # packing is dear
    slots = [balance_layer(load_E, slots_W, speed_W, **effort) for load_E in problem.profile.load_LE]
    return finish(problem, make_plan(problem.shape, problem.ranks, slots), "balance", started)


def balance_layer(
    load_E: np.ndarray, slots_W: np.ndarray, speed_W: np.ndarray, *, steps: int = 20, starts: int = 12
) -> list[list[int]]:
    """``[rank]`` lists of experts that fill every slot, no two copies on one rank."""
    expert_S, rank_S = _flat(eplb_node(load_E, slots_W, speed_W))
    counts = [np.bincount(expert_S, minlength=len(load_E))]
    rank_S = swap_pairs((load_E / counts[0])[expert_S], rank_S, expert_S, speed_W)
    best = (*_times(load_E, counts[0], expert_S, rank_S, speed_W), counts[0], expert_S, rank_S)
    if slots_W.sum() > len(load_E) and load_E.sum() > 0 and steps:
        counts += _threshold_counts(load_E, int(slots_W.sum()), len(slots_W), starts)
        for copies_E in counts:
            found = _search(load_E, copies_E, (slots_W, speed_W), steps)
            if found is not None and found[0] < best[0] * (1 - 1e-12):
                best = found
    _, _, _, expert_S, rank_S = best
    return [np.sort(expert_S[rank_S == rank]).tolist() for rank in range(len(slots_W))]


def _threshold_counts(load_E: np.ndarray, slots: int, ranks: int, starts: int) -> list[np.ndarray]:
    shares = np.unique((load_E[:, None] / np.arange(1, ranks + 1)).ravel())
    out = []
    for limit in shares[shares > 0]:
        copies_E = np.clip(np.ceil(load_E / limit - 1e-9), 1, None).astype(np.int64)
        left = slots - int(copies_E.sum())
        if left < 0 or copies_E.max() > ranks:
            continue
        for _ in range(left):
            whole_E = np.where((copies_E < ranks) & (load_E < limit), load_E / copies_E, -1.0)
            any_E = np.where(copies_E < ranks, load_E / copies_E, -1.0)
            copies_E[int((whole_E if whole_E.max() > 0 else any_E).argmax())] += 1
        out.append(copies_E)
        if len(out) == starts:
            break
    return out


def _search(load_E: np.ndarray, copies_E: np.ndarray, machine: tuple[np.ndarray, np.ndarray], steps: int):
    """Exchanges of copies from ``copies_E``: (slowest, power mean, copies, experts, ranks); ``None``: nothing packs."""
    packed = pack_copies(load_E, copies_E, *machine)
    best = None
    if packed is not None:
        best = (*_times(load_E, copies_E, *packed, machine[1]), copies_E, *packed)
    for _ in range(steps):
        found = _better_counts(load_E, copies_E, machine, np.inf if best is None else best[1])
        if found is None:
            break
        best, copies_E = found, found[2]
    return best


def _better_counts(load_E: np.ndarray, copies_E: np.ndarray, machine: tuple[np.ndarray, np.ndarray], best: float):
    """The best packing with one copy exchanged whose power mean is below ``best``, or ``None``."""
    slots_W, speed_W = machine
    share_E = load_E / copies_E
    givers = [e for e in np.argsort(share_E, kind="stable") if copies_E[e] > 1][:CANDIDATES]
    takers = [e for e in np.argsort(-share_E, kind="stable") if copies_E[e] < len(slots_W)][:CANDIDATES]
    found = None
    for giver in givers:
        for taker in takers:
            if giver == taker:
                continue
            trial_E = copies_E.copy()
            trial_E[giver] -= 1
            trial_E[taker] += 1
            packed = pack_copies(load_E, trial_E, slots_W, speed_W)
            if packed is None:
                continue
            slowest, mean = _times(load_E, trial_E, *packed, speed_W)
            if mean < best * (1 - 1e-12):
                best, found = mean, (slowest, mean, trial_E, *packed)
    return found


def pack_copies(
    load_E: np.ndarray, copies_E: np.ndarray, slots_W: np.ndarray, speed_W: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """(expert, rank) of each slot: longest first to the rank that is done first, then pair swaps.

    Copies go to distinct ranks; ``None`` where this order runs into a dead end.
    """
    share_E, W = load_E / copies_E, len(slots_W)
    done_W, free_W = np.zeros(W), slots_W.copy()
    experts, ranks = [], []
    for expert in np.argsort(-share_E, kind="stable"):
        count = copies_E[expert]
        open_W = np.flatnonzero(free_W > 0)
        if len(open_W) < count:
            return None
        chosen = open_W[np.argsort((done_W[open_W] + share_E[expert]) / speed_W[open_W], kind="stable")[:count]]
        done_W[chosen] += share_E[expert]
        free_W[chosen] -= 1
        experts += [expert] * count
        ranks += chosen.tolist()
    expert_S, rank_S = np.array(experts), np.array(ranks)
    return expert_S, swap_pairs(share_E[expert_S], rank_S, expert_S, speed_W)


def _times(
    load_E: np.ndarray, copies_E: np.ndarray, expert_S: np.ndarray, rank_S: np.ndarray, speed_W: np.ndarray
) -> tuple[float, float]:
    """(slowest, power mean) of the ranks' times."""
    time_W = np.bincount(rank_S, (load_E / copies_E)[expert_S], len(speed_W)) / speed_W
    slowest = float(time_W.max())
    if slowest <= 0:
        return 0.0, 0.0
    return slowest, slowest * float(((time_W / slowest) ** POWER).mean()) ** (1 / POWER)


def _flat(held: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([np.asarray(h, np.int64) for h in held]), np.repeat(
        np.arange(len(held)), list(map(len, held))
    )
