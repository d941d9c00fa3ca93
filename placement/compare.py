"""Methods side by side: solved on one part of the tokens, judged by the cost function on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from placement import cost
from placement.errors import UserError
from placement.methods import Method
from placement.solution import Problem, Solution
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
    methods: Iterable[Method], problem: Problem, train: Trace, held_out: Trace, skip: Callable[[str, str], None]
) -> Iterator[Row]:
    """One row per method, as each is solved; ``skip`` hears (name, reason) of those that cannot solve this problem."""
    for method in methods:
        try:
            solution = method(problem)
        except UserError as error:
            skip(method.name, str(error))
            continue
        yield Row(solution, judge(solution, problem, train), judge(solution, problem, held_out))


def judge(solution: Solution, problem: Problem, trace: Trace) -> cost.Costs:
    """The plan's costs on ``trace`` with round-robin homes, on the problem's machine."""
    options = {"combine": problem.combine, "calibration": problem.calibration}
    return cost.evaluate(solution.plan, trace, problem.topology, **options)


def _figures(costs: cost.Costs) -> dict[str, float]:
    values = costs.to_dict(arrays=False)
    return {name: values[name] for name in FIGURES}
