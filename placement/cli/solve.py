"""``epmoe-placement solve``: recordings and a machine in, a plan with its proof out."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from placement import cost, methods
from placement.cli import inputs
from placement.cli.console import note, print_table, progress_line, require_writable, write_json
from placement.cohome import place_with_homes
from placement.compare import FIGURES, PROBE, judge, sum_bound, term_bounds, with_bound
from placement.errors import UserError
from placement.home_rules import choose_homes
from placement.homes import Affinity, fit_affinity
from placement.plan import Plan
from placement.profile import Profile
from placement.solution import Problem, Solution, make_problem
from placement.topology import Topology
from placement.trace import Trace, join
from placement.unseen import cap_for_unseen, even_for_unseen

HELP = "decide which GPU holds which expert"
EXAMPLES = """\
examples:
  epmoe-placement solve --trace law.npz --gpus 8 -o plan.json
  epmoe-placement solve --trace law.npz intent.npz summary.npz --gpus 8 --cap 1.05 --seconds 60 -o plan.json
  epmoe-placement solve --trace law.npz --nodes 2 --gpus-per-node 8 --inter 25G --redundant 1 -o plan.json
  epmoe-placement solve --trace load.csv --top-k 8 --gpus 8 --method eplb --redundant 2 -o plan.json
  epmoe-placement solve --trace law.npz intent.npz --gpus 8 --method homes --cut 256 -o plan.json
  epmoe-placement solve --trace today.npz --gpus 8 --old-plan plan.json --max-moves 100 -o next.json

