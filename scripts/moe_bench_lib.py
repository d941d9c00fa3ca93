"""Pieces of bench_moe.py: problems, the layer, its peers, checks against float32, and timing by graph replay."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.language.extra.cuda import globaltimer, smid

from epmoe.gpu_timer import Timer, read_kernel, replay
from epmoe.ops.combine import weighted_sum_triton
from epmoe.ops.experts import ExpertOptions, expert_mlp_triton, expert_sum, split_gate_up
from epmoe.ops.moe_index import build_index_triton
from epmoe.ops.router import RouterRule, route_triton
from epmoe.ops.tiles import choose

RULE = RouterRule(renormalize=True)
DEFAULT = ExpertOptions()


@dataclass(frozen=True)
class Shape:
    name: str
    experts: int
    top_k: int
    hidden: int
    features: int

    def flops(self, tokens: int) -> float:
        return 6.0 * tokens * self.top_k * self.hidden * self.features

    def bytes(self, tokens: int, active: int) -> float:
        return 6.0 * active * self.hidden * self.features + 4.0 * tokens * self.hidden


SHAPES = (
    Shape("mixtral", 8, 2, 4096, 14336),
    Shape("qwen3", 128, 8, 2048, 768),
    Shape("dsv3-slice", 32, 8, 7168, 2048),
)


class Weights(NamedTuple):
    gate_up: torch.Tensor
    down: torch.Tensor


def make_weights(shape: Shape, dtype=torch.bfloat16) -> Weights:
    """Normal weights of variance 1 / fan-in; any row order of gate_up is as good as another for random weights."""
    e, d, f = shape.experts, shape.hidden, shape.features
    gate_up = torch.empty(e, 2 * f, d, device="cuda", dtype=dtype)
    down = torch.empty(e, d, f, device="cuda", dtype=dtype)
    for i in range(e):
        gate_up[i] = torch.randn(2 * f, d, device="cuda") * d**-0.5
        down[i] = torch.randn(d, f, device="cuda") * f**-0.5
    return Weights(gate_up, down)


def make_inputs(shape: Shape, tokens: int, routing: str, dtype=torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden rows and router logits: independent normal, or Gumbel top-k with p ~ 1 / rank over a random order."""
    x_TD = torch.randn(tokens, shape.hidden, device="cuda", dtype=dtype)
    if routing == "uniform":
        return x_TD, torch.randn(tokens, shape.experts, device="cuda", dtype=torch.float32)
    rank_E = torch.randperm(shape.experts, device="cuda") + 1.0
    gumbel = -torch.log(-torch.log(torch.rand(tokens, shape.experts, device="cuda").clamp(1e-9, 1 - 1e-7)))
    return x_TD, gumbel - rank_E.log()


def layer(x_TD, logits_TE, weights: Weights, shape: Shape, choice, exact=False, options=DEFAULT):
    """The whole layer on one rank, logits to combined output."""
    weight_TK, expert_TK = route_triton(logits_TE, RULE, shape.top_k)
    index = build_index_triton(expert_TK, shape.experts, choice.rows, choice.tail)
    if exact:
        rows = expert_mlp_triton(x_TD, index, weights, options, choice)
        return weighted_sum_triton(rows, index.pos_RK, weight_TK)
    return expert_sum(x_TD, index, weights, weight_TK, options, choice)


def layer_deterministic(x_TD, logits_TE, weights: Weights, shape: Shape):
    """The layer with its one pinned tile, whatever the batch."""
    choice = choose(x_TD, x_TD.shape[0] * shape.top_k, weights, deterministic=True)
    return layer(x_TD, logits_TE, weights, shape, choice, True, ExpertOptions(deterministic=True))


@triton.jit
def _silu_mul_kernel(h_ptr, out_ptr, F, BLOCK: tl.constexpr):
    row, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = h_ptr + row * 2 * F + f // 64 * 128 + f % 64
    gate = tl.load(source, mask=f < F).to(tl.float32)
    up = tl.load(source + 64, mask=f < F).to(tl.float32)
    tl.store(out_ptr + row * F + f, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=f < F)


def peer_grouped_mm(x_TD, logits_TE, weights: Weights, shape: Shape):
    """torch grouped_mm with this project's router, index, activation and sum kernels around it."""
    weight_TK, expert_TK = route_triton(logits_TE, RULE, shape.top_k)
    index = build_index_triton(expert_TK, shape.experts)
    end_L = index.offset_L1[1:]
    h_M2F = functional.grouped_mm(x_TD[index.row_M], weights.gate_up.transpose(1, 2), offs=end_L)
    act_MF = h_M2F.new_empty(h_M2F.shape[0], shape.features)
    _silu_mul_kernel[(h_M2F.shape[0], triton.cdiv(shape.features, 1024))](h_M2F, act_MF, shape.features, BLOCK=1024)
    rows = functional.grouped_mm(act_MF, weights.down.transpose(1, 2), offs=end_L)
    return weighted_sum_triton(rows, index.pos_RK, weight_TK)


