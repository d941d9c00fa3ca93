#!/usr/bin/env python3
"""One lane against two on real ranks: layers of real weights over a real exchange.

    python scripts/bench_overlap_ranks.py --ranks 2 --device cuda [--exchange p2p alltoall] [--tokens 2048 8192]

For each case: milliseconds of one layer (the slowest rank, median of rounds, launched from the host) in one lane and in
two, in turns, and the share of the communication that the timeline of a further run in two lanes saw beside compute.
On GPUs that are fewer than the ranks the figures say nothing about speed, and the label says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from itertools import product
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epmoe.comm import Comm  # noqa: E402
from epmoe.moe.exchange import Exchange, ExchangeShape  # noqa: E402
from epmoe.moe.open_exchange import open_exchange  # noqa: E402
from epmoe.moe.overlap import free_sms, open_travel, run_lanes  # noqa: E402
from epmoe.moe.timeline import Timeline, hidden_of  # noqa: E402
from epmoe.ops.blas import blas_sms  # noqa: E402
from scripts import overlap_bench_lib as lib  # noqa: E402
from scripts.rank_group import label, on_ranks  # noqa: E402


class Step:
    """The layers of one rank over one exchange, one number of tokens."""

    def __init__(self, rank: lib.Rank, exchange: Exchange, tokens: int) -> None:
        self.rank, self.exchange, self.tokens = rank, exchange, tokens
        self.travel = open_travel(exchange)
        self.inputs = {lanes: rank.inputs(tokens, lanes) for lanes in (1, 2)}

    def run(self, lanes: int, timeline: Timeline | None = None) -> None:
        """One step, launched from the host."""
        inputs, exchange = self.inputs[lanes], self.exchange
        exchange.begin_step(max(len(lane.x_TD) for lane in inputs))
        num_sms = free_sms(exchange) if lanes == 2 else 0
        with blas_sms(num_sms):
            stages = [self.rank.lane(n, lane, num_sms) for n, lane in enumerate(inputs)]
            run_lanes(stages, exchange.comm.at, self.travel, timeline, exchange.waits_for_counts)

    def time_ms(self, lanes: int, repeat: int) -> float:
        """Milliseconds of one layer on the slowest rank."""
        comm = self.exchange.comm
        synchronize(comm)
        started = time.perf_counter()
        for _ in range(repeat):
            self.run(lanes)
        synchronize(comm, meet=False)
        mine = (time.perf_counter() - started) * 1e3 / repeat / self.rank.layers
        return max(gather(comm, mine))


def synchronize(comm: Comm, meet: bool = True) -> None:
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
    if meet:
        gather(comm, 0.0)


def gather(comm: Comm, value: float) -> list[float]:
    """Every rank's value."""
    return (comm.all_gather_headers(np.array([round(value * 1e6)])).ravel() / 1e6).tolist()


def run_case(step: Step, rounds: int, repeat: int) -> dict:
    for lanes in (1, 2):
        step.run(lanes)
    times = {1: [], 2: []}
    for _ in range(rounds):
        for lanes, found in times.items():
            found.append(step.time_ms(lanes, repeat))
    timeline = Timeline(step.exchange.comm)
    synchronize(step.exchange.comm)
    for number in range(2):
        step.exchange.comm.at.step = number
        with timeline.forward():
            step.run(2, timeline)
    hidden = hidden_of(span for span in timeline.read() if span.step == 1)[-1]
    step.exchange.comm.on_work = None
    one, two = (statistics.median(found) for found in times.values())
    return {
        "one_ms": one,
        "two_ms": two,
        "all_ms": times,
        "hidden": hidden.share,
        "communication_us": hidden.communication,
    }


def run_rank(comm: Comm, args: dict) -> None:
    report = {"where": label(comm.device.type, comm.world), "cases": []}
    lib.DEVICE = str(comm.device)
    lib.DTYPE = torch.bfloat16 if comm.device.type == "cuda" else torch.float32
    say(comm, report["where"])
    for name in args["shapes"]:
        rank = lib.Rank(lib.SHAPES[name], comm.world, args["layers"], 2)
        shape = ExchangeShape(rank.slots, max(args["tokens"]), rank.shape.hidden, rank.shape.top_k, lib.DTYPE, "reduce")
        for kind, tokens in product(args["exchange"], args["tokens"]):
            try:
                exchange = open_exchange(comm, shape, kind)
                rank.connect(exchange)
                with torch.inference_mode():
                    case = run_case(Step(rank, exchange, tokens), args["rounds"], args["repeat"])
            except Exception:
                traceback.print_exc(limit=-4)
                break
            report["cases"].append({"shape": name, "exchange": kind, "tokens": tokens, **case})
            say(
                comm,
                f"{name:14s} {kind:9s} T {tokens:5d}  one lane {case['one_ms']:.3f} ms  two {case['two_ms']:.3f}"
                f" ({case['one_ms'] / case['two_ms']:.2f}x)  communication {case['communication_us']:.0f} us,"
                f" hidden {case['hidden']:.0%}",
            )
    if comm.rank == 0 and args["json"]:
        Path(args["json"]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def say(comm: Comm, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", nargs="+", default=list(lib.SHAPES), choices=list(lib.SHAPES))
    parser.add_argument("--exchange", nargs="+", default=["p2p", "alltoall"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096, 8192], help="per rank")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    on_ranks(args.ranks, args.device, run_rank, vars(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
