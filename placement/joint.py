"""The joint solver: load, fan-out (or dispatch rows) and locality together, under a load cap in every layer.

Annealing by exact exchanges (``moves.py``) in all layers (``team.py``), from the balanced start of LPT with pair swaps,
then descent.  Between rounds, where ranks are alike, an assignment program relabels the ranks of each layer so that
clusters of neighbouring layers meet.

The work of a time budget is fixed beforehand from a table of step costs, so that a run that keeps its budget depends on
the seed alone, not on the clock or the number of cores.  On a machine so slow that the budget ends first, the
temperature falls with the clock instead, and the plan may differ from run to run.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from placement.balance import balance_layer
from placement.cost import compute_tail_L
from placement.greedy import lpt_swap, single_slots_W
from placement.heat import Heat, picks_of
from placement.layout import (
    LayerLimits,
    Layout,
    Sample,
    Weights,
    chain_data,
    draw_sample,
    home_weights,
    item_loads,
    layout_of,
    plan_of,
    weights_of,
)
from placement.moves import LayerSearch
from placement.plan import Plan, make_plan
from placement.replicate import LayerTokens, improve_copies
from placement.solution import Problem, Solution, finish
from placement.states import layer_caps
from placement.team import ChainData, Team, one_hot
from placement.threads import end_with_parent, usable_cores
from placement.transport import is_linear, polish

HOT, COLD = 0.35, 0.12  # below it exchanges only undo each other
SWEEP_STEPS = 16
PLANNED_CORES = 2
LATE = 0.1  # of what is left of the time; so late, the clock sets the temperature (starting workers makes nothing late)

History = list[tuple[float, float, "float | None"]]


@dataclass(frozen=True)
class Pace:
    """Budget of one anneal: ``rounds`` sweeps that look at ``rows`` items a step, ended at ``deadline``.

    Times are of ``time.perf_counter()``; ``started`` is the solver's start, from which history counts. ``hot`` and
    ``cold`` are the first and last temperature in standard deviations of an exchange's change at the start.
    """

    rounds: int
    rows: int
    started: float
    deadline: float
    hot: float = HOT
    cold: float = COLD


def solve_joint(problem: Problem) -> Solution:
    """With spare slots: single copies first, then copies where they gain most, then exchanges of all slots."""
    if problem.old_plan is not None:
        from placement.migrate import solve_from_old  # which uses this module's parts

        return solve_from_old(problem)
    started = time.perf_counter()
    problem = timed_from(problem, started)
    if weights_of(problem) == Weights():
        return finish(problem, balanced_plan(problem), "joint", started)
    sample, layout = draw_sample(problem), start_layout(problem)
    share = 0.5 if problem.spare_slots else 1.0
    layout, history = improve(problem, sample, layout, Budget(started, share * problem.seconds))
    if problem.spare_slots:
        layout = add_copies(problem, sample, layout)
        left = problem.seconds - (time.perf_counter() - started)
        budget = Budget(time.perf_counter(), max(0.1 * problem.seconds, 0.9 * left), 0.5 * HOT)
        layout, more = improve(problem, sample, layout, budget)
        history += [(budget.started - started + at, value, bound) for at, value, bound in more]
    return finish(problem, plan_of(problem, layout), "joint", started, history=history)


def timed_from(problem: Problem, started: float) -> Problem:
    """The problem with progress told in seconds since ``started``, whichever of its searches tells it."""
    if (tell := problem.progress) is None:
        return problem
    return replace(problem, progress=lambda _, best, bound: tell(time.perf_counter() - started, best, bound))


def start_layout(problem: Problem) -> Layout:
    """One copy of each expert, as balanced as LPT with pair swaps makes it.

    Where spare slots are needed to come near the cap, copies for load instead.
    """
    load_LE, W = problem.profile.load_LE, problem.ranks
    rank_LE = lpt_swap(load_LE, single_slots_W(problem), problem.topology.speed_W)
    L, E = rank_LE.shape
    if problem.spare_slots and problem.cap is not None:
        load_LW = np.stack([np.bincount(rank_E, load_E, W) for rank_E, load_E in zip(rank_LE, load_LE)])
        if compute_tail_L(load_LW, problem.topology.speed_W).max() > 1.5 * problem.cap:
            return layout_of(balanced_plan(problem))
    items = np.arange(E)
    return Layout([items] * L, list(rank_LE), [np.tile(items, (W, 1))] * L)


def balanced_plan(problem: Problem) -> Plan:
    """Load alone: copies and their ranks together."""
    speed_W = problem.topology.speed_W
    small = int(problem.slots_W.sum()) <= 32  # packing anew costs little there
    effort = {} if small else {"steps": 0}
    slots = [balance_layer(load_E, problem.slots_W, speed_W, **effort) for load_E in problem.profile.load_LE]
    return make_plan(problem.shape, problem.ranks, slots)


@dataclass(frozen=True)
class Budget:
    """``seconds`` from ``started`` for one anneal, from temperature ``hot`` to ``cold``."""

    started: float
    seconds: float
    hot: float = HOT
    cold: float = COLD


def improve(
    problem: Problem, sample: Sample, layout: Layout, budget: Budget, limits: list[LayerLimits] | None = None
) -> tuple[Layout, History]:
    """Anneal where the layout's items are, under ``limits`` (the problem's caps if not given)."""
    chain = chain_data(problem, sample, layout, limits or layer_limits(problem, sample, layout))
    pace = replace(
        pace_of(chain, budget.started, budget.seconds), hot=budget.hot, cold=min(budget.cold, budget.hot / 2)
    )
    rank, history = anneal(problem, chain, layout.rank, pace)
    if is_linear(chain):
        polish(chain, rank, budget.started + budget.seconds)
    return replace(layout, rank=rank), history


def layer_limits(problem: Problem, sample: Sample, layout: Layout) -> list[LayerLimits]:
    """The cap of each layer, or what LPT with pair swaps (or EPLB) reaches where that is more."""
    limits = []
    for load_S, cap in zip(item_loads(layout, sample.load_LHE), layer_caps(problem)):
        fair_W = load_S.sum() * problem.topology.share_W
        limits.append(LayerLimits(load_S[None], cap * fair_W[None] * (1 + 1e-9)))
    return limits


def add_copies(problem: Problem, sample: Sample, layout: Layout) -> Layout:
    """Fill the spare slots of every layer (or better their use), layers in parallel."""
    tasks = []
    groups = problem.ranks**2 * problem.shape.num_experts  # cells of the tables that each try counts anew
    tries = min(20, 1_000_000 // groups - 1)
    for layer, cap in enumerate(layer_caps(problem)):
        load_HE = sample.load_LHE[layer]
        cap_W = cap * load_HE.sum() * problem.topology.share_W
        home_weight_HW = home_weights(problem)
        tokens = LayerTokens(sample.ids_TLK[:, layer], sample.home_T, home_weight_HW, load_HE, cap_W, problem.slots_W)
        rank_HE = layout.rank[layer][layout.serve[layer]]
        tasks.append((tokens, layout.expert[layer], layout.rank[layer], rank_HE, tries))
    workers = min(problem.threads or usable_cores(), len(tasks))
    if workers == 1:
        found = [improve_copies(*task) for task in tasks]
    else:
        with ProcessPoolExecutor(workers, None, end_with_parent) as pool:
            found = [done.result() for done in [pool.submit(improve_copies, *task) for task in tasks]]
    return Layout(*map(list, zip(*found)))


def pace_of(chain: ChainData, started: float, seconds: float) -> Pace:
    """Sweeps that fit in ``seconds`` on ``PLANNED_CORES`` cores by a table of step costs."""
    tokens, choices = chain.layers[0].item_TK.shape
    items = max(len(data.expert_S) for data in chain.layers)
    rows = items if items <= 96 else 64
    table = (20e-6 + 24e-9 * rows * items) / picks_of(chain.layers[0].ranks)
    step = 160e-6 + table + 10e-9 * tokens * choices**2 / items
    rounds = max(1, int(0.75 * seconds * PLANNED_CORES / (step * SWEEP_STEPS * len(chain.layers))))
    return Pace(rounds, rows, started, started + 0.85 * seconds)


def anneal(problem: Problem, chain: ChainData, start: list[np.ndarray], pace: Pace) -> tuple[list[np.ndarray], History]:
    """(rank of each item by layer, history in units of the objective without its constant)."""
    rank_LS = [np.asarray(rank_S, np.intp) for rank_S in start]
    unit, alike = unit_temperature(chain, rank_LS), ranks_alike(problem, chain)
    begun, history = time.perf_counter(), []
    with Team(chain, problem.threads or usable_cores()) as team:
        for round in range(pace.rounds):
            clock, done = (time.perf_counter() - begun) / max(pace.deadline - begun, 1e-9), round / pace.rounds
            if clock - done > LATE * (1 - done):
                done = clock
            if done >= 1:
                break
            after = min(1.0, done + 1 / pace.rounds)
            hot, cold = (unit * pace.hot * (pace.cold / pace.hot) ** x for x in (done, after))
            team.sweep(rank_LS, Heat(hot, cold, SWEEP_STEPS, pace.rows), round)
            if alike and round % 4 == 3:
                relabel(chain, rank_LS)
            if round % 16 == 15:
                _note(problem, team, rank_LS, pace, history)
        if alike:
            relabel(chain, rank_LS)
        _settle(team, rank_LS, pace)
        _note(problem, team, rank_LS, pace, history)
    return rank_LS, history


def _settle(team: Team, rank_LS: list[np.ndarray], pace: Pace) -> None:
    """Descend until no exchange helps; a tenth of the budget at most."""
    last = pace.deadline + 0.1 * (pace.deadline - pace.started)
    for round in range(300):
        made = team.sweep(rank_LS, Heat(1, 1, 16, pace.rows), round, cold=True)
        if not made or time.perf_counter() > last:
            return


def _note(problem: Problem, team: Team, rank_LS: list[np.ndarray], pace: Pace, history: History) -> None:
    if weights_of(problem) == Weights():
        return  # loads alone: the search costs nothing but what breaks a cap
    counts = max(1, len(team.chain.layers[0].item_TK)) * len(rank_LS)
    value = team.cost(rank_LS) / counts
    value = problem.objective.offset + (-value if problem.objective.maximise else value)
    history.append((time.perf_counter() - pace.started, value, None))
    if problem.progress:
        problem.progress(*history[-1])


def unit_temperature(chain: ChainData, rank_LS: list[np.ndarray]) -> float:
    """Standard deviation of the change by a legal exchange at the start, over some layers."""
    spread = []
    for layer in range(0, len(rank_LS), max(1, len(rank_LS) // 4)):
        rows_alone = replace(chain.layers[layer], even=0.0)  # hot experts would drown the rest
        delta = LayerSearch(rows_alone, rank_LS[layer]).deltas(chain.linear_SW(layer, rank_LS))
        legal = delta[np.isfinite(delta)]
        spread.append(float(legal.std()) if legal.size else 0.0)
    return max(float(np.mean(spread)), 1e-6)


def ranks_alike(problem: Problem, chain: ChainData) -> bool:
    """Relabelling the ranks of one layer changes no cost but locality."""
    free = chain.base is None and bool(chain.cross) and all(data.weight_WT is None for data in chain.layers)
    caps_alike = all(np.allclose(data.cap_DW, data.cap_DW[:, :1]) for data in chain.layers)
    return free and caps_alike and np.ptp(problem.slots_W) == 0


def relabel(chain: ChainData, rank_LS: list[np.ndarray]) -> None:
    """The best relabelling of each layer's ranks to its predecessor's: exact, for it moves nothing else."""
    W = chain.layers[0].ranks
    for layer in range(1, len(rank_LS)):
        meet_WW = one_hot(rank_LS[layer - 1], W).T @ chain.cross[layer - 1] @ one_hot(rank_LS[layer], W)
        _, partner_W = linear_sum_assignment(meet_WW)
        rank_LS[layer] = np.argsort(partner_W)[rank_LS[layer]]
