"""MoETuner's two integer programs (arXiv 2502.06643), through PuLP and HiGHS.

ILP 1, per layer: experts -> clusters, one per GPU, so that loads are even::

    min sum_c |T_c - target_c|,  T_c = sum_e load_e x[c, e],  sum_c x[c, e] = 1,  sum_e x[c, e] >= 1

ILP 2: clusters -> GPUs, one to one in each layer, so that the traffic C of consecutive layers meets good links::

    time[l, g, h] = sum_{c, d} C[l, c, d] a[l, c, g] a[l+1, d, h] / bandwidth[g, h]     (0 where g = h)
    min sum_l max_{g, h} time[l, g, h]   (``max``)      or   sum of all times   (``sum``)
    sum over layers and clusters of cluster size * a[., ., g]  equal for all g   (memory)

Products are linearised by ``sum_d z[c, d, g, h] = a[l, c, g]`` and ``sum_c z[c, d, g, h] = a[l+1, d, h]``.
The paper solves with Gurobi at a gap of 0.025 for 4 GPUs; the second program has ``(L - 1) * W**4`` products, so for
more it is solved layer by layer, the layer before fixed.  Differing GPUs: targets follow speed, and a cluster may only
take the place of one made for a like GPU.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from functools import lru_cache

import highspy
import numpy as np
import pulp

from placement.errors import UserError
from placement.greedy import lpt_swap, plan_of_ranks, single_slots_W
from placement.solution import Problem, Solution, finish
from placement.two_stage import chain_labels, cluster_traffic, like_GPUs

MAX_PRODUCTS = 10_000  # of the second program solved whole
_SPILL = 1e3  # price of a slot beyond a GPU's memory share, far above any share of traffic


@dataclass(frozen=True)
class MoETunerOptions:
    """How to run the two programs.

    ``objective`` of ILP 2: ``max`` (the paper's) or ``sum``. ``equal_counts``: clusters hold exactly a GPU's slots in
    every layer; else, as in the paper, only their sum over the layers is even (spare slots come on top). ``gap``:
    relative, where HiGHS stops.
    """

    objective: str = "max"
    equal_counts: bool = True
    gap: float = 0.025


@dataclass(frozen=True)
class Stage:
    """What HiGHS said of one program: ``status`` optimal, feasible or none (no solution in time)."""

    status: str
    objective: float
    bound: float


def solve_moetuner(problem: Problem, options: MoETunerOptions | None = None) -> Solution:
    """Both stages within the time budget. The status speaks of the problem's objective, so it is ``feasible``."""
    started = time.perf_counter()
    options = options or MoETunerOptions()
    if options.objective not in ("max", "sum"):
        raise UserError(f"MoETuner's objective is {options.objective!r}; choose max or sum")
    cluster_LE, _ = cluster_experts(problem, options, problem.seconds / 2)
    if problem.profile.transitions_LEE is not None:
        left = max(0.1, problem.seconds - (time.perf_counter() - started))
        place_LC, _ = place_clusters(problem, cluster_LE, options, left)
        rank_LE = np.take_along_axis(place_LC, cluster_LE, axis=1)
    else:
        rank_LE = cluster_LE
    name = "moetuner" if options.objective == "max" else "moetuner-sum"
    return finish(problem, plan_of_ranks(problem, rank_LE), name, started)


# -- ILP 1 ------------------------------------------------------------------------------------------------------------


def cluster_experts(problem: Problem, options: MoETunerOptions, seconds: float) -> tuple[np.ndarray, list[Stage]]:
    """int64 ``[L, E]``: expert -> cluster, cluster c made for GPU c; and each layer's stage."""
    load_LE, slots_W, speed_W = problem.profile.load_LE, single_slots_W(problem), problem.topology.speed_W
    start_LE = lpt_swap(load_LE, slots_W, speed_W)
    cluster_LE, stages = [], []
    deadline = time.perf_counter() + seconds
    for layer, (load_E, start_E) in enumerate(zip(load_LE, start_LE)):
        left = max(0.05, (deadline - time.perf_counter()) / (len(load_LE) - layer))
        cluster_E, stage = _cluster_layer(problem, options, load_E, start_E, left)
        cluster_LE.append(cluster_E)
        stages.append(stage)
    return np.stack(cluster_LE), stages


def _cluster_layer(
    problem: Problem, options: MoETunerOptions, load_E: np.ndarray, start_E: np.ndarray, seconds: float
) -> tuple[np.ndarray, Stage]:
    W, E = problem.ranks, len(load_E)
    slots_W, share_W = single_slots_W(problem), problem.topology.share_W
    load_E = load_E / (load_E.sum() or 1.0)
    model = pulp.LpProblem("clusters", pulp.LpMinimize)
    x = [[model.add_variable(f"x_{c}_{e}", cat="Binary") for e in range(E)] for c in range(W)]
    deviation = [model.add_variable(f"d_{c}", 0) for c in range(W)]
    model += pulp.lpSum(deviation)
    for e in range(E):
        model += pulp.lpSum(x[c][e] for c in range(W)) == 1
    for c in range(W):
        held = pulp.lpSum(x[c])
        model += held == int(slots_W[c]) if options.equal_counts else held >= min(1, E // W)
        load = pulp.lpDot(load_E.tolist(), x[c])
        model += deviation[c] >= load - float(share_W[c])
        model += deviation[c] >= float(share_W[c]) - load
    start_W = np.bincount(start_E, load_E, W)
    start = {x[c][e]: float(start_E[e] == c) for c in range(W) for e in range(E)}
    start |= {deviation[c]: float(abs(start_W[c] - share_W[c])) for c in range(W)}
    stage = _solve(model, problem, options.gap, seconds, start)
    if stage.status == "none":
        return start_E, stage
    value_CE = np.array([[variable.value() for variable in row] for row in x])
    return value_CE.argmax(0), stage


# -- ILP 2 ------------------------------------------------------------------------------------------------------------


def place_clusters(
    problem: Problem, cluster_LE: np.ndarray, options: MoETunerOptions, seconds: float
) -> tuple[np.ndarray, list[Stage]]:
    """int64 ``[L, C]``: cluster -> GPU; and the stages of the programs solved (none where the answer is known)."""
    L, W = problem.shape.num_layers, problem.ranks
    if W == 1 or L == 1:
        return np.tile(np.arange(W), (L, 1)), []
    if options.objective == "sum" and options.equal_counts and like_GPUs(problem).all() and problem.topology.is_uniform:
        return chain_labels(problem, cluster_LE), []
    traffic_LCC = cluster_traffic(problem, cluster_LE)
    size_LC = np.stack([np.bincount(c, minlength=W) for c in cluster_LE])
    whole = (L - 1) * W**4 <= MAX_PRODUCTS
    started = time.perf_counter()
    place_LC, stages = _place_in_turn(problem, traffic_LCC, size_LC, options, seconds / 3 if whole else seconds)
    if whole:
        left = max(0.1, seconds - (time.perf_counter() - started))
        place_LC, stage = _place_all(problem, (traffic_LCC, size_LC, place_LC), options, left)
        stages = [stage]
    return place_LC, stages


def _place_all(
    problem: Problem, given: tuple[np.ndarray, np.ndarray, np.ndarray], options: MoETunerOptions, seconds: float
) -> tuple[np.ndarray, Stage]:
    """The second program whole, for (traffic, sizes, places to start from)."""
    traffic_LCC, size_LC, start_LC = given
    L, W = size_LC.shape
    cost_GG, R = _link_costs(problem), range(W)
    model = pulp.LpProblem("places", pulp.LpMinimize)
    place = [_add_places(model, f"{layer}", problem) for layer in range(L)]
    times = []
    for layer in range(L - 1):
        z = [[[[model.add_variable(f"z_{layer}_{c}_{d}_{g}_{h}", 0, 1) for h in R] for g in R] for d in R] for c in R]
        for a in R:
            for g in R:
                for h in R:
                    model += pulp.lpSum(z[a][d][g][h] for d in R) == place[layer][a][g]
                    model += pulp.lpSum(z[c][a][g][h] for c in R) == place[layer + 1][a][h]
        link = {
            (g, h): pulp.lpSum(float(traffic_LCC[layer, c, d] * cost_GG[g, h]) * z[c][d][g][h] for c in R for d in R)
            for g in R
            for h in R
            if g != h
        }
        times.append(_combine_links(model, f"t_{layer}", list(link.values()), options))
    spill = _add_memory(model, place, size_LC, np.zeros(W), L * single_slots_W(problem), options)
    model += pulp.lpSum(times) + _SPILL * spill
    start = {place[i][c][g]: float(start_LC[i, c] == g) for i in range(L) for c in R for g in R}
    stage = _solve(model, problem, options.gap, seconds, start)
    return (start_LC if stage.status == "none" else np.stack([_values(p) for p in place])), stage


def _place_in_turn(
    problem: Problem, traffic_LCC: np.ndarray, size_LC: np.ndarray, options: MoETunerOptions, seconds: float
) -> tuple[np.ndarray, list[Stage]]:
    """One program per layer, the layer before fixed: products become sums."""
    L, W = size_LC.shape
    cost_GG, R = _link_costs(problem), range(W)
    place_LC, stages = [np.arange(W)], []
    deadline = time.perf_counter() + seconds
    for layer in range(1, L):
        at_GC = np.zeros((W, W))
        at_GC[place_LC[-1]] = traffic_LCC[layer - 1]  # traffic from the GPU of each cluster before
        model = pulp.LpProblem("places", pulp.LpMinimize)
        place = _add_places(model, f"{layer}", problem)
        links = [
            pulp.lpSum(float(at_GC[g, d] * cost_GG[g, h]) * place[d][h] for d in R) for g in R for h in R if g != h
        ]
        used_W = np.bincount(np.stack(place_LC).ravel(), size_LC[:layer].ravel(), W)
        spill = _add_memory(
            model, [place], size_LC[layer : layer + 1], used_W, (layer + 1) * single_slots_W(problem), options
        )
        model += _combine_links(model, "t", links, options) + _SPILL * spill
        left = max(0.05, (deadline - time.perf_counter()) / (L - layer))
        stage = _solve(model, problem, options.gap, left)
        stages.append(stage)
        place_LC.append(np.arange(W) if stage.status == "none" else _values(place))
    return np.stack(place_LC), stages


def _add_places(model: pulp.LpProblem, name: str, problem: Problem) -> list[list[pulp.LpVariable]]:
    """``a[c][g]``: cluster c on GPU g, one to one, only between like GPUs."""
    W, like = problem.ranks, like_GPUs(problem)
    place = [
        [model.add_variable(f"a_{name}_{c}_{g}", 0, int(like[c, g]), "Integer") for g in range(W)] for c in range(W)
    ]
    for c in range(W):
        model += pulp.lpSum(place[c]) == 1
        model += pulp.lpSum(row[c] for row in place) == 1
    return place


def _combine_links(model: pulp.LpProblem, name: str, links: list, options: MoETunerOptions):
    if options.objective == "sum":
        return pulp.lpSum(links)
    heaviest = model.add_variable(name, 0)
    for link in links:
        model += heaviest >= link
    return heaviest


def _add_memory(
    model: pulp.LpProblem,
    place: list,
    size_LC: np.ndarray,
    used_W: np.ndarray,
    budget_W: np.ndarray,
    options: MoETunerOptions,
) -> pulp.LpVariable | int:
    """Experts per GPU over the layers stay in the budget, or as near it as cluster sizes allow (the spill)."""
    if options.equal_counts:
        return 0
    spill = model.add_variable("spill", 0)
    R = range(len(used_W))
    for g in R:
        held = pulp.lpSum(int(size_LC[i, c]) * layer[c][g] for i, layer in enumerate(place) for c in R)
        model += held + float(used_W[g]) <= float(budget_W[g]) + spill
    return spill


def _link_costs(problem: Problem) -> np.ndarray:
    """float64 ``[W, W]``: inverse bandwidth in units of the best link, 0 on the diagonal."""
    bandwidth = problem.topology.bandwidth_WW
    off = ~np.eye(problem.ranks, dtype=bool)
    return np.where(off, bandwidth[off].max() / np.where(off, bandwidth, 1.0), 0.0)


# -- PuLP -------------------------------------------------------------------------------------------------------------


class _StartedHiGHS(pulp.HiGHS):
    """HiGHS in this process from a known solution, which PuLP 3.3 has no argument for."""

    start: dict | None = None

    def callSolver(self, lp: pulp.LpProblem) -> None:
        if self.start is not None:
            index = np.array([variable.index for variable in self.start], np.int32)
            lp.solverModel.setSolution(len(index), index, np.array(list(self.start.values())))
        super().callSolver(lp)


def _solve(model: pulp.LpProblem, problem: Problem, gap: float, seconds: float, start: dict | None = None) -> Stage:
    """Run HiGHS and read what it proved.

    PuLP calls a run that hit its time limit ``Optimal`` (and its solution feasible even if there is none), so the
    answer is read from ``sol_status`` and from HiGHS itself.
    """
    threads = problem.threads or 0
    solver = _StartedHiGHS(
        msg=False,
        gapRel=gap,
        timeLimit=seconds,
        threads=threads,
        random_seed=problem.seed % 2**31,
        log_to_console=False,
    )
    solver.start = start
    _silence_banner()
    model.solve(solver)
    info = model.solverModel.getInfo()
    objective, bound = float(info.objective_function_value), float(info.mip_dual_bound)
    if model.sol_status == pulp.LpSolutionInfeasible:
        raise AssertionError(f"program {model.name} is infeasible")
    if int(info.primal_solution_status) != 2 or not np.isfinite(objective):
        return Stage("none", float("inf"), bound)
    proven = model.sol_status == pulp.LpSolutionOptimal and objective - bound <= 1e-7 * max(1.0, abs(objective))
    return Stage("optimal" if proven else "feasible", objective, bound)


@lru_cache(maxsize=1)
def _silence_banner() -> None:
    """HiGHS greets on the process's standard output when first constructed, which would spoil JSON printed there."""
    sys.stdout.flush()
    saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)


def _values(place: list[list[pulp.LpVariable]]) -> np.ndarray:
    """int64 ``[C]``: GPU of each cluster."""
    return np.array([[variable.value() for variable in row] for row in place]).argmax(1)
