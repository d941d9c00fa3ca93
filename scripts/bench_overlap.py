#!/usr/bin/env python3
"""How much of the communication two lanes hide, on one GPU with an EMULATED link.

    scripts/bench_overlap.py --emulate-ranks 8 --link-gbps 340,400 [--shapes ...] [--tokens 2048,4096] [--json FILE]

One rank's real attention, router and expert kernels over several layers in one captured graph, driven by the engine's
own schedule (``epmoe/moe/overlap.py``).  The exchange is stood in for by a kernel of C CTAs that moves the real bytes
within this GPU's memory and is paced to the link: nothing leaves the GPU.  Compute plans for the other SMs in both
modes.  Modes are replayed A B A B.

``bound``: makespan of the two lanes' stage graph on one compute and one communication resource
(``scripts/least_makespan.py``), from stage times of half a batch measured alone.  ``hidden`` = (sum of compute + sum of
communication - overlapped) / sum of communication.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epmoe.moe.lane_cost import LaneTimes, StageTimes, choose_lanes  # noqa: E402
from epmoe.moe.makespan import layer_tasks  # noqa: E402
from epmoe.moe.overlap import free_sms, open_travel, run_lanes  # noqa: E402
from epmoe.moe.timeline import Timeline  # noqa: E402
from epmoe.ops.blas import blas_sms  # noqa: E402
from launch.timeline import spans_by_rank, summary, write_timeline  # noqa: E402
from scripts import overlap_bench_lib as lib  # noqa: E402
from scripts.gpu_arguments import parse  # noqa: E402
from scripts.least_makespan import best_makespan  # noqa: E402

NOTE = (
    "the link is EMULATED: one GPU, a kernel of {ctas} CTAs moves a rank's real bytes in local memory, paced to the"
    " stated GB/s; no other GPU takes part"
)
COMPUTE = ("attention", "router", "shared", "experts", "sum")
TRAVEL = ("dispatch", "combine")
STAGE_MS = 15  # of a stage timed alone: clocks rise again after some tens of milliseconds of less power


@dataclass(frozen=True)
class Captured:
    """A graph, and what it reads."""

    graph: torch.cuda.CUDAGraph
    reads: object


def capture(run: Callable[[], object], reads: object) -> Captured:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return Captured(graph, (run, reads))


def replay_us(captured: Captured, timed_ms: float, warm: tuple[Captured, int]) -> float:
    """Microseconds of one replay, under the clocks that ``warm`` brings about: so many replays of that one just
    before."""
    once = replays_us(captured, 1)
    for _ in range(warm[1]):
        warm[0].graph.replay()
    return replays_us(captured, max(1, int(1e3 * timed_ms / once)), settle=False)


def warm_by(captured: Captured, ms: float) -> tuple[Captured, int]:
    """At least one replay, about so many milliseconds of them."""
    return captured, max(1, int(1e3 * ms / replays_us(captured, 1)))


def replays_us(captured: Captured, count: int, settle: bool = True) -> float:
    """Microseconds of each of ``count`` replays, behind one more if they are to ``settle``."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    if settle:
        captured.graph.replay()
    marks[0].record()
    for _ in range(count):
        captured.graph.replay()
    marks[1].record()
    marks[1].synchronize()
    return max(marks[0].elapsed_time(marks[1]) * 1e3 / count, 1.0)


def step_graph(rank: lib.Rank, tokens: int, lanes: int, num_sms: int) -> tuple[Captured, list]:
    """The layers in one or two lanes; the outputs of a first run for comparison."""
    inputs = rank.inputs(tokens, lanes)
    rank.fix_traffic(inputs)
    travel = open_travel(rank.exchange)
    outputs: list = []

    def run() -> None:
        stages = [rank.lane(n, lane, num_sms) for n, lane in enumerate(inputs)]
        outputs[:] = run_lanes(stages, rank.exchange.comm.at, travel)

    with blas_sms(num_sms):
        return capture(run, (inputs, dict(rank.exchange.traffic))), outputs


def stage_graphs(rank: lib.Rank, lane: lib.LaneInput, number: int, num_sms: int) -> dict[str, Captured]:
    """Each stage alone, once a layer, with every layer's own weights."""
    exchange, traffic = rank.exchange, rank.exchange.traffic[number]
    x = lane.x_TD
    routing = rank.moe[0].route(x)
    sending = exchange.dispatch_begin(x, routing.slot_TK, routing.weight_TK, number)
    received, way_back = exchange.dispatch_end(sending, rank.slots)
    out_MD = rank.moe[0].experts(received, num_sms)
    returning = exchange.combine_begin(out_MD, way_back)
    residual = torch.zeros_like(x)

    def experts(n: int) -> None:
        got, _ = exchange.dispatch_end((traffic, sending[1], number), rank.slots)
        rank.moe[n].experts(got, num_sms)

    stages = {
        "attention": lambda n: rank.attention(n, x, residual, lane),
        "router": lambda n: rank.moe[n].route(x),
        "dispatch": lambda n: exchange.dispatch_begin(x, routing.slot_TK, routing.weight_TK, number),
        "experts": experts,
        "combine": lambda n: exchange.combine_begin(out_MD, way_back),
        "sum": lambda n: exchange.combine_end(returning, x),
    }
    if rank.shape.shared:
        stages["shared"] = lambda n: rank.moe[n].shared(x)
    graphs = {}
    for name, stage in stages.items():
        with blas_sms(num_sms):
            run = lambda stage=stage: [stage(n) for n in range(rank.layers)] and None  # noqa: E731
            graphs[name] = capture(run, lane)
    return graphs


