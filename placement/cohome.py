"""Placement and homes together: alternate between assigning requests to homes and placing experts for them.

First a joint anneal without homes (fan-out and locality, which makes ranks that belong together over all layers); then
rounds of: homes of the training requests under the present plan, balanced; exchanges that lower dispatch rows for these
homes, from warm to cold.  Spare slots get copies for the homes, and both are bettered in turn.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from placement.errors import UserError
from placement.homes import Affinity, assign_homes, fit_affinity, remote_rows_RW
from placement.joint import Budget, add_copies, improve, start_layout
from placement.layout import Layout, draw_sample, plan_of
from placement.solution import Objective, Problem, Solution, finish

WARM, COLD = 0.15, 0.03
ROUNDS = 6
STARTS = 2
BEFORE_HOMES = Objective("fan_out and locality", terms=(("fan_out", 1.0), ("locality", -2.5)))


def solve_homes(problem: Problem) -> Solution:
    """The plan of :func:`place_with_homes`; its objective is taken with the homes it was solved for."""
    return place_with_homes(problem)[0]


def place_with_homes(problem: Problem, slack: float = 1.08, probe: int = 32) -> tuple[Solution, np.ndarray, Affinity]:
    """(solution, homes of the training requests, affinity for new ones).

    Args:
        problem: with a trace; its sequences are requests. Its own ``homes`` are ignored.
        slack: most tokens of a home over the mean.
        probe: tokens that are seen of a new request before its home is chosen.
    """
    if problem.train is None or not len(problem.train.seq_lens):
        raise UserError("homes are chosen for requests; give a trace, not only counts")
    started, trace = time.perf_counter(), problem.train
    problem = replace(problem, homes=None)
    layout, history = _best_start(problem, slack, started)
    rounds = ROUNDS + (ROUNDS // 2 if problem.spare_slots else 0)
    for step in range(rounds):
        homes = assign_homes(-remote_rows_RW(plan_of(problem, layout), trace), trace.seq_lens, slack)
        problem = replace(problem, homes=homes)
        now = time.perf_counter()
        share = (problem.seconds - (now - started)) / (rounds - step)
        layout = _round(problem, layout, step, Budget(now, max(share, 0.02 * problem.seconds)))
        history.append((time.perf_counter() - started, _rows(problem, layout), None))
    plan = plan_of(problem, layout)
    homes = assign_homes(-remote_rows_RW(plan, trace), trace.seq_lens, slack)
    problem = replace(problem, homes=homes)
    affinity = fit_affinity(plan, trace, probe)
    return finish(problem, plan, "homes", started, history=history), homes, affinity


def _best_start(problem: Problem, slack: float, started: float) -> tuple[Layout, list]:
    """The anneal without homes that leaves fewest rows once homes are chosen: later rounds rarely leave its basin."""
    best, history = None, []
    for start in range(STARTS):
        seed = problem.seed + 1_000_003 * start
        first = replace(problem, objective=BEFORE_HOMES, seed=seed)
        budget = Budget(time.perf_counter(), 0.3 * problem.seconds / STARTS)
        layout, _ = improve(first, draw_sample(first), start_layout(first), budget)
        scores_RW = -remote_rows_RW(plan_of(problem, layout), problem.train)
        homes = assign_homes(scores_RW, problem.train.seq_lens, slack)
        rows = _rows(replace(problem, homes=homes), layout)
        if best is None or rows < best[0]:
            best = rows, layout
        history.append((time.perf_counter() - started, best[0], None))
    return best[1], history


def _round(problem: Problem, layout: Layout, step: int, budget: Budget) -> Layout:
    sample = draw_sample(problem)
    if step >= ROUNDS:  # copies belong to homes: only once those have settled
        layout = add_copies(problem, sample, layout)
        left = budget.seconds - (time.perf_counter() - budget.started)
        budget = Budget(time.perf_counter(), max(left, 0.2 * budget.seconds))
    done = min(step, ROUNDS - 1) / (ROUNDS - 1)
    layout, _ = improve(problem, sample, layout, replace(budget, hot=WARM * (COLD / WARM) ** done))
    return layout


def _rows(problem: Problem, layout: Layout) -> float:
    rows_RW = remote_rows_RW(plan_of(problem, layout), problem.train)
    at_home_R = rows_RW[np.arange(len(rows_RW)), problem.homes]
    return float(np.average(at_home_R, weights=problem.train.seq_lens))
