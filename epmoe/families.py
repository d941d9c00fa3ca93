"""One small entry per model family: how to read its config.json, its router rule, its checkpoint's names.

To add a family, add an entry to ``FAMILIES`` and a parity test.  ``Settings`` is config.json with the names of
transformers v5 (``epmoe.config`` maps older names); ``defaults`` are what transformers assumes for absent keys.

Templates of names: ``{i}`` is the layer, ``{e}`` the expert.  An expert template without ``{e}`` is one tensor that
stacks all experts along its first axis; a rank then reads only the slices of its own experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from epmoe.ops.router import RouterRule

Settings = Mapping[str, Any]
LAYER = "model.layers.{i}."


@dataclass(frozen=True)
class MLPNames:
    """A gated MLP on disk: gate, up ``[F, D]`` and down ``[D, F]``, or ``gate_up`` fused along its output axis.

    ``transposed`` is for checkpoints that store ``[in, out]``.
    """

    gate: str = ""
    up: str = ""
    down: str = ""
    gate_up: str = ""
    transposed: bool = False


def mlp_names(prefix: str) -> MLPNames:
    return MLPNames(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight", f"{prefix}.down_proj.weight")


@dataclass(frozen=True)
class Names:
    """Checkpoint name of every role; a role the model's config leaves out is not looked for."""

    experts: MLPNames = mlp_names(LAYER + "mlp.experts.{e}")
    router: str = LAYER + "mlp.gate.weight"
    router_bias: str = ""
    correction_bias: str = ""
    shared: MLPNames = mlp_names(LAYER + "mlp.shared_expert")
    shared_gate: str = LAYER + "mlp.shared_expert_gate.weight"
    dense: MLPNames = mlp_names(LAYER + "mlp")
    input_norm: str = LAYER + "input_layernorm.weight"
    post_norm: str = LAYER + "post_attention_layernorm.weight"
    q: str = LAYER + "self_attn.q_proj"  # + ".weight" and, with a bias, ".bias"
    k: str = LAYER + "self_attn.k_proj"
    v: str = LAYER + "self_attn.v_proj"
    o: str = LAYER + "self_attn.o_proj"
    q_norm: str = LAYER + "self_attn.q_norm.weight"
    k_norm: str = LAYER + "self_attn.k_norm.weight"
    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)  # patterns of whole names that hold no weight


def every_layer(settings: Settings) -> tuple[int, ...]:
    return tuple(range(settings["num_hidden_layers"]))


def sparse_step_layers(settings: Settings) -> tuple[int, ...]:
    """Qwen: layer i is MoE iff ``(i + 1) % decoder_sparse_step == 0`` and it is not in ``mlp_only_layers``."""
    step, dense = settings["decoder_sparse_step"], settings["mlp_only_layers"] or ()
    return tuple(i for i in every_layer(settings) if i not in dense and (i + 1) % step == 0)


@dataclass(frozen=True)
class Family:
    """What is particular to a family; a ``*_key`` names the setting that holds the value, "" where there is none."""

    router: Callable[[Settings], RouterRule]
    defaults: Settings = field(default_factory=dict)
    moe_layers: Callable[[Settings], tuple[int, ...]] = every_layer
    expert_size_key: str = "moe_intermediate_size"
    shared_size_key: str = ""
    shared_gate: bool = False
    qkv_bias_key: str = ""
    o_bias_key: str = ""
    qk_norm: str | None = None  # None, "head" (over each head), "full" (over the whole projection)
    implements: frozenset[str] = frozenset()  # settings of config.REFUSED that this family does implement
    names: Names = Names()


def qwen_router(settings: Settings) -> RouterRule:
    """Softmax over all experts in float32, the best K, renormalised on request, rounded to the logits' dtype."""
    return RouterRule(renormalize=settings["norm_topk_prob"], weight_dtype="logits")


COMMON = {"rope_theta": 10000.0, "tie_word_embeddings": False, "num_key_value_heads": None, "head_dim": None}
QWEN = {**COMMON, "rms_norm_eps": 1e-6, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()}
MIXTRAL_NAMES = Names(
    router=LAYER + "block_sparse_moe.gate.weight",
    experts=MLPNames(
        gate=LAYER + "block_sparse_moe.experts.{e}.w1.weight",
        up=LAYER + "block_sparse_moe.experts.{e}.w3.weight",
        down=LAYER + "block_sparse_moe.experts.{e}.w2.weight",
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "mixtral": Family(
            router=lambda settings: RouterRule(renormalize=True),
            defaults={**COMMON, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
            expert_size_key="intermediate_size",
            names=MIXTRAL_NAMES,
        ),
        "qwen3_moe": Family(
            router=qwen_router,
            defaults={**QWEN, "attention_bias": False},
            moe_layers=sparse_step_layers,
            qkv_bias_key="attention_bias",
            o_bias_key="attention_bias",
            qk_norm="head",
        ),
        "qwen2_moe": Family(
            router=qwen_router,
            defaults={**QWEN, "qkv_bias": True},
            moe_layers=sparse_step_layers,
            shared_size_key="shared_expert_intermediate_size",
            shared_gate=True,
            qkv_bias_key="qkv_bias",
        ),
        "olmoe": Family(
            router=qwen_router,
            defaults={**COMMON, "rms_norm_eps": 1e-5, "norm_topk_prob": False, "attention_bias": False},
            expert_size_key="intermediate_size",
            qkv_bias_key="attention_bias",
            o_bias_key="attention_bias",
            qk_norm="full",
            implements=frozenset({"clip_qkv"}),
        ),
    }
)
