"""Measures the tiles of the MoE layer's grouped GEMMs on the GPU at hand, for one shape and number of tokens.

Each GEMM's candidates are timed alone; the best of the likeliest block sizes, and what the heuristic would take, are
then timed as a whole: experts and weighted sum.  A candidate that fails, or whose result is off, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from epmoe.gpu_timer import Timer
from epmoe.model.weights import ExpertWeights
from epmoe.ops.down_gemm import down_triton
from epmoe.ops.experts import ExpertOptions, expert_sum
from epmoe.ops.experts_sparse import vector_down, vector_gate_up
from epmoe.ops.gate_up_gemm import gate_up_triton
from epmoe.ops.moe_index import MoEIndex, build_index_triton, with_block_rows
from epmoe.ops.tile_candidates import VECTORS, candidates
from epmoe.ops.tiles import Choice, choose
from epmoe.ops.tuned import TunedCase

LIMIT = 1e-2  # relative Frobenius distance from the heuristic's result
FINALISTS = 3
CLEARLY = 0.99  # the heuristic's tiles stay unless others take less than this share of their time
COMPILERS = 8
OPTIONS = ExpertOptions()


@dataclass(frozen=True)
class Shape:
    """A layer on one rank: ``experts`` slots, ``top_k`` local choices of a row, hidden and feature sizes."""

    experts: int
    top_k: int
    hidden: int
    features: int

    def __str__(self) -> str:
        return f"{self.experts},{self.top_k},{self.hidden},{self.features}"


@dataclass(frozen=True)
class Problem:
    """Random weights, and rows with uniform choices."""

    shape: Shape
    weights: ExpertWeights
    x_TD: torch.Tensor
    slot_TK: torch.Tensor
    mix_TK: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.x_TD.shape[0]

    def index(self, rows: int) -> MoEIndex:
        return build_index_triton(self.slot_TK, self.shape.experts, rows)

    def whole(self, choice: Choice) -> torch.Tensor:
        return expert_sum(self.x_TD, self.index(choice.rows), self.weights, self.mix_TK, OPTIONS, choice)


def random_weights(shape: Shape, dtype: torch.dtype) -> ExpertWeights:
    """Normal weights of variance 1 / fan-in on the current GPU."""
    sizes = (shape.experts, 2 * shape.features, shape.hidden), (shape.experts, shape.hidden, shape.features)
    gate_up, down = (torch.empty(size, dtype=dtype, device="cuda") for size in sizes)
    for weight in (gate_up, down):
        for matrix in weight:
            matrix.normal_(std=matrix.shape[1] ** -0.5)
    return ExpertWeights(gate_up, down)


def problem(shape: Shape, weights: ExpertWeights, tokens: int) -> Problem:
    x_TD = torch.randn(tokens, shape.hidden, device="cuda").to(weights.down.dtype)
    mix_TK, slot_TK = torch.randn(tokens, shape.experts, device="cuda").softmax(1).topk(shape.top_k, 1)
    return Problem(shape, weights, x_TD, slot_TK.int(), mix_TK)


def tune(problem: Problem, timer: Timer, say: Callable[[str], None] = lambda line: None) -> TunedCase:
    """The fastest tiles for one problem; ``say`` hears of candidates that were left out."""
    shape = problem.shape
    heuristic = choose(problem.x_TD, problem.slot_TK.numel(), problem.weights)
    finalists = _sound(problem, heuristic, _finalists(problem, heuristic, timer, say), say)
    calls = {choice: [partial(problem.whole, choice)] for choice in (heuristic, *finalists)}
    us = timer.compare(calls, 3, _copies(problem))
    best = min(us, key=us.get)
    best = best if us[best] < CLEARLY * us[heuristic] else heuristic
    return TunedCase(
        device=torch.cuda.get_device_name(),
        experts=shape.experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        features=shape.features,
        dtype=str(problem.x_TD.dtype).removeprefix("torch."),
        tokens=problem.tokens,
        tuned_us=round(us[best], 2),
        heuristic_us=round(us[heuristic], 2),
        choice=best,
    )


def _copies(problem: Problem) -> int:
    return 4 if problem.tokens <= 1024 else 2


def _finalists(problem: Problem, heuristic: Choice, timer: Timer, say: Callable) -> list[Choice]:
    if problem.tokens == 1:
        return _vector_finalists(problem, heuristic, timer, say)
    act_MF = problem.x_TD.new_empty((problem.slot_TK.numel(), problem.shape.features)).normal_()
    calls: dict[tuple, dict] = {}
    for rows, config in candidates(problem.slot_TK.numel(), problem.shape.experts):
        index = with_block_rows(problem.index(rows), rows)
        calls[rows, config] = {
            "gate_up": partial(gate_up_triton, problem.x_TD, index, problem.weights, config, OPTIONS.act),
            "down": partial(down_triton, act_MF, index, problem.weights, config),
        }
    us = _time_each(calls, timer, _copies(problem), say)
    choices = []
    for rows in {rows for rows, _ in us}:
        best = {
            name: min((each[name], n, config) for n, ((r, config), each) in enumerate(us.items()) if r == rows)
            for name in ("gate_up", "down")
        }
        total = best["gate_up"][0] + best["down"][0]
        choices.append((total, replace(heuristic, rows=rows, gate_up=best["gate_up"][2], down=best["down"][2])))
    choices.sort(key=lambda pair: pair[0])
    return [choice for _, choice in choices[:FINALISTS]]


def _vector_finalists(problem: Problem, heuristic: Choice, timer: Timer, say: Callable) -> list[Choice]:
    index = problem.index(heuristic.rows)
    act_KF = problem.x_TD.new_empty((problem.shape.top_k, problem.shape.features)).normal_()
    calls = {
        tile: {
            "gate_up": partial(vector_gate_up, problem.x_TD, index, problem.weights, OPTIONS.act, tile),
            "down": partial(vector_down, act_KF, index, problem.weights, problem.mix_TK, tile),
        }
        for tile in VECTORS
    }
    us = _time_each(calls, timer, _copies(problem), say)
    if not us:
        return []
    pick = tuple(min(us, key=lambda tile: us[tile][name]) for name in ("gate_up", "down"))
    return [replace(heuristic, vector=pick)]


def _time_each(calls: dict, timer: Timer, copies: int, say: Callable) -> dict:
    """Candidate -> {"gate_up": us, "down": us}; those that fail are left out."""
    us = {}
    with ThreadPoolExecutor(COMPILERS) as pool:  # the compiler releases the interpreter's lock
        errors = dict(zip(calls, pool.map(_try, calls.values())))
    torch.cuda.synchronize()
    for candidate, both in calls.items():
        if errors[candidate]:
            say(f"left out {candidate}: {errors[candidate]}")
        else:
            us[candidate] = timer.compare({name: [call] for name, call in both.items()}, 1, copies)
    return us


def _try(calls: dict) -> str:
    torch.cuda.synchronize()  # makes the device's context this thread's too
    try:
        for call in calls.values():
            call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _sound(problem: Problem, heuristic: Choice, choices: Iterable[Choice], say: Callable) -> list[Choice]:
    """The choices whose results are those of the heuristic's tiles, to rounding."""
    want = problem.whole(heuristic).float()
    kept = []
    for choice in choices:
        apart = ((problem.whole(choice).float() - want).norm() / want.norm()).item()
        if apart < LIMIT:
            kept.append(choice)
        else:
            say(f"left out {choice}: its result is off by {apart:.1e}")
    return kept
