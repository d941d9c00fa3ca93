#!/usr/bin/env python3
"""Check, tune and time the MoE layer on one GPU; one line per case, JSON on request.

    scripts/bench_moe.py [--shapes mixtral,qwen3] [--tokens 1,64,4096] [--seconds 240] [--json FILE]

In this order, each part guarded so that a failing one does not lose the rest: kernels compiled side by side in
processes, checks against float32, ceilings of the machine, and per (shape, T): tiles tuned, the layer timed beside its
peers, skewed routing, components.  A case whose own check is red is not timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epmoe.ops.combine import weighted_sum_triton  # noqa: E402
from epmoe.ops.experts import ExpertOptions, expert_mlp_triton  # noqa: E402
from epmoe.ops.experts_sparse import vector_down, vector_gate_up  # noqa: E402
from epmoe.ops.grouped_gemm import TileConfig, down_triton, gate_up_triton  # noqa: E402
from epmoe.ops.moe_index import block_rows, build_index_triton  # noqa: E402
from epmoe.ops.router import route_triton  # noqa: E402
from epmoe.ops.tiles import PINNED, PINNED_ROWS, Choice, choose  # noqa: E402
from scripts import moe_bench_lib as lib  # noqa: E402

TOKENS = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
LIMIT = 1e-2
CANDIDATES = (
    (16, TileConfig(128, 128, 4, 4, 1, swap=True, flatten=True)),
    (16, TileConfig(128, 128, 4, 3, 2, swap=True, flatten=True)),
    (16, TileConfig(128, 64, 4, 4, 3, swap=True)),
    (16, TileConfig(128, 64, 4, 5, 2, swap=True, flatten=True)),
    (32, TileConfig(128, 64, 4, 4, 2, swap=True, flatten=True)),
    (32, TileConfig(128, 128, 4, 4, 1, swap=True, flatten=True)),
    (32, TileConfig(128, 64, 4, 3, 3, swap=True)),
    (64, TileConfig(128, 64, 4, 4, 2, swap=True, flatten=True)),
    (64, TileConfig(256, 64, 8, 4, 1, flatten=True)),
    (128, TileConfig(256, 64, 8, 4, specialised=True)),
    (128, TileConfig(256, 64, 8, 4, specialised=True, group=16)),
    (128, TileConfig(256, 64, 8, 4, specialised=True, group=32)),
    (128, TileConfig(256, 64, 8, 4, 1, tail=64)),
    (128, TileConfig(256, 64, 8, 3, 1, flatten=True)),
    (128, TileConfig(256, 64, 8, 4, 1, group=16)),
    (128, TileConfig(128, 64, 4, 3, 2, tail=64)),
    (128, TileConfig(128, 64, 4, 3, 2, flatten=True)),
    (128, TileConfig(256, 64, 8, 3, 1, swap=True, flatten=True)),
)
VECTORS = ((2, 1024, 4), (8, 512, 4), (4, 1024, 4), (8, 1024, 8), (2, 2048, 4), (2, 1024, 2), (4, 2048, 8))


HUNG = []


def compile_one(task: tuple) -> str:
    """Compile one kernel into Triton's cache, in a process of its own, by running it on a tiny problem."""
    kind, what = task
    shape = what if kind == "small" else lib.Shape("tiny", 16, 2, 1024, 256)
    weights = lib.Weights(
        torch.zeros(16, 512, 1024, device="cuda", dtype=torch.bfloat16),
        torch.zeros(16, 1024, 256, device="cuda", dtype=torch.bfloat16),
    )
    try:
        tokens = 1 if kind == "vector" else 8
        x_TD, logits_TE = lib.make_inputs(shape, tokens, "uniform")
        if kind == "small":
            for tokens in (1, 512, 16384):
                logits_TE = torch.zeros(tokens, shape.experts, device="cuda")
                weight_TK, expert_TK = route_triton(logits_TE, lib.RULE, shape.top_k)
                index = build_index_triton(expert_TK, shape.experts)
                weighted_sum_triton(x_TD, index.pos_RK * 0, weight_TK)
            return ""
        expert_TK = torch.zeros(tokens, 2, device="cuda", dtype=torch.int32)
        rows = what[0] if kind == "tile" else 16
        index = build_index_triton(expert_TK + torch.arange(2, device="cuda", dtype=torch.int32), 16, rows)
        if kind == "tile":
            down_triton(gate_up_triton(x_TD, index, weights, what[1], "silu"), index, weights, what[1])
        else:
            act = vector_gate_up(x_TD, index, weights, "silu", what)
            vector_down(act, index, weights, None, what)
            vector_down(act, index, weights, torch.ones(1, 2, device="cuda"), what)
        torch.cuda.synchronize()
    except Exception:
        return f"{task}: {traceback.format_exc(limit=-2)}"
    return ""


