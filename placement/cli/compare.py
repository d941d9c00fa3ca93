"""``epmoe-placement compare``: every method on the same tokens, one table."""

from __future__ import annotations

import argparse
from dataclasses import replace

from placement import methods
from placement.cli import inputs
from placement.cli.console import note, print_table, progress_line, require_writable, write_json
from placement.cli.solve import add_solver_arguments, for_unseen, priced, problem_of, whole_lens
from placement.compare import FIGURES, HOME_OBJECTIVE, LoadRow, Row, compare, compare_loads, sum_bound, term_bounds
from placement.errors import UserError
from placement.report import plot_frontier
from placement.solution import Problem
from placement.trace import join

LEGEND = """\
tail: fullest GPU over mean; dispatch, combine: rows to and from other ranks, per token and layer
requests have round-robin homes, with method homes those that a probe of their first 32 tokens suggests"""
LOAD_LEGEND = """\
tail: fullest GPU over mean by the plan's replica rule
equal split, best split: the same where copies share an expert's load evenly, or as well as possible"""
BOUND_SECONDS = 4.0  # most that the bound that all methods share may take, about
HELP = "run every method on the first part of the tokens and judge them on the rest"
EXAMPLES = """\
examples:
  epmoe-placement compare --trace law.npz --gpus 8 --holdout 0.5 --json rows.json
  epmoe-placement compare --trace law.npz --gpus 8 --method linear eplb joint --seconds 60
  epmoe-placement compare --trace law.npz --nodes 2 --gpus-per-node 4 --redundant 1 --plot frontier.png
  epmoe-placement compare --trace load.csv --top-k 8 --gpus 8 --redundant 1      (loads only: balance)

All figures of the table are on held-out tokens and weigh tokens. Read load (tail) and locality or fan-out together:
a plan without a load cap always looks good in the other two.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compare", help=HELP, description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    inputs.add_trace_arguments(parser)
    inputs.add_machine_arguments(parser)
    inputs.add_slot_arguments(parser)
    add_solver_arguments(parser, seconds=15.0)
    parser.add_argument("--method", nargs="+", metavar="NAME", help="only these (default: all that apply)")
    parser.add_argument("--worst", action="store_true", help="method domains: the worst domain counts, not the mean")
    parser.add_argument("--holdout", type=inputs.share, default=0.5, help="share of sequences judged on (default 0.5)")
    inputs.add_cost_arguments(parser)
    parser.add_argument("--plot", type=inputs.picture, metavar="FILE.png", help="draw tail against the others")
    parser.add_argument("--json", metavar="FILE", help="write the rows ('-': stdout)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require_writable(args.json, args.plot)
    chosen = [methods.find(name) for name in args.method] if args.method else list(methods.METHODS.values())
    if not args.holdout:
        raise UserError("compare judges on tokens that no method has seen; give --holdout above 0")
    topology = inputs.load_topology(args)
    loads = inputs.load_loads(args)
    if loads is not None:
        return _run_on_loads(args, chosen, problem_of(args, inputs.one_load(loads), topology))
    train, held = inputs.split_all(inputs.load_traces(args), args.holdout)
    whole = whole_lens(train) if args.cut else None
    train, held = inputs.cut_requests(train, args.cut), inputs.cut_requests(held, args.cut)
    asked = problem_of(args, train, topology, recordings=whole)
    problem = for_unseen(asked, args)
    held_out = join(held, "held-out")
    rows: list[Row] = []
    bounds = term_bounds(problem, min(BOUND_SECONDS, args.seconds / 4))
    bound = sum_bound(problem, bounds)
    for method in (methods.for_domains(each, train, args.worst) for each in chosen):
        given = priced(replace(asked, objective=HOME_OBJECTIVE), args) if method.places_homes else problem
        with progress_line(method.name, None if method.places_homes else bound) as show:
            rows += compare([method], replace(given, progress=show), (problem.train, held_out), _left_out, bound)
    content = _content(rows)
    if args.json != "-":
        _show(rows, problem, held_out.num_tokens, bounds)
    if args.plot:
        title = f"{problem.shape.name}: {topology.ranks} GPUs, {held_out.num_tokens:,} held-out tokens"
        _draw(content, args.plot, title)
    if args.json:
        write_json(args.json, content)
    return 0


def _run_on_loads(args: argparse.Namespace, chosen: list[methods.Method], problem: Problem) -> int:
    """The methods that need no tokens, judged on the load table itself."""
    if args.plot:
        raise UserError(
            "the picture shows locality and rows, which loads do not tell; leave out --plot or record tokens"
        )
    rows: list[LoadRow] = []
    bound = sum_bound(problem, term_bounds(problem, min(BOUND_SECONDS, args.seconds / 4)))
    for method in chosen:
        with progress_line(method.name, bound) as show:
            rows += compare_loads([method], replace(problem, progress=show), _left_out, bound)
    content = _content(rows)
    if args.json != "-":
        _show_loads(rows, problem)
    if args.json:
        write_json(args.json, content)
    return 0


def _left_out(name: str, reason: str) -> None:
    note(f"{name} left out: {reason}")


def _content(rows: list[Row] | list[LoadRow]) -> list[dict]:
    if not rows:
        raise UserError("no method could solve this; the notes say why")
    return [row.to_dict() for row in rows]


def _show_loads(rows: list[LoadRow], problem: Problem) -> None:
    table = []
    for row in rows:
        solution = row.solution
        gap = None if solution.gap is None else f"{solution.gap:.1%}"
        proof = [solution.objective, solution.bound, gap, solution.status, f"{solution.seconds:.2f}"]
        table.append([solution.method, *row.figures.values(), *proof])
    columns = ("method", "tail", "worst layer", "equal split", "best split", problem.objective.name)
    columns += ("bound", "gap", "status", "seconds")
    title = f"load balance on {problem.ranks} GPUs (loads only: judged on the table itself, nothing is held out)"
    print_table(title, columns, table, LOAD_LEGEND)


def _show(rows: list[Row], problem: Problem, held: int, bounds: dict[str, float]) -> None:
    table, name = [], problem.objective.name
    for row in rows:
        solution, figures = row.solution, row.to_dict()["held_out"]
        gap = None if solution.gap is None else f"{solution.gap:.1%}"
        value = solution.objective if solution.objective_name == name else None  # homes: its own objective
        table.append(
            [solution.method, *(figures[figure] for figure in FIGURES), value, solution.bound, gap]
            + [solution.status, f"{solution.seconds:.2f}"]
        )
    columns = ("method", "tail", "worst layer", "locality", "fan-out", "dispatch", "combine")
    columns += (f"train {name}", "bound", "gap", "status", "seconds")
    tokens = f"{problem.train.num_tokens:,} tokens to solve, {held:,} to judge"
    print_table(f"held-out figures on {problem.ranks} GPUs ({tokens})", columns, table, LEGEND)
    for figure, value in bounds.items():
        side = "above" if methods.OBJECTIVES[figure].maximise else "below"
        print(f"on the training tokens no plan under the cap has {figure} {side} {value:.4f}")


def _draw(content: list[dict], path: str, title: str) -> None:
    try:
        plot_frontier(content, path, title)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give another path") from None
    note(f"drawn: {path}")
