"""From a plan in force: move few experts, or only those that pay for their move.

``Problem.move_price`` is charged in the objective for every expert copy on a rank that did not hold it.  Where
``Problem.max_moves`` limits the copies that move, the price is raised until the plan keeps to it.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from placement.joint import Budget, improve, start_layout
from placement.layout import Layout, draw_sample, layout_of, plan_of
from placement.plan import Plan
from placement.solution import Problem, Solution, finish, objective_value

ATTEMPTS = 6
WARM = 0.05


def moved_copies(plan: Plan, old: Plan) -> int:
    """Expert copies on ranks that did not hold them, over all layers: what must be sent."""
    return int(((plan.copy_slot_LEW >= 0) & (old.copy_slot_LEW < 0)).sum())


def solve_from_old(problem: Problem) -> Solution:
    """Start from ``problem.old_plan``; the best plan found whose moves are within ``max_moves``, price included.

    Where the old plan does not fill the problem's slots, the start is a new plan, and moves are what they are.
    """
    assert problem.old_plan is not None
    started = time.perf_counter()
    old = problem.old_plan
    sizes_LW = np.array([[len(held) for held in layer] for layer in old.slots])
    fits = (sizes_LW == problem.slots_W).all()
    start = layout_of(old) if fits else start_layout(problem)
    sample = draw_sample(problem)
    limit = problem.max_moves
    best, history = _judge(problem, start), []
    attempts = 1 if limit is None else ATTEMPTS
    low, high, price = problem.move_price, None, problem.move_price
    for _ in range(attempts):
        budget = Budget(time.perf_counter(), problem.seconds / attempts, WARM)
        layout, more = improve(replace(problem, move_price=price), sample, start, budget)
        history += [(budget.started - started + at, value, bound) for at, value, bound in more]
        found = _judge(problem, layout)
        keeps = limit is None or found[1] <= limit
        if keeps and found[0] < best[0]:
            best = found
        if keeps and price == problem.move_price:
            break
        low, high = (low, price) if keeps else (price, high)
        price = _next_price(low, high, (_judge(problem, start)[0] - found[0]) / max(1, found[1]))
    return finish(problem, best[2], "joint", started, history=history)


def _next_price(low: float, high: float | None, gain_per_move: float) -> float:
    """Between the dearest price that moved too much and the cheapest that kept the limit, or above the first."""
    if high is None:
        return max(2 * low, gain_per_move, 1e-9)
    return (max(low, high / 100) * high) ** 0.5


def _judge(problem: Problem, layout: Layout) -> tuple[float, int, Plan]:
    """(objective to lower with the price of moves, moves, plan)."""
    plan = plan_of(problem, layout)
    moves = moved_copies(plan, problem.old_plan)
    value = objective_value(problem, plan)
    return (-value if problem.objective.maximise else value) + problem.move_price * moves, moves, plan
