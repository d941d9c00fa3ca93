"""config.json of a Hugging Face checkpoint as one flat dict of settings, with transformers v5's names.

Both v4 and v5 files are read.  A setting that changes the maths and is not implemented is refused by name; settings
that change nothing are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from epmoe.families import FAMILIES, Family
from placement.errors import UserError

# config.json: older name -> the name used here
ALIASES = {
    "torch_dtype": "dtype",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "moe_num_experts": "num_experts",
    "moe_topk": "num_experts_per_tok",
    "moe_k": "num_experts_per_tok",
}

# Settings that change the maths: key -> the values that leave it as implemented (a family may implement more).
ANOTHER = "serve another checkpoint, or add the rule to epmoe/families.py and the model"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish", None), ANOTHER),
    "attention_bias": ((False, None), ANOTHER),
    "mlp_bias": ((False, None), ANOTHER),
    "clip_qkv": ((None,), ANOTHER),
    "partial_rotary_factor": ((1, None), ANOTHER),
    "use_sliding_window": ((False, None), "set it to false if the contexts served are shorter than the window"),
    "attention_chunk_size": ((None,), ANOTHER),
    "attn_logit_softcapping": ((None,), ANOTHER),
    "final_logit_softcapping": ((None,), ANOTHER),
    "query_pre_attn_scalar": ((None,), ANOTHER),
    "attention_multiplier": ((None,), ANOTHER),
    "embedding_multiplier": ((1, None), ANOTHER),
    "residual_multiplier": ((1, None), ANOTHER),
    "logits_scaling": ((1, None), ANOTHER),
    "logit_scale": ((1, None), ANOTHER),
    "scoring_func": (("softmax", None), ANOTHER),
    "routed_scaling_factor": ((1, None), ANOTHER),
    "n_group": ((1, None), ANOTHER),
    "is_encoder_decoder": ((False, None), ANOTHER),
}


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(type(item) is kind for item in value)


def _is_ids(value: object) -> bool:
    return type(value) is int or _is_list_of(int, value)


# Settings that are read beside the sizes: key -> (what its value must be, in words).  ``null`` counts as absent.
FORMS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "clip_qkv"), (_is_number, "a finite number above 0")),
    **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob", "use_sliding_window"), (_is_flag, "true or false")),
    **dict.fromkeys(("attention_bias", "qkv_bias"), (_is_flag, "true or false")),
    "decoder_sparse_step": (_is_count, "a whole number of at least 1"),
    "sliding_window": (lambda value: type(value) is int, "a whole number of tokens"),
    "mlp_only_layers": (partial(_is_list_of, int), "a list of layers"),
    "layer_types": (partial(_is_list_of, str), "a list, an attention's name for each layer"),
    "eos_token_id": (_is_ids, "a token id, or a list of them"),
}


# quantization_config: key -> the values that are implemented.
QUANTIZATION: Mapping[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([128, 128],),
    "activation_scheme": ("dynamic", None),
    "fmt": ("e4m3", None),
}


def read_settings(folder: Path) -> dict[str, Any]:
    """Settings of ``config.json``, with the end tokens of ``generation_config.json`` where it states them."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    return normalise(raw if eos is None else {**raw, "eos_token_id": eos}, str(folder / "config.json"))


def normalise(raw: Mapping[str, Any], source: str = "config.json") -> dict[str, Any]:
    """Settings of a parsed config.json, checked against ``REFUSED``; ``source`` names the file in errors."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"{source}: model_type is {kind!r}, implemented are {sorted(FAMILIES)}; serve a checkpoint of one of these"
        )
    settings = _settings(raw, FAMILIES[kind], source)
    _check_forms(settings, source)
    _refuse(settings, FAMILIES[kind], source)
    _refuse_quantization(settings.get("quantization_config"), source)
    return settings


def _settings(raw: Mapping[str, Any], family: Family, source: str) -> dict[str, Any]:
    """config.json with the names used here, the rotary block unpacked and the family's defaults filled in."""
    found: dict[str, Any] = {}
    for key, value in raw.items():
        key = ALIASES.get(key, key)
        given = value if value is None else found.setdefault(key, value)
        if given is not value and given != value:
            raise UserError(f"{source}: {key} is given twice, as {found[key]!r} and {value!r}; keep one")
    rotary = {}
    for key in ("rope_scaling", "rope_parameters"):
        rotary |= _rotary(key, found.pop(key, None) or {}, source)
    return {**family.defaults, **found, **rotary}


def _rotary(key: str, rope: object, source: str) -> dict[str, Any]:
    """What the rotary block ``key`` states, if its rule is the implemented one."""
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{source}: {key} is {rope!r}; one rotary rule for all layers is implemented")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(
            f"{source}: rope type is {kind!r}, only 'default' is implemented; remove it to serve contexts"
            " up to the original length"
        )
    return {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key) is not None}


def _check_forms(settings: Mapping[str, Any], source: str) -> None:
    """Raise for the first setting whose value is of no use: a flag in words would count as set."""
    for key, (fits, form) in FORMS.items():
        if settings.get(key) is not None and not fits(settings[key]):
            raise UserError(f"{source}: {key} is {settings[key]!r}; it must be {form}")


def _refuse(settings: Mapping[str, Any], family: Family, source: str) -> None:
    """Raise for the first setting that changes the maths and is not implemented for this family."""
    own = family.implements | {family.qkv_bias_key, family.o_bias_key}
    for key, (neutral, remedy) in REFUSED.items():
        value = settings.get(key)
        if key not in own and value not in neutral:
            raise UserError(f"{source}: {key} is {value!r}, implemented is {neutral[0]!r}; {remedy}")
    window = settings.get("sliding_window")
    if settings.get("use_sliding_window", True) and window and window < settings.get("max_position_embeddings", 0):
        raise UserError(
            f"{source}: sliding_window is {window}, implemented is attention over the whole context;"
            f" lower max_position_embeddings to {window} to serve contexts inside the window"
        )
    kinds = set(settings.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise UserError(
            f"{source}: layer_types has {sorted(kinds)}, implemented is ['full_attention']; serve another checkpoint"
        )


def _refuse_quantization(value: object, source: str) -> None:
    """8-bit floats in blocks of 128 x 128 are implemented (DeepSeek-V3, Qwen3 FP8); other forms are refused."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise UserError(f"{source}: quantization_config is {value!r}; serve the unquantised checkpoint")
    for key, allowed in QUANTIZATION.items():
        if value.get(key) not in allowed:
            raise UserError(
                f"{source}: quantization_config has {key} {value.get(key)!r}, implemented is {allowed[0]!r};"
                " serve the unquantised checkpoint"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the folder of a Hugging Face checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds {type(raw).__name__}, expected an object; download it again")
    return raw
