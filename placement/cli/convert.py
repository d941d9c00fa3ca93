"""``epmoe-placement convert``: recordings to traces, plans to and from other engines' files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from placement import formats, readers
from placement.cli import inputs
from placement.cli.console import note, require_writable, write_json, write_text
from placement.errors import UserError
from placement.model_shape import shape_like
from placement.trace import Trace

HELP = "turn recordings into traces, and plans into the files of other engines"
EXAMPLES = """\
plans (--to sglang | vllm | vllm-ascend | epmoe):
  epmoe-placement convert plan.json --to sglang -o location.json    then: --init-expert-location location.json
  epmoe-placement convert plan.json --to vllm -o phy2log.json
  epmoe-placement convert plan.json --to vllm-ascend -o expert_map.json
  epmoe-placement convert location.json --to epmoe --like config.json --gpus 8 -o plan.json

recordings (--to trace):
  epmoe-placement convert responses.jsonl --to trace --like config.json -o law.npz
  epmoe-placement convert recorder_folder --to trace -o law.npz     (SGLang, one .pt per rank)
  epmoe-placement convert topk.npy --from exflow --to trace --num-experts 8 --sequence-length 512 -o t.npz
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "convert", help=HELP, description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", metavar="FILE", help="a recording (with --to trace) or a plan")
    parser.add_argument("--to", required=True, choices=("trace", *formats.PLAN_FORMATS), help="what to write")
    parser.add_argument("-o", "--output", type=inputs.file_name, required=True, metavar="FILE")
    parser.add_argument("--gpus", type=inputs.positive_int, metavar="W", help="ranks, where the plan lists only slots")
    parser.add_argument(
        "--model-layers", type=inputs.positive_int, metavar="N", help="all layers of the model, dense ones too (sglang)"
    )
    inputs.add_format_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write what was done ('-': stdout)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require_writable(args.output, args.json)
    done = _trace(args) if args.to == "trace" else _plan(args)
    if args.json:
        write_json(args.json, done)
    if args.json != "-":
        print(f"{args.output}: " + ", ".join(f"{value} {key}" for key, value in done.items() if isinstance(value, int)))
    return 0


def _trace(args: argparse.Namespace) -> dict:
    trace: Trace = readers.read_trace(args.input, inputs.read_options(args), args.kind)
    try:
        trace.save(args.output)
    except OSError as error:
        raise UserError(f"cannot write {args.output}: {error.strerror}; give another path") from None
    shape = trace.shape
    return {
        "input": args.input,
        "output": args.output,
        "tokens": trace.num_tokens,
        "sequences": len(trace.seq_lens),
        "layers": shape.num_layers,
        "experts": shape.num_experts,
    }


def _plan(args: argparse.Namespace) -> dict:
    shape = shape_like(args.like) if args.like else None
    plan = formats.read_plan(args.input, shape, args.gpus)
    for lost in formats.lost_in(plan, args.to):
        note(f"a {args.to} file cannot hold {lost}")
    text = formats.write_plan(plan, args.to, args.model_layers or _layers_of(args.like))
    write_text(args.output, text)
    return {
        "input": args.input,
        "output": args.output,
        "ranks": plan.ranks,
        "layers": plan.shape.num_layers,
        "experts": plan.shape.num_experts,
        "replicas": int((plan.copies_LE - 1).sum()),
    }


def _layers_of(like: str | None) -> int | None:
    """The model's number of layers, where ``--like`` is its config."""
    if like is None:
        return None
    path = Path(like) / "config.json" if Path(like).is_dir() else Path(like)
    if path.suffix != ".json":
        return None
    raw = json.loads(path.read_text(encoding="utf-8"))
    text = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else raw
    return text.get("num_hidden_layers")
