#!/usr/bin/env python3
"""One lane against two on real ranks: layers of real weights over a real exchange.

    python scripts/bench_overlap_ranks.py --ranks 2 --device cuda [--exchange p2p alltoall] [--tokens 2048 8192]

For each case: milliseconds of one layer (the slowest rank, median of rounds) in one lane and in two, in turns, and the
share of the communication that the timeline of a further run in two lanes saw beside compute: launched from the host,
and in a captured graph where the exchange allows it.  Over p2p a graph is also run with the two lanes' compute alone
(nothing is sent) and with the travel of their rows alone: ``hidden`` = (compute + travel - two lanes) / travel.
On GPUs that are fewer than the ranks the figures say nothing about speed, and the label says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
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
from scripts.gpu_arguments import parse  # noqa: E402
from scripts.rank_group import label, on_ranks  # noqa: E402


class Step:
    """The layers of one rank over one exchange, one number of tokens."""

    def __init__(self, rank: lib.Rank, exchange: Exchange, tokens: int) -> None:
        self.rank, self.exchange, self.tokens = rank, exchange, tokens
        self.travel = open_travel(exchange)
        self.inputs = {lanes: rank.inputs(tokens, lanes) for lanes in (1, 2)}

    def begin(self, lanes: int) -> None:
        self.exchange.shares_sms = lanes == 2
        self.exchange.begin_step(max(len(lane.x_TD) for lane in self.inputs[lanes]))

    def sms(self, lanes: int) -> int:
        return free_sms(self.exchange) if lanes == 2 else 0

    def layers(self, lanes: int, timeline: Timeline | None = None) -> None:
        """One step behind `begin`, launched from the host."""
        num_sms = self.sms(lanes)
        with blas_sms(num_sms):
            stages = [self.rank.lane(n, lane, num_sms) for n, lane in enumerate(self.inputs[lanes])]
            exchange = self.rank.exchange
            run_lanes(stages, exchange.comm.at, self.travel, timeline, exchange.waits_for_counts)

    def eager(self, lanes: int) -> Callable[[], None]:
        def run() -> None:
            self.begin(lanes)
            self.layers(lanes)

        return run

    def graph(self, lanes: int, timeline: Timeline | None = None) -> Callable[[], None]:
        """The same as a captured graph."""
        graph = torch.cuda.CUDAGraph()
        self.eager(lanes)()
        torch.cuda.synchronize()
        captured = nullcontext() if timeline is None else timeline.captured()
        with captured as marks, torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.layers(lanes, timeline)

        def run() -> None:
            self.begin(lanes)
            if timeline is not None:
                timeline.before(marks)
            graph.replay()
            if timeline is not None:
                timeline.ran(marks)

        return run


def layer_ms(step: Step, run: Callable[[], None], repeat: int) -> float:
    """Milliseconds of one layer on the slowest rank."""
    comm = step.exchange.comm
    synchronize(comm)
    started = time.perf_counter()
    for _ in range(repeat):
        run()
    synchronize(comm, meet=False)
    return max(gather(comm, (time.perf_counter() - started) * 1e3 / repeat / step.rank.layers))


def synchronize(comm: Comm, meet: bool = True) -> None:
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
    if meet:
        gather(comm, 0.0)


def gather(comm: Comm, value: float) -> list[float]:
    """Every rank's value."""
    return (comm.all_gather_headers(np.array([round(value * 1e6)])).ravel() / 1e6).tolist()


