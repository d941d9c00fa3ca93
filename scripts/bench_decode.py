#!/usr/bin/env python3
"""Decode of a whole Qwen3-30B-A3B-shaped model (random bf16 weights) on one GPU, through the engine.

    scripts/bench_decode.py [--batches 1,64,256] [--steps 40] [--capture] [--prefill] [--peer] [--json FILE]

Every case: requests are prefilled to the context by the engine itself, then whole engine steps are timed while all of
them decode.  *limit*: the bytes a step must read (weights it uses, given the experts active in this very run, and all
keys and values) at --bandwidth.  *host*: share of a step in which the host does not just wait for the device.  *gap*:
device time between the end of a step's graph and the start of the next one's.  --peer adds transformers over the same
weights: one request by generate, 256 by its continuous batching (prompts of 16 tokens, so that it ends; the shorter
context is in its favour).  --prefill adds the cases of `bench_prefill.py`, over the same weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epmoe.engine.engine import Engine  # noqa: E402
from scripts import bench_prefill, decode_peer  # noqa: E402
from scripts import model_bench_lib as lib  # noqa: E402
from scripts.gpu_arguments import parse  # noqa: E402
from scripts.moe_bench_lib import clock_mark, ghz_between  # noqa: E402

WARM = 6  # decode steps ahead of the timed ones: compile, capture, settle


def main() -> int:
    args = arguments()
    batches = [int(n) for n in args.batches.split(",")]
    report = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "cases": []}
    report |= {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name()}
    clock_mark()  # compiles
    report["ceilings"] = lib.ceilings()
    print(report["device"], report["torch"], report["triton"], report["ceilings"], lib.clocks(), flush=True)
    torch.cuda.empty_cache()
    room = args.context + 64 + 3 * args.steps + sum(batches) * args.context // args.chunk
    folder, load = lib.shape_folder(args.layers), lib.kept(lib.random_load)
    engine = lib.open_engine(
        folder, "cuda", load, max_batch_tokens=args.chunk, max_requests=max(batches),
        max_model_len=room, block_size=args.block_size, num_blocks=max(batches) * (-(-room // args.block_size)),
        graphs=not args.eager, capture_at_start=args.capture, combine=args.combine,
    )  # fmt: skip
    print(
        f"weights of {engine.load_report.bytes_total / 1e9:.1f} GB made in {engine.load_report.seconds:.1f} s",
        flush=True,
    )
    report["graphs_at_start"] = engine.report()["graphs_at_start"]
    print("graphs captured at start:", report["graphs_at_start"], flush=True)
    gc.collect()
    gc.freeze()  # as a rank does once it is ready
    for batch in batches:
        try:
            report["cases"].append(case(engine, batch, args))
            show(report["cases"][-1], report["ceilings"])
        except Exception:
            traceback.print_exc()
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    report["clocks_after"] = lib.clocks()
    config, weights = engine.model, engine.runner.decoder.weights
    del engine
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    if args.prefill:
        report["prefill"] = bench_prefill.run_cases(bench_prefill.CASES, folder, load, report["ceilings"])
        torch.cuda.empty_cache()
    if args.peer:
        report["peer"] = decode_peer.measure_all(folder, config, weights)
    print("clocks", report["clocks_after"], f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def case(engine: Engine, batch: int, args: argparse.Namespace) -> dict:
    """Prefill ``batch`` requests, time decode steps, profile some more, and let the requests go."""
    config, first = engine.model, engine.steps * 1000
    messages = lib.random_requests(config.vocab_size, batch, args.context - args.steps // 2, 1 << 30, first, batch)
    began = time.perf_counter()
    engine.step(messages)
    while engine.scheduler.waiting or any(r.computed < len(r.prompt) for r in engine.scheduler.running):
        engine.step([])
    torch.cuda.synchronize()
    prefill_s = time.perf_counter() - began
    for _ in range(WARM):
        engine.step([])
    context = sum(r.computed for r in engine.scheduler.running) / batch + args.steps / 2
    marks = Marks(engine)
    before = counters(engine)
    clock = clock_mark()
    engine.step([])  # every step ends with the tokens of the one before: the clock runs from one such end to another
    waited, began = engine.wait_seconds, time.perf_counter()
    outputs = sum(len(output.tokens) for _ in range(args.steps) for output in engine.step([]))
    seconds, wait_s = time.perf_counter() - began, engine.wait_seconds - waited
    gap_us, graph_us = marks.close()
    ghz = ghz_between(clock, clock_mark())
    after = counters(engine)
    assert outputs == batch * args.steps, (outputs, batch, args.steps)
    active = (after["active"] - before["active"]) / len(config.moe_layers) / (args.steps + 1)
    floor_s = lib.decode_bytes(config, active, batch, context) / (args.bandwidth * 1e12)
    try:
        host = lib.host_breakdown(lambda: engine.step([]), 8)
        breakdown = lib.kernel_breakdown(lambda: engine.step([]), 3)
    except Exception as error:  # a profiler that fails costs the breakdown, not the case
        breakdown, host = {"us": {}, "kernels": 0, "top": [], "error": repr(error)}, []
    engine.step([{"op": "abort", "id": first + n} for n in range(batch)])
    while not engine.idle:
        engine.step([])
    step_s = seconds / args.steps
    return {
        "batch": batch, "context": context, "tokens_per_s": batch / step_s, "step_us": step_s * 1e6,
        "limit_tokens_per_s": batch / floor_s, "share_of_limit": floor_s / step_s, "active_experts": active,
        "host_share": 1 - wait_s / seconds, "host_us": (seconds - wait_s) / args.steps * 1e6, "graph_us": graph_us,
        "gap_us": gap_us, "ghz": ghz, "floor_us": floor_s * 1e6,
        "flops": lib.prefill_flops(config, [(context - 1, 1)] * batch, batch),
        "replays": after["replays"] - before["replays"], "prefill_s": prefill_s, "breakdown": breakdown, "host": host,
    }  # fmt: skip


class Marks:
    """Events around each replayed step, to see what lies between them."""

    def __init__(self, engine: Engine) -> None:
        self.graphs, self.pairs = engine.runner.graphs, []
        if self.graphs is None:
            return
        run = self.graphs.run

        def marked(chunks, size):
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            out = run(chunks, size)
            pair[1].record()
            self.pairs.append(pair)
            return out

        self.graphs.run = marked

    def close(self) -> tuple[float, float]:
        """Microseconds between steps and within them (median); the methods are put back."""
        if self.graphs is None:
            return float("nan"), float("nan")
        del self.graphs.run
        self.pairs[-1][1].synchronize()
        gaps = sorted(a[1].elapsed_time(b[0]) * 1e3 for a, b in zip(self.pairs, self.pairs[1:]))
        inside = sorted(a.elapsed_time(b) * 1e3 for a, b in self.pairs)
        return gaps[len(gaps) // 2], inside[len(inside) // 2]


def counters(engine: Engine) -> dict:
    report = engine.report()
    return {"active": sum(report["active_L"]), "replays": report["graph_replays"]}


def show(case: dict, ceilings: dict) -> None:
    print(
        f"batch {case['batch']:4d}  context {case['context']:6.0f}  {case['tokens_per_s']:8.1f} tokens/s"
        f"  step {case['step_us']:8.0f} us  limit {case['limit_tokens_per_s']:8.0f}"
        f" ({100 * case['share_of_limit']:.0f} %, {case['active_experts']:.1f} experts active)"
        f"  host {case['host_us']:6.0f} us ({100 * case['host_share']:.1f} %)  gap {case['gap_us']:.0f} us"
        f"  graph {case['graph_us']:.0f} us  {case['ghz']:.2f} GHz  floors: bytes {case['floor_us']:.0f} us,"
        f" flops {case['flops'] / ceilings['burst_tflops'] / 1e6:.0f} us",
        flush=True,
    )
    print("     us:", {part: round(us) for part, us in case["breakdown"]["us"].items()},
          f"sum {sum(case['breakdown']['us'].values()):.0f}, {case['breakdown']['kernels']:.0f} kernels")  # fmt: skip
    host = f"{case['host_us']:.0f} us of a step's {case['step_us']:.0f} ({100 * case['host_share']:.1f} %)"
    print(
        f"     host: works {host}, under the device's work: {case['gap_us']:.0f} us between a graph and the next"
        f" ({100 * case['gap_us'] / case['step_us']:.2f} %); copies to the host a step:"
        f" {case['breakdown'].get('to_host', float('nan')):.0f}"
    )
    for line in case["breakdown"]["top"]:
        print("       ", *line)
    print("     host us a step:", "; ".join(f"{name} {us:.0f} ({calls:.0f})" for name, us, calls in case["host"][:16]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40, help="timed decode steps of a case")
    parser.add_argument("--chunk", type=int, default=8192, help="token budget of a prefill step")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--combine", default="reduce", choices=("exact", "reduce"))
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the limit")
    parser.add_argument("--layers", type=int, help="fewer layers, for a rehearsal")
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument("--capture", action="store_true", help="capture the graphs of all sizes at start-up")
    parser.add_argument("--prefill", action="store_true", help="the cases of bench_prefill.py too, afterwards")
    parser.add_argument("--peer", action="store_true", help="transformers too, afterwards")
    parser.add_argument("--json", type=Path)
    return parse(parser)


if __name__ == "__main__":
    sys.exit(main())
