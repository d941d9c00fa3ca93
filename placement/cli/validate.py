"""``epmoe-placement validate``: is a plan whole, and is it for this model?"""

from __future__ import annotations

import argparse
from pathlib import Path

from placement import formats, readers
from placement.checks import check_trace
from placement.cli import inputs
from placement.cli.console import note, print_table, require_writable, write_json
from placement.errors import UserError
from placement.homes import Affinity
from placement.model_shape import shape_like
from placement.plan import Plan

HELP = "check a plan (experts placed, replicas on distinct GPUs, affinity file), and that it fits a model or trace"
EXAMPLES = """\
examples:
  epmoe-placement validate plan.json
  epmoe-placement validate plan.json --model Qwen3-30B-A3B --trace law.npz
  epmoe-placement validate location.json --model config.json --gpus 8       (SGLang, vLLM, vllm-ascend files)

exit code: 0 the plan is sound and fits; 2 it is not (one line says where)
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "validate", help=HELP, description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", metavar="PLAN", help="a plan in any format")
    parser.add_argument("--model", metavar="FILE", help="the model's config.json or its folder")
    parser.add_argument("--trace", metavar="FILE", help="a recording that the plan must fit; it is checked too")
    parser.add_argument("--gpus", type=inputs.positive_int, metavar="W", help="ranks the plan must have")
    inputs.add_format_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write the summary ('-': stdout)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require_writable(args.json)
    shapes = [(source, shape_like(source)) for source in (args.model, args.like) if source]
    trace = readers.read_trace(args.trace, inputs.read_options(args), args.kind) if args.trace else None
    if trace is not None:
        shapes.append((args.trace, trace.shape))
    plan = formats.read_plan(args.plan, shapes[0][1] if shapes else None, args.gpus)
    for source, shape in shapes:
        shape.require_same(plan.shape, source, args.plan)
    if plan.affinity is not None:
        Affinity.load(Path(args.plan).parent / plan.affinity).require_fits(plan)
    for finding in check_trace(trace) if trace is not None else []:
        if finding.severity == "error":
            raise UserError(finding.message)
        note(finding.message)
    summary = summarise(plan)
    if args.json != "-":
        print_table(f"{args.plan} is sound", ("", "value"), [[k.replace("_", " "), v] for k, v in summary.items()])
    if args.json:
        write_json(args.json, summary)
    return 0


def summarise(plan: Plan) -> dict:
    sizes = [len(held) for layer in plan.slots for held in layer]
    return {
        "model": plan.shape.name or "-",
        "layers": plan.shape.num_layers,
        "experts": plan.shape.num_experts,
        "ranks": plan.ranks,
        "fewest_slots_of_a_rank": min(sizes),
        "most_slots_of_a_rank": max(sizes),
        "replicas": int((plan.copies_LE - 1).sum()),
        "most_copies_of_an_expert": int(plan.copies_LE.max()),
        "replica_rule": "own copy, else by home" if plan.serve is None else "table",
        "affinity": plan.affinity or "-",
        "made_by": plan.made_by or "-",
    }
