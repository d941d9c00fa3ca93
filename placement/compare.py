"""Methods side by side: solved on one part of the tokens, judged by the cost function on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from placement import cost, lower_bound
from placement.errors import UserError
from placement.methods import OBJECTIVES, Method
from placement.solution import Problem, Solution
from placement.states import layer_caps
from placement.trace import Trace

FIGURES = ("compute_tail", "compute_tail_worst_layer", "locality", "fan_out", "dispatch_rows", "combine_rows")


@dataclass(frozen=True, eq=False)
class Row:
    """One method: its solution, and the costs of its plan on train and held-out tokens (weighing tokens)."""

    solution: Solution
    train: cost.Costs
    held_out: cost.Costs

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
            solution = method(problem)
        except UserError as error:
            skip(method.name, str(error))
            continue
        solution = with_bound(solution, problem, bound)
        yield Row(solution, *(judge(solution, problem, trace) for trace in traces))


def judge(solution: Solution, problem: Problem, trace: Trace) -> cost.Costs:
    """The plan's costs on ``trace`` with round-robin homes, on the problem's machine."""
    options = {"combine": problem.combine, "calibration": problem.calibration}
    return cost.evaluate(solution.plan, trace, problem.topology, **options)


def problem_bound(problem: Problem, seconds: float) -> float | None:
    """A bound on the problem's objective, also where it is a weighted sum: then the sum of its terms' bounds.

    No plan can be better in the sum than the best of each term. ``None`` where a term has no bound.
    """
    terms = problem.objective.terms or ((problem.objective.name, 1.0),)
    total = 0.0
    for name, weight in terms:
        single = OBJECTIVES[name]
        if single.maximise != (problem.objective.maximise == (weight > 0)):
            return None  # the term is pulled the way its figure has no bound for
        found = lower_bound.bound(replace(problem, objective=single), seconds / len(terms))
        if found is None:
            return None
        total += weight * found
    return total


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
