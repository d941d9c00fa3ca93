"""Measures the tiles of the MoE layer's grouped GEMMs on the GPU at hand, for one shape and number of tokens.

Each GEMM's candidates are timed alone; the best of the likeliest block sizes, and what the heuristic would take, are
then timed as a whole: index, experts and weighted sum.  A candidate that fails, or whose result is off, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from epmoe.gpu_timer import Timer
from epmoe.model.weights import ExpertWeights
from epmoe.ops.combine import weighted_sum
from epmoe.ops.down_gemm import down_triton
from epmoe.ops.experts import ExpertOptions, expert_sum
from epmoe.ops.experts_fp8 import choose_fp8, down_fp8_triton, expert_mlp_fp8_triton, gate_up_fp8_triton
from epmoe.ops.experts_sparse import vector_down, vector_gate_up
from epmoe.ops.fp8 import FP8, scale_shape
from epmoe.ops.gate_up_gemm import gate_up_triton
from epmoe.ops.grouped_gemm import TileConfig
from epmoe.ops.moe_index import MoEIndex, build_index_triton
from epmoe.ops.tile_candidates import VECTORS, candidates, candidates_fp8
from epmoe.ops.tiles import Choice, choose
from epmoe.ops.tuned import TunedCase
from placement.errors import UserError

LIMIT = 1e-2  # relative Frobenius distance from the heuristic's result
FINALISTS = 3
FINAL = 0.7  # share of a case's work that comes before the last comparison
CLEARLY = 0.99  # the heuristic's tiles stay unless others take less than this share of their time
COMPILERS = 8
OPTIONS = ExpertOptions()
GATE_UP, DOWN = "gate_up", "down"


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

    @property
    def pairs(self) -> int:
        return self.slot_TK.numel()

    def index(self, rows: int, tail: int = 0) -> MoEIndex:
        return build_index_triton(self.slot_TK, self.shape.experts, rows, tail)

    @property
    def kernels(self) -> Kernels:
        return EIGHT_BIT if self.weights.down.dtype == FP8 else HALF


@dataclass(frozen=True)
class Kernels:
    """The kernels of one kind of weights.  ``gate_up`` makes what ``down`` takes; both take an index and tiles."""

    heuristic: Callable[[Problem], Choice]
    candidates: Callable[[int, int], list[tuple[int, int, TileConfig]]]
    gate_up: Callable[[Problem, MoEIndex, TileConfig], Any]
    down: Callable[[Problem, MoEIndex, TileConfig, Any], torch.Tensor]
    whole: Callable[[Problem, Choice], torch.Tensor]


def _whole_half(problem: Problem, choice: Choice) -> torch.Tensor:
    index = problem.index(choice.rows, choice.tail)
    return expert_sum(problem.x_TD, index, problem.weights, problem.mix_TK, OPTIONS, choice)


def _whole_fp8(problem: Problem, choice: Choice) -> torch.Tensor:
    index = problem.index(choice.rows)
    out_MD = expert_mlp_fp8_triton(problem.x_TD, index, problem.weights, OPTIONS, choice)
    return weighted_sum(out_MD, index.pos_RK, problem.mix_TK)


HALF = Kernels(
    heuristic=lambda p: choose(p.x_TD, p.pairs, p.weights),
    candidates=candidates,
    gate_up=lambda p, index, tiles: gate_up_triton(p.x_TD, index, p.weights, tiles, OPTIONS.act),
    down=lambda p, index, tiles, act: down_triton(act, index, p.weights, tiles),
    whole=_whole_half,
)
EIGHT_BIT = Kernels(
    heuristic=lambda p: choose_fp8(p.x_TD, p.pairs, p.weights),
    candidates=candidates_fp8,
    gate_up=lambda p, index, tiles: gate_up_fp8_triton(p.x_TD, index, p.weights, tiles, OPTIONS.act),
    down=lambda p, index, tiles, act: down_fp8_triton(act, index, p.weights, tiles, 0, p.x_TD.dtype),
    whole=_whole_fp8,
)


def random_weights(shape: Shape, dtype: torch.dtype) -> ExpertWeights:
    """Normal weights of variance 1 / fan-in on the current GPU; 8-bit ones with scales."""
    L, D, F = shape.experts, shape.hidden, shape.features
    gate_up, down = (torch.empty(size, dtype=dtype, device="cuda") for size in ((L, 2 * F, D), (L, D, F)))
    scales = []
    for weight, sides in ((gate_up, (2,)), (down, ())):
        std = weight.shape[2] ** -0.5
        for matrix in weight:
            normal = torch.randn(matrix.shape, device="cuda")
            matrix.copy_((normal * 100).clamp(-448, 448) if dtype == FP8 else normal * std)  # larger: NaN
        blocks = scale_shape(weight.shape[1] // (2 if sides else 1), weight.shape[2])
        scales.append(torch.full((L, *sides, *blocks), std / 100, device="cuda"))
    return ExpertWeights(gate_up, down, *scales) if dtype == FP8 else ExpertWeights(gate_up, down)


def problem(shape: Shape, weights: ExpertWeights, tokens: int) -> Problem:
    dtype = torch.bfloat16 if weights.down.dtype == FP8 else weights.down.dtype
    x_TD = torch.randn(tokens, shape.hidden, device="cuda").to(dtype)
    mix_TK, slot_TK = torch.randn(tokens, shape.experts, device="cuda").softmax(1).topk(shape.top_k, 1)
    return Problem(shape, weights, x_TD, slot_TK.int(), mix_TK)


@dataclass(frozen=True)
class Listener:
    """Hears of a case as it is measured: candidates left out, and what is being done with the share already done."""

    say: Callable[[str], None] = lambda line: None
    step: Callable[[str, float], None] = lambda what, share: None


def tune(problem: Problem, timer: Timer, listener: Listener = Listener()) -> TunedCase:
    """The fastest tiles for one problem."""
    shape, whole = problem.shape, problem.kernels.whole
    heuristic = problem.kernels.heuristic(problem)
    finalists = _sound(problem, heuristic, _finalists(problem, heuristic, timer, listener), listener)
    listener.step(f"comparing the {len(finalists)} best with the heuristic", FINAL)
    calls = {choice: [partial(whole, problem, choice)] for choice in (heuristic, *finalists)}
    us = timer.compare(calls, 3, _copies(problem))
    best = clearly_fastest(us, heuristic)
    return TunedCase(
        device=torch.cuda.get_device_name(),
        experts=shape.experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        features=shape.features,
        dtype=str(problem.weights.down.dtype).removeprefix("torch."),
        tokens=problem.tokens,
        tuned_us=round(us[best], 2),
        heuristic_us=round(us[heuristic], 2),
        choice=best,
    )


def _copies(problem: Problem) -> int:
    return 4 if problem.tokens <= 1024 else 2


def clearly_fastest(us: dict[Choice, float], heuristic: Choice) -> Choice:
    """What took the fewest microseconds, or the heuristic's tiles where that wins nothing to speak of."""
    if min(us.values()) <= 0:
        raise UserError(
            "a layer took no longer than the read ahead of it that empties the cache: other work is on this GPU; tune"
            " where the GPU has nothing else to do"
        )
    best = min(us, key=us.get)
    return best if us[best] < CLEARLY * us[heuristic] else heuristic