what it prints:
  status    optimal: proven; feasible: the best found when time was up
  bound     no plan under the load cap can be better than this
  gap       |bound - objective| / |objective|: what is left unproven, not what is left to gain
  held-out  figures on the last sequences (--holdout), which the solver has not seen
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    listed = "\n".join(f"  {m.name:<18}{m.summary}" for m in methods.METHODS.values())
    parser = commands.add_parser(
        "solve",
        help=HELP,
        description=HELP,
        epilog=f"methods:\n{listed}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inputs.add_trace_arguments(parser)
    inputs.add_machine_arguments(parser)
    inputs.add_slot_arguments(parser)
    add_solver_arguments(parser)
    parser.add_argument("--method", default=methods.DEFAULT, metavar="NAME", help=f"see below ({methods.DEFAULT})")
    parser.add_argument("--holdout", type=inputs.share, default=0.2, help="share of sequences to judge on (0.2)")
    parser.add_argument("--worst", action="store_true", help="method domains: the worst domain counts, not the mean")
    parser.add_argument(
        "--probe",
        type=inputs.positive_int,
        metavar="N",
        help="write an affinity file that chooses homes by the first N tokens of a request (method homes: always, 32)",
    )
    parser.add_argument("--old-plan", metavar="PLAN", help="the plan in force: moves from it are limited or priced")
    parser.add_argument("--max-moves", type=inputs.natural_int, metavar="N", help="expert copies that may move")
    parser.add_argument(
        "--move-price", type=inputs.positive_or_zero, default=0.0, metavar="P", help="cost of a move, in the objective"
    )
    inputs.add_cost_arguments(parser)
    parser.add_argument(
        "-o", "--output", type=inputs.file_name, metavar="PLAN", help="write the plan (epmoe-plan/1; see convert)"
    )
    parser.add_argument("--json", metavar="FILE", help="write status, bound, gap, history and figures ('-': stdout)")
    parser.set_defaults(run=run)


def add_solver_arguments(parser: argparse.ArgumentParser, seconds: float = 10.0) -> None:
    group = parser.add_argument_group("solver")
    group.add_argument(
        "--objective",
        choices=sorted(methods.OBJECTIVES),
        metavar="NAME",
        help=f"one of {', '.join(methods.OBJECTIVES)} (default: mixed, which is fan_out + 5 (1 - locality);"
        " dispatch_rows for method homes; compute_tail for loads)",
    )
    caps = group.add_mutually_exclusive_group()
    caps.add_argument(
        "--unseen-cap",
        type=cap,
        default=1.085,
        metavar="X",
        help="most load of a GPU over the mean that unseen tokens keep on average; resampling says what cap on the"
        " training tokens that needs (default 1.085)",
    )
    caps.add_argument("--cap", type=cap, default=False, metavar="X", help="the cap on training tokens itself, or none")
    group.add_argument(
        "--seconds", type=inputs.seconds, default=seconds, metavar="S", help=f"time of a method (default {seconds:g})"
    )
    group.add_argument("--seed", type=inputs.natural_int, default=0, metavar="N", help="the only source of randomness")
    group.add_argument("--threads", type=inputs.positive_int, metavar="N", help="cores to use (default: all)")


def cap(text: str) -> float | None:
    if text == "none":
        return None
    value = inputs.positive_or_zero(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: the fullest GPU has at least the mean load; give 1 or more, or none")
    return min(value, 1e6)  # no GPU has that many others to take load from


def run(args: argparse.Namespace) -> int:
    require_writable(args.output, args.json)
    method = methods.find(args.method)
    if args.old_plan and method.name != methods.DEFAULT:
        raise UserError(f"method {method.name} starts anew; --old-plan is for method {methods.DEFAULT}")
    if method.weighs_domains and len(args.trace) < 2:
        raise UserError(f"method {method.name} weighs several domains; give more than one trace")
    args.probe_given, args.probe = args.probe is not None, args.probe or PROBE
    topology = inputs.load_topology(args)
    loads = inputs.load_loads(args)
    if loads is not None:
        train, held, whole = inputs.one_load(loads), None, None
    else:
        train, held = _split(inputs.load_traces(args), args.holdout)
        train, whole = inputs.cut_requests(train, args.cut), whole_lens(train) if args.cut else None
        held = held and join(inputs.cut_requests(held, args.cut), "held-out")
    usual = "dispatch_rows" if method.places_homes else methods.MIXED.name
    extra = {
        "recordings": whole,
        "old_plan": _old_plan(args, train),
        "max_moves": args.max_moves,
        "move_price": args.move_price,
    }
    problem = problem_of(args, train, topology, usual, **extra)
    if method.searches:
        problem = priced(problem, args) if method.places_homes else for_unseen(problem, args)
    found = solve_method(methods.for_domains(method, train if loads is None else (), args.worst), problem, args)
    if args.output:
        found = _save(found, args)
    solution, result = found.solution, describe(found, problem, held, args)
    if args.json != "-":
        _show(solution, result, args)
    if args.json:
        write_json(args.json, result)
    return 0


@dataclass(frozen=True, eq=False)
class Found:
    """A solution, and for plans made with homes those of the training requests and the affinity for new ones."""

    solution: Solution
    homes: np.ndarray | None = None
    affinity: Affinity | None = None


def solve_method(method: methods.Method, problem: Problem, args: argparse.Namespace) -> Found:
    """Solve with progress on stderr. Baselines answer at once; searches get a bound first, to show the gap to."""
    if method.places_homes:
        with progress_line(method.name) as show:
            return Found(*place_with_homes(replace(problem, progress=show), probe=args.probe))
    bound = sum_bound(problem, term_bounds(problem, args.seconds / 4)) if method.searches else None
    with progress_line(method.name, bound) as show:
        solution = with_bound(method(replace(problem, progress=show)), problem, bound)
    if args.probe_given:
        return Found(solution, affinity=fit_affinity(solution.plan, problem.train, args.probe))
    return Found(solution)


def problem_of(
    args: argparse.Namespace, train: list[Trace] | Profile, topology: Topology, usual: str = methods.MIXED.name, **extra
) -> Problem:
    """The problem that the arguments describe; ``usual``: the objective where none is given and tokens are known."""
    loads_only = not isinstance(train, list)
    return make_problem(
        train,
        topology,
        objective=methods.OBJECTIVES[args.objective or ("compute_tail" if loads_only else usual)],
        slots=args.slots,
        redundant=args.redundant,
        cap=args.unseen_cap if args.cap is False else args.cap,
        seed=args.seed,
        seconds=args.seconds,
        threads=args.threads,
        combine=args.combine,
        calibration=inputs.load_calibration(args),
        **extra,
    )


def priced(problem: Problem, args: argparse.Namespace) -> Problem:
    """As :func:`for_unseen`, for method homes: uneven load has a price in place of a lower cap."""
    if args.cap is not False or problem.cap is None or problem.train is None:
        return problem
    note(f"uneven load is priced, so that unseen tokens keep a load cap of {problem.cap:g} (or set one by --cap)")
    return even_for_unseen(problem)


def for_unseen(problem: Problem, args: argparse.Namespace) -> Problem:
    """The problem with its cap lowered so that unseen tokens keep it, unless the cap was given for training tokens."""
    if args.cap is not False or problem.cap is None or problem.train is None:
        return problem
    lowered = cap_for_unseen(problem)
    note(f"load cap {lowered:.4f} on training tokens, for {problem.cap:g} on unseen ones (or set it by --cap)")
    return replace(problem, cap=lowered)


def describe(found: Found, problem: Problem, held: Trace | None, args: argparse.Namespace) -> dict:
    """The solution and its figures, for JSON and tables; with an affinity, at the homes it chooses."""
    solution, traces = found.solution, (problem.train, held)
    result = solution.to_dict() | {"homes": "round-robin", "train": None, "held_out": None}
    if problem.train is None:
        tail, worst = cost.compute_tail_from_load(problem.profile.load_LE, solution.plan, problem.topology.speed_W)
        return result | {"train": {"compute_tail": tail, "compute_tail_worst_layer": worst}}
    homes = found.homes, None
    if found.affinity is not None:
        result["homes"] = f"probe:{args.probe}"
        how = "probe", args.probe
        homes = [trace and choose_homes(solution.plan, found.affinity, trace, how) for trace in traces]
    if found.homes is not None:
        homes = found.homes, homes[1]
    for name, trace, chosen in zip(("train", "held_out"), traces, homes):
        if trace is not None:
            result[name] = judge(solution, problem, trace, chosen).to_dict(arrays=False)
    return result


def whole_lens(traces: list[Trace]) -> tuple[np.ndarray, ...]:
    """Tokens of every sequence, by recording."""
    return tuple(trace.seq_lens for trace in traces)


def _split(traces: list[Trace], holdout: float) -> tuple[list[Trace], list[Trace] | None]:
    if not holdout:
        return traces, None
    if any(len(trace.seq_lens) * min(holdout, 1 - holdout) < 0.5 for trace in traces):
        note("too few sequences to hold any out: no figures on unseen tokens (record more)")
        return traces, None
    return inputs.split_all(traces, holdout)


def _old_plan(args: argparse.Namespace, train) -> Plan | None:
    if args.old_plan is None:
        if args.max_moves is not None or args.move_price:
            raise UserError("--max-moves and --move-price are about moves from a plan; give --old-plan")
        return None
    return inputs.load_plan(args.old_plan, train[0] if isinstance(train, list) else None, args.gpus)


def _save(found: Found, args: argparse.Namespace) -> Found:
    """Write the plan and, beside it, its affinity file."""
    path, plan = Path(args.output), found.solution.plan
    try:
        if found.affinity is not None:
            plan = replace(plan, affinity=f"{path.stem}.affinity.npz")
            found.affinity.save(path.parent / plan.affinity)
        plan.save(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give another path") from None
    return replace(found, solution=replace(found.solution, plan=plan))


def _show(solution: Solution, result: dict, args: argparse.Namespace) -> None:
    gap = "-" if solution.gap is None else f"{solution.gap:.2%}"
    bound = "-" if solution.bound is None else f"{solution.bound:.5f}"
    print(
        f"{solution.method}: {solution.status}, {solution.objective_name} {solution.objective:.5f},"
        f" bound {bound}, gap {gap}, {solution.seconds:.2f} s"
    )
    train, held = result["train"] or {}, result["held_out"] or {}
    rows = [[name, train.get(name), held.get(name)] for name in (*FIGURES, "home_tail") if name in train]
    print_table(f"figures (weighing tokens; homes {result['homes']})", ("figure", "train", "held-out"), rows)
    if args.output:
        affinity = solution.plan.affinity
        print(f"plan written to {args.output}" + (f", affinity beside it to {affinity}" if affinity else ""))
