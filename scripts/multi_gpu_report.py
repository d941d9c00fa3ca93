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

METHODS = ("linear", "joint", "moetuner", "eplb")
SHARES = {"links": 0.1, "promises": 0.25, "exchanges": 0.2, "model": 0.45}  # of the time


PARTS = {"1": "links", "2": "promises", "3": "exchanges", "4": "model"}


def main() -> int:
    args = arguments()
    ends = time.monotonic() + args.seconds
    report: dict = {"date": str(date.today()), "where": label(args.device, args.ranks), "torch": torch.__version__}
    report |= {"ranks": args.ranks, "command": " ".join(sys.argv), "parts": {}}
    print(report["where"], flush=True)
    asked = {number: ready(args, number, report) for number in args.parts}
    groups = [args.parts] if args.together else [[number] for number in args.parts]
    for group in groups:
        left = ends - time.monotonic()
        seconds = left if group is groups[-1] else max(20.0, args.seconds * SHARES[PARTS[group[0]]])
        jobs = [(PARTS[number], *asked[number]) for number in group if asked[number]]
        try:
            report["parts"] |= ask_ranks(args, seconds, jobs)
        except Exception as error:
            print(traceback.format_exc(limit=-4), flush=True)
            failed = {"failed": f"{type(error).__name__}: {str(error)[-2000:]}"}
            report["parts"] |= {PARTS[number]: {"seconds": seconds, "found": failed} for number in group}
        write(args, report)
    return 0


def ready(args: argparse.Namespace, number: str, report: dict) -> tuple[Callable, tuple] | None:
    """What the ranks are to call for a part, made ready here; None if that fails, which the report then says."""
    kinds = (
        args.exchange or {"cpu": ["alltoall", "oneshot", "padded"], "cuda": ["p2p", "padded", "alltoall"]}[args.device]
    )
    try:
        if number == "1":
            return links, (args.topology,)
        if number == "2":
            return promises, ([*kinds, "auto"],)
        if number == "3":
            return exchanges, (kinds, args.rehearse or args.device == "cpu", args.tokens)
        return measure_model, (model_work(args),)
    except Exception as error:
        print(traceback.format_exc(limit=-4), flush=True)
        report["parts"][PARTS[number]] = {"seconds": 0, "found": {"failed": f"{type(error).__name__}: {error}"}}
        return None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if device == "cuda" else 2)
    parser.add_argument("--parts", nargs="+", choices=("1", "2", "3", "4"), default=["1", "2", "3", "4"])
    parser.add_argument("--seconds", type=float, default=440, help="for all parts (default 440)")
    parser.add_argument("--together", action="store_true", help="all parts in the same processes: saves their start")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128, 588, 1024, 4096], help="of part 3")
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


def ask_ranks(args: argparse.Namespace, seconds: float, jobs: list) -> dict:
    """Runs parts ``(name, function, values)`` on the ranks; what they found, or had saved when time was up."""
    ends = time.monotonic() + seconds - 2
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        try:
            on_ranks(args.ranks, args.device, run_parts, jobs, str(answer), ends, limit_s=seconds)
        except (Exception, KeyboardInterrupt) as error:
            if not answer.is_file():
                raise
            print(f"   cut short: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
        return json.loads(answer.read_text(encoding="utf-8"))


def run_parts(comm: Comm, jobs: list, answer: str, ends: float) -> None:
    """``function(comm, save, seconds, *values)`` for every part, on one rank; what one leaves over the others get."""
    parts: dict = {}
    for number, (name, function, values) in enumerate(jobs):
        began = time.monotonic()
        seconds = (ends - began) * SHARES[name] / sum(SHARES[job[0]] for job in jobs[number:])

        def save(found: object, name: str = name, began: float = began) -> None:
            parts[name] = {"seconds": round(time.monotonic() - began, 1), "found": found}
            if comm.rank == 0:
                Path(answer + ".part").write_text(json.dumps(parts, default=float), encoding="utf-8")
                Path(answer + ".part").rename(answer)

        if comm.rank == 0:
            print(f"-- {name}, {seconds:.0f} s", flush=True)
        try:
            save(function(comm, save, seconds, *values))
        except Exception as error:
            if comm.rank == 0:
                print(traceback.format_exc(limit=-4), flush=True)
            known = parts.get(name, {}).get("found")
            save(known or {"failed": f"{type(error).__name__}: {error}"})


def exchanges(comm: Comm, save: Callable, seconds: float, names: list[str], small: bool, tokens: list[int]) -> dict:
    hidden = [256] if small else [7168]
    dtype = "float32" if comm.device.type == "cpu" else "bfloat16"
    sizes = product(hidden, ("reduce", "exact"), names, tokens)
    cases = [Case(name, count, size, 8, "even", combine, dtype) for size, combine, name, count in sizes]
    if not small:
        cases += [Case(name, count, 2048, 8, "skewed", "reduce", dtype) for name in names for count in (128, 4096)]
    return as_record(*run_cases(comm, cases, 9, save, seconds))


def model_work(args: argparse.Namespace) -> Work:
    train, held = recorded(args)
    topology = Topology.from_json(Path(args.topology).read_text()) if Path(args.topology).is_file() else None
    if topology is not None and topology.ranks != args.ranks:
        topology = None
    plans = {name: plan_of(args, name, train, topology) for name in METHODS}
    plans = {name: plan for name, plan in plans.items() if plan is not None}
    small = args.rehearse
    sizes = (64, 8) if small else (16384, 64)
    return Work(train, held, plans, topology, small, args.model_exchange, *sizes)


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