def compile_all(shapes: list) -> tuple[list, list]:
    """Compile and try every candidate side by side: failures, and the tasks not done after a minute (hung)."""
    tasks = [("small", s) for s in shapes] + [("tile", c) for c in (*CANDIDATES, (PINNED_ROWS, PINNED))]
    tasks += [("vector", v) for v in VECTORS]
    pool = get_context("spawn").Pool(12)
    results = [pool.apply_async(compile_one, (task,)) for task in tasks]
    end = time.monotonic() + 60
    while time.monotonic() < end and not all(r.ready() for r in results):
        time.sleep(0.2)
    hung = [task for task, r in zip(tasks, results) if not r.ready()]
    failed = [r.get() for r in results if r.ready() and r.get()]
    pool.terminate()
    return failed, hung


def check_cases(shape: lib.Shape, weights: lib.Weights) -> list[dict]:
    """Every candidate against float32, in routings with empty slots and one slot that takes all; then bitwise."""
    cases = []
    for rows, config in CANDIDATES:
        if (rows, config) in HUNG:
            cases.append({"rows": rows, "config": asdict(config), "error": float("nan")})
            continue
        for tokens, routing in ((33, "uniform"), (300, "uniform"), (200, "one")):
            x_TD, logits_TE = lib.make_inputs(shape, tokens, "uniform")
            if routing == "one":
                logits_TE[:, : shape.top_k] += 100.0
            choice = Choice(rows, config, config)
            sample = torch.randperm(tokens, device="cuda")[:48]
            want = lib.reference(x_TD, logits_TE, weights, shape, sample)
            try:
                error = lib.frobenius(lib.layer(x_TD, logits_TE, weights, shape, choice)[sample], want)
            except Exception:
                print(traceback.format_exc(limit=-3))
                error = float("nan")
            cases.append({"rows": rows, "config": asdict(config), "tokens": tokens, "routing": routing, "error": error})
            if not error < LIMIT:
                print(f"RED {shape.name} rows {rows} {config} T {tokens} {routing}: error {error:.2e}", flush=True)
    return cases


def check_invariance(shape: lib.Shape, weights: lib.Weights) -> bool:
    """Deterministic mode: a token's bits alone, in a small and in a large batch."""
    x_TD, logits_TE = lib.make_inputs(shape, 700, "uniform")
    options = ExpertOptions(deterministic=True)
    outs = []
    for tokens in (1, 5, 64, 700):
        x, logits = x_TD[-tokens:].contiguous(), logits_TE[-tokens:].contiguous()
        choice = choose(x, tokens * shape.top_k, weights, deterministic=True)
        outs.append(lib.layer(x, logits, weights, shape, choice, True, options)[-1])
    same = all(torch.equal(outs[0], out) for out in outs[1:])
    print(f"deterministic, one token in batches of 1, 5, 64, 700 ({shape.name}): {'bitwise equal' if same else 'RED'}")
    return same


