"""Methods side by side: solved on one part of the tokens, judged by the cost function on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from placement import cost, lower_bound
from placement.cohome import place_with_homes
from placement.errors import UserError
from placement.home_rules import choose_homes
from placement.methods import OBJECTIVES, Method
from placement.solution import Problem, Solution, figures
from placement.states import layer_caps
from placement.trace import Trace

HOME_OBJECTIVE = OBJECTIVES["dispatch_rows"]
PROBE = 32  # tokens of a request that are routed before its home is chosen
FIGURES = ("compute_tail", "compute_tail_worst_layer", "locality", "fan_out", "dispatch_rows", "combine_rows")


@dataclass(frozen=True, eq=False)
class Row:
    """One method: its solution, and the costs of its plan on train and held-out tokens (weighing tokens).

    ``homes`` says how the home ranks of requests were chosen for these costs.
    """

    solution: Solution
    train: cost.Costs
    held_out: cost.Costs
    homes: str = "round-robin"

    def to_dict(self) -> dict:
        solution = self.solution
        return {
            "method": solution.method,
            "held_out": _figures(self.held_out),
            "train": _figures(self.train),
            "seconds": solution.seconds,
            "objective": solution.objective,
            "objective_name": solution.objective_name,
            "bound": solution.bound,
            "gap": solution.gap,
            "status": solution.status,
            "homes": self.homes,
        }


def compare(
    methods: Iterable[Method],
    problem: Problem,
    traces: tuple[Trace, Trace],
    skip: Callable[[str, str], None],
    bound: float | None = None,
) -> Iterator[Row]:
    """One row per method, as each is solved; ``traces`` are (train, held-out).

    ``skip`` hears (name, reason) of methods that cannot solve this problem. ``bound`` is the problem's, for solvers
    that bring none of their own.
    """
    for method in methods:
        try:
            yield _with_homes(problem, traces) if method.places_homes else _row(method(problem), problem, traces, bound)
        except UserError as error:
            skip(method.name, str(error))


LOAD_FIGURES = ("compute_tail", "compute_tail_worst_layer", "compute_tail_equal", "compute_tail_lp")


@dataclass(frozen=True, eq=False)
class LoadRow:
    """One method on a load table: there are no tokens to hold out, so ``figures`` (``LOAD_FIGURES``) are of the table.

    ``compute_tail`` is by the plan's replica rule with equal homes, ``compute_tail_equal`` where copies share evenly,
    ``compute_tail_lp`` where they share as well as possible.
    """

    solution: Solution
    figures: dict[str, float]

    def to_dict(self) -> dict:
        solution = self.solution.to_dict()
        names = ("method", "seconds", "objective", "objective_name", "bound", "gap", "status")
        return {"held_out": None, "train": self.figures, "homes": None} | {name: solution[name] for name in names}


def compare_loads(
    methods: Iterable[Method], problem: Problem, skip: Callable[[str, str], None], bound: float | None = None
) -> Iterator[LoadRow]:
    """One row per method that needs no tokens; arguments as of :func:`compare`."""
    for method in methods:
        try:
            solution = with_bound(method(problem), problem, bound)
        except UserError as error:
            skip(method.name, str(error))
            continue
        load_LE, speed_W = problem.profile.load_LE, problem.topology.speed_W
        found = figures(problem, solution.plan)
        found["compute_tail_lp"] = float(cost.best_split_tail_L(load_LE, solution.plan, speed_W).mean())
        yield LoadRow(solution, {name: found[name] for name in LOAD_FIGURES})


def judge(solution: Solution, problem: Problem, trace: Trace, homes: np.ndarray | None = None) -> cost.Costs:
    """The plan's costs on ``trace`` on the problem's machine; ``homes`` int ``[sequences]``, ``None``: round-robin."""
    options = {"combine": problem.combine, "calibration": problem.calibration}
    return cost.evaluate(solution.plan, trace, problem.topology, homes=homes, **options)


def _row(solution: Solution, problem: Problem, traces: tuple[Trace, Trace], bound: float | None) -> Row:
    solution = with_bound(solution, problem, bound)
    return Row(solution, *(judge(solution, problem, trace) for trace in traces))


def _with_homes(problem: Problem, traces: tuple[Trace, Trace]) -> Row:
    """Unseen requests get the home that a probe of their first tokens suggests, as they would at run time.

    The objective is what homes are chosen for, dispatch rows, also where other methods are given another.
    """
    problem = replace(problem, objective=HOME_OBJECTIVE)
    solution, train_homes, affinity = place_with_homes(problem, probe=PROBE)
    held_homes = choose_homes(solution.plan, affinity, traces[1], ("probe", PROBE))
    costs = [judge(solution, problem, trace, homes) for trace, homes in zip(traces, (train_homes, held_homes))]
    return Row(solution, *costs, homes=f"probe:{PROBE}")


def term_bounds(problem: Problem, seconds: float) -> dict[str, float]:
    """Bounds, under the cap, of the figures in the problem's objective; those that none is known for are left out."""
    terms = problem.objective.terms or ((problem.objective.name, 1.0),)
    found = {}
    for name, weight in terms:
        single = OBJECTIVES[name]
        if single.maximise == (problem.objective.maximise == (weight > 0)):  # else it is pulled to its unbounded side
            found[name] = lower_bound.bound(replace(problem, objective=single), seconds / len(terms))
    return {name: bound for name, bound in found.items() if bound is not None}


def sum_bound(problem: Problem, bounds: dict[str, float]) -> float | None:
    """A bound on the objective: no plan's weighted sum is better than the best of each term."""
    terms = problem.objective.terms or ((problem.objective.name, 1.0),)
    if any(name not in bounds for name, _ in terms):
        return None
    return problem.objective.value(bounds)


def with_bound(solution: Solution, problem: Problem, bound: float | None) -> Solution:
    """The solution with ``bound`` and its gap, where it has none and its plan keeps the cap that the bound assumes."""
    if bound is None or solution.bound is not None or not keeps_cap(solution, problem):
        return solution
    gap = abs(bound - solution.objective) / max(abs(solution.objective), 1e-12)
    return replace(solution, bound=bound, gap=gap)


def keeps_cap(solution: Solution, problem: Problem) -> bool:
    """Every layer's compute tail on the training loads is within ``max(cap, smallest achievable)``."""
    load_LW = cost.rank_load_LW(problem.profile.load_LE, solution.plan)
    tail_L = cost.compute_tail_L(load_LW, problem.topology.speed_W)
    return bool(np.all(tail_L <= layer_caps(problem) * (1 + 1e-6)))


def _figures(costs: cost.Costs) -> dict[str, float]:
    values = costs.to_dict(arrays=False)
    return {name: values[name] for name in FIGURES}
