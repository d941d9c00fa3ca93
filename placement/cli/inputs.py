"""Arguments that several commands share, and what they name: recordings, machines, plans."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from placement import readers
from placement.checks import require_sound
from placement.cli.console import note
from placement.cost import Calibration
from placement.errors import UserError
from placement.formats import read_plan
from placement.home_rules import choose_homes, read_homes
from placement.homes import Affinity
from placement.model_shape import shape_like
from placement.plan import Plan
from placement.profile import Profile
from placement.recording import ReadOptions, cut_sequences
from placement.topology import NETWORK, NETWORK_LATENCY, NVLINK, NVLINK_LATENCY, Topology, two_level, uniform
from placement.trace import Trace

_SUFFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


# -- arguments ------------------------------------------------------------------------------------------------------


def add_trace_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    group = parser.add_argument_group("recordings")
    group.add_argument(
        "--trace",
        nargs="+",
        action="extend",
        required=required,
        metavar="FILE",
        help="routing recordings; several are domains of one model (formats: docs/placement.md)",
    )
    add_format_arguments(group)
    group.add_argument("--cut", type=positive_int, metavar="N", help="cut sequences into requests of at most N tokens")
    group.add_argument("--no-checks", action="store_true", help="do not look for faulty captures (faster)")


def add_format_arguments(group: argparse._ActionsContainer) -> None:
    group.add_argument("--from", dest="kind", choices=readers.FORMATS, help="format of the recordings (default: found)")
    group.add_argument("--like", metavar="FILE", help="config.json, trace or plan that states the model's shape")
    group.add_argument("--num-experts", type=positive_int, metavar="E", help="experts per layer, where no file says so")
    group.add_argument("--top-k", type=positive_int, metavar="K", help="choices per token, where only loads are known")
    group.add_argument(
        "--sequence-length", type=positive_int, metavar="N", help="cut recordings that mark no sequences every N tokens"
    )


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine (one of --gpus, --topology, --nodes with --gpus-per-node)")
    group.add_argument("--gpus", type=positive_int, metavar="W", help="W equal GPUs with equal links")
    group.add_argument("--topology", metavar="FILE", help="epmoe-topology/1 JSON: speeds, slots, bandwidths, latencies")
    group.add_argument("--nodes", type=positive_int, metavar="N")
    group.add_argument("--gpus-per-node", type=positive_int, metavar="M")
    group.add_argument("--intra", type=bandwidth, metavar="B/S", help="bytes/s inside a node (default 450G)")
    group.add_argument("--inter", type=bandwidth, metavar="B/S", help="bytes/s between nodes (default 50G)")
    group.add_argument("--speed", type=numbers, metavar="S,S,...", help="relative speed of each GPU")


def add_slot_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("slots")
    group.add_argument("--slots", type=positive_int, metavar="S", help="expert slots per layer over all GPUs")
    group.add_argument("--redundant", type=natural_int, default=0, metavar="R", help="spare slots per GPU and layer")


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cost")
    group.add_argument("--combine", choices=("exact", "reduce"), default="exact", help="rows back (default exact)")
    group.add_argument("--calibration", metavar="FILE", help="epmoe-calibration/1 JSON (bytes, seconds)")


def positive_int(text: str) -> int:
    value = natural_int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def natural_int(text: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def share(text: str) -> float:
    """0 <= value < 1."""
    value = positive_or_zero(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share: give 0 or more and less than 1")
    return value


def positive_or_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def seconds(text: str) -> float:
    value = positive_or_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 seconds is no time; give more")
    return value


def bandwidth(text: str) -> float:
    """``450G``, ``450GB/s`` or ``4.5e11`` -> bytes/s."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?)(?:B(?:/s)?)?", text)
    try:
        value = float(match[1]) * _SUFFIX[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth; write 450G or 4.5e11 (bytes/s)")
    return value


def picture(text: str) -> str:
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"{text!r} is no picture's name; end it in .png, .svg or .pdf")
    return text


def file_name(text: str) -> str:
    if text == "-":
        raise argparse.ArgumentTypeError("'-' is standard output, which --json can have; name a file")
    return text


def numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,1,0.5,0.5") from None


# -- what they name ---------------------------------------------------------------------------------------------------


def read_options(args: argparse.Namespace) -> ReadOptions:
    return ReadOptions(
        like=shape_like(args.like) if args.like else None,
        num_experts=args.num_experts,
        top_k=args.top_k,
        sequence_length=args.sequence_length,
        note=note,
    )


def load_traces(args: argparse.Namespace) -> list[Trace]:
    """Every ``--trace`` whole, checked, of one model."""
    options = read_options(args)
    traces = [readers.read_trace(path, options, args.kind) for path in args.trace]
    for trace in traces:
        if not args.no_checks:
            require_sound(trace, note)
        traces[0].shape.require_same(trace.shape, traces[0].source, trace.source)
    return traces


