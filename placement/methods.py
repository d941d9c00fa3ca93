"""Every solver by name. Modules are imported when a method is first used, so that naming them costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from placement.errors import UserError
from placement.solution import Problem, Solution


@dataclass(frozen=True)
class Method:
    """``options`` are passed to the solver; ``searches`` says that more time may give a better plan."""

    name: str
    module: str
    function: str
    summary: str
    searches: bool = False
    options: tuple[tuple[str, object], ...] = ()

    def __call__(self, problem: Problem) -> Solution:
        return self.load()(problem, **dict(self.options))

    def load(self) -> Callable[..., Solution]:
        return getattr(importlib.import_module(self.module), self.function)


METHODS = {
    m.name: m
    for m in (
        Method("linear", "placement.greedy", "solve_linear", "contiguous runs: what engines do without a plan"),
        Method("round-robin", "placement.greedy", "solve_round_robin", "experts dealt to the ranks in turn"),
        Method("random", "placement.greedy", "solve_random", "a random deal in every layer"),
        Method("lpt", "placement.greedy", "solve_lpt", "hottest expert to the least loaded rank"),
        Method("lpt-swap", "placement.greedy", "solve_lpt_swap", "lpt, then exchanges until none evens the load"),
        Method("eplb", "placement.eplb", "solve_eplb", "DeepSeek's EPLB, global policy, replicas on distinct ranks"),
    )
}
DEFAULT = "joint"


def find(name: str) -> Method:
    if name not in METHODS:
        raise UserError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
    return METHODS[name]
