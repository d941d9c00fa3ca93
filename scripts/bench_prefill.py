#!/usr/bin/env python3
"""Prefill of a whole Qwen3-30B-A3B-shaped model (random bf16 weights) on one GPU, through the engine.

    scripts/bench_prefill.py [--cases 16x1024:16384,1x16384:4096] [--json FILE]

A case ``NxL:C`` is N prompts of L tokens under a budget of C tokens a step, from the first step to the first token of
every prompt on the host.  Flops: linear layers, the causal half of attention, the head on last tokens only; the ceiling
is a matrix product of 8192^3 measured in the same run, in a burst and under sustained load.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epmoe.checkpoint import Loader  # noqa: E402
from epmoe.engine.engine import Engine  # noqa: E402
from scripts import model_bench_lib as lib  # noqa: E402
from scripts.gpu_arguments import parse  # noqa: E402
from scripts.moe_bench_lib import clock_mark, ghz_between  # noqa: E402

CASES = "16x1024:16384,1x16384:4096"


def main() -> int:
    args = arguments()
    report = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "cases": []}
    report |= {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name()}
    clock_mark()  # compiles
    report["ceilings"] = lib.ceilings()
    print(report["device"], report["torch"], report["triton"], report["ceilings"], lib.clocks(), flush=True)
    torch.cuda.empty_cache()
    folder, load = lib.shape_folder(args.layers), lib.kept(lib.random_load)
    report["cases"] = run_cases(args.cases, folder, load, report["ceilings"], args.rounds, args.plain)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print("clocks", lib.clocks(), f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB", flush=True)
    return 0


def run_cases(cases: str, folder: str, load: Loader, ceilings: dict, rounds: int = 3, plain: bool = True) -> list[dict]:
    """Time and show what can be."""
    found = []
    for name in cases.split(","):
        try:
            found.append(case(name, folder, load, rounds, plain))
            show(found[-1], ceilings)
        except Exception:
            traceback.print_exc()
        torch.cuda.empty_cache()
    return found


def case(name: str, folder: str, load: Loader, rounds: int, plain: bool) -> dict:
    prompts, rest = name.split("x")
    length, budget = map(int, rest.split(":"))
    room, count = length + 64, int(prompts)
    engine = lib.open_engine(
        folder, "cuda", load, max_batch_tokens=budget, max_requests=count, max_model_len=room, block_size=64,
        num_blocks=count * -(-room // 64), combine="reduce",
    )  # fmt: skip
    prefill(engine, count, length, 0)  # compiles
    clock = clock_mark()
    seconds = [prefill(engine, count, length, seed) for seed in range(1, rounds + 1)]
    ghz = ghz_between(clock, clock_mark())
    breakdown = {"us": {}, "kernels": 0, "top": []}
    try:
        if not plain:
            breakdown = lib.kernel_breakdown(lambda: prefill(engine, count, length, rounds + 1), 1)
    except Exception as error:  # a profiler that fails costs the breakdown, not the case
        breakdown["error"] = repr(error)
    middle = sorted(seconds)[rounds // 2]
    chunks = [(start, min(budget, length - start)) for start in range(0, length, budget)] * count
    flops = lib.prefill_flops(engine.model, chunks, count)
    weights = lib.decode_bytes(engine.model, engine.model.num_experts, 0, 0)  # read in every step
    steps = -(-count * length // budget)
    return {
        "case": name, "seconds": seconds, "tokens_per_s": count * length / middle, "tflops": flops / middle / 1e12,
        "flops": flops, "bytes": steps * weights, "ghz": ghz, "breakdown": breakdown,
    }  # fmt: skip


def prefill(engine: Engine, count: int, length: int, seed: int) -> float:
    """Seconds until the last prompt's first token."""
    messages = lib.random_requests(engine.model.vocab_size, count, length, 1, engine.steps * 1000, seed)
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.step(messages)
    tokens = 0
    while tokens < count:
        tokens += sum(len(output.tokens) for output in engine.step([]))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    while not engine.idle:
        engine.step([])
    return seconds


def show(case: dict, ceilings: dict) -> None:
    share = [100 * case["tflops"] / ceilings[key] for key in ("burst_tflops", "sustained_tflops")]
    print(
        f"{case['case']:18s} {case['tokens_per_s']:8.0f} tokens/s  {case['tflops']:5.0f} TFLOP/s"
        f"  ({share[0]:.0f} % of the burst ceiling, {share[1]:.0f} % of the sustained one)"
        f"  seconds {[round(s, 3) for s in case['seconds']]}  {case['ghz']:.2f} GHz"
        f"  floors: flops {case['flops'] / ceilings['burst_tflops'] / 1e12:.3f} s,"
        f" bytes {case['bytes'] / ceilings['copy_tbs'] / 1e12:.3f} s",
        flush=True,
    )
    print("     us:", {part: round(us) for part, us in case["breakdown"]["us"].items()},
          f"sum {sum(case['breakdown']['us'].values()):.0f}, {case['breakdown']['kernels']:.0f} kernels")  # fmt: skip
    for line in case["breakdown"]["top"]:
        print("       ", *line)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="without the breakdown by kernels")
    parser.add_argument("--layers", type=int, help="fewer layers, for a rehearsal")
    parser.add_argument("--json", type=Path)
    return parse(parser)


if __name__ == "__main__":
    sys.exit(main())