def transformers_peers(weights: Weights, shape: Shape) -> dict:
    """transformers' experts implementations over the same weights (their gate and up order differs, not the work)."""
    from transformers.integrations import moe

    config = SimpleNamespace(hidden_act="silu", num_local_experts=shape.experts)
    module = SimpleNamespace(
        gate_up_proj=weights.gate_up,
        down_proj=weights.down,
        num_experts=shape.experts,
        act_fn=functional.silu,
        config=config,
        is_transposed=False,
        has_bias=False,
        has_gate=True,
        is_concatenated=True,
        has_post_expert_norm=False,
        _is_expert_parallel=False,
    )
    module._apply_gate = lambda h: functional.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]

    def runner(forward):
        def run(x_TD, logits_TE):
            probs = torch.softmax(logits_TE, -1)
            weight_TK, expert_TK = probs.topk(shape.top_k, -1)
            return forward(module, x_TD, expert_TK, (weight_TK / weight_TK.sum(-1, keepdim=True)).to(x_TD.dtype))

        return run

    names = ("grouped_mm_experts_forward", "batched_mm_experts_forward")
    return {f"hf-{n.split('_')[0]}": runner(getattr(moe, n)) for n in names if hasattr(moe, n)}


def reference(x_TD, logits_TE, weights: Weights, shape: Shape, token_S: torch.Tensor) -> torch.Tensor:
    """Float32 loop over the experts of the sampled tokens."""
    probs = torch.softmax(logits_TE[token_S].float(), -1)
    weight_SK, expert_SK = probs.topk(shape.top_k, -1)
    weight_SK = weight_SK / weight_SK.sum(-1, keepdim=True)
    y_SD = torch.zeros(len(token_S), shape.hidden, device=x_TD.device)
    for expert in expert_SK.unique().tolist():
        at, choice = (expert_SK == expert).nonzero(as_tuple=True)
        gate, up = split_gate_up(x_TD[token_S[at]].float() @ weights.gate_up[expert].float().T)
        out = (functional.silu(gate) * up) @ weights.down[expert].float().T
        y_SD.index_add_(0, at, out * weight_SK[at, choice, None])
    return y_SD


def frobenius(out: torch.Tensor, want: torch.Tensor) -> float:
    return ((out.float() - want).norm() / want.norm()).item()


@triton.jit
def _clock_kernel(out_ptr):
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    at = out_ptr + tl.program_id(0) * 3
    tl.store(at, smid().to(tl.int64))
    tl.store(at + 1, cycles)
    tl.store(at + 2, globaltimer())


def clock_ghz(timer: Timer, calls: list) -> float:
    """Mean SM clock under ``calls`` for 10 ms, after 15 ms of them: cycles over nanoseconds of the median SM."""
    graph = timer.capture(calls, True)
    once = max(replay(graph, 0, 0), 1.0)
    marks = []
    for us in (15e3, 10e3):
        for _ in range(int(us / once) + 1):
            graph.replay()
        marks.append(clock_mark())
    return ghz_between(*marks)


def clock_mark() -> torch.Tensor:
    """SM, its cycles and nanoseconds, int64 ``[1024, 3]``: read in stream order by a kernel of 1024 programs."""
    mark = torch.zeros(1024, 3, dtype=torch.int64, device="cuda")
    _clock_kernel[(1024,)](mark, num_warps=1)
    return mark


def ghz_between(*marks: torch.Tensor) -> float:
    """Mean clock of the median SM from one mark to another; waits for them."""
    first, last = ({sm: (cycles, ns) for sm, cycles, ns in mark.tolist()} for mark in marks)
    clocks = sorted((last[sm][0] - first[sm][0]) / (last[sm][1] - first[sm][1]) for sm in first.keys() & last.keys())
    return clocks[len(clocks) // 2]


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@lru_cache
def matrix_product() -> Callable:
    """The matrix ceiling: a bf16 product of 8192^3 on random operands."""
    a, b, out = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return partial(torch.mm, a, b, out=out)


def ceilings(timer: Timer) -> dict:
    """Matrix product (bf16, 8192^3, random), copy (bytes read + written), and a Triton streaming read."""
    big = torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16).normal_()
    other = torch.empty_like(big)
    read = lambda: read_kernel[(132 * 16,)](  # noqa: E731
        big.view(torch.float32), timer.buffer, big.numel() // 2, BLOCK=4096, num_warps=8
    )
    copy = lambda: _copy_kernel[(big.numel() // 8192,)](big, other, big.numel(), BLOCK=8192)  # noqa: E731
    functions = {"mm": [matrix_product()], "copy": [copy], "read": [read]}
    us = timer.compare(functions, rounds=3, copies=5, flush=False)
    graph = timer.capture(functions["mm"] * 5, False)
    torch.cuda.synchronize()
    time.sleep(0.3)
    burst, long = replay(graph, 0, 0) / 5, replay(graph, 300e3, 100e3) / 5
    return {
        "tflops": 2 * 8192**3 / us["mm"] / 1e6,
        "matrix_ghz": clock_ghz(timer, functions["mm"]),
        "tflops_burst": 2 * 8192**3 / burst / 1e6,
        "tflops_sustained": 2 * 8192**3 / long / 1e6,
        "copy_tbs": 2 * big.numel() * 2 / us["copy"] / 1e6,
        "read_tbs": big.numel() * 2 / us["read"] / 1e6,
    }
