"""Checks of bench_moe.py: candidates compiled side by side, each against float32, and batch invariance."""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict
from multiprocessing import get_context

import torch

from epmoe.ops.combine import weighted_sum_triton
from epmoe.ops.down_gemm import down_triton
from epmoe.ops.experts import ExpertOptions
from epmoe.ops.experts_sparse import vector_down, vector_gate_up
from epmoe.ops.gate_up_gemm import gate_up_triton
from epmoe.ops.moe_index import build_index_triton
from epmoe.ops.router import route_triton
from epmoe.ops.tile_candidates import CANDIDATES, VECTORS
from epmoe.ops.tiles import FORMS, PINNED, PINNED_ROWS, TAIL, Choice, choose
from scripts import moe_bench_lib as lib

LIMIT = 1e-2


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
        rows = 16 if kind == "vector" else what[0]
        tail = TAIL if kind == "tail" else 0
        index = build_index_triton(expert_TK + torch.arange(2, device="cuda", dtype=torch.int32), 16, rows, tail)
        if kind != "vector":
            down_triton(gate_up_triton(x_TD, index, weights, what[1], "silu"), index, weights, what[1])
        else:
            act = vector_gate_up(x_TD, index, weights, "silu", what)
            vector_down(act, index, weights, None, what)
            vector_down(act, index, weights, torch.ones(1, 2, device="cuda"), what)
        torch.cuda.synchronize()
    except Exception:
        return f"{task}: {traceback.format_exc(limit=-2)}"
    return ""


def compile_all(shapes: list, untuned: bool) -> tuple[list, list]:
    """Compile and try every candidate side by side: failures, and the tasks not done after a minute (hung).

    ``untuned``: only what the heuristic may choose.
    """
    tiles = {(form.rows, form.tiles) for form in FORMS} if untuned else CANDIDATES
    tasks = [("small", s) for s in shapes] + [("tile", c) for c in (*tiles, (PINNED_ROWS, PINNED))]
    tasks += [("tail", (form.rows, form.tiles)) for form in FORMS if form.tail]
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


def check_cases(shape: lib.Shape, weights: lib.Weights, hung: list) -> list[dict]:
    """Every candidate against float32, in routings with empty slots and one slot that takes all; then bitwise."""
    cases = []
    for rows, config in CANDIDATES:
        if (rows, config) in hung:
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
