"""Every solver by name, and the objectives that people ask for.

Solvers are imported when they are first used: to list the methods costs nothing, and pulp loads only for MoETuner.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from placement import solution
from placement.errors import UserError
from placement.solution import Objective, Problem, Solution
from placement.trace import Trace

# fan_out + 5 (1 - locality): ranks a token reaches in a layer, and the share of its pairs that change rank on the way.
MIXED = Objective("mixed", terms=(("fan_out", 1.0), ("locality", -5.0)), offset=5.0)
OBJECTIVES = {**solution.OBJECTIVES, MIXED.name: MIXED}


@dataclass(frozen=True)
class Method:
    """``options`` are keyword arguments of the solver; ``searches``: more time may give a better plan.

    ``places_homes``: the plan is made together with home ranks; see :func:`placement.cohome.place_with_homes`.
    """

    name: str
    module: str
    function: str
    summary: str
    searches: bool = False
    options: tuple[tuple[str, object], ...] = ()
    places_homes: bool = False

    @property
    def weighs_domains(self) -> bool:
        return self.function == "solve_domains"

    def __call__(self, problem: Problem) -> Solution:
        return self.load()(problem, **dict(self.options))

    def load(self) -> Callable[..., Solution]:
        return getattr(importlib.import_module(self.module), self.function)


def solve_moetuner_sum(problem: Problem) -> Solution:
    """MoETuner with the sum of all link times in place of each layer's heaviest."""
    from placement.ilp import MoETunerOptions, solve_moetuner

    return solve_moetuner(problem, MoETunerOptions(objective="sum"))


def solve_domains(problem: Problem, domains: Sequence[Trace] = (), worst: bool = False) -> Solution:
    """The joint solver for several domains, each of which counts the same, or the worst of which counts.

    The problem's cap is kept as it is: whoever makes the problem lowers it for unseen tokens, or does not.
    """
    from placement.robust import RobustOptions, solve_robust

    if len(domains) < 2:
        raise UserError("it weighs several domains; give more than one trace")
    return solve_robust(problem, RobustOptions(tuple(domains), worst, shrink=False))


METHODS = {
    m.name: m
    for m in (
        Method("linear", "placement.greedy", "solve_linear", "contiguous runs: what engines do without a plan"),
        Method("round-robin", "placement.greedy", "solve_round_robin", "experts dealt to the GPUs in turn"),
        Method("random", "placement.greedy", "solve_random", "a random deal in every layer"),
        Method("lpt", "placement.greedy", "solve_lpt", "hottest expert to the least loaded GPU"),
        Method("lpt-swap", "placement.greedy", "solve_lpt_swap", "lpt, then exchanges until none evens the load"),
        Method("eplb", "placement.eplb", "solve_eplb", "DeepSeek's EPLB, global; replicas on distinct GPUs"),
        Method(
            "eplb-hierarchical",
            "placement.eplb",
            "solve_eplb",
            "EPLB, groups of experts on nodes first",
            options=(("policy", "hierarchical"),),
        ),
        Method("balance", "placement.balance", "solve_balance", "load alone, replicas and packing together", True),
        Method("two-stage", "placement.two_stage", "solve_two_stage", "even loads, then clusters follow the tokens"),
        Method("moetuner", "placement.ilp", "solve_moetuner", "MoETuner's two integer programs, min-max", True),
        Method("moetuner-sum", "placement.methods", "solve_moetuner_sum", "the same, sum of link times", True),
        Method("exact", "placement.exact", "solve_exact", "a proven optimum, where structure allows one", True),
        Method("joint", "placement.joint", "solve_joint", "load cap, fan-out and locality together", True),
        Method("domains", "placement.methods", "solve_domains", "joint, for every --trace alike or the worst", True),
        Method(
            "homes",
            "placement.cohome",
            "solve_homes",
            "joint, in turn with the home ranks of requests; writes an affinity file",
            True,
            places_homes=True,
        ),
    )
}
DEFAULT = "joint"


def for_domains(method: Method, domains: Sequence[Trace], worst: bool) -> Method:
    """The method told of the domains, where it asks for them."""
    if not method.weighs_domains:
        return method
    return replace(method, options=(("domains", tuple(domains)), ("worst", worst)))


def find(name: str) -> Method:
    if name not in METHODS:
        raise UserError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
    return METHODS[name]