def cut_requests(traces: list[Trace], most: int | None) -> list[Trace]:
    """The same tokens as requests of at most ``most`` tokens; a sequence's last piece may be shorter.

    To be done after any split: pieces of one sequence belong on one side.
    """
    return traces if most is None else [_cut(trace, most) for trace in traces]


def _cut(trace: Trace, most: int) -> Trace:
    pieces = [cut_sequences(length, most) for length in trace.seq_lens.tolist()]
    homes = None if trace.homes is None else np.repeat(trace.homes, [len(each) for each in pieces])
    return replace(trace, seq_lens=np.array([n for each in pieces for n in each], np.int32), homes=homes)


def load_loads(args: argparse.Namespace) -> list[Profile] | None:
    """The recordings' profiles where none of them holds tokens, else ``None``."""
    options = read_options(args)
    if any(readers.holds_tokens(path, args.kind) for path in args.trace):
        return None
    return [readers.read_profile(path, options, args.kind) for path in args.trace]


def one_load(loads: list[Profile]) -> Profile:
    if len(loads) > 1:
        raise UserError(f"{len(loads)} load tables were given; add them up first, or record tokens")
    return loads[0]


def split_all(traces: list[Trace], holdout: float) -> tuple[list[Trace], list[Trace]]:
    """(train, held out) of each domain, split by sequence."""
    parts = [trace.split(holdout) for trace in traces]
    return [train for train, _ in parts], [held for _, held in parts]


def load_topology(args: argparse.Namespace) -> Topology:
    given = [name for name in ("gpus", "topology", "nodes") if getattr(args, name) is not None]
    if len(given) != 1 or (args.nodes is None) != (args.gpus_per_node is None):
        raise UserError("describe the machine once: --gpus W, or --topology FILE, or --nodes N with --gpus-per-node M")
    if args.topology:
        if args.intra or args.inter or args.speed:
            raise UserError("--topology states speeds and links; leave out --intra, --inter and --speed")
        return Topology.load(args.topology)
    intra = (args.intra or NVLINK, NVLINK_LATENCY)
    if args.gpus:
        if args.inter:
            raise UserError("--inter is for several nodes; give --nodes and --gpus-per-node instead of --gpus")
        return uniform(args.gpus, speed=args.speed, bandwidth=intra[0])
    inter = (args.inter or NETWORK, NETWORK_LATENCY)
    return two_level(args.nodes, args.gpus_per_node, speed=args.speed, intra=intra, inter=inter)


def topology_for(plan: Plan, args: argparse.Namespace) -> Topology:
    """The machine of a plan: as described, or equal GPUs where nothing is said."""
    if all(getattr(args, name) is None for name in ("gpus", "topology", "nodes")):
        if args.intra or args.inter:
            raise UserError("--intra and --inter need --gpus or --nodes with --gpus-per-node")
        return uniform(plan.ranks, speed=args.speed)
    topology = load_topology(args)
    if topology.ranks != plan.ranks:
        raise UserError(f"the plan has {plan.ranks} ranks, the machine {topology.ranks} GPUs; they must agree")
    return topology


def load_calibration(args: argparse.Namespace) -> Calibration:
    return Calibration.load(args.calibration) if args.calibration else Calibration()


def load_plan(path: str, trace: Trace | None, ranks: int | None) -> Plan:
    """A plan in any format; foreign files take the model's shape from the trace."""
    return read_plan(path, trace.shape if trace is not None else None, ranks)


def add_homes_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--homes",
        default="round-robin",
        metavar="RULE",
        help="home ranks of the requests: round-robin (default); prompt:N or probe:N, chosen by the plan's affinity"
        " file from the ids or the routing of a request's first N tokens; or a file with one rank per sequence",
    )


def load_homes(rule: str, plan: Plan, plan_path: str, trace: Trace) -> np.ndarray | None:
    """int64 ``[sequences]``, or ``None`` for round-robin; see :func:`add_homes_argument`."""
    if rule == "round-robin":
        return None
    match = re.fullmatch(r"(prompt|probe):(\d{1,9})", rule)
    if match is None and rule.startswith(("prompt", "probe")):
        raise UserError(f"--homes {rule}: write prompt:N or probe:N, with the number of tokens that are seen first")
    if match is None:
        return read_homes(rule, len(trace.seq_lens))
    if plan.affinity is None:
        raise UserError(f"{plan_path} has no affinity file for --homes {rule}; solve it with --probe or method homes")
    affinity = Affinity.load(Path(plan_path).parent / plan.affinity)
    affinity.require_fits(plan)
    return choose_homes(plan, affinity, trace, (match[1], int(match[2])))