def stage_times(rank, tokens: int, lanes: int, ms: tuple[float, float], load: Captured) -> list[dict[str, float]]:
    """Microseconds of each stage of each lane, alone: short runs, each behind ``load``, so that the chip's power limit
    sets the same clocks as for the layers together."""
    num_sms, warm = free_sms(rank.exchange), warm_by(load, ms[0])
    inputs = rank.inputs(tokens, lanes)
    rank.fix_traffic(inputs)
    times = []
    for number, lane in enumerate(inputs):
        if len(lane.x_TD):
            graphs = stage_graphs(rank, lane, number, num_sms)
            short = (min(ms[1], STAGE_MS), warm)
            times.append({name: replay_us(graph, *short) / rank.layers for name, graph in graphs.items()})
    return times


def run_case(rank: lib.Rank, tokens: int, rounds: int, ms: tuple[float, float], bound: bool) -> dict:
    """One size; with ``bound`` also what its two lanes could at best take."""
    num_sms = free_sms(rank.exchange)
    modes = {}
    graphs = {}
    for name, lanes in (("unsplit", 1), ("overlapped", 2)):
        if lanes == 2 and tokens < 2:
            continue
        graphs[name], outputs = step_graph(rank, tokens, lanes, num_sms)
        graphs[name].graph.replay()
        torch.cuda.synchronize()
        modes[name] = torch.cat([out.float() for out in outputs])
        assert bool(modes[name].isfinite().all()), f"{name}: outputs are not finite"
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(replay_us(graph, ms[1], warm_by(graph, ms[0])))
    median = {name: sorted(t)[len(t) // 2] for name, t in times.items()}
    case = {"tokens": tokens, "us": median, "all_us": times}
    case["unsplit_us"] = stage_times(rank, tokens, 1, ms, graphs["unsplit"])[0]
    if "overlapped" in modes:
        case["apart"] = float((modes["unsplit"] - modes["overlapped"]).norm() / modes["unsplit"].norm())
    if bound:
        case["lanes_us"] = stage_times(rank, tokens, 2, ms, graphs["overlapped"])
        against_bound(rank, case)
    return case


def against_bound(rank: lib.Rank, case: dict) -> None:
    """Adds the bound of its two lanes, and how near the overlapped run comes, to the case."""
    compute = rank.layers * sum(lane.get(s, 0) for lane in case["lanes_us"] for s in COMPUTE)
    travel = rank.layers * sum(lane.get(s, 0) for lane in case["lanes_us"] for s in TRAVEL)
    bound, exact = best_makespan(layer_tasks(case["lanes_us"], rank.layers))
    case |= {"compute_us": compute, "travel_us": travel, "bound_us": bound, "bound_is_exact": exact}
    case["ratio_to_bound"] = case["us"]["overlapped"] / bound
    case["hidden"] = (compute + travel - case["us"]["overlapped"]) / travel
    case["fits"] = all(
        lane["dispatch"] <= lane["attention"] + lane.get("shared", 0) and lane["combine"] <= lane["experts"]
        for lane in case["lanes_us"]
    )


def decide(cases: list[dict], ranks: int) -> list[dict]:
    """What ``auto`` does at each size, knowing the stage times of all of them, against one lane."""
    names = list(cases[0]["unsplit_us"])
    table = StageTimes.of(
        [case["tokens"] for case in cases], {name: [case["unsplit_us"][name] for case in cases] for name in names}
    )
    decisions = []
    for case in cases:
        lanes = choose_lanes((case["tokens"],) * ranks, LaneTimes(table, table))
        us = case["us"]
        ratio = us["overlapped"] / us["unsplit"] if lanes == 2 else 1.0
        best = min(us.values()) / us["unsplit"]
        decisions.append({"tokens": case["tokens"], "lanes": lanes, "auto_to_unsplit": ratio, "best_to_unsplit": best})
    return decisions


def save_timeline(rank: lib.Rank, tokens: int, path: str) -> str:
    """One replay of the overlapped graph, timed by events inside it."""
    rank.exchange.comm.at.step = 0
    timeline = Timeline(rank.exchange.comm)
    inputs = rank.inputs(tokens, 2)
    rank.fix_traffic(inputs)
    travel, num_sms = open_travel(rank.exchange), free_sms(rank.exchange)
    run_lanes([rank.lane(n, lane, num_sms) for n, lane in enumerate(inputs)], rank.exchange.comm.at, travel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with blas_sms(num_sms), timeline.captured() as marks, torch.cuda.graph(graph):
        run_lanes(
            [rank.lane(n, lane, num_sms) for n, lane in enumerate(inputs)], rank.exchange.comm.at, travel, timeline
        )
    for _ in range(3):
        timeline.before(marks)
        graph.replay()
        timeline.ran(marks)
        rank.exchange.comm.at.step += 1
    messages = [{"rank": 0, "spans": [astuple(s) for s in timeline.read() if s.step == 2], "full": False}]
    return "\n".join([write_timeline(path, messages), *summary(spans_by_rank(messages))])


def show(shape: str, gbps: float, case: dict) -> None:
    us = case["us"]
    line = f"{shape:14s} link {gbps:g} T {case['tokens']:5d}  unsplit {us['unsplit']:9.1f} us"
    if "overlapped" in us:
        line += f"  overlapped {us['overlapped']:9.1f} ({us['unsplit'] / us['overlapped']:.2f}x)"
        line += f"  apart {case['apart']:.1e}"
    if "hidden" in case:
        line += (
            f"  bound {case['bound_us']:9.1f}  ratio {case['ratio_to_bound']:.3f}  hidden {case['hidden']:6.1%}"
            f"  fits {case['fits']}  compute {case['compute_us']:.0f}  travel {case['travel_us']:.0f}"
        )
    print(line)
    for lane in case.get("lanes_us", ()):
        print("    half ", {name: round(t, 1) for name, t in lane.items()})
    print("    whole", {name: round(t, 1) for name, t in case["unsplit_us"].items()}, flush=True)


def run_link(rank: lib.Rank, args: argparse.Namespace, report: dict) -> None:
    """All sizes over one link; what fails is printed and does not lose the rest."""
    ms = tuple(map(float, args.ms.split(",")))
    wanted = [int(tokens) for tokens in args.tokens.split(",") if tokens]
    auto = [int(tokens) for tokens in args.auto.split(",") if tokens]
    done = []
    for tokens in [*wanted, *(size for size in reversed(auto) if size not in wanted)]:
        try:
            case = run_case(rank, tokens, args.rounds, ms, tokens in wanted)
            done.append(case)
            report["cases"].append({"shape": rank.shape.name, "gbps": rank.exchange.link.gbps, **case})
            show(rank.shape.name, rank.exchange.link.gbps, case)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1))
        except Exception:
            traceback.print_exc(limit=-6)
            torch.cuda.synchronize()
    done.sort(key=lambda case: case["tokens"])
    decided = decide([case for case in done if case["tokens"] in auto], args.emulate_ranks) if auto else []
    for each in decided:
        print("auto", each)
    report["auto"].append({"shape": rank.shape.name, "gbps": rank.exchange.link.gbps, "decisions": decided})
    if args.timeline:
        print(save_timeline(rank, wanted[-1], args.timeline))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate-ranks", type=int, default=8)
    parser.add_argument("--link-gbps", default="340,400")
    parser.add_argument("--shapes", default=",".join(lib.SHAPES))
    parser.add_argument("--tokens", default="2048,4096,8192", help="sizes to compare with the bound")
    parser.add_argument("--auto", default="", help="sizes at which the cost model decides, e.g. 1,2,4,...,8192")
    parser.add_argument("--timeline", metavar="FILE", help="a trace of the last size of --tokens, for ui.perfetto.dev")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ctas", type=int, default=12)
    parser.add_argument("--cluster", type=int, default=1, help="CTAs of the link that sit together")
    parser.add_argument("--rows", type=int, default=16, help="parts of 2 KB that each of them has in flight")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", default="100,100", help="warm-up and timed milliseconds of each measurement")
    parser.add_argument("--json", type=Path)
    args = parse(parser)
    report = {"note": NOTE.format(ctas=args.ctas), "device": torch.cuda.get_device_name(), "cases": [], "auto": []}
    report |= {"torch": torch.__version__, "triton": triton.__version__, "date": time.strftime("%Y-%m-%d")}
    print(report["note"])
    for name in args.shapes.split(","):
        rank = lib.Rank(lib.SHAPES[name], args.emulate_ranks, args.layers, 8 if name.startswith("qwen") else 2)
        for gbps in map(float, args.link_gbps.split(",")):
            link = lib.Link(gbps, args.ctas, args.cluster, args.rows)
            rank.connect(lib.EmulatedExchange(args.emulate_ranks, link, rank.shape.hidden))
            with torch.inference_mode():
                run_link(rank, args, report)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1))
        del rank
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
