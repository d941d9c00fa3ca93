"""The weights of one rank, as the model's functions take them.

Every matrix is stored ``[out, in]``, contiguous along the reduction.  All tensors have the model dtype unless their
line says otherwise.  Letters beyond the package legend: V vocabulary, d head size, Hk key/value heads.  Built by
``epmoe.checkpoint.load_weights``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """Grouped-query attention; rows of ``qkv`` are all query heads, then all key heads, then all value heads."""

    qkv: Tensor  # [(H + 2 Hk) d, D]
    qkv_bias: Tensor | None  # [(H + 2 Hk) d]
    o: Tensor  # [D, H d]
    o_bias: Tensor | None  # [D]
    q_norm: Tensor | None  # [d] per head, or [H d] over the full width
    k_norm: Tensor | None  # [d] per head, or [Hk d] over the full width


@dataclass(frozen=True)
class DenseMLP:
    """A gated MLP that every rank holds: a dense layer, or the shared experts of a MoE layer as one."""

    gate_up: Tensor  # [2F, D], the F gate rows first
    down: Tensor  # [D, F]


@dataclass(frozen=True)
class ExpertWeights:
    """The experts in this rank's L slots of one layer; with scales, both matrices are 8-bit floats (ops.fp8)."""

    gate_up: Tensor  # [L, 2F, D], gate and up rows interleaved in blocks of 64 (ops.experts.interleave_gate_up)
    down: Tensor  # [L, D, F]
    gate_up_scale: Tensor | None = None  # float32 [L, 2, F / 128, D / 128], of gate, then of up
    down_scale: Tensor | None = None  # float32 [L, D / 128, F / 128]


@dataclass(frozen=True)
class MoEWeights:
    router: Tensor  # [E, D]
    router_bias: Tensor | None  # [E], added to the logits
    correction_bias: Tensor | None  # float32 [E], moves the selection only
    experts: ExpertWeights
    shared: DenseMLP | None
    shared_gate: Tensor | None  # [1, D]; the shared output is scaled by sigmoid(x @ shared_gate.T)


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Tensor  # [D]
    attention: AttentionWeights
    post_norm: Tensor  # [D]
    mlp: MoEWeights | DenseMLP


@dataclass(frozen=True)
class ModelWeights:
    embed: Tensor  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [D]
    head: Tensor  # [V, D]; the same tensor as ``embed`` where the checkpoint ties them
