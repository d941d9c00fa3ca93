"""What the model computes, read from its checkpoint's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from epmoe.families import FAMILIES, Family
from epmoe.hf_config import read_settings
from epmoe.ops.router import RouterRule
from placement.errors import UserError
from placement.plan import MoEShape

DTYPES = ("float32", "bfloat16", "float16")
MOST = 1 << 16  # layers, and experts of a layer; ids of experts are stored in 16 bits


@dataclass(frozen=True)
class ModelConfig:
    """What the model computes.  Sizes are counts of elements; letters as in the package legend.

    ``qk_norm``: None, "head" (RMS norm over each head's d) or "full" (over the whole projection), before rotary.
    ``clip_qkv``: q, k and v are clamped to +-clip_qkv after the norm.  ``rotary_dim``: leading elements of a head that
    rotate.  ``intermediate_size``: of dense layers (those not in ``moe_layers``).  ``shared_intermediate_size``:
    summed over the shared experts, None without.  ``block_fp8``: matrices may be stored as 8-bit floats with a
    scale for each block of 128 x 128.  ``config_sha256``: of every field that changes the maths.
    """

    family: str
    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    max_position_embeddings: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    router: RouterRule
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str | None = None
    clip_qkv: float | None = None
    intermediate_size: int | None = None
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    block_fp8: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    config_sha256: str = ""

    @property
    def moe_shape(self) -> MoEShape:
        return MoEShape(self.moe_layers, self.num_experts, self.top_k, self.name, self.config_sha256)

    @staticmethod
    def from_folder(folder: str | Path, name: str = "") -> ModelConfig:
        """Read ``config.json`` (and the end tokens of ``generation_config.json``) of a checkpoint folder."""
        folder = Path(folder)
        return model_config(read_settings(folder), name or folder.resolve().name, str(folder / "config.json"))


def model_config(settings: Mapping[str, Any], name: str, source: str = "config.json") -> ModelConfig:
    """The config of checked settings (``hf_config.normalise``); ``source`` names the file in errors."""
    try:
        family = FAMILIES[settings["model_type"]]
        _check_sizes(settings, family)
        return _from_settings(settings, family, name)
    except KeyError as error:
        raise UserError(f"{source} lacks {error.args[0]!r}, which {settings['model_type']} needs; add it") from None
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def _from_settings(settings: Mapping[str, Any], family: Family, name: str) -> ModelConfig:
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    head_dim = settings["head_dim"] or hidden // heads
    eos = settings.get("eos_token_id")
    values = {
        "family": settings["model_type"],
        "name": name,
        "hidden_size": hidden,
        "num_layers": settings["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": settings["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "vocab_size": settings["vocab_size"],
        "rms_norm_eps": float(settings["rms_norm_eps"]),
        "rope_theta": float(settings["rope_theta"]),
        "rotary_dim": int(head_dim * (settings.get("partial_rotary_factor") or 1)),
        "max_position_embeddings": settings["max_position_embeddings"],
        "moe_layers": family.moe_layers(settings),
        "num_experts": settings["num_experts"],
        "top_k": settings["num_experts_per_tok"],
        "moe_intermediate_size": settings[family.expert_size_key],
        "router": family.router(settings),
        "hidden_act": "silu",
        "tie_word_embeddings": bool(settings["tie_word_embeddings"]),
        "qkv_bias": bool(family.qkv_bias_key and settings[family.qkv_bias_key]),
        "o_bias": bool(family.o_bias_key and settings[family.o_bias_key]),
        "qk_norm": family.qk_norm,
        "clip_qkv": settings.get("clip_qkv"),
        "shared_intermediate_size": settings[family.shared_size_key] if family.shared_size_key else None,
        "shared_gate": family.shared_gate,
        "block_fp8": settings.get("quantization_config") is not None,
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        "dtype": str(settings.get("dtype") or "float32").removeprefix("torch."),
    }
    if len(values["moe_layers"]) < values["num_layers"]:
        values["intermediate_size"] = settings["intermediate_size"]
    _check_values(values)
    return ModelConfig(**values, config_sha256=_sha256(values))


def _check_sizes(settings: Mapping[str, Any], family: Family) -> None:
    counts = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
    experts = ("num_experts", "num_experts_per_tok", family.expert_size_key, family.shared_size_key)
    given = [key for key in ("num_key_value_heads", "head_dim") if settings[key] is not None]
    for key in (*counts, *filter(None, experts), *given):
        if type(settings[key]) is not int or settings[key] < 1:
            raise UserError(f"{key} is {settings[key]!r}; it must be a whole number of at least 1")
    for key in ("num_hidden_layers", "num_experts"):
        if settings[key] > MOST:
            raise UserError(f"{key} is {settings[key]}; it must be at most {MOST}")


def _check_values(values: Mapping[str, Any]) -> None:
    if values["num_heads"] % values["num_kv_heads"]:
        raise UserError(
            f"num_key_value_heads {values['num_kv_heads']} does not divide num_attention_heads {values['num_heads']};"
            " correct it"
        )
    if values["top_k"] > values["num_experts"]:
        raise UserError(
            f"num_experts_per_tok is {values['top_k']}, the model has {values['num_experts']} experts; correct it"
        )
    if not values["moe_layers"]:
        raise UserError("no layer is a MoE layer, so nothing can be spread over ranks; serve a MoE checkpoint")
    dense = values.get("intermediate_size")
    if dense is not None and (type(dense) is not int or dense < 1):
        raise UserError(f"intermediate_size is {dense!r}; it must be a whole number of at least 1")
    if values["rotary_dim"] % 2 or not values["rotary_dim"]:
        raise UserError(
            f"head_dim {values['head_dim']} rotates {values['rotary_dim']} elements; it must be even and above 0"
        )
    if values["dtype"] not in DTYPES:
        raise UserError(f"dtype is {values['dtype']!r}, implemented are {DTYPES}; convert the checkpoint")


def _sha256(values: Mapping[str, Any]) -> str:
    """Hash of the fields that change the maths; a field at its default is left out, so that new fields keep hashes."""
    cosmetic = {"name", "dtype", "eos_token_ids", "max_position_embeddings", "config_sha256"}
    stated = _stated(ModelConfig, {**values, "router": _stated(RouterRule, asdict(values["router"]))})
    kept = {key: value for key, value in stated.items() if key not in cosmetic}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _stated(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {item.name: item.default for item in fields(kind)}
    return {key: value for key, value in values.items() if defaults[key] is MISSING or value != defaults[key]}
