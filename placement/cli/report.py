"""``epmoe-placement report``: what a plan changes on recorded tokens, as tables and a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from placement.cli import inputs
from placement.cli.console import note, print_table, require_writable, write_json
from placement.errors import UserError
from placement.plan import linear_plan
from placement.recording import read_text
from placement.report import Report, make_report, moved_copies, plot_report
from placement.textfiles import parse_json
from placement.trace import join

HELP = "explain a plan on recorded tokens, beside another plan (default: linear)"
EXAMPLES = """\
examples:
  epmoe-placement report --plan joint.json --trace law.npz
  epmoe-placement report --plan joint.json --trace law.npz --holdout 0.5        (only tokens it was not solved on)
  epmoe-placement report --plan new.json --before old.json --trace today.npz --plot change.png
  epmoe-placement report --plan joint.json --trace law.npz --solution joint_solve.json --plot all.png

--solution takes what `solve --json` wrote and adds the objective over time to the picture.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "report", help=HELP, description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", required=True, metavar="PLAN", help="the plan, in any format")
    parser.add_argument("--before", metavar="PLAN", help="the plan to compare with (default: linear)")
    inputs.add_trace_arguments(parser)
    parser.add_argument("--holdout", type=inputs.share, default=0.0, help="judge on this last share of sequences only")
    inputs.add_homes_argument(parser)
    inputs.add_machine_arguments(parser)
    inputs.add_cost_arguments(parser)
    parser.add_argument("--solution", metavar="FILE", help="JSON of `solve --json`, for the objective over time")
    parser.add_argument("--plot", type=inputs.picture, metavar="FILE.png", help="draw loads, traffic and progress")
    parser.add_argument("--json", metavar="FILE", help="write all figures and arrays ('-': stdout)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require_writable(args.plot, args.json)
    traces = inputs.load_traces(args)
    if args.holdout:
        traces = inputs.split_all(traces, args.holdout)[1]
    trace = join(inputs.cut_requests(traces, args.cut), "+".join(args.trace))
    plan = inputs.load_plan(args.plan, trace, args.gpus)
    topology = inputs.topology_for(plan, args)
    if args.before:
        before = inputs.load_plan(args.before, trace, args.gpus)
        if before.ranks != plan.ranks:
            raise UserError(f"{args.before} has {before.ranks} ranks, {args.plan} has {plan.ranks}; they must agree")
    else:
        before = linear_plan(trace.shape, plan.ranks)
    homes = inputs.load_homes(args.homes, plan, args.plan, trace)
    # a file says where requests were; a rule is part of the new plan, and the old one had none
    homes_before = homes if homes is not None and ":" not in args.homes else None
    options = {"combine": args.combine, "calibration": inputs.load_calibration(args)}
    report = make_report((before, homes_before), (plan, homes), trace, topology, **options)
    solution = _solution(args.solution) if args.solution else None
    if args.json != "-":
        _show(report, args)
    if args.plot:
        _draw(report, args.plot, solution)
    if args.json:
        write_json(args.json, report.to_dict())
    return 0


def _solution(path: str) -> dict:
    raw = parse_json(read_text(Path(path)), path, "give what `solve --json` wrote")
    if not isinstance(raw, dict) or not {"history", "objective_name", "method", "status"} <= raw.keys():
        raise UserError(f"{path} is no solution; give what `solve --json` wrote")
    return raw


def _draw(report: Report, path: str, solution: dict | None) -> None:
    try:
        plot_report(report, path, solution)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give another path") from None
    note(f"drawn: {path}")


def _show(report: Report, args: argparse.Namespace) -> None:
    rows = [[name, before, after, _change(before, after), meaning] for name, before, after, meaning in report.rows()]
    moved = f"{report.costs_after.tokens:,} tokens, figures weigh tokens"
    if args.before:
        moved += f"; {moved_copies(report.before, report.after):,} expert copies move"
    title = f"{args.plan} on {report.source}, {report.after.ranks} GPUs, combine {args.combine}"
    columns = ("figure", f"before ({report.before.made_by or args.before})", "after", "change", "meaning")
    print_table(title, columns, rows, moved)


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else "-"
