"""The experts' MLP over rows in expert order: ``down(act(gate(x)) * up(x))`` per pair.

Weights of a layer are ``gate_up [L, 2F, D]``, gate and up rows interleaved in blocks of 64, and ``down [L, D, F]``:
both are contiguous along the reduction, and a tile of 128 rows of ``gate_up`` holds gate and up of the same features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from epmoe.ops.activation import silu
from epmoe.ops.combine import weighted_sum
from epmoe.ops.down_gemm import down_triton
from epmoe.ops.experts_sparse import choices_of_one, vector_down, vector_gate_up
from epmoe.ops.gate_up_gemm import gate_up_triton
from epmoe.ops.linear import TILE_ROWS
from epmoe.ops.moe_index import MoEIndex, with_block_rows
from epmoe.ops.tiles import Choice, choose
from epmoe.ops.tuned import Tuned

GATE_BLOCK = 64
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


class ExpertWeights(Protocol):
    """What the experts read of a layer's weights."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class ExpertOptions:
    """How to run the experts.

    ``num_sms``: how many SMs persistent kernels may take, 0 = all.  ``deterministic``: a row's bits are independent of
    the other rows (tiles of exactly 16 rows on CPU, one pinned tile on GPU).
    ``tuned``: measured tiles, taken where one is near, except in deterministic mode.  ``likely``: how many pairs to
    expect where the index could hold many more (tiles are chosen for as many); 0: as many as it can hold.
    """

    act: str = "silu"
    num_sms: int = 0
    deterministic: bool = False
    tuned: Tuned | None = None
    likely: int = 0

    def measured(self, rows_RD: torch.Tensor, pairs: int, weights: ExpertWeights) -> Choice | None:
        """Tuned tiles for ``pairs`` pairs (an upper bound will do), if there are any near."""
        if self.tuned is None or self.deterministic:
            return None
        return self.tuned.choice(rows_RD, pairs, weights)

    def tiles(self, rows_RD: torch.Tensor, pairs: int, weights: ExpertWeights, heuristic: Callable) -> Choice:
        """Tuned tiles or the heuristic's (`choose` or its like) for at most ``pairs`` pairs."""
        expected = min(self.likely or pairs, pairs)
        return self.measured(rows_RD, expected, weights) or heuristic(rows_RD, expected, weights, self.deterministic)

    def __post_init__(self):
        if self.act not in ACTIVATIONS:
            raise ValueError(f"expert activation {self.act!r} is none of {', '.join(ACTIVATIONS)}")


def interleave_gate_up(gate_FD: torch.Tensor, up_FD: torch.Tensor) -> torch.Tensor:
    """``[..., F, D]`` twice -> ``[..., 2F, D]``: rows 64b.. of gate, then those of up; the last run may be short."""
    runs = []
    for start in range(0, gate_FD.shape[-2], GATE_BLOCK):
        runs += [gate_FD[..., start : start + GATE_BLOCK, :], up_FD[..., start : start + GATE_BLOCK, :]]
    return torch.cat(runs, dim=-2)


