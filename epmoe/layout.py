"""Where each stored tensor, or the part of it that an expert is, lands in the final tensors of one rank.

``empty_weights`` states the whole model once.  Walked for all experts on the meta device it says what a checkpoint
must hold; walked for the local experts it says what to read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.families import FAMILIES, MLPNames
from epmoe.model.weights import AttentionWeights, DenseMLP, ExpertWeights, LayerWeights, ModelWeights, MoEWeights
from epmoe.model_config import ModelConfig
from epmoe.ops.experts import GATE_BLOCK
from epmoe.ops.fp8 import FP8, SCALE_SUFFIX, fits_blocks, scale_shape

Views = tuple[tuple[int, Tensor], ...]
"""(first row of a matrix, view of ``[..., columns]`` that takes its rows from there on)."""


@dataclass(frozen=True)
class Piece:
    """A matrix on disk (a tensor, or one expert of a stacked one) and the views its rows fill.

    ``shape`` is the stored tensor's; the piece is its ``rows`` rows from ``row`` on, seen as 2-D, transposed after
    reading if ``transposed``.
    """

    name: str
    shape: tuple[int, ...]
    row: int
    rows: int
    into: Views
    transposed: bool = False


def empty_weights(
    config: ModelConfig,
    local_experts: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keeps_fp8: Callable[[str], bool] = lambda name: False,
) -> tuple[ModelWeights, list[Piece]]:
    """Unfilled weights of one rank, and the pieces of a checkpoint that fill them.

    ``keeps_fp8``: whether an expert's tensor stays an 8-bit float; a layer's do together, if no block is short.
    """
    assert len(local_experts) == len(config.moe_layers), (len(local_experts), len(config.moe_layers))
    layout = _Layout(config, dtype, device, keeps_fp8)
    experts_of = dict(zip(config.moe_layers, local_experts))
    names, vocabulary = layout.names, (config.vocab_size, config.hidden_size)
    embed = layout.matrix(names.embed, *vocabulary)
    layers = tuple(layout.layer(i, experts_of.get(i)) for i in range(config.num_layers))
    final_norm = layout.vector(names.final_norm, config.hidden_size)
    head = embed if config.tie_word_embeddings else layout.matrix(names.head, *vocabulary)
    return ModelWeights(embed, layers, final_norm, head), layout.pieces


class _Layout:
    """Allocates final tensors and notes, in ``pieces``, what of the checkpoint fills them."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        keeps_fp8: Callable[[str], bool],
    ) -> None:
        self.config, self.dtype, self.device, self.keeps_fp8 = config, dtype, device, keeps_fp8
        self.names = FAMILIES[config.family].names
        self.pieces: list[Piece] = []

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def fill(self, name: str, into: Tensor) -> Tensor:
        """A stored tensor of exactly the shape of ``into``."""
        rows = into if into.dim() == 2 else into.unsqueeze(0)
        self.pieces.append(Piece(name, tuple(into.shape), 0, len(rows), ((0, rows),)))
        return into

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.fill(name, self.empty(rows, columns))

    def vector(self, name: str, size: int) -> Tensor:
        return self.fill(name, self.empty(size))

    def layer(self, i: int, local_experts: Sequence[int] | None) -> LayerWeights:
        config, names = self.config, self.names
        return LayerWeights(
            input_norm=self.vector(names.input_norm.format(i=i), config.hidden_size),
            attention=self.attention(i),
            post_norm=self.vector(names.post_norm.format(i=i), config.hidden_size),
            mlp=self.moe(i, local_experts)
            if local_experts is not None
            else self.dense(names.dense, i, config.intermediate_size),
        )

    def attention(self, i: int) -> AttentionWeights:
        config, names = self.config, self.names
        heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = self.empty(heads + 2 * kv, config.hidden_size)
        bias = self.empty(heads + 2 * kv) if config.qkv_bias else None
        for name, rows in zip((names.q, names.k, names.v), torch.arange(len(qkv)).split((heads, kv, kv))):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            self.fill(f"{name}.weight".format(i=i), qkv[part])
            if bias is not None:
                self.fill(f"{name}.bias".format(i=i), bias[part])
        norm = {None: (0, 0), "head": (config.head_dim, config.head_dim), "full": (heads, kv)}[config.qk_norm]
        return AttentionWeights(
            qkv=qkv,
            qkv_bias=bias,
            o=self.matrix(f"{names.o}.weight".format(i=i), config.hidden_size, heads),
            o_bias=self.vector(f"{names.o}.bias".format(i=i), config.hidden_size) if config.o_bias else None,
            q_norm=self.vector(names.q_norm.format(i=i), norm[0]) if config.qk_norm else None,
            k_norm=self.vector(names.k_norm.format(i=i), norm[1]) if config.qk_norm else None,
        )

    def dense(self, names: MLPNames, i: int, size: int) -> DenseMLP:
        gate_up, down = self.empty(2 * size, self.config.hidden_size), self.empty(self.config.hidden_size, size)
        self.mlp(names, {"i": i}, ((0, gate_up[:size]),), ((0, gate_up[size:]),), down)
        return DenseMLP(gate_up, down)

    def moe(self, i: int, local_experts: Sequence[int]) -> MoEWeights:
        config, names = self.config, self.names
        bias = names.correction_bias
        return MoEWeights(
            router=self.matrix(names.router.format(i=i), config.num_experts, config.hidden_size),
            router_bias=self.vector(names.router_bias.format(i=i), config.num_experts) if names.router_bias else None,
            correction_bias=self.fill(
                bias.format(i=i), torch.empty(config.num_experts, dtype=torch.float32, device=self.device)
            )
            if bias
            else None,
            experts=self.experts(i, local_experts),
            shared=self.dense(names.shared, i, config.shared_intermediate_size)
            if config.shared_intermediate_size
            else None,
            shared_gate=self.matrix(names.shared_gate.format(i=i), 1, config.hidden_size)
            if config.shared_gate
            else None,
        )

    def experts(self, i: int, local_experts: Sequence[int]) -> ExpertWeights:
        names, hidden, size = self.names.experts, self.config.hidden_size, self.config.moe_intermediate_size
        slots = len(local_experts)
        stored = [t.format(i=i, e=e) for e in local_experts for t in (names.gate, names.up, names.down)]
        fp8 = fits_blocks(hidden, size) and bool(stored) and all(map(self.keeps_fp8, stored))
        kind = FP8 if fp8 else self.dtype
        gate_up, down = self.empty(slots, 2 * size, hidden, dtype=kind), self.empty(slots, hidden, size, dtype=kind)
        for slot, expert in enumerate(local_experts):
            gate, up = interleaved_views(gate_up[slot])
            self.mlp(names, {"i": i, "e": expert}, gate, up, down[slot])
        if not fp8:
            return ExpertWeights(gate_up, down)
        gate_up_scale = self.empty(slots, 2, *scale_shape(size, hidden), dtype=torch.float32)
        down_scale = self.empty(slots, *scale_shape(hidden, size), dtype=torch.float32)
        for slot, expert in enumerate(local_experts):
            parts = ((names.gate, gate_up_scale[slot, 0]), (names.up, gate_up_scale[slot, 1]))
            for template, into in (*parts, (names.down, down_scale[slot])):
                self.fill(template.format(i=i, e=expert) + SCALE_SUFFIX, into)
        return ExpertWeights(gate_up, down, gate_up_scale, down_scale)

    def mlp(self, names: MLPNames, at: dict[str, int], gate: Views, up: Views, down: Tensor) -> None:
        """Pieces of one gated MLP; ``at`` fills the templates, its "e" picks the expert of a stacked tensor."""
        hidden, size = down.shape
        if names.gate_up:
            both = (*gate, *((offset + size, view) for offset, view in up))
            self.part(names, names.gate_up, at, (2 * size, hidden), both)
        else:
            self.part(names, names.gate, at, (size, hidden), gate)
            self.part(names, names.up, at, (size, hidden), up)
        self.part(names, names.down, at, (hidden, size), ((0, down),))

    def part(self, names: MLPNames, template: str, at: dict[str, int], shape: tuple[int, int], into: Views) -> None:
        rows, columns = shape[::-1] if names.transposed else shape
        stacked = "e" in at and "{e}" not in template
        stored = (self.config.num_experts, rows, columns) if stacked else (rows, columns)
        first = at["e"] * rows if stacked else 0
        self.pieces.append(Piece(template.format(**at), stored, first, rows, into, names.transposed))


def interleaved_views(gate_up: Tensor) -> tuple[Views, Views]:
    """Views of ``[2F, D]`` that are the gate rows and the up rows: whole blocks as ``[F // 64, 64, D]``, then the rest.

    Block b holds gate rows ``[64 b, min(64 b + 64, F))``, then the same up rows.
    """
    size, hidden = gate_up.shape[0] // 2, gate_up.shape[1]
    whole = size // GATE_BLOCK
    blocks = gate_up[: 2 * GATE_BLOCK * whole].view(whole, 2, GATE_BLOCK, hidden)
    rest = gate_up[2 * GATE_BLOCK * whole :]
    views = []
    for side in (0, 1):
        part = [(0, blocks[:, side])] if whole else []
        if len(rest):
            part.append((GATE_BLOCK * whole, rest[side * (len(rest) // 2) :][: len(rest) // 2]))
        views.append(tuple(part))
    return views[0], views[1]
