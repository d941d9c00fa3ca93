"""``epmoe-placement inspect``: what recordings look like."""

from __future__ import annotations

import argparse

import numpy as np

from placement import readers, stats
from placement.checks import check_trace
from placement.cli import inputs
from placement.cli.console import note, print_table, require_writable, write_json
from placement.errors import UserError
from placement.inspect import Inspection, inspect_stream, similarity
from placement.profile import Profile

HELP = "show load skew, dependence between layers, domain similarity, repeated paths"
EXAMPLES = """\
examples:
  epmoe-placement inspect law.npz
  epmoe-placement inspect law.npz intent.npz summary.npz --json domains.json    (similarity of domains)
  epmoe-placement inspect expert_distribution_recorder_1.5_0.pt                 (SGLang, per token)
  epmoe-placement inspect responses.jsonl --like Qwen3-30B-A3B/config.json      (vLLM routed experts)

how to read it:
  max/mean, Gini   1 and 0 are even; what placement or replication has to even out
  entropy          share of log E; 1 is even
  MI to next       nat of information a layer's choice gives about the next; near "shuffled" means no affinity to use
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "inspect", help=HELP, description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="routing recordings of one model")
    parser.add_argument("--trace", nargs="+", action="extend", default=[], metavar="FILE", help="the same")
    inputs.add_format_arguments(parser)
    parser.add_argument("--layers", type=inputs.positive_int, default=64, metavar="N", help="rows of the layer table")
    parser.add_argument("--json", metavar="FILE", help="write all figures ('-': stdout)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not (paths := args.files + args.trace):
        raise UserError("nothing to look at; give one or more FILEs")
    require_writable(args.json)
    options = inputs.read_options(args)
    found: list[Inspection] = []
    content = []
    for path in paths:
        if readers.holds_tokens(path, args.kind):
            first, findings = [], []
            inspection = inspect_stream(_watch(readers.stream(path, options, args.kind), first))
            findings = check_trace(first[0])
            content.append({**inspection.to_dict(), "findings": [vars(f) for f in findings]})
        else:
            inspection, findings = _of_loads(path, readers.read_profile(path, options, args.kind)), []
            content.append({**inspection.to_dict(), "tokens": None, "sequences": None, "duplicate_paths": None})
        found.append(inspection)
        if args.json != "-":
            _show(inspection, args.layers, content[-1])
        for finding in findings:
            note(f"{finding.severity}: {finding.message}")
    result = {"recordings": content}
    if len(found) > 1:
        result["similarity"] = _show_similarity(found, quiet=args.json == "-")
    if args.json:
        write_json(args.json, result)
    return 0


def _watch(traces, first: list):
    """Passes the pieces on and keeps the first, which the checks look at."""
    for trace in traces:
        if not first:
            first.append(trace)
        yield trace


def _of_loads(path: str, profile: Profile) -> Inspection:
    empty = np.zeros(0)
    return Inspection(str(path), profile.shape, int(profile.tokens), 0, profile.load_LE, 0, empty, empty)


def _show(inspection: Inspection, limit: int, content: dict) -> None:
    shape = inspection.shape
    sizes = f"{shape.num_layers} x {shape.num_experts} experts, top-{shape.top_k}"
    if content["tokens"] is None:
        caption = "loads only: no tokens, sequences or paths"
    else:
        share = inspection.duplicates / max(1, inspection.tokens)
        caption = (
            f"{inspection.tokens:,} tokens, {inspection.sequences:,} sequences,"
            f" {inspection.duplicates:,} tokens ({share:.1%}) share their whole path with another"
        )
    names = ("max_over_mean", "gini", "entropy_share", "unused_experts", "information_to_next", "information_shuffled")
    rows = [[layer["layer"], *(layer[name] for name in names)] for layer in content["layers"][:limit]]
    skew = [measure(inspection.load_LE) for measure in (stats.max_over_mean, stats.gini, stats.entropy_share)]
    mean_row = ["mean", *(float(x.mean()) for x in skew), None]
    mean_row += [float(x.mean()) if x.size else None for x in (inspection.information, inspection.shuffled)]
    columns = ("layer", "max/mean", "Gini", "entropy", "unused", "MI to next", "shuffled")
    print_table(f"{inspection.source}: {shape.name or 'model'}, {sizes}", columns, [*rows, mean_row], caption)


def _show_similarity(found: list[Inspection], quiet: bool) -> list[list[float]]:
    cosine = similarity(found)
    names = [inspection.source.rsplit("/", 1)[-1].removesuffix(".npz") for inspection in found]
    if not quiet:
        rows = [[name, *map(float, row)] for name, row in zip(names, cosine)]
        print_table("cosine of expert loads between domains (mean of layers)", ("domain", *names), rows)
    return cosine.tolist()
