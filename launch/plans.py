"""``--placement``: by name, solved from a trace, or read from a plan file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from epmoe.config import EngineConfig
from launch.hub import DEMO, DEMO_FOLDER
from placement.errors import UserError
from placement.plan import MoEShape, Plan, linear_plan, round_robin_plan, with_shape
from placement.trace import Trace, join, load_trace

BY_SHAPE = {"linear": linear_plan, "round-robin": round_robin_plan}
FROM_TRACE = ("greedy", "auto")
AUTO_CAP = 1.05  # most load of a rank over the mean
AUTO_SECONDS = 10.0


def choose_plan(
    placement: str | Path | Plan, trace_paths: str | Path | Sequence[str | Path] | None, shape: MoEShape, ranks: int
) -> tuple[Plan, Trace | None]:
    """The plan that ``--placement`` and ``--trace`` ask for, and the joined traces; all fit the model."""
    trace = _read(trace_paths, shape)
    if placement in BY_SHAPE:
        return BY_SHAPE[placement](shape, ranks), trace
    if placement in FROM_TRACE:
        if trace is None:
            raise UserError(f"placement {placement} is solved from recorded routing; give it with --trace FILE.npz")
        return _solve(placement, trace, shape, ranks), trace
    if isinstance(placement, Plan):
        return _fitting(placement, "placement", shape, ranks), trace
    return _load(str(placement), shape, ranks), trace


def with_plan(engine: EngineConfig, plan: Plan, placement: str | Path | Plan) -> EngineConfig:
    """The engine under this plan; homes by affinity where the plan's file has an affinity file beside it."""
    affinity = None
    if plan.affinity is not None and not isinstance(placement, Plan):
        affinity = Path(placement).parent / plan.affinity
        if not affinity.is_file():
            raise UserError(f"plan {placement} names the affinity file {affinity}, which is not there; put it back")
    return replace(engine, plan=plan.to_json(), affinity=None if affinity is None else str(affinity))


def _read(paths: str | Path | Sequence[str | Path] | None, shape: MoEShape) -> Trace | None:
    if not paths:
        return None
    listed = list(paths) if isinstance(paths, (list, tuple)) else [paths]
    if not all(isinstance(path, (str, Path)) for path in listed):
        raise UserError(f"trace is {paths!r}; give a trace's file, or a list of them")
    traces = []
    for path in listed:
        for file in sorted(DEMO_FOLDER.glob("trace_*.npz")) if path == DEMO else [path]:
            traces.append(load_trace(file))
            shape.require_same(traces[-1].shape, "the model", f"trace {file}")
    return join(traces, "the traces") if len(traces) > 1 else traces[0]


def _load(placement: str, shape: MoEShape, ranks: int) -> Plan:
    if not Path(placement).exists() and not placement.endswith(".json"):
        names = ", ".join([*BY_SHAPE, *FROM_TRACE])
        raise UserError(f"placement {placement} is unknown; use {names}, or a plan file")
    return _fitting(Plan.load(placement), f"plan {placement}", shape, ranks)


def _fitting(plan: Plan, source: str, shape: MoEShape, ranks: int) -> Plan:
    shape.require_same(plan.shape, "the model", source)
    if plan.ranks != ranks:
        raise UserError(f"{source} is for {plan.ranks} ranks, this run has {ranks}; solve it for {ranks}")
    return with_shape(plan, shape)


def _solve(placement: str, trace: Trace, shape: MoEShape, ranks: int) -> Plan:
    """greedy: balanced load alone.  auto: the fewest ranks per token that a balanced load allows."""
    from placement import methods
    from placement.solution import make_problem
    from placement.threads import one_blas_thread

    one_blas_thread()
    if placement == "greedy":
        solution = methods.find("lpt-swap")(make_problem(trace, ranks, objective="compute_tail"))
    else:
        problem = make_problem(trace, ranks, objective="fan_out", cap=AUTO_CAP, seconds=AUTO_SECONDS)
        solution = methods.find(methods.DEFAULT)(problem)
    return with_shape(solution.plan, shape)
