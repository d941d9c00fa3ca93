"""What a load cap for unseen tokens asks of a plan's training tokens: a lower cap, or a price of uneven load.

Everything here is estimated from training tokens alone.  Where homes are placed together with experts the price follows
the plan: after every round unseen requests are drawn, given homes as they would be, and served by the plan's copies.
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

FIRST_PRICE = 10.0  # a spread of 2% costs 0.004 rows per (token, choice)
PRICE_RANGE = (1.0, 40.0)  # above it training loads are even, and rows are paid for nothing
CROSSINGS = 2  # plans of each half: one alone is half noise
LEAST_DRAWS = 16
MOST_DRAWN = 1024  # requests of a batch that is drawn and given homes
MOST_CELLS = 1 << 26  # (home, request, layer, rank) loads that batches are drawn from
FEWEST_SEQUENCES = 32  # whole ones; halves of fewer differ by chance more than by drift
PRICE_STEP = 60.0  # the price's logarithm moves by this much per unit of tail; five times the price lowers it by 0.015


def cap_for_unseen(problem: Problem) -> float:
    """The cap on training tokens under which unseen ones should keep ``problem.cap``, by resampling sequences.

    Judged on a quick plan of the kind that will be made: what rises together on one rank depends on the plan.
    """
    quick = replace(problem, seconds=0.1 * problem.seconds, progress=None, old_plan=None, max_moves=None)
    return shrunk_cap(problem, solve_joint(quick).plan)


def even_for_unseen(problem: Problem) -> Problem:
    """The problem with a price of uneven load to begin with, and the drift of its recordings.

    At equal tails a price leaves fewer rows than a lower cap: loads that are spread cost unseen tokens less than
    several GPUs that are exactly at a cap. The drift is what rises of the tail from half to half of the recordings have
    beyond resampling, on quick plans of single copies; where requests are whole sequences resampling sees it, and of
    few sequences nothing can be said.
    """
    priced = replace(problem, even=FIRST_PRICE, drift=0.0)
    if problem.recordings is None or sum(map(len, problem.recordings)) < FEWEST_SEQUENCES:
        return priced
    quick = replace(priced, seconds=0.04 * problem.seconds, progress=None, old_plan=None, max_moves=None)
    single_W = single_slots_W(problem)
    if single_W.min() > 0:
        quick = replace(quick, slots_W=single_W)
    drawn = tail_rise(solve_joint(quick).plan, problem.train, problem.topology.speed_W, problem.seed)
    quicks = [replace(quick, seed=problem.seed + 1_000_003 * i) for i in range(CROSSINGS)]
    crossed = np.mean([crossed_rise(each, lambda half: solve_joint(half).plan) for each in quicks])
    return replace(priced, drift=drift_variance(float(crossed), drawn))


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
    total_LW = request_loads(plan, trace, problem.homes).sum(0)
    most = max(2, MOST_CELLS // (plan.ranks**2 * plan.shape.num_layers))
    if len(trace.seq_lens) > most:
        pool = np.sort(rng.choice(R, most, replace=False))
        trace, score_RW = trace.take_sequences(pool), score_RW[pool]
    at_home = (np.full(len(trace.seq_lens), home) for home in range(plan.ranks))
    load_HRLW = np.stack([request_loads(plan, trace, homes).astype(np.float32) for homes in at_home])
    batch = min(len(trace.seq_lens), MOST_DRAWN)

    def draw() -> np.ndarray:
        some = rng.integers(0, len(trace.seq_lens), batch)
        homes = assign_homes(score_RW[some], trace.seq_lens[some], slack, improve=False)
        load_LW = load_HRLW[homes, some].sum(0, dtype=np.float64)
        return load_LW * (total_LW.sum(-1, keepdims=True) / np.maximum(load_LW.sum(-1, keepdims=True), 1e-12))

    draws = int(np.clip(problem.seconds, LEAST_DRAWS, DRAWS))  # a short search has no time for a fine estimate
    noise = [np.sqrt(batch / R) * (draw() - draw()) for _ in range(draws)]  # that of R requests
    unseen = [np.maximum(total_LW + noise_LW, 0) for noise_LW in noise]
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
