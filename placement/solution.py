"""The contract of every solver: ``solve_x(problem: Problem) -> Solution``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from placement import cost
from placement.errors import UserError
from placement.plan import MoEShape, Plan
from placement.profile import Profile, profile_traces
from placement.topology import Topology, uniform
from placement.trace import Trace, join

MAX_EXPERTS = 4096
Progress = Callable[[float, float, "float | None"], None]  # (seconds, best objective, bound)


@dataclass(frozen=True)
class Objective:
    """``offset`` plus a weighted sum of figures of :class:`placement.cost.Costs`; ``maximise``: more is better."""

    name: str
    maximise: bool = False
    terms: tuple[tuple[str, float], ...] = ()  # (figure, weight); empty means the figure of this name
    offset: float = 0.0  # keeps the value away from 0, where a relative gap means nothing

    def value(self, figures: dict[str, float]) -> float:
        return self.offset + sum(weight * figures[name] for name, weight in self.terms or ((self.name, 1.0),))

    def better(self, a: float, b: float) -> bool:
        return a > b if self.maximise else a < b


OBJECTIVES = {
    o.name: o
    for o in (
        Objective("locality", maximise=True),
        Objective("compute_tail"),
        Objective("compute_tail_worst_layer"),
        Objective("compute_tail_equal"),
        Objective("fan_out"),
        Objective("dispatch_rows"),
        Objective("combine_rows"),
        Objective("link_tail"),
        Objective("step_seconds"),
    )
}


@dataclass(frozen=True, eq=False)
class Problem:
    """What to solve; build it with :func:`make_problem`, which checks that it can be solved.

    Args:
        profile: counts of the training tokens.
        topology: the machine.
        slots_W: int64, expert slots of each rank in every layer; a plan fills all of them.
        objective: what is optimised, see ``OBJECTIVES``.
        cap: compute tail allowed in every layer, where one that low exists (else the lowest there is); ``None``: any.
        train: the training tokens, where a solver or the objective needs more than counts.
        seed: the only source of randomness.
        seconds: time budget.
        threads: most threads or processes a solver may use; ``None``: all cores.
        old_plan: the plan in force; then at most ``max_moves`` expert copies may move (``None``: any number), each
            costing ``move_price`` in units of the objective.
        homes: int64 ``[sequences]``, home ranks of the training sequences; ``None`` is round-robin.
        even: price of uneven load where rows are searched for: a load spread of s (standard deviation over GPUs, in
            units of the mean) costs ``even * s**2`` rows per (token, choice). Beside ``cap``: what unseen tokens make
            of the fullest GPU depends on how many are nearly full.
        drift: variance that the tail of unseen tokens has beyond the noise of their number, where ``cap`` is for unseen
            tokens and ``even`` follows the plan; ``None``: both are as given.
        recordings: of each recording in ``train`` the tokens of its whole sequences, int, where ``train`` holds pieces
            of them as requests; ``None``: its sequences are whole.
        combine: ``exact`` or ``reduce``.
        calibration: what turns counts into seconds.
        progress: called with (seconds, best objective so far, bound) while solving.
    """

    profile: Profile
    topology: Topology
    slots_W: np.ndarray
    objective: Objective
    cap: float | None = None
    train: Trace | None = None
    seed: int = 0
    seconds: float = 10.0
    threads: int | None = None
    old_plan: Plan | None = None
    max_moves: int | None = None
    move_price: float = 0.0
    homes: np.ndarray | None = None
    even: float = 0.0
    drift: float | None = None
    recordings: tuple[np.ndarray, ...] | None = None
    combine: str = "exact"
    calibration: cost.Calibration = cost.Calibration()
    progress: Progress | None = None

    @property
    def shape(self) -> MoEShape:
        return self.profile.shape

    @property
    def ranks(self) -> int:
        return self.topology.ranks

    @property
    def spare_slots(self) -> int:
        """Slots of a layer beyond one copy of each expert."""
        return int(self.slots_W.sum()) - self.shape.num_experts


@dataclass(frozen=True)
class Solution:
    """A plan with its proof.

    ``bound`` is no worse than any plan's objective under the problem's cap (``None``: none was computed); ``gap`` is
    ``|bound - objective| / |objective|``; ``status`` is ``optimal`` only where the gap is closed by proof. ``history``
    lists (seconds, best objective, bound) as solving went on.
    """

    plan: Plan
    method: str
    status: str
    objective: float
    objective_name: str
    bound: float | None
    gap: float | None
    seconds: float
    history: tuple[tuple[float, float, float | None], ...] = ()

    def to_dict(self) -> dict:
        """Everything but the plan, for JSON."""
        names = ("method", "status", "objective", "objective_name", "bound", "gap", "seconds")
        return {name: getattr(self, name) for name in names} | {"history": [list(entry) for entry in self.history]}


def make_problem(
    data: Trace | Profile | Iterable[Trace],
    topology: Topology | int,
    *,
    objective: str | Objective = "locality",
    slots: int | None = None,
    redundant: int = 0,
    **options,
) -> Problem:
    """Check a request and make it a :class:`Problem`.

    Args:
        data: training tokens (one trace, or several of one model), or only their profile.
        topology: the machine, or a number of equal GPUs.
        slots: expert slots of a layer over all GPUs; the default is one per expert plus ``redundant`` per GPU, in
            equal shares (the first ranks one more), unless the topology says how many each GPU has.
        options: further fields of :class:`Problem`.
    """
    topology = uniform(topology) if isinstance(topology, int) else topology
    if isinstance(data, Profile):
        profile, train = data, None
    else:
        traces = [data] if isinstance(data, Trace) else list(data)
        profile = profile_traces(traces)
        train = traces[0] if len(traces) == 1 else join(traces, "+".join(t.source for t in traces))
    if isinstance(objective, str):
        if objective not in OBJECTIVES:
            raise UserError(f"objective {objective!r} is unknown; choose one of {', '.join(OBJECTIVES)}")
        objective = OBJECTIVES[objective]
    problem = Problem(
        profile, topology, _slots(profile.shape, topology, slots, redundant), objective, **{"train": train} | options
    )
    _validate(problem)
    return problem


def figures(problem: Problem, plan: Plan) -> dict[str, float]:
    """The figures of a plan on the training data, by ``cost.py``: all with a trace, else those of the profile.

    ``compute_tail_equal`` is the compute tail if the copies of an expert shared its tokens evenly.
    """
    load_LE, speed_W = problem.profile.load_LE, problem.topology.speed_W
    equal = float(cost.compute_tail_L(cost.equal_split_LW(load_LE, plan), speed_W).mean())
    if problem.train is not None:
        costs = cost.evaluate(
            plan,
            problem.train,
            problem.topology,
            homes=problem.homes,
            combine=problem.combine,
            calibration=problem.calibration,
        )
        return costs.to_dict(arrays=False) | {"compute_tail_equal": equal}
    tail, worst = cost.compute_tail_from_load(load_LE, plan, speed_W)
    found = {"compute_tail": tail, "compute_tail_worst_layer": worst, "compute_tail_equal": equal}
    if problem.profile.transitions_LEE is not None and (plan.copies_LE == 1).all():
        found["locality"] = cost.locality_from_profile(plan, problem.profile)
    return found


def objective_value(problem: Problem, plan: Plan) -> float:
    """The problem's objective of a plan, from ``cost.py``; ``UserError`` where it needs a trace and there is none."""
    needed = {name for name, _ in problem.objective.terms or ((problem.objective.name, 1.0),)}
    single = bool((plan.copies_LE == 1).all())
    by_counts = {"locality", "compute_tail", "compute_tail_worst_layer"} if single else set()
    if needed <= by_counts | {"compute_tail_equal"}:
        problem = replace(problem, train=None)  # counts alone give the same figures, sooner
    found = figures(problem, plan)
    if missing := sorted(needed - found.keys()):
        raise UserError(f"objective {problem.objective.name} needs {missing} of recorded tokens; give a trace")
    return problem.objective.value(found)


