"""Placement and homes together: alternate between assigning requests to homes and placing experts for them.

First a joint anneal without homes (fan-out and locality, which makes ranks that belong together over all layers).  Then
rounds of: homes of the training requests under the present plan, balanced; a new anneal of every layer for these homes,
from a temperature at which little of the old layer is left.  Under given homes the layers of a plan cost rows
independently of each other, and two anneals of one layer end one or two per cent apart; so each layer keeps the better
of old and new, and the rounds are also restarts.  Spare slots get copies for the homes, and rounds go on with them.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from placement.errors import UserError
from placement.homes import COPY_SLACK, HOME_SLACK, Affinity, assign_homes, fit_affinity, remote_rows_RW
from placement.joint import Budget, add_copies, improve, layer_limits, start_layout, timed_from
from placement.layout import Layout, Sample, draw_sample, even_price, home_weights, load_noise, plan_of, weights_of
from placement.solution import Objective, Problem, Solution, finish
from placement.team import one_hot
from placement.unseen import even_for_plan

HOT, COLD = 0.25, 0.1  # of a round; below COLD exchanges only undo each other
WARM = 0.12  # of the last round, which fits the plan to its homes without leaving its basin
ROUNDS, ROUNDS_BEFORE_COPIES, COPY_ROUNDS = 6, 2, 6  # without spare slots; with them
STARTS, START_SHARE = 2, 0.2
BEFORE_HOMES = Objective("fan_out and locality", terms=(("fan_out", 1.0), ("locality", -2.5)))


def solve_homes(problem: Problem) -> Solution:
    """The plan of :func:`place_with_homes`; its objective is taken with the homes it was solved for."""
    return place_with_homes(problem)[0]


def place_with_homes(
    problem: Problem, slack: float | None = None, probe: int = 32
) -> tuple[Solution, np.ndarray, Affinity]:
    """(solution, homes of the training requests, affinity for new ones).

    Args:
        problem: with a trace; its sequences are requests. Its own ``homes`` are ignored.
        slack: most tokens of a home over the mean; ``None``: as :func:`placement.homes.home_slack`.
        probe: tokens that are seen of a new request before its home is chosen.
    """
    if problem.train is None or not len(problem.train.seq_lens):
        raise UserError("homes are chosen for requests; give a trace, not only counts")
    started, trace = time.perf_counter(), problem.train
    problem = timed_from(replace(problem, homes=None), started)
    slack = slack or (COPY_SLACK if problem.spare_slots else HOME_SLACK)
    layout, history = _best_start(problem, slack, started)
    single = ROUNDS_BEFORE_COPIES if problem.spare_slots else ROUNDS
    rounds = single + (COPY_ROUNDS if problem.spare_slots else 0)
    for step in range(rounds):
        plan = plan_of(problem, layout)
        score_RW = -remote_rows_RW(plan, trace)
        problem = replace(problem, homes=assign_homes(score_RW, trace.seq_lens, slack))
        if problem.drift is not None:
            problem = even_for_plan(problem, plan, score_RW, slack)
        now = time.perf_counter()
        share = (problem.seconds - (now - started)) / (rounds - step)
        budget = Budget(now, max(share, 0.02 * problem.seconds), WARM if step == rounds - 1 else HOT, COLD)
        layout = _round(problem, layout, step >= single, budget)
        history.append((time.perf_counter() - started, _rows(problem, layout), None))
    plan = plan_of(problem, layout)
    homes = assign_homes(-remote_rows_RW(plan, trace), trace.seq_lens, slack)
    problem = replace(problem, homes=homes)
    affinity = fit_affinity(plan, trace, probe)
    return finish(problem, plan, "homes", started, history=history), homes, affinity


def _best_start(problem: Problem, slack: float, started: float) -> tuple[Layout, list]:
    """The anneal without homes that leaves fewest rows once homes are chosen."""
    best, history = None, []
    for start in range(STARTS):
        seed = problem.seed + 1_000_003 * start
        first = replace(problem, objective=BEFORE_HOMES, seed=seed)
        budget = Budget(time.perf_counter(), START_SHARE * problem.seconds / STARTS)
        layout, _ = improve(first, draw_sample(first), start_layout(first), budget)
        scores_RW = -remote_rows_RW(plan_of(problem, layout), problem.train)
        homes = assign_homes(scores_RW, problem.train.seq_lens, slack)
        rows = _rows(replace(problem, homes=homes), layout)
        if best is None or rows < best[0]:
            best = rows, layout
        history.append((time.perf_counter() - started, best[0], None))
    return best[1], history


def _round(problem: Problem, layout: Layout, copies: bool, budget: Budget) -> Layout:
    """A new anneal of all layers; with ``copies`` every slot is used afterwards."""
    sample = draw_sample(problem)
    if copies:  # copies belong to homes: only once those have settled
        half_cap = problem.cap and 1 + (problem.cap - 1) / 2  # copies fill a rank up to the cap; anneals need room
        layout = add_copies(replace(problem, cap=half_cap), sample, layout)
        left = budget.seconds - (time.perf_counter() - budget.started)
        budget = replace(budget, started=time.perf_counter(), seconds=max(left, 0.2 * budget.seconds))
    found, _ = improve(problem, sample, layout, budget)
    if weights_of(problem).locality:
        return found  # layers bind each other: they cannot be chosen one by one
    return _better_layers(problem, sample, layout, found)


def _better_layers(problem: Problem, sample: Sample, old: Layout, new: Layout) -> Layout:
    """Each layer from the layout in which it is nearer its cap, or as near and causes fewer rows."""
    judged = [zip(_excess(problem, sample, each), _layer_rows(problem, sample, each)) for each in (old, new)]
    chosen = [new if b <= a else old for a, b in zip(*judged)]
    layers = range(len(chosen))
    return Layout(*([getattr(chosen[i], part)[i] for i in layers] for part in ("expert", "rank", "serve")))


def _excess(problem: Problem, sample: Sample, layout: Layout) -> list[float]:
    """Load of each layer above its cap, as a share of all load, in steps that rounding does not cross."""
    over = []
    for limit, rank_S in zip(layer_limits(problem, sample, layout), layout.rank):
        load_W = np.bincount(rank_S, limit.load_DS[0], problem.ranks)
        over.append(round(float(np.maximum(load_W - limit.cap_DW[0], 0).sum() / max(load_W.sum(), 1e-12)), 4))
    return over


def _layer_rows(problem: Problem, sample: Sample, layout: Layout) -> list[float]:
    """Cost of each layer's rows for the sample's tokens, and of its uneven load."""
    weight_TW, token_T1 = home_weights(problem)[sample.home_T], np.arange(len(sample.home_T))[:, None]
    rows = []
    for layer, limit in enumerate(layer_limits(problem, sample, layout)):
        rank_S, serve_HE = layout.rank[layer], layout.serve[layer]
        reached_TW = np.zeros(weight_TW.shape, bool)
        reached_TW[token_T1, rank_S[serve_HE[sample.home_T[:, None], sample.ids_TLK[:, layer]]]] = True
        load_W = np.bincount(rank_S, limit.load_DS[0], problem.ranks)
        unfair_W = load_W - load_W.sum() * problem.topology.share_W
        uneven = float((unfair_W**2).sum())
        if even := even_price(problem, sample, limit):
            item_TK = serve_HE[sample.home_T[:, None], sample.ids_TLK[:, layer]]
            noise_SW = load_noise(sample, item_TK, limit) @ one_hot(rank_S, problem.ranks)
            uneven += float(noise_SW[np.arange(len(rank_S)), rank_S].sum())
        uneven *= even
        rows.append(float(weight_TW[reached_TW].sum(dtype=np.float64)) + uneven)
    return rows


def _rows(problem: Problem, layout: Layout) -> float:
    rows_RW = remote_rows_RW(plan_of(problem, layout), problem.train)
    at_home_R = rows_RW[np.arange(len(rows_RW)), problem.homes]
    return float(np.average(at_home_R, weights=problem.train.seq_lens))