def _finalists(problem: Problem, heuristic: Choice, timer: Timer, listener: Listener) -> list[Choice]:
    """The best tiles of the block sizes whose two GEMMs take least together."""
    if heuristic.vector:
        return _vector_finalists(problem, heuristic, timer, listener)
    kernels = problem.kernels
    act = kernels.gate_up(problem, problem.index(heuristic.rows, heuristic.tail), heuristic.gate_up)
    calls: dict[tuple, dict] = {}
    for rows, tail, tiles in kernels.candidates(problem.pairs, problem.shape.experts):
        index = problem.index(rows, tail)
        calls[rows, tail, tiles] = {
            GATE_UP: partial(kernels.gate_up, problem, index, tiles),
            DOWN: partial(kernels.down, problem, index, tiles, act),
        }
    best: dict[tuple[int, int], dict] = {}
    for (*blocks, tiles), us in time_each(calls, timer, _copies(problem), listener).items():
        mine = best.setdefault(tuple(blocks), {})
        for part, each in us.items():
            mine[part] = min(mine.get(part, (each, tiles)), (each, tiles), key=lambda pair: pair[0])
    both = [(blocks, mine[GATE_UP], mine[DOWN]) for blocks, mine in best.items()]
    both.sort(key=lambda each: each[1][0] + each[2][0])
    return [
        replace(heuristic, rows=rows, tail=tail, gate_up=one[1], down=two[1])
        for (rows, tail), one, two in both[:FINALISTS]
    ]


def _vector_finalists(problem: Problem, heuristic: Choice, timer: Timer, listener: Listener) -> list[Choice]:
    x_1D, weights, index = problem.x_TD, problem.weights, problem.index(heuristic.rows)
    act_KF = vector_gate_up(x_1D, index, weights, OPTIONS.act, heuristic.vector[0])
    calls = {
        tile: {
            GATE_UP: partial(vector_gate_up, x_1D, index, weights, OPTIONS.act, tile),
            DOWN: partial(vector_down, act_KF, index, weights, problem.mix_TK, tile),
        }
        for tile in VECTORS
    }
    us = time_each(calls, timer, _copies(problem), listener)
    if not us:
        return []
    pick = tuple(min(us, key=lambda tile: us[tile][name]) for name in (GATE_UP, DOWN))
    return [replace(heuristic, vector=pick)]


def time_each(calls: dict, timer: Timer, copies: int, listener: Listener = Listener()) -> dict:
    """Candidate -> microseconds of its parts; those that fail are left out."""
    us = {}
    listener.step(f"compiling {len(calls)} candidates", 0.0)
    with ThreadPoolExecutor(COMPILERS) as pool:  # the compiler releases the interpreter's lock
        errors = dict(zip(calls, pool.map(_try, calls.values())))
    torch.cuda.synchronize()
    for number, (candidate, both) in enumerate(calls.items()):
        if errors[candidate]:
            listener.say(f"left out {candidate}: {errors[candidate]}")
            continue
        listener.step(f"timing candidate {number + 1} of {len(calls)}", FINAL * (number + 1) / (len(calls) + 1))
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


def _sound(problem: Problem, heuristic: Choice, choices: Iterable[Choice], listener: Listener) -> list[Choice]:
    """The choices whose results are those of the heuristic's tiles, to rounding."""
    whole = problem.kernels.whole
    want = whole(problem, heuristic).float()
    kept = []
    for choice in choices:
        apart = ((whole(problem, choice).float() - want).norm() / want.norm()).item()
        if apart < LIMIT:
            kept.append(choice)
        else:
            listener.say(f"left out {choice}: its result is off by {apart:.1e}")
    return kept