def tune(timer: lib.Timer, shape: lib.Shape, weights: lib.Weights, tokens: int, bad: set) -> tuple[Choice, list]:
    """The fastest tiles of each GEMM for one number of tokens (both share the block size)."""
    x_TD, logits_TE = lib.make_inputs(shape, tokens, "uniform")
    _, expert_TK = route_triton(logits_TE, lib.RULE, shape.top_k)
    copies = 4 if tokens <= 1024 else 2
    rows_now = block_rows(expert_TK.numel(), shape.experts)
    log, best = [], {}
    if tokens == 1:
        index = build_index_triton(expert_TK, shape.experts)
        act = vector_gate_up(x_TD, index, weights, "silu", VECTORS[0])
        mix = torch.rand(1, shape.top_k, device="cuda")
        for tile in VECTORS:
            us = timer.compare(
                {
                    "gate_up": [lambda t=tile: vector_gate_up(x_TD, index, weights, "silu", t)],
                    "down": [lambda t=tile: vector_down(act, index, weights, mix, t)],
                },
                2, copies,
            )
            log.append({"tile": tile, **us})
        pick = [min(log, key=lambda r: r[k])["tile"] for k in ("gate_up", "down")]
        default = choose(x_TD, expert_TK.numel(), weights)
        return Choice(default.rows, default.gate_up, default.down, tuple(pick)), log
    for i, (rows, config) in enumerate(CANDIDATES):
        if i in bad or not rows_now // 2 <= rows <= max(rows_now * 2, 32):
            continue
        index = build_index_triton(expert_TK, shape.experts, rows)
        act = gate_up_triton(x_TD, index, weights, config, "silu")
        us = timer.compare(
            {
                "gate_up": [partial(gate_up_triton, x_TD, index, weights, config, "silu")],
                "down": [partial(down_triton, act, index, weights, config)],
            },
            1, copies,
        )
        log.append({"rows": rows, "config": asdict(config), **us})
        for kernel in ("gate_up", "down"):
            if us[kernel] < best.get((rows, kernel), (1e30,))[0]:
                best[rows, kernel] = (us[kernel], config)
    rows = min({r for r, _ in best}, key=lambda r: best[r, "gate_up"][0] + best[r, "down"][0])
    return Choice(rows, best[rows, "gate_up"][1], best[rows, "down"][1]), log


def time_case(timer, shape, weights, tokens, choice, routing, peers) -> dict:
    """Reduce and exact mode of the layer and the peers over three rotating inputs, checked first."""
    inputs = [lib.make_inputs(shape, tokens, routing) for _ in range(3)]
    sample = torch.randperm(tokens, device="cuda")[:48]
    want = lib.reference(*inputs[0], weights, shape, sample)
    functions = {
        "reduce": lambda x, g: lib.layer(x, g, weights, shape, choice),
        "exact": lambda x, g: lib.layer(x, g, weights, shape, choice, exact=True),
        "default": lambda x, g: lib.layer(x, g, weights, shape, choose(x, x.shape[0] * shape.top_k, weights)),
        "grouped_mm": lambda x, g: lib.peer_grouped_mm(x, g, weights, shape),
    }
    result = {"shape": shape.name, "tokens": tokens, "routing": routing, "us": {}, "error": {}}
    for name, function in functions.items():
        try:
            result["error"][name] = lib.frobenius(function(*inputs[0])[sample], want)
        except Exception as error:
            print(f"{name} fails: {error!r}"[:300])
            result["error"][name] = float("nan")
    for name, function in list(peers.items()):
        try:
            function(*inputs[0])
        except Exception as error:
            print(f"{name} is left out: {error!r}"[:300])
            peers = {k: f for k, f in peers.items() if k != name}
    red = [n for n, e in result["error"].items() if not e < LIMIT]
    if red:
        print(f"RED {shape.name} T {tokens} {routing}: {result['error']}")
    functions = {n: f for n, f in (functions | peers).items() if n not in red}
    calls = {n: [lambda f=f, i=i: f(*i) for i in inputs] for n, f in functions.items()}
    try:
        result["us"] = timer.compare(calls, 3, 6 if tokens <= 1024 else 3)
    except Exception:
        traceback.print_exc(limit=-3)
        torch.cuda.synchronize()
    active = min(shape.experts, tokens * shape.top_k)
    if routing == "uniform":
        active = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
    result["bytes"], result["flops"] = shape.bytes(tokens, active), shape.flops(tokens)
    return result


def components(timer, shape, weights, tokens, choice) -> dict:
    """Microseconds of each stage on its own, back to back, without a flush."""
    x_TD, logits_TE = lib.make_inputs(shape, tokens, "uniform")
    weight_TK, expert_TK = route_triton(logits_TE, lib.RULE, shape.top_k)
    index = build_index_triton(expert_TK, shape.experts, choice.rows)
    rows = expert_mlp_triton(x_TD, index, weights, choice=choice)
    stages = {
        "router": lambda: route_triton(logits_TE, lib.RULE, shape.top_k),
        "index": lambda: build_index_triton(expert_TK, shape.experts, choice.rows),
        "combine": lambda: weighted_sum_triton(rows, index.pos_RK, weight_TK),
    }
    return timer.compare({k: [v] for k, v in stages.items()}, 3, 20, flush=False)


