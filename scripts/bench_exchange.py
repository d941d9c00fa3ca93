#!/usr/bin/env python3
"""Dispatch and combine of one MoE layer: every exchange, over sizes, against plain all_to_all_single.

    python scripts/bench_exchange.py --ranks 2                     CPU ranks over gloo
    python scripts/bench_exchange.py --ranks 4 --device cuda       GPUs; fewer GPUs than ranks are shared (labelled)
    python scripts/bench_exchange.py --ranks 2 --calibrate FILE    latency and bandwidth of each, for --exchange auto

One line per case: microseconds of dispatch and combine launched from the host, and of both in a replayed graph where
the exchange allows it (the slowest rank, median); the megabytes that the busiest rank sends to other ranks; GB/s; the
share of what a plain all_to_all_single of large blocks reaches between the same ranks; and the time over that of two
plain all_to_all_single of exactly the same rows, whose sizes are known beforehand (on NCCL in a replayed graph too).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import date
from itertools import product
from pathlib import Path

import numpy as np
import torch
from exchange_bench_lib import Case, Times, check_against, link_limit, measure, open_for, slowest
from gpu_arguments import parse
from rank_group import label, on_ranks

from epmoe.comm import Comm
from epmoe.moe.by_size import wire_bytes
from epmoe.moe.exchange import Exchange
from placement.cli.console import require_writable
from placement.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--exchange", nargs="+", help="default: all that run there")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64, 128, 512, 4096], help="per rank")
    parser.add_argument("--hidden", nargs="+", type=int, default=[2048, 7168])
    parser.add_argument("--top-k", nargs="+", type=int, default=[8])
    parser.add_argument("--routing", nargs="+", choices=("even", "skewed"), default=["even"])
    parser.add_argument("--combine", nargs="+", choices=("exact", "reduce"), default=["reduce"])
    parser.add_argument("--dtype", default=None, help="default float32 on CPU, bfloat16 on GPUs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--calibrate", metavar="FILE", help="write the fitted costs there")
    args = parse(parser)
    if args.ranks < 1:
        parser.error(f"--ranks is {args.ranks}; it must be at least 1")
    try:
        require_writable(args.json, args.calibrate)
    except UserError as error:
        parser.error(str(error))
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    kinds = args.exchange or (
        ["alltoall", "oneshot", "padded"] if args.device == "cpu" else ["alltoall", "padded", "p2p"]
    )
    sizes = (args.combine, args.hidden, args.top_k, args.routing, kinds, args.tokens)
    cases = [Case(x, t, d, k, r, c, dtype) for c, d, k, r, x, t in product(*sizes)]
    on_ranks(args.ranks, args.device, run_rank, cases, vars(args))
    return 0


def run_rank(comm: Comm, cases: list[Case], args: dict) -> None:
    """One rank of the benchmark; rank 0 prints and writes."""
    results, link = run_cases(comm, cases, args["rounds"])
    if comm.rank == 0 and args["json"]:
        where = label(args["device"], comm.world)
        record = {"date": str(date.today()), "where": where, "cores": os.cpu_count(), **as_record(results, link)}
        Path(args["json"]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if comm.rank == 0 and args["calibrate"]:
        costs = fit(results, comm.world)
        Path(args["calibrate"]).write_text(json.dumps({"costs": costs}, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(costs))


def as_record(results: list[Times], link: float) -> dict:
    return {"link_gb_per_s": link, "results": [times.record(link) for times in results]}


def say(comm: Comm, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)


def run_cases(
    comm: Comm,
    cases: list[Case],
    rounds: int,
    save: Callable[[dict], None] = lambda record: None,
    seconds: float = 1e9,
    say: Callable[[Comm, str], None] = say,
) -> tuple[list[Times], float]:
    """Every case on all ranks while there is time; an exchange that does not open, or fails, is said and left out."""
    ends = time.monotonic() + seconds
    on_cpu = comm.device.type == "cpu"
    link = link_limit(comm, 8 if on_cpu else 256)
    say(comm, f"{label(comm.device.type, comm.world)}; plain all_to_all_single of large blocks: {link:.2f} GB/s sent")
    results, opened, failed = [], {}, set()
    for case in cases:
        same = [c.tokens for c in cases if opens(c) == opens(case)]
        if opens(case) in failed or slowest(comm, np.array([time.monotonic() - ends]))[0] > 0:
            continue
        try:
            if opens(case) not in opened:
                opened.clear()
                opened[opens(case)] = open_checked(comm, case, max(same))
            results.append(measure(comm, case, opened[opens(case)], rounds if case.tokens < 2048 else 7))
        except (UserError, AssertionError, RuntimeError) as error:
            failed.add(opens(case))
            known = isinstance(error, UserError)
            say(comm, f"{case.exchange:9s} left out: {error if known else traceback.format_exc(limit=-3)}")
            continue
        say(comm, results[-1].line(link))
        save(as_record(results, link))
    return results, link


def opens(case: Case) -> tuple:
    """Cases that are alike in this share an exchange."""
    return case.exchange, case.hidden, case.top_k, case.combine, case.dtype


def open_checked(comm: Comm, case: Case, most_tokens: int) -> Exchange:
    exchange = open_for(comm, case, most_tokens)
    check_against(comm, case, exchange)
    return exchange


def fit(results: list[Times], world: int) -> dict[str, dict[str, float]]:
    """Least squares of time over bytes on the wire, weighted so that every size counts alike."""
    costs = {}
    for name in dict.fromkeys(times.case.exchange for times in results):
        mine = [times for times in results if times.case.exchange == name]
        wire = [wire_bytes(name, t.case.shape(world, t.case.tokens), world, t.case.tokens) for t in mine]
        us = np.array([times.best_us for times in mine])
        columns = np.stack((np.ones(len(mine)), wire), 1) / us[:, None]
        latency, per_byte = np.linalg.lstsq(columns, np.ones(len(mine)), rcond=None)[0]
        costs[name] = {"latency_us": max(float(latency), 0.0), "gb_per_s": 1e-3 / max(float(per_byte), 1e-9)}
    return costs


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