def in_turns(step: Step, runs: dict[str, Callable[[], None]], rounds: int, repeat: int) -> dict[str, float]:
    """Median milliseconds of a layer of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        layer_ms(step, run, 2)
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(layer_ms(step, run, repeat))
    return {name: statistics.median(found) for name, found in times.items()}


def seen_hidden(step: Step, graphed: bool) -> dict[str, float]:
    """Of a run in two lanes: the share of its communication that a timeline saw beside compute, and how much it was."""
    comm = step.exchange.comm
    timeline = Timeline(comm)
    run = step.graph(2, timeline) if graphed else step.eager(2)
    synchronize(comm)
    for number in range(3):
        comm.at.step = number
        if graphed:
            run()
            continue
        step.begin(2)
        with timeline.forward():
            step.layers(2, timeline)
    hidden = hidden_of(span for span in timeline.read() if span.step == 2)[-1]
    comm.on_work = None
    return {"seen_hidden": hidden.share, "seen_us": hidden.communication}


def parts_of(step: Step) -> dict[str, Callable[[], None]]:
    """Graphs of the two lanes' compute alone and of their rows' travel alone, over p2p by put."""
    from scripts import overlap_parts as parts  # kernels that CPU ranks need not load

    rank, exchange = step.rank, step.exchange
    step.begin(2)
    ran = [parts.run_layer(rank, lane.x_TD, n, step.sms(2)) for n, lane in enumerate(step.inputs[2])]
    graph = torch.cuda.CUDAGraph()
    parts.travel(exchange, ran)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(rank.layers):
            parts.travel(exchange, ran)

    def travel() -> None:
        step.begin(2)
        graph.replay()

    rank.connect(parts.Still(exchange, ran))
    compute = step.graph(2)
    rank.connect(exchange)
    return {"compute_ms": compute, "travel_ms": travel}


def run_eager(step: Step, rounds: int, repeat: int) -> dict[str, float]:
    case = in_turns(step, {"one_ms": step.eager(1), "two_ms": step.eager(2)}, rounds, repeat)
    return {**case, **seen_hidden(step, graphed=False)}


def run_graph(step: Step, rounds: int, repeat: int) -> dict[str, float] | None:
    """None where the exchange cannot be captured."""
    step.begin(1)
    if not step.exchange.capturable or step.exchange.waits_for_counts:
        return None
    runs = {"one_ms": step.graph(1), "two_ms": step.graph(2)}
    if step.exchange.name == "p2p":
        runs |= parts_of(step)
    case = in_turns(step, runs, rounds, repeat)
    if "travel_ms" in case:
        case["hidden"] = (case["compute_ms"] + case["travel_ms"] - case["two_ms"]) / case["travel_ms"]
    return {**case, **seen_hidden(step, graphed=True)}


def describe(case: dict) -> str:
    line = f"one lane {case['one_ms']:.3f} ms  two {case['two_ms']:.3f} ({case['one_ms'] / case['two_ms']:.2f}x)"
    if "travel_ms" in case:
        line += f"  compute {case['compute_ms']:.3f}  travel {case['travel_ms']:.3f}  hidden {case['hidden']:.0%}"
    return line + f"  timeline: {case['seen_us']:.0f} us, {case['seen_hidden']:.0%} beside compute"


RUNS = {"graph": run_graph, "eager": run_eager}


def run_rank(comm: Comm, args: dict) -> None:
    report = {"where": label(comm.device.type, comm.world), "cases": []}
    lib.DEVICE = str(comm.device)
    lib.DTYPE = torch.bfloat16 if comm.device.type == "cuda" else torch.float32
    say(comm, report["where"])
    for name in args["shapes"]:
        rank = lib.Rank(lib.SHAPES[name], comm.world, args["layers"], 2)
        most, hidden, top_k = max(args["tokens"]), rank.shape.hidden, rank.shape.top_k
        shape = ExchangeShape(rank.slots, most, hidden, top_k, lib.DTYPE, "reduce", graph_tokens=most)
        for kind, tokens, how in product(args["exchange"], args["tokens"], args["launch"]):
            try:
                exchange = open_exchange(comm, shape, kind)
                rank.connect(exchange)
                with torch.inference_mode():
                    case = RUNS[how](Step(rank, exchange, tokens), args["rounds"], args["repeat"])
            except Exception:
                traceback.print_exc(limit=-4)
                break
            if case is not None:
                report["cases"].append({"shape": name, "exchange": kind, "tokens": tokens, "launch": how, **case})
                say(comm, f"{name:14s} {kind:9s} T {tokens:5d}  {how:5s} {describe(case)}")
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
    parser.add_argument("--launch", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    args = parse(parser)
    on_ranks(args.ranks, args.device, run_rank, vars(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
