"""What a load cap for unseen tokens asks of a plan's training tokens: a lower cap, or a price of uneven load.

Everything here is estimated from training tokens alone.  Where homes are placed together with experts the price is set
twice: first from quick plans of single copies, then after every round from the plan at hand, its copies serving the
homes that requests would be given.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from placement import cost
from placement.greedy import single_slots_W
from placement.homes import assign_homes
from placement.joint import solve_joint
from placement.plan import Plan
from placement.robust import DRAWS, crossed_rise, drift_variance, shrunk_cap, tail_rise
from placement.solution import Problem
from placement.trace import Trace

EVEN_PRICES = (20.0, 10.0, 5.0, 2.5)  # a spread of 2% costs 0.008 to 0.001 rows per (token, choice)
PRICE_RANGE = (1.0, 100.0)
PRICE_STEP = 60.0  # the price's logarithm moves by this much per unit of tail; five times the price lowers it by 0.015


def cap_for_unseen(problem: Problem) -> float:
    """The cap on training tokens under which unseen ones should keep ``problem.cap``, by resampling sequences.

    Judged on a quick plan of the kind that will be made: what rises together on one rank depends on the plan.
    """
    quick = replace(problem, seconds=0.1 * problem.seconds, progress=None, old_plan=None, max_moves=None)
    return shrunk_cap(problem, solve_joint(quick).plan)


def even_for_unseen(problem: Problem) -> Problem:
    """The problem with the lowest price of uneven load under which unseen tokens should keep ``problem.cap``.

    The tail of unseen tokens comes from quick plans at four prices (and is interpolated between them): the training
    tail, what resampling adds, and the drift between the halves of the recordings where requests are pieces of them.
    No held-out token is looked at. At equal tails a price leaves fewer rows than a lower cap: loads that are spread
    cost unseen tokens less than several GPUs that are exactly at a cap.
    """
    quick = replace(problem, seconds=0.04 * problem.seconds, progress=None, old_plan=None, max_moves=None)
    single_W = single_slots_W(problem)
    if single_W.min() > 0:
        quick = replace(quick, slots_W=single_W)  # copies come once homes are known
    speed_W, train = problem.topology.speed_W, problem.train
    drift, found = None, None
    for even in EVEN_PRICES:
        plan = solve_joint(replace(quick, even=even)).plan
        rise = tail_rise(plan, train, speed_W, problem.seed)
        if drift is None:
            drift = _drift(replace(quick, even=even), rise)
        tail = float(cost.compute_tail_L(cost.evaluate(plan, train).load_LW, speed_W).mean())
        tail += float(np.hypot(rise, np.sqrt(drift)))
        if tail > problem.cap:
            if found is not None:  # between two prices: linear in the logarithm
                share = (problem.cap - found[1]) / (tail - found[1])
                found = found[0] * (even / found[0]) ** share, problem.cap
            break
        found = even, tail
    return replace(problem, even=EVEN_PRICES[0] if found is None else found[0], drift=drift)


def even_for_plan(problem: Problem, plan: Plan, score_RW: np.ndarray, slack: float) -> Problem:
    """The problem with its price moved towards the one under which unseen tokens keep ``problem.cap``.

    ``score_RW`` and ``slack`` are those by which the training requests' homes are chosen.
    """
    assert problem.drift is not None and problem.cap is not None
    rise = np.hypot(served_rise(plan, problem, score_RW, slack), np.sqrt(problem.drift))
    load_RLW = request_loads(plan, problem.train, problem.homes)
    tail = cost.compute_tail_L(load_RLW.sum(0), problem.topology.speed_W).mean() + rise
    step = np.clip(PRICE_STEP * (tail - problem.cap), -0.7, 0.7)
    return replace(problem, even=float(np.clip(problem.even * np.exp(step), *PRICE_RANGE)))


def served_rise(plan: Plan, problem: Problem, score_RW: np.ndarray, slack: float) -> float:
    """Expected rise of the mean compute tail from the training requests at ``problem.homes`` to as many unseen ones.

    As :func:`placement.robust.tail_rise`, but each drawn batch of requests is given homes by its scores, and the copies
    that the plan keeps for these homes serve it: with copies, which homes are full is part of which ranks are.
    """
    trace, speed_W = problem.train, problem.topology.speed_W
    R, rng = len(trace.seq_lens), np.random.default_rng(problem.seed)
    if R < 2:
        return 0.0
    if (plan.copies_LE == 1).all():
        return tail_rise(plan, trace, speed_W, problem.seed)
    load_HRLW = np.stack([request_loads(plan, trace, np.full(R, home)) for home in range(plan.ranks)])
    total_LW = load_HRLW[problem.homes, np.arange(R)].sum(0)

    def draw() -> np.ndarray:
        some = rng.integers(0, R, R)
        homes = assign_homes(score_RW[some], trace.seq_lens[some], slack, improve=False)
        load_LW = load_HRLW[homes, some].sum(0)
        return load_LW * (total_LW.sum(-1, keepdims=True) / np.maximum(load_LW.sum(-1, keepdims=True), 1e-12))

    unseen = [np.maximum(total_LW + draw() - draw(), 0) for _ in range(DRAWS)]
    before = cost.compute_tail_L(total_LW, speed_W).mean()
    return float(max(0.0, np.mean([cost.compute_tail_L(load_LW, speed_W).mean() for load_LW in unseen]) - before))


def request_loads(plan: Plan, trace: Trace, homes: np.ndarray) -> np.ndarray:
    """float64 ``[R, L, W]``: (token, choice) pairs of each request that each rank serves, at the given homes."""
    R, L, W = len(trace.seq_lens), plan.shape.num_layers, plan.ranks
    load_RLW = np.zeros((R, L, W))
    request_T1 = np.repeat(np.arange(R), trace.seq_lens)[:, None]
    for layer in range(L):
        ids_TK = trace.expert_ids_TLK[:, layer].astype(np.intp)
        rank_TK = plan.serve_rank_WLE[homes[request_T1], layer, ids_TK]
        load_RLW[:, layer] = np.bincount((request_T1 * W + rank_TK).ravel(), minlength=R * W).reshape(R, W)
    return load_RLW


def _drift(quick: Problem, drawn: float) -> float:
    if quick.recordings is None:
        return 0.0
    return drift_variance(crossed_rise(quick, lambda half: solve_joint(half).plan), drawn)
