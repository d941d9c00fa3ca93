#!/usr/bin/env python3
"""What several GPUs do together: links, promises, exchanges, a whole model; one call, each part guarded.

    python scripts/multi_gpu_report.py                              all GPUs of this machine, 8 minutes at most
    python scripts/multi_gpu_report.py --parts 1 4 --limit-seconds 120          some parts
    python scripts/multi_gpu_report.py --ranks 4                    more ranks than GPUs share them, and are labelled so
    python scripts/multi_gpu_report.py --device cpu --ranks 2 --rehearse        CPU ranks over gloo, small layers

1. links: NCCL (or gloo) and symmetric memory; bandwidth and latency of every link, written as a topology file for
   epmoe-placement --topology.
2. promises: the embedded model in deterministic mode; every exchange, lanes off and on, linear and random placement
   with copies draw the tokens of one rank.
3. exchanges: every exchange at 1 to 4096 tokens per rank, beside plain all_to_all_single; put: the kernels of p2p by
   themselves, and the costs of its transports; lanes: layers in one lane and in two.
4. model: the attention and experts of Qwen3-30B-A3B and random weights, routed as recorded (--trace): every placement,
   round-robin homes and those of the plan's affinity, lanes off and on, beside what the simulation says.
5. Everything in one JSON file, written whenever something is known, and as tables in Markdown.

Before the parts, groups of ranks beside each other compile what they need (not with --cold).  A part that fails or
outlives its share of the time costs its ranks, not the others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import date
from itertools import groupby, product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from bench_exchange import as_record, run_cases  # noqa: E402
from exchange_bench_lib import Case  # noqa: E402
from rank_group import label  # noqa: E402
from report_links import links  # noqa: E402
from report_model import LINK, Work, measure_model  # noqa: E402
from report_parts import Part, run_parts  # noqa: E402
from report_promises import promises  # noqa: E402
from report_replay import model_folder  # noqa: E402
from report_simulated import nominal, predictions  # noqa: E402
from report_text import markdown  # noqa: E402
from report_warm import Warmers, warm_up  # noqa: E402

from epmoe.comm import Comm  # noqa: E402
from epmoe.model_config import ModelConfig  # noqa: E402
from placement.cli.console import require_writable  # noqa: E402
from placement.cost import Calibration  # noqa: E402
from placement.errors import UserError  # noqa: E402
from placement.methods import find  # noqa: E402
from placement.plan import Plan  # noqa: E402
from placement.solution import make_problem  # noqa: E402
from placement.topology import uniform  # noqa: E402
from placement.trace import Trace, join, load_trace  # noqa: E402

METHODS = ("linear", "eplb", "joint", "moetuner")
NUMBERS = {"1": ("links",), "2": ("promises",), "3": ("exchanges", "put", "lanes"), "4": ("model",)}
ORDER = ("links", "promises", "exchanges", "put", "model", "lanes")  # put measures the costs that the model goes by
SCRIPTS = {"put": "bench_p2p.py", "lanes": "bench_overlap_ranks.py"}
ROWS, TRANSPORTS = ("1", "128", "588", "4096"), ("256", "1024", "4096", "8192")  # of bench_p2p.py
LANES = ("2048", "4096", "8192")  # tokens a rank, of bench_overlap_ranks.py
CAP = 1.01  # of the joint plan's fullest rank: without one it trades load for rows, which links this fast do not repay
SHARES = {"links": 0.05, "promises": 0.18, "exchanges": 0.15, "put": 0.1, "model": 0.4, "lanes": 0.12}  # of the time
WARM = 0.2  # at most so much of it goes into compiling ahead


def main() -> int:
    args = arguments()
    began = time.monotonic()
    ends = began + args.limit_seconds
    report: dict = {"date": str(date.today()), "where": label(args.device, args.ranks), "torch": torch.__version__}
    report |= {"ranks": args.ranks, "command": " ".join(sys.argv), "parts": {}}
    print(report["where"], flush=True)

    def keep(found: dict) -> None:
        report["parts"] |= found
        report["seconds"] = round(time.monotonic() - began, 1)
        write(args, report)

    asked = {name for part in args.parts for name in NUMBERS.get(part, (part,))}
    own_gpus = args.device == "cuda" and args.ranks <= args.gpus
    names = [name for name in ORDER if name in asked and (name not in SCRIPTS or own_gpus)]
    parts = {name: part for name in names if name not in SCRIPTS and (part := ready(args, name, keep)) is not None}
    where = (args.ranks, args.device)
    if args.device == "cuda" and not args.cold:
        warmers = Warmers(where, warm_up(kinds_of(args), args.rehearse, list(parts.values())))
        keep({"warm": warmers.wait(began + WARM * args.limit_seconds)})
    for inside, each in groupby(names, lambda name: name not in SCRIPTS):
        group = list(each)
        left = sum(SHARES[name] for name in names[names.index(group[0]) :])
        seconds = (ends - time.monotonic()) * sum(SHARES[name] for name in group) / left
        if inside:
            ready_ones = [parts[name] for name in group if name in parts]
            run_parts(where, ready_ones, time.monotonic() + seconds, keep)
            add_predictions(args, ready_ones, report["parts"].get("model", {}))
        else:
            keep({name: run_script(args, name, seconds) for name in group})
        keep({})
    return 0


def add_predictions(args: argparse.Namespace, parts: list[Part], model: dict) -> None:
    """What the simulation says, beside what was measured; its calibration as a file for ``epmoe-placement``."""
    work = next((part.values[0] for part in parts if part.name == "model"), None)
    if work is None or not model.get("found"):
        return
    try:
        model["found"]["predicted"] = said = predictions(work, model["found"]["rows"])
        if said:
            Calibration(**said[0]["calibration"]).save(Path(args.topology).with_name("calibration.json"))
    except Exception as error:
        print(traceback.format_exc(limit=-4), flush=True)
        model["failed"] = f"no predictions: {type(error).__name__}: {error}"


def ready(args: argparse.Namespace, name: str, keep: Callable[[dict], None]) -> Part | None:
    """What the ranks are to call for a part; None if that cannot be made, which the report then says."""
    small = args.rehearse or args.device == "cpu"
    try:
        if name == "links":
            return Part(name, SHARES[name], links, (args.topology,))
        if name == "promises":
            return Part(name, SHARES[name], promises, ([*kinds_of(args), "auto"],))
        if name == "exchanges":
            return Part(name, SHARES[name], exchanges, (kinds_of(args), small, args.tokens))
        return Part(name, SHARES[name], measure_model, (model_work(args),))
    except Exception as error:
        print(traceback.format_exc(limit=-4), flush=True)
        keep({name: {"seconds": 0, "found": None, "failed": f"{type(error).__name__}: {error}"}})
        return None


def kinds_of(args: argparse.Namespace) -> list[str]:
    every = {"cpu": ["alltoall", "oneshot", "padded"], "cuda": ["p2p", "padded", "alltoall"]}
    return args.exchange or every[args.device]


def run_script(args: argparse.Namespace, name: str, seconds: float) -> dict:
    """Another benchmark's lines, as it prints them."""
    options = {
        "put": ["--gpus", str(args.ranks), "--rows", *ROWS, "--transports", *TRANSPORTS, "--calibrate", args.costs],
        "lanes": ["--ranks", str(args.ranks), "--shapes", "qwen3-30b-a3b", "--exchange", "p2p", "--tokens", *LANES],
    }
    command = [sys.executable, str(Path(__file__).with_name(SCRIPTS[name])), *options[name]]
    print(f"-- {name}, at most {seconds:.0f} s: {' '.join(command[1:])}", flush=True)
    began, failed = time.monotonic(), ""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, **streams)
    try:
        out, errors = process.communicate(timeout=max(1.0, seconds))
        failed = "" if process.returncode == 0 else errors[-1500:]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        failed = "it did not end within its time"
    print(out, failed, sep="", flush=True)
    found = {"command": " ".join(["scripts/" + SCRIPTS[name], *options[name]]), "lines": out.splitlines()}
    return {"seconds": round(time.monotonic() - began, 1), "found": found} | ({"failed": failed} if failed else {})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()), help="two at least")
    every = [*NUMBERS, *(name for names in NUMBERS.values() for name in names)]
    parser.add_argument("--parts", nargs="+", choices=every, default=list(NUMBERS), help="by number or name, in order")
    parser.add_argument("--limit-seconds", type=float, default=480, help="for all parts together (default 480)")
    parser.add_argument("--cold", action="store_true", help="compile kernels as they come, not beforehand")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128, 588, 1024, 4096], help="of part 3")
    parser.add_argument("--rehearse", action="store_true", help="small layers and few sizes")
    parser.add_argument("--exchange", nargs="+", help="of parts 2 and 3 (default: all that run there)")
    parser.add_argument("--brief", action="store_true", help="part 4 in half the time, without decode and affinity")
    parser.add_argument("--model-exchange", default="auto", help="of part 4 (default auto)")
    parser.add_argument("--costs", default="costs.json", help="of put and copy: written by part put, read by part 4")
    parser.add_argument("--tuned", default="tuned.json", help="tiles of part 4's expert kernels, as epmoe tune writes")
    parser.add_argument("--prefill-tokens", type=int, default=None, help="of part 4, a rank and step (default 16384)")
    parser.add_argument("--trace", nargs="+", default=None, help="recordings (default: those of the embedded model)")
    parser.add_argument("--plans", help="folder of METHOD.json, solved for half of every recording")
    parser.add_argument("--solve-seconds", type=float, default=20, help="of each method without a plan file")
    parser.add_argument(
        "--topology", default="topology.json", help="where the link matrix is written; calibration.json beside"
    )
    parser.add_argument("--json", default="multi_gpu.json")
    parser.add_argument("--markdown", default=None, help="tables are written there too")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: several ranks are what this is about; give 2 or more")
    try:
        require_writable(args.json, args.markdown, args.topology)
    except UserError as error:
        parser.error(str(error))
    args.gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    return args


