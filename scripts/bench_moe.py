#!/usr/bin/env python3
"""Check, tune and time the MoE layer on one GPU; one line per case, JSON on request.

    scripts/bench_moe.py [--shapes mixtral,qwen3] [--tokens 1,64,4096] [--untuned] [--seconds 240] [--json FILE]

In this order, each part guarded so that a failing one does not lose the rest: kernels compiled side by side in
processes, checks against float32, ceilings of the machine, and per (shape, T): tiles tuned, the layer timed beside its
peers, skewed routing, components.  A case whose own check is red is not timed.  ``--untuned`` leaves out the tuning and
its checks and times the heuristic's tiles, also on 116 and 124 SMs, deterministic mode up to 4096 tokens.  A shape may
be given as E:K:D:F, and with numbers of tokens of its own: mixtral=1+64.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epmoe.ops.block_schedule import block_rows  # noqa: E402
from epmoe.ops.combine import weighted_sum_triton  # noqa: E402
from epmoe.ops.down_gemm import down_triton  # noqa: E402
from epmoe.ops.experts import ExpertOptions, expert_mlp_triton  # noqa: E402
from epmoe.ops.experts_sparse import vector_down, vector_gate_up  # noqa: E402
from epmoe.ops.gate_up_gemm import gate_up_triton  # noqa: E402
from epmoe.ops.moe_index import build_index_triton  # noqa: E402
from epmoe.ops.router import route_triton  # noqa: E402
from epmoe.ops.tile_candidates import CANDIDATES, VECTORS  # noqa: E402
from epmoe.ops.tiles import Choice, choose  # noqa: E402
from scripts import moe_bench_lib as lib  # noqa: E402
from scripts import moe_bench_published as published  # noqa: E402
from scripts.gpu_arguments import parse  # noqa: E402
from scripts.moe_bench_checks import LIMIT, check_cases, check_invariance, compile_all  # noqa: E402

TOKENS = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
FEWER_SMS = (116, 124)
COPIED = 16e9  # transformers' batched_mm copies the weights of every pair: as many bytes as there are flops


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
                2,
                copies,
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
            1,
            copies,
        )
        log.append({"rows": rows, "config": asdict(config), **us})
        for kernel in ("gate_up", "down"):
            if us[kernel] < best.get((rows, kernel), (1e30,))[0]:
                best[rows, kernel] = (us[kernel], config)
    rows = min({r for r, _ in best}, key=lambda r: best[r, "gate_up"][0] + best[r, "down"][0])
    return Choice(rows, best[rows, "gate_up"][1], best[rows, "down"][1]), log


def time_case(timer, shape, weights, tokens, choice, routing, peers, untuned=False) -> dict:
    """Reduce and exact mode of the layer and the peers over three rotating inputs, checked first."""
    inputs = [lib.make_inputs(shape, tokens, routing) for _ in range(3)]
    sample = torch.randperm(tokens, device="cuda")[:48]
    want = lib.reference(*inputs[0], weights, shape, sample)
    functions = {
        "reduce": lambda x, g: lib.layer(x, g, weights, shape, choice),
        "exact": lambda x, g: lib.layer(x, g, weights, shape, choice, exact=True),
        "default": lambda x, g: lib.layer(x, g, weights, shape, choose(x, x.shape[0] * shape.top_k, weights)),
        "grouped_mm": lambda x, g: lib.peer_grouped_mm(x, g, weights, shape),
        "deterministic": lambda x, g: lib.layer_deterministic(x, g, weights, shape),
    }
    if untuned:
        del functions["default"]
        if tokens > 4096:
            del functions["deterministic"]
        for sms in FEWER_SMS if tokens in (64, 1024, 4096) and routing == "uniform" else ():
            options = ExpertOptions(num_sms=sms)
            functions[f"{sms} SMs"] = lambda x, g, o=options: lib.layer(x, g, weights, shape, choice, options=o)
        if routing != "uniform":
            functions = {name: functions[name] for name in ("reduce", "grouped_mm")}
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
    if tokens >= 1024 and routing == "uniform":
        calls["mm"] = [lib.matrix_product()]  # the matrix ceiling under this case's clocks
    for some in (calls, {n: c for n, c in calls.items() if n not in peers}):  # a peer may fail under capture only
        try:
            result["us"] = timer.compare(some, 3, 6 if tokens <= 1024 else 3)
            if "reduce" in calls and routing == "uniform":
                result["ghz"] = lib.clock_ghz(timer, calls["reduce"])
            break
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
    index = build_index_triton(expert_TK, shape.experts, choice.rows, choice.tail)
    rows = expert_mlp_triton(x_TD, index, weights, choice=choice)
    stages = {
        "router": lambda: route_triton(logits_TE, lib.RULE, shape.top_k),
        "index": lambda: build_index_triton(expert_TK, shape.experts, choice.rows, choice.tail),
        "combine": lambda: weighted_sum_triton(rows, index.pos_RK, weight_TK),
    }
    return timer.compare({k: [v] for k, v in stages.items()}, 3, 20, flush=False)


def show(result: dict, top: dict) -> None:
    us, floor = result["us"], max(result["bytes"] / top["copy_tbs"] / 1e6, result["flops"] / top["tflops"] / 1e6)
    ours = us.get("reduce", float("nan"))
    peers = "  ".join(f"{k} {v:.1f}" for k, v in us.items() if k not in ("reduce", "mm"))
    if "mm" in us:
        peers += f"  matrix {2 * 8192**3 / us['mm'] / 1e6:.0f} TFLOP/s"
    if "ghz" in result:
        peers += f"  {result['ghz']:.2f} GHz"
    if ratio := published.compare(result, top):
        peers += f"  best published {ratio[0]:.2f}, scaled {ratio[1]:.2f}"
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
    parser.add_argument("--untuned", action="store_true", help="the heuristic's tiles only")
    parser.add_argument("--seconds", type=float, default=240, help="stop starting new cases after this long")
    parser.add_argument("--json", type=Path)
    return parse(parser)


def run_shape(timer, shape, tokens, report, left, untuned) -> None:
    weights = lib.make_weights(shape)
    checked = [] if untuned else check_cases(shape, weights, report["hung"])
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
            if untuned:
                rows_RD = weights.down.new_empty((count, shape.hidden))
                choice, log = choose(rows_RD, count * shape.top_k, weights), []
            else:
                choice, log = tune(timer, shape, weights, count, bad)
            report["tuning"].append({"shape": shape.name, "tokens": count, "log": log, "choice": asdict(choice)})
            some = peers if count in (64, 4096) and shape.name != "mixtral" else {}
            some = {k: f for k, f in some.items() if k != "hf-batched" or count == 64 and shape.flops(count) < COPIED}
            result = time_case(timer, shape, weights, count, choice, "uniform", some, untuned)
            show(result, report["ceilings"])
            skewed = time_case(timer, shape, weights, count, choice, "zipf", {}, untuned) if count > 1 else None
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
    known = {shape.name: shape for shape in lib.SHAPES}
    tokens = {}
    for text in args.shapes.split(","):
        name, _, own = text.partition("=")
        shape = known.get(name) or lib.Shape(name, *map(int, name.split(":")))
        tokens[shape] = [int(t) for t in (own.split("+") if own else args.tokens.split(","))]
    shapes = list(tokens)
    report = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    report |= {"triton": triton.__version__, "device": torch.cuda.get_device_name()}
    report |= {k: [] for k in ("checks", "tuning", "cases", "components")} | {"invariant": {}}
    report["failed_compiles"], hung = compile_all(shapes, args.untuned)
    report["hung"] = [what for kind, what in hung if kind == "tile"]
    print(f"compiled in {time.monotonic() - start:.0f} s", *report["failed_compiles"], *hung, sep="\n", flush=True)
    timer = lib.Timer()
    report["ceilings"] = lib.ceilings(timer)
    print({k: report[k] for k in ("device", "torch", "triton", "ceilings")}, flush=True)
    for shape in shapes:
        try:
            run_shape(timer, shape, tokens[shape], report, left, args.untuned)
        except Exception:
            traceback.print_exc()
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(report, default=str))
    report["ceilings_after"] = lib.ceilings(timer)
    print("ceilings at the end", report["ceilings_after"], f"{time.monotonic() - start:.0f} s")
    print(published.summary(report["cases"], report["ceilings"]))
    if args.json:
        args.json.write_text(json.dumps(report, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