def split_gate_up(h_M2F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `interleave_gate_up` on the last dimension: ``[M, 2F]`` -> gate, up ``[M, F]``."""
    rows, width = h_M2F.shape
    tail = width % (2 * GATE_BLOCK)
    blocks = h_M2F[:, : width - tail].unflatten(1, (-1, 2, GATE_BLOCK))
    gate, up = blocks[:, :, 0].reshape(rows, -1), blocks[:, :, 1].reshape(rows, -1)
    if tail:
        gate_tail, up_tail = h_M2F[:, width - tail :].chunk(2, dim=1)
        gate, up = torch.cat([gate, gate_tail], dim=1), torch.cat([up, up_tail], dim=1)
    return gate, up


def activate_ref(h_M2F: torch.Tensor, act: str, *, tiled: bool = False) -> torch.Tensor:
    """``act(gate) * up`` of interleaved ``[M, 2F]`` -> ``[M, F]``."""
    gate, up = split_gate_up(h_M2F)
    if act == "silu":
        return silu(gate, tiled=tiled).mul_(up)
    if act == "relu":
        return functional.relu(gate).mul_(up)
    return functional.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none").mul_(up)


def expert_mlp_ref(
    rows_RD: torch.Tensor,
    index: MoEIndex,
    weights: ExpertWeights,
    options: ExpertOptions = ExpertOptions(),
) -> torch.Tensor:
    """Unweighted expert outputs ``out_MD`` in pair order, rounded to the model dtype.

    ``weights`` has ``gate_up [L, 2F, D]`` and ``down [L, D, F]``.  Rows from ``index.offset_L1[L]`` on are undefined.
    The activated values between the two products are rounded to the model dtype too.

    Three CPU forms, chosen by size: a loop over the active slots, one grouped product, and (deterministic) tiles of
    exactly 16 rows.
    """
    bounds = index.offset_L1.tolist()
    pairs_MD = rows_RD.index_select(0, index.row_M[: bounds[-1]])
    out_MD = rows_RD.new_empty(index.row_M.shape[0], rows_RD.shape[1])
    if not bounds[-1]:
        return out_MD
    runs = [(slot, a, b) for slot, (a, b) in enumerate(zip(bounds, bounds[1:])) if a < b]
    gate_up_L2FD, down_LDF = weights.gate_up, weights.down
    wide = _wide_dtype(rows_RD.dtype)
    if options.deterministic:
        _tiled_mlp(pairs_MD, runs, (gate_up_L2FD, down_LDF), (options.act, wide), out_MD)
    elif len(runs) * 3 >= len(bounds) and _grouped_mm_takes(gate_up_L2FD, down_LDF, wide):
        end_L = index.offset_L1[1:]
        h_M2F = functional.grouped_mm(pairs_MD.to(wide), gate_up_L2FD.to(wide).transpose(1, 2), offs=end_L)
        act_MF = activate_ref(h_M2F, options.act).to(rows_RD.dtype).to(wide)
        out_MD[: bounds[-1]] = functional.grouped_mm(act_MF, down_LDF.to(wide).transpose(1, 2), offs=end_L)
    else:
        h_M2F = _loop_mm(pairs_MD, runs, gate_up_L2FD, wide)
        act_MF = activate_ref(h_M2F, options.act).to(rows_RD.dtype)
        out_MD[: bounds[-1]] = _loop_mm(act_MF, runs, down_LDF, wide)
    return out_MD


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the CPU products: without AVX-512 a half-precision product runs 3 to 7 times slower than float32."""
    if dtype == torch.float32 or torch.backends.cpu.get_cpu_capability() == "AVX512":
        return dtype
    return torch.float32


def _grouped_mm_takes(gate_up_L2FD: torch.Tensor, down_LDF: torch.Tensor, dtype: torch.dtype) -> bool:
    """`torch.nn.functional.grouped_mm` wants every reduction and output width to be a multiple of 16 bytes."""
    lanes = 16 // dtype.itemsize
    return gate_up_L2FD.shape[2] % lanes == 0 and down_LDF.shape[2] % lanes == 0


def _loop_mm(x_MC: torch.Tensor, runs: list, weight_LOC: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    out_MO = torch.empty(x_MC.shape[0], weight_LOC.shape[1], dtype=wide)
    x_MC = x_MC.to(wide)
    for slot, start, stop in runs:
        torch.mm(x_MC[start:stop], weight_LOC[slot].to(wide).t(), out=out_MO[start:stop])
    return out_MO


def _tiled_mlp(pairs_MD: torch.Tensor, runs: list, weights: tuple, form: tuple, out_MD: torch.Tensor) -> None:
    """Every product has exactly 16 rows, the missing ones zero: BLAS then does the same arithmetic for each row."""
    act, wide = form
    for slot, start, stop in runs:
        gate_up_2FD, down_DF = (weight[slot].to(wide) for weight in weights)
        for first in range(start, stop, TILE_ROWS):
            rows = min(TILE_ROWS, stop - first)
            tile = functional.pad(pairs_MD[first : first + rows], (0, 0, 0, TILE_ROWS - rows)).to(wide)
            act_tile = activate_ref(functional.linear(tile, gate_up_2FD), act, tiled=True).to(out_MD.dtype).to(wide)
            out_MD[first : first + rows] = functional.linear(act_tile, down_DF)[:rows]


def expert_mlp_triton(
    rows_RD: torch.Tensor,
    index: MoEIndex,
    weights: ExpertWeights,
    options: ExpertOptions = ExpertOptions(),
    choice: Choice | None = None,
) -> torch.Tensor:
    """`expert_mlp_ref` in two kernels, without a host synchronisation; ``choice`` overrides the tiles."""
    pairs = index.row_M.numel()
    if not pairs:
        return torch.empty_like(rows_RD[:0])
    choice = choice or options.tiles(rows_RD, pairs, weights, choose)
    if choice.vector:
        act_MF = vector_gate_up(rows_RD, index, weights, options.act, choice.vector[0])
        return vector_down(act_MF, index, weights, None, choice.vector[1])
    index = with_block_rows(index, choice.rows, choice.tail)
    act_MF = gate_up_triton(rows_RD, index, weights, choice.gate_up, options.act, options.num_sms)
    return down_triton(act_MF, index, weights, choice.down, options.num_sms)


def expert_mlp(
    rows_RD: torch.Tensor, index: MoEIndex, weights: ExpertWeights, options: ExpertOptions = ExpertOptions()
) -> torch.Tensor:
    """`expert_mlp_ref`; the kernels on CUDA."""
    return (expert_mlp_triton if rows_RD.is_cuda else expert_mlp_ref)(rows_RD, index, weights, options)


def expert_sum(
    rows_RD: torch.Tensor,
    index: MoEIndex,
    weights: ExpertWeights,
    weight_RK: torch.Tensor,
    options: ExpertOptions = ExpertOptions(),
    choice: Choice | None = None,
) -> torch.Tensor:
    """Reduce mode: ``weighted_sum(expert_mlp(...), index.pos_RK, weight_RK)``, ``[R, D]``.

    For a single row on CUDA the sum is fused into the second product, and the expert outputs are not rounded before
    they are added.
    """
    if rows_RD.is_cuda and rows_RD.shape[0] == 1 and not options.deterministic:
        choice = choice or options.tiles(rows_RD, index.row_M.numel(), weights, choose)
        if choice.vector:
            act_MF = vector_gate_up(rows_RD, index, weights, options.act, choice.vector[0])
            return vector_down(act_MF, index, weights, weight_RK, choice.vector[1])
    if rows_RD.is_cuda:
        return weighted_sum(expert_mlp_triton(rows_RD, index, weights, options, choice), index.pos_RK, weight_RK)
    return weighted_sum(expert_mlp(rows_RD, index, weights, options), index.pos_RK, weight_RK)


def expert_sum_of_one(
    x_1D: torch.Tensor,
    slot_1K: torch.Tensor,
    weights: ExpertWeights,
    weight_1K: torch.Tensor,
    options: ExpertOptions = ExpertOptions(),
) -> torch.Tensor:
    """`expert_sum` of a single row on CUDA, from the slots of its choices (int32, -1 is none): no index is built."""
    pairs = slot_1K.shape[1]
    tiles = options.tiles(x_1D, pairs, weights, choose).vector or choose(x_1D, pairs, weights).vector
    index = choices_of_one(slot_1K)
    act_KF = vector_gate_up(x_1D, index, weights, options.act, tiles[0])
    return vector_down(act_KF, index, weights, weight_1K, tiles[1])