def write(args: argparse.Namespace, report: dict) -> None:
    new = Path(args.json + ".new")
    new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    new.rename(args.json)
    if not args.markdown:
        return
    try:
        Path(args.markdown).write_text(markdown(report), encoding="utf-8")
    except Exception:  # the JSON has it all
        print(traceback.format_exc(limit=-4), flush=True)


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
    small = args.rehearse
    prefill, requests = (args.prefill_tokens or 64, 8) if small else (args.prefill_tokens or 16384, 640)
    calibration = nominal(ModelConfig.from_folder(model_folder(train, small)), prefill * args.ranks, small)
    plans = {name: plan_of(args, name, train, calibration) for name in METHODS}
    plans = {name: plan for name, plan in plans.items() if plan is not None}
    files = (args.topology, args.costs, args.tuned)
    return Work(train, held, plans, files, small, args.model_exchange, prefill, requests, args.brief)


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


def plan_of(args: argparse.Namespace, name: str, train: Trace, calibration: Calibration) -> Plan | None:
    """From its file, else solved here; None where the solver is not at hand."""
    path = Path(args.plans or ".") / f"{name}.json"
    if args.plans and path.is_file():
        plan = Plan.from_json(path.read_text(encoding="utf-8"), str(path))
        return Plan(**{**vars(plan), "shape": train.shape})
    try:
        options = {"objective": "step_seconds", "combine": "reduce", "threads": os.cpu_count()}
        options["cap"] = CAP if name == "joint" else None
        topology = uniform(args.ranks, bandwidth=LINK / (args.ranks - 1))
        problem = make_problem(train, topology, seconds=args.solve_seconds, calibration=calibration, **options)
        return find(name)(problem).plan
    except Exception as error:
        print(f"   {name} left out: {type(error).__name__}: {error}", flush=True)
        return None


if __name__ == "__main__":
    sys.exit(main())