def finish(
    problem: Problem,
    plan: Plan,
    method: str,
    started: float,
    *,
    bound: float | None = None,
    proven: bool = False,
    history: Iterable[tuple[float, float, float | None]] = (),
) -> Solution:
    """A :class:`Solution` whose objective is recomputed from the plan.

    ``started`` is ``time.perf_counter()`` at the solver's start. ``proven`` says that the solver proved optimality;
    the bound then is the objective itself.
    """
    objective = objective_value(problem, plan)
    if proven:
        bound = objective
    if bound is not None:
        wrong = objective - bound if problem.objective.maximise else bound - objective
        assert wrong <= 1e-6 * max(1.0, abs(objective)), f"{method}: objective {objective} is beyond its bound {bound}"
    gap = None if bound is None else abs(bound - objective) / max(abs(objective), 1e-12)
    seconds = time.perf_counter() - started
    status = "optimal" if proven or (gap is not None and gap < 1e-9) else "feasible"
    return Solution(
        replace(plan, made_by=method),
        method,
        status,
        objective,
        problem.objective.name,
        bound,
        gap,
        seconds,
        tuple(history) or ((seconds, objective, bound),),
    )


def _slots(shape: MoEShape, topology: Topology, slots: int | None, redundant: int) -> np.ndarray:
    E, W = shape.num_experts, topology.ranks
    if topology.slots_W is not None:
        if slots is not None or redundant:
            raise UserError("the topology says how many slots each GPU has; leave out slots and redundant")
        return topology.slots_W
    if slots is not None and redundant:
        raise UserError(f"give slots ({slots}) or redundant ({redundant}), not both")
    if redundant < 0:
        raise UserError(f"redundant is {redundant}; it must be 0 or more slots per GPU and layer")
    total = E + redundant * W if slots is None else slots
    return total // W + (np.arange(W) < total % W)


def _validate(problem: Problem) -> None:
    E, W, slots_W = problem.shape.num_experts, problem.ranks, problem.slots_W
    if E > MAX_EXPERTS:
        raise UserError(f"{E} experts in a layer; solvers keep tables of all pairs, of {MAX_EXPERTS} experts at most")
    total = int(slots_W.sum())
    if total < E:
        raise UserError(f"{total} slots on {W} GPUs cannot hold {E} experts; give at least {E} slots per layer")
    if slots_W.min() < 1:
        raise UserError(f"{total} slots leave GPU {slots_W.argmin()} of {W} empty; use fewer GPUs or more slots")
    if slots_W.max() > E:
        raise UserError(
            f"GPU {slots_W.argmax()} has {slots_W.max()} slots for {E} experts, and holds one copy of each at most"
            f" (an expert cannot have more replicas than the {W} GPUs); give at most {E * W} slots"
        )
    if problem.cap is not None and not problem.cap >= 1:
        raise UserError(f"cap is {problem.cap}; the compute tail is at least 1 (1.05 is usual)")
    if not problem.seconds > 0:
        raise UserError(f"the time budget is {problem.seconds} s; give more than 0")
    if problem.old_plan is not None:
        problem.shape.require_same(problem.old_plan.shape, "the trace", "the old plan")
        if problem.old_plan.ranks != W:
            raise UserError(f"the old plan has {problem.old_plan.ranks} ranks, the topology {W} GPUs; leave it out")