def show(result: dict, top: dict) -> None:
    us, floor = result["us"], max(result["bytes"] / top["copy_tbs"] / 1e6, result["flops"] / top["tflops"] / 1e6)
    ours = us.get("reduce", float("nan"))
    peers = "  ".join(f"{k} {v:.1f}" for k, v in us.items() if k != "reduce")
    print(
        f"{result['shape']:10s} T {result['tokens']:5d} {result['routing']:7s} {ours:9.1f} us  floor {floor:8.1f} "
        f"({100 * floor / ours:3.0f} %)  {result['flops'] / ours / 1e6:5.0f} TFLOP/s "
        f"{result['bytes'] / ours / 1e6:5.2f} TB/s | {peers}",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(s.name for s in lib.SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--seconds", type=float, default=240, help="stop starting new cases after this long")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def run_shape(timer, shape, tokens, report, left) -> None:
    weights = lib.make_weights(shape)
    checked = check_cases(shape, weights)
    red = [c for c in checked if not c["error"] < LIMIT]
    bad = {i for i, (r, c) in enumerate(CANDIDATES) for k in red if (r, asdict(c)) == (k["rows"], k["config"])}
    report["checks"] += checked
    report["invariant"][shape.name] = check_invariance(shape, weights)
    try:
        peers = lib.transformers_peers(weights, shape)
        peers = {k: (lambda x, g, f=f: f(x, g)) for k, f in peers.items()}
    except Exception as error:
        print(f"transformers' experts are left out: {error!r}")
        peers = {}
    for count in tokens:
        if left() < 5:
            print(f"out of time before {shape.name} T {count}")
            return
        try:
            choice, log = tune(timer, shape, weights, count, bad)
            report["tuning"].append({"shape": shape.name, "tokens": count, "log": log, "choice": asdict(choice)})
            some = peers if count in (64, 4096) and shape.name != "mixtral" else {}
            some = {k: f for k, f in some.items() if k != "hf-batched" or count == 64}
            result = time_case(timer, shape, weights, count, choice, "uniform", some)
            show(result, report["ceilings"])
            skewed = time_case(timer, shape, weights, count, choice, "zipf", {}) if count > 1 else None
            if skewed:
                show(skewed, report["ceilings"])
            report["cases"] += [r for r in (result, skewed) if r]
            parts = components(timer, shape, weights, count, choice)
            report["components"].append({"shape": shape.name, "tokens": count, **parts})
            print("   ", {k: round(v, 1) for k, v in parts.items()}, choice, flush=True)
        except Exception:
            traceback.print_exc(limit=-4)
            torch.cuda.synchronize()


def main() -> int:
    args = arguments()
    start = time.monotonic()
    left = lambda: args.seconds - (time.monotonic() - start)  # noqa: E731
    shapes = [s for s in lib.SHAPES if s.name in args.shapes.split(",")]
    report = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    report |= {"triton": triton.__version__, "device": torch.cuda.get_device_name()}
    report |= {k: [] for k in ("checks", "tuning", "cases", "components")} | {"invariant": {}}
    report["failed_compiles"], hung = compile_all(shapes)
    HUNG.extend(what for kind, what in hung if kind == "tile")
    print(f"compiled in {time.monotonic() - start:.0f} s", *report["failed_compiles"], *hung, sep="\n", flush=True)
    timer = lib.Timer()
    report["ceilings"] = lib.ceilings(timer)
    print({k: report[k] for k in ("device", "torch", "triton", "ceilings")}, flush=True)
    for shape in shapes:
        try:
            run_shape(timer, shape, [int(t) for t in args.tokens.split(",")], report, left)
        except Exception:
            traceback.print_exc()
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(report))
    report["ceilings_after"] = lib.ceilings(timer)
    print("ceilings at the end", report["ceilings_after"], f"{time.monotonic() - start:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
