#!/usr/bin/env python3
"""Check and time the MoE layer on block-scaled 8-bit experts beside the bfloat16 layer; one line per case.

    scripts/bench_fp8.py [--shapes mixtral,qwen3] [--tokens 1,64,4096] [--seconds 60] [--json FILE]

Each case is first compared with its twin, which rounds to 8 bits at the same places, and with float32 products of the
dequantised weights.  Times are graph replays, the L2 cache flushed before each layer, both layers alternating.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epmoe.gpu_timer import Timer  # noqa: E402
from epmoe.ops.combine import weighted_sum, weighted_sum_ref  # noqa: E402
from epmoe.ops.experts import split_gate_up  # noqa: E402
from epmoe.ops.experts_fp8 import (  # noqa: E402
    choose_fp8,
    dequantize_gate_up,
    expert_mlp_fp8_ref,
    expert_mlp_fp8_triton,
)
from epmoe.ops.fp8 import FP8, dequantize  # noqa: E402
from epmoe.ops.moe_index import build_index_ref, build_index_triton  # noqa: E402
from epmoe.ops.router import route_triton  # noqa: E402
from epmoe.ops.tiles import choose  # noqa: E402
from epmoe.tune import Shape, random_weights  # noqa: E402
from scripts import moe_bench_lib as lib  # noqa: E402
from scripts.gpu_arguments import parse  # noqa: E402

TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
# Relative Frobenius errors.  Against the twin: the tensor cores keep some 14 bits of a sum of 8-bit products, and where
# that moves an activated value over a rounding boundary it moves by a sixteenth.  Against float32: 8-bit activations.
TWIN_LIMIT, FLOAT_LIMIT = 2.5e-2, 5e-2


def layer(x_TD, logits_TE, weights, shape) -> torch.Tensor:
    """Router logits to combined output on one rank."""
    weight_TK, expert_TK = route_triton(logits_TE, lib.RULE, shape.top_k)
    choice = choose_fp8(x_TD, expert_TK.numel(), weights)
    index = build_index_triton(expert_TK, shape.experts, choice.rows)
    return weighted_sum(expert_mlp_fp8_triton(x_TD, index, weights, choice=choice), index.pos_RK, weight_TK)


def layer_half(x_TD, logits_TE, weights, shape) -> torch.Tensor:
    return lib.layer(x_TD, logits_TE, weights, shape, choose(x_TD, x_TD.shape[0] * shape.top_k, weights))


def errors(got_TD, inputs, weights, shape, sample) -> dict:
    """Of sampled tokens: against the twin, and against float32 products without 8-bit activations."""
    x_SD, logits_SE = (part[sample] for part in inputs)
    weight_SK, expert_SK = route_triton(logits_SE, lib.RULE, shape.top_k)
    index = build_index_ref(expert_SK, shape.experts)
    twin = weighted_sum_ref(expert_mlp_fp8_ref(x_SD, index, weights), index.pos_RK, weight_SK)
    want_SD = torch.zeros_like(x_SD, dtype=torch.float32)
    for expert in expert_SK.unique().tolist():
        at, choice = (expert_SK == expert).nonzero(as_tuple=True)
        gate, up = split_gate_up(x_SD[at].float() @ dequantize_gate_up(weights, expert).T)
        down_DF = dequantize(weights.down[expert], weights.down_scale[expert], torch.float32)
        out = (torch.nn.functional.silu(gate) * up) @ down_DF.T
        want_SD.index_add_(0, at, out * weight_SK[at, choice, None])
    got_SD = got_TD[sample]
    return {"twin": lib.frobenius(got_SD, twin.float()), "float32": lib.frobenius(got_SD, want_SD)}


def time_case(timer: Timer, shape, eight, half, tokens: int, routing: str) -> dict:
    inputs = [lib.make_inputs(shape, tokens, routing) for _ in range(3)]
    sample = torch.randperm(tokens, device="cuda")[:48]
    apart = errors(layer(*inputs[0], eight, shape), inputs[0], eight, shape, sample)
    result = {"shape": shape.name, "tokens": tokens, "routing": routing, "error": apart, "us": {}}
    if apart["twin"] < TWIN_LIMIT and apart["float32"] < FLOAT_LIMIT:
        calls = {
            "fp8": [lambda i=i: layer(*i, eight, shape) for i in inputs],
            "bf16": [lambda i=i: layer_half(*i, half, shape) for i in inputs],
        }
        result["us"] = timer.compare(calls, 3, 6 if tokens <= 1024 else 3)
    active = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
    result["bytes"] = shape.bytes(tokens, active) / 2 + 2.0 * tokens * shape.hidden
    result["flops"] = shape.flops(tokens)
    return result


def show(result: dict) -> None:
    us, error = result["us"], result["error"]
    if not us:
        print(f"RED {result}", flush=True)
        return
    print(
        f"{result['shape']:10s} T {result['tokens']:5d} {result['routing']:7s} fp8 {us['fp8']:9.1f} us"
        f"  {result['flops'] / us['fp8'] / 1e6:5.0f} TFLOP/s {result['bytes'] / us['fp8'] / 1e6:5.2f} TB/s"
        f" | bf16 {us['bf16']:9.1f} ({us['bf16'] / us['fp8']:.2f}x)"
        f" | error: twin {error['twin']:.1e}, float32 {error['float32']:.1e}",
        flush=True,
    )


def compile_side_by_side(shapes: list, tokens: list[int]) -> None:
    """The kernels of both layers for all these mean numbers of pairs, in threads, on tiny layers."""
    means = {tokens_now * s.top_k / s.experts for s in shapes for tokens_now in tokens if tokens_now > 1}
    counts = sorted({1} | {max(2, round(4 * mean)) for mean in means if mean <= 1024})

    def run(call) -> None:
        torch.cuda.synchronize()  # makes the device's context this thread's too
        call()

    calls = []
    for features in (768, 1152):
        tiny = lib.Shape("tiny", 8, 2, 1024, features)
        sizes = Shape(tiny.experts, tiny.top_k, tiny.hidden, tiny.features)
        for function, dtype in ((layer, FP8), (layer_half, torch.bfloat16)):
            weights = random_weights(sizes, dtype)
            for count in counts:
                inputs = lib.make_inputs(tiny, count, "uniform")
                calls.append(lambda f=function, i=inputs, w=weights, s=tiny: f(*i, w, s))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, calls))


def ceiling(timer: Timer) -> float:
    """TFLOP/s of cuBLAS on 8-bit floats, 8192^3, one scale a matrix, under the power limit."""
    a, b = ((torch.randn(8192, 8192, device="cuda") * 60).clamp(-448, 448).to(FP8) for _ in range(2))
    one = torch.ones((), device="cuda")
    product = lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)  # noqa: E731
    return 2 * 8192**3 / timer.compare({"mm": [product]}, 3, 5, flush=False)["mm"] / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(s.name for s in lib.SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--routing", default="uniform", help="uniform,zipf")
    parser.add_argument("--seconds", type=float, default=60, help="stop starting new cases after this long")
    parser.add_argument("--json", type=Path)
    args = parse(parser)
    start, timer, cases = time.monotonic(), Timer(), []
    report = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    report |= {"triton": triton.__version__, "device": torch.cuda.get_device_name(), "cases": cases}
    shapes = [s for s in lib.SHAPES if s.name in args.shapes.split(",")]
    compile_side_by_side(shapes, list(map(int, args.tokens.split(","))))
    report["compile_seconds"] = round(time.monotonic() - start, 1)
    report["fp8_tflops"] = ceiling(timer)
    print({key: value for key, value in report.items() if key != "cases"}, flush=True)
    for shape in shapes:
        sizes = Shape(shape.experts, shape.top_k, shape.hidden, shape.features)
        eight, half = random_weights(sizes, FP8), random_weights(sizes, torch.bfloat16)
        for tokens in map(int, args.tokens.split(",")):
            for routing in args.routing.split(",") if tokens > 1 else ("uniform",):
                if time.monotonic() - start > args.seconds:
                    print(f"out of time before {shape.name} T {tokens}")
                    break
                try:
                    cases.append(time_case(timer, shape, eight, half, tokens, routing))
                    show(cases[-1])
                except Exception:
                    traceback.print_exc(limit=-4)
                    torch.cuda.synchronize()
        del eight, half
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(report))
    return int(any(not case["us"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
