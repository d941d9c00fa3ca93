#!/usr/bin/env python3
"""What several GPUs do together: links, promises, exchanges, a whole model; one call, each part guarded.

    python scripts/multi_gpu_report.py                              all GPUs of this machine
    python scripts/multi_gpu_report.py --ranks 4                    more ranks than GPUs share them, and are labelled so
    python scripts/multi_gpu_report.py --device cpu --ranks 2 --rehearse        CPU ranks over gloo, small layers

1. NCCL (or gloo) and symmetric memory; bandwidth and latency of every link, written as a topology file for
   epmoe-placement --topology.
2. The embedded model in deterministic mode: every exchange, lanes off and on, linear and random placement with copies
   draw the tokens of one rank.
3. Every exchange at 1 to 4096 tokens per rank, beside plain all_to_all_single.
4. A model with the attention and experts of Qwen3-30B-A3B and random weights, which routes as recorded (--trace): every
   placement, round-robin homes and those of the plan's affinity, lanes off and on, beside what the simulation says.
5. Everything in one JSON file, and as tables in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import date
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from bench_exchange import as_record, run_cases  # noqa: E402
from exchange_bench_lib import Case  # noqa: E402
from rank_group import label, on_ranks  # noqa: E402
from report_links import links  # noqa: E402
from report_model import Work, measure_model, model_folder  # noqa: E402
from report_promises import promises  # noqa: E402
from report_text import markdown  # noqa: E402

from epmoe.comm import Comm  # noqa: E402
from epmoe.config import ModelConfig  # noqa: E402
from placement.methods import find  # noqa: E402
from placement.plan import Plan  # noqa: E402
from placement.topology import Topology, uniform  # noqa: E402
from placement.trace import Trace, join, load_trace  # noqa: E402

METHODS = ("linear", "eplb", "moetuner", "joint")
SHARES = {"1": 0.15, "2": 0.3, "3": 0.25, "4": 0.6}  # of the time that is left when a part begins


def main() -> int:
    args = arguments()
    ends = time.monotonic() + args.seconds
    report: dict = {"date": str(date.today()), "where": label(args.device, args.ranks), "torch": torch.__version__}
    report |= {"ranks": args.ranks, "command": " ".join(sys.argv), "parts": {}}
    print(report["where"], flush=True)
    for number, (name, part) in {"1": ("links", part_links), "2": ("promises", part_promises),
                                 "3": ("exchanges", part_exchanges), "4": ("model", part_model)}.items():  # fmt: skip
        if number not in args.parts:
            continue
        began, left = time.monotonic(), ends - time.monotonic()
        print(f"-- {number}. {name}, {left:.0f} s left", flush=True)
        try:
            found = part(args, left if args.parts[-1] == number else max(20.0, left * SHARES[number]))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            print(traceback.format_exc(limit=-4), flush=True)
            found = {"failed": f"{type(error).__name__}: {str(error)[-2000:]}"}
        report["parts"][name] = {"seconds": round(time.monotonic() - began, 1), "found": found}
        write(args, report)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if device == "cuda" else 2)
    parser.add_argument("--parts", nargs="+", choices=("1", "2", "3", "4"), default=["1", "2", "3", "4"])
    parser.add_argument("--seconds", type=float, default=440, help="for all parts (default 440)")
    parser.add_argument("--rehearse", action="store_true", help="small layers and few sizes")
    parser.add_argument("--exchange", nargs="+", help="of parts 2 and 3 (default: all that run there)")
    parser.add_argument("--model-exchange", default="auto", help="of part 4 (default auto)")
    parser.add_argument("--trace", nargs="+", default=None, help="recordings (default: those of the embedded model)")
    parser.add_argument("--plans", help="folder of METHOD.json, solved for half of every recording")
    parser.add_argument("--solve-seconds", type=float, default=20, help="of each method without a plan file")
    parser.add_argument("--topology", default="topology.json", help="where the link matrix is written")
    parser.add_argument("--json", default="multi_gpu.json")
    parser.add_argument("--markdown", default=None, help="tables are written there too")
    return parser.parse_args()


def write(args: argparse.Namespace, report: dict) -> None:
    Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        Path(args.markdown).write_text(markdown(report), encoding="utf-8")


def ask_ranks(args: argparse.Namespace, seconds: float, function: Callable, *values) -> object:
    """What ``function(comm, save, *values)`` returned on rank 0, or if it failed or had no time, what it saved last."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        try:
            on_ranks(args.ranks, args.device, answered, function, values, str(answer), limit_s=seconds)
        except Exception as error:
            if not answer.is_file():
                raise
            print(f"   cut short: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
        return json.loads(answer.read_text(encoding="utf-8"))


def answered(comm: Comm, function: Callable, values: tuple, answer: str) -> None:
    def save(found: object) -> None:
        if comm.rank == 0:
            Path(answer + ".part").write_text(json.dumps(found, default=float), encoding="utf-8")
            Path(answer + ".part").rename(answer)

    save(function(comm, save, *values))


def kinds(args: argparse.Namespace) -> list[str]:
    return args.exchange or (
        ["alltoall", "oneshot", "padded"] if args.device == "cpu" else ["p2p", "padded", "alltoall"]
    )


def part_links(args: argparse.Namespace, seconds: float) -> object:
    found = ask_ranks(args, seconds, links, args.topology)
    print(json.dumps({key: value for key, value in found.items() if key != "latency_us"}), flush=True)
    return found


def part_promises(args: argparse.Namespace, seconds: float) -> object:
    found = ask_ranks(args, seconds, promises, [*kinds(args), "auto"], seconds * 0.8)
    for each in found:
        print("  ", {True: "holds", False: "BROKEN", None: "not run"}[each["holds"]], each["case"], each.get("why", ""))
    return found


def part_exchanges(args: argparse.Namespace, seconds: float) -> object:
    return ask_ranks(args, seconds, exchanges, kinds(args), args.rehearse or args.device == "cpu")


def exchanges(comm: Comm, save: Callable, names: list[str], small: bool) -> dict:
    hidden, tokens = ([256], [1, 16, 128]) if small else ([7168], [1, 16, 128, 588, 1024, 4096])
    dtype = "float32" if comm.device.type == "cpu" else "bfloat16"
    sizes = product(hidden, ("reduce", "exact"), names, tokens)
    cases = [Case(name, count, size, 8, "even", combine, dtype) for size, combine, name, count in sizes]
    if not small:
        cases += [Case(name, count, 2048, 8, "skewed", "reduce", dtype) for name in names for count in (128, 4096)]
    results, link = run_cases(comm, cases, 9, save)
    return as_record(results, link)


def part_model(args: argparse.Namespace, seconds: float) -> object:
    began = time.monotonic()
    train, held = recorded(args)
    topology = Topology.from_json(Path(args.topology).read_text()) if Path(args.topology).is_file() else None
    if topology is not None and topology.ranks != args.ranks:
        topology = None
    plans = {name: plan_of(args, name, train, topology) for name in METHODS}
    plans = {name: plan for name, plan in plans.items() if plan is not None}
    left = seconds - (time.monotonic() - began)
    small = args.rehearse
    work = Work(train, held, plans, topology, small, args.model_exchange, left - 30, 64 if small else 2048,
                8 if small else 64)  # fmt: skip
    found = ask_ranks(args, left, measure_model, work)
    return {"trace": train.source, "shape": list(train.expert_ids_TLK.shape[1:]) + [train.shape.num_experts], **found}


def recorded(args: argparse.Namespace) -> tuple[Trace, Trace]:
    """(train, held out): the first half of every recording's sequences and the rest, in the model's shape."""
    default = sorted((ROOT / "epmoe" / "demo_model").glob("trace_*.npz"))
    traces = [load_trace(path) for path in args.trace or default]
    halves = [trace.split(0.5) for trace in traces]
    if args.rehearse:
        halves = [(train, held.take_sequences(range(min(2, len(held.seq_lens))))) for train, held in halves]
    parts = [join([half[side] for half in halves], "+".join(Path(t.source).stem for t in traces)) for side in (0, 1)]
    shape = ModelConfig.from_folder(model_folder(parts[0], args.rehearse)).moe_shape
    train, held = (Trace(shape, part.expert_ids_TLK, part.seq_lens, source=part.source) for part in parts)
    return train, held


def plan_of(args: argparse.Namespace, name: str, train: Trace, topology: Topology | None) -> Plan | None:
    """From its file, else solved here; None where the solver is not at hand."""
    path = Path(args.plans or ".") / f"{name}.json"
    if args.plans and path.is_file():
        plan = Plan.from_json(path.read_text(encoding="utf-8"), str(path))
        return Plan(**{**vars(plan), "shape": train.shape})
    try:
        return solved(name, train, topology or uniform(args.ranks), args.solve_seconds)
    except Exception as error:
        print(f"   {name} left out: {type(error).__name__}: {error}", flush=True)
        return None


def solved(name: str, train: Trace, topology: Topology, seconds: float) -> Plan:
    from placement.solution import make_problem

    options = {"objective": "step_seconds", "combine": "reduce", "threads": os.cpu_count()}
    problem = make_problem(train, topology, seconds=seconds, **options)
    return find(name)(problem).plan


if __name__ == "__main__":
    sys.exit(main())
