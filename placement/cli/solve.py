"""``epmoe-placement solve``: recordings and a machine in, a plan with its proof out."""

from __future__ import annotations

import argparse
from dataclasses import replace

from placement import cost, methods
from placement.cli import inputs
from placement.cli.console import note, print_table, progress_line, require_writable, write_json
from placement.compare import FIGURES, problem_bound, with_bound
from placement.errors import UserError
from placement.plan import Plan
from placement.solution import Problem, Solution, make_problem
from placement.trace import Trace, join

HELP = "decide which GPU holds which expert"
EXAMPLES = """\
examples:
  epmoe-placement solve --trace law.npz --gpus 8 -o plan.json
  epmoe-placement solve --trace law.npz intent.npz summary.npz --gpus 8 --cap 1.05 --seconds 60 -o plan.json
  epmoe-placement solve --trace law.npz --nodes 2 --gpus-per-node 8 --inter 25G --redundant 1 -o plan.json
  epmoe-placement solve --trace load.csv --top-k 8 --gpus 8 --method eplb --redundant 2 -o plan.json
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
    parser.add_argument("--old-plan", metavar="PLAN", help="the plan in force: moves from it are limited or priced")
    parser.add_argument("--max-moves", type=inputs.natural_int, metavar="N", help="expert copies that may move")
    parser.add_argument(
        "--move-price", type=inputs.positive_or_zero, default=0.0, metavar="P", help="cost of a move, in the objective"
    )
    inputs.add_cost_arguments(parser)
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan (epmoe-plan/1; see convert)")
    parser.add_argument("--json", metavar="FILE", help="write status, bound, gap, history and figures ('-': stdout)")
    parser.set_defaults(run=run)


def add_solver_arguments(parser: argparse.ArgumentParser, seconds: float = 10.0) -> None:
    group = parser.add_argument_group("solver")
    group.add_argument(
        "--objective",
        choices=sorted(methods.OBJECTIVES),
        metavar="NAME",
        help=f"one of {', '.join(methods.OBJECTIVES)} (default: mixed, fan-out - 4 locality; compute_tail for loads)",
    )
    group.add_argument(
        "--cap", type=cap, default=1.05, metavar="X", help="most load of a GPU over the mean, or none (default 1.05)"
    )
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
    return value


def run(args: argparse.Namespace) -> int:
    require_writable(args.output, args.json)
    method = methods.find(args.method)
    topology = inputs.load_topology(args)
    loads = inputs.load_loads(args)
    if loads is not None:
        train, held = loads[0] if len(loads) == 1 else _no_mix(args), None
    else:
        train, held = _split(inputs.load_traces(args), args.holdout)
    problem = problem_of(args, train, topology, old_plan=_old_plan(args, train))
    bound = problem_bound(problem, args.seconds / 4) if method.searches else None  # a baseline answers at once
    with progress_line(method.name, bound) as show:
        solution = with_bound(method(replace(problem, progress=show)), problem, bound)
    result = describe(solution, problem, held)
    if args.output:
        _save(solution.plan, args.output)
    if args.json != "-":
        _show(solution, result, args)
    if args.json:
        write_json(args.json, result)
    return 0


def problem_of(args: argparse.Namespace, train, topology, **extra) -> Problem:
    """The problem that the arguments describe; ``train`` is a list of traces or a profile of loads."""
    loads_only = not isinstance(train, list)
    return make_problem(
        train,
        topology,
        objective=methods.OBJECTIVES[args.objective or ("compute_tail" if loads_only else methods.MIXED.name)],
        slots=args.slots,
        redundant=args.redundant,
        cap=args.cap,
        seed=args.seed,
        seconds=args.seconds,
        threads=args.threads,
        combine=args.combine,
        calibration=inputs.load_calibration(args),
        **extra,
    )


def describe(solution: Solution, problem: Problem, held: Trace | None) -> dict:
    """The solution and its figures, for JSON and tables."""
    result = solution.to_dict()
    for name, trace in (("train", problem.train), ("held_out", held)):
        result[name] = None
        if trace is not None:
            options = {"combine": problem.combine, "calibration": problem.calibration}
            result[name] = cost.evaluate(solution.plan, trace, problem.topology, **options).to_dict(arrays=False)
    if problem.train is None:
        tail, worst = cost.compute_tail_from_load(problem.profile.load_LE, solution.plan, problem.topology.speed_W)
        result["train"] = {"compute_tail": tail, "compute_tail_worst_layer": worst}
    return result


def _split(traces: list[Trace], holdout: float) -> tuple[list[Trace], Trace | None]:
    if not holdout:
        return traces, None
    if any(len(trace.seq_lens) * min(holdout, 1 - holdout) < 0.5 for trace in traces):
        note("too few sequences to hold any out: no figures on unseen tokens (record more)")
        return traces, None
    train, held = inputs.split_all(traces, holdout)
    return train, join(held, "held-out")


def _no_mix(args: argparse.Namespace):
    raise UserError(f"{len(args.trace)} load tables were given; add them up first, or record tokens")


def _old_plan(args: argparse.Namespace, train) -> Plan | None:
    if args.old_plan is None:
        if args.max_moves is not None or args.move_price:
            raise UserError("--max-moves and --move-price are about moves from a plan; give --old-plan")
        return None
    return inputs.load_plan(args.old_plan, train[0] if isinstance(train, list) else None, args.gpus)


def _save(plan: Plan, path: str) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give another path") from None


def _show(solution: Solution, result: dict, args: argparse.Namespace) -> None:
    gap = "-" if solution.gap is None else f"{solution.gap:.2%}"
    bound = "-" if solution.bound is None else f"{solution.bound:.5f}"
    print(
        f"{solution.method}: {solution.status}, {solution.objective_name} {solution.objective:.5f},"
        f" bound {bound}, gap {gap}, {solution.seconds:.2f} s"
    )
    train, held = result["train"] or {}, result["held_out"] or {}
    rows = [[name, train.get(name), held.get(name)] for name in FIGURES if name in train]
    print_table("figures (weighing tokens)", ("figure", "train", "held-out"), rows)
    if args.output:
        print(f"plan written to {args.output}")
