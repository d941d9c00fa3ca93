"""``epmoe-placement simulate``: step times and bytes of plans over a trace."""

from __future__ import annotations

import argparse
import re

from placement.cli import inputs
from placement.cli.console import note, print_table, require_writable, write_json
from placement.errors import UserError
from placement.plan import linear_plan
from placement.simulate import simulate
from placement.trace import join

HELP = "predict step times and bytes of plans over a trace, from a calibration file"
EXAMPLES = """\
examples:
  epmoe-placement simulate --trace law.npz --plan linear joint.json --gpus 8 --calibration h200.json
  epmoe-placement simulate --trace law.npz --plan joint.json --homes homes.json --combine reduce
  epmoe-placement simulate --trace law.npz --plan linear joint.json --gpus 8 --cut 256 --homes probe:32

A calibration file holds {"format": "epmoe-calibration/1", "dispatch_row_bytes", "combine_row_bytes", "pair_seconds",
"layer_seconds", "step_tokens", "overlap"}. Without one, built-in figures of a mid-size model are used: then compare
plans with each other, and do not take the seconds as a promise.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "simulate", help=HELP, description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    inputs.add_trace_arguments(parser)
    parser.add_argument(
        "--plan", nargs="+", required=True, metavar="PLAN", help="plans in any format; 'linear' is no placement"
    )
    inputs.add_homes_argument(parser)
    inputs.add_machine_arguments(parser)
    inputs.add_cost_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write totals and every step ('-': stdout)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require_writable(args.json)
    trace = join(inputs.cut_requests(inputs.load_traces(args), args.cut), "+".join(args.trace))
    calibration = inputs.load_calibration(args)
    rows, content = [], []
    for name in args.plan:
        if name == "linear":
            if args.gpus is None and args.topology is None and args.nodes is None:
                raise UserError("the linear plan needs to know the machine; give --gpus")
            plan = linear_plan(trace.shape, inputs.load_topology(args).ranks)
        else:
            plan = inputs.load_plan(name, trace, args.gpus)
        topology = inputs.topology_for(plan, args)
        chosen = args.homes
        if re.fullmatch(r"(prompt|probe):\d+", chosen) and plan.affinity is None:
            note(f"{name} has no affinity file: its requests get round-robin homes")
            chosen = "round-robin"
        homes = inputs.load_homes(chosen, plan, name, trace)
        result = simulate(plan, trace, topology, homes=homes, combine=args.combine, calibration=calibration)
        content.append({"plan": name, **result.to_dict()})
        s = result.summary()
        rows.append(
            [name, s["steps"], s["step_seconds_mean"] * 1e3, s["step_seconds_p99"] * 1e3, s["step_bytes_mean"] / 1e6]
            + [s["compute_tail_mean"], s["compute_tail_p99"], s["tokens_per_second"]]
        )
    if args.json != "-":
        columns = ("plan", "steps", "ms/step", "p99 ms", "MB/step", "tail", "p99 tail", "tokens/s")
        print_table(f"{trace.num_tokens:,} tokens on {topology.ranks} GPUs", columns, rows)
    if args.json:
        write_json(args.json, content)
    return 0
