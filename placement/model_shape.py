"""The MoE shape of a model: from its ``config.json``, or from a trace or plan made for it."""

from __future__ import annotations

from pathlib import Path

from placement.errors import UserError
from placement.plan import FORMAT as PLAN_FORMAT
from placement.plan import MoEShape, Plan
from placement.recording import read_text
from placement.textfiles import parse_json
from placement.trace import stream_trace

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_topk")


def shape_like(path: str | Path) -> MoEShape:
    """The shape in a model's ``config.json`` (or its folder), an ``epmoe-trace/1`` or an ``epmoe-plan/1`` file."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".npz":
        return next(stream_trace(path)).shape
    text = read_text(path)
    raw = parse_json(text, str(path), "give a config.json, a trace or a plan")
    if isinstance(raw, dict) and raw.get("format") == PLAN_FORMAT:
        return Plan.from_json(text, str(path)).shape
    return shape_from_config(raw, str(path))


def shape_from_config(raw: object, source: str) -> MoEShape:
    """From a Hugging Face ``config.json`` as a dict; multimodal configs are read from their ``text_config``.

    The hash stays empty: only the shape is compared later.
    """
    if not isinstance(raw, dict):
        raise UserError(f"{source} is {type(raw).__name__}, expected a model's config.json")
    text = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else raw
    experts, top_k = _first(text, _EXPERTS), _first(text, _TOP_K)
    layers = text.get("num_hidden_layers", text.get("num_layers"))
    if experts is None or layers is None or (top_k is None and text.get("model_type") != "llama4_text"):
        raise UserError(f"{source} describes no mixture-of-experts model (no expert count, choices or layers found)")
    name = raw.get("_name_or_path") or Path(source).resolve().parent.name
    return MoEShape(moe_layers(text, int(layers), source), int(experts), int(top_k or 1), str(name))


def moe_layers(config: dict, layers: int, source: str) -> tuple[int, ...]:
    """Model indices of the layers that have experts, by the config's rule (every layer where it states none)."""
    if isinstance(config.get("mlp_layer_types"), list):
        chosen = [i for i, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse"]
    elif isinstance(config.get("moe_layers"), list):
        chosen = sorted(int(i) for i in config["moe_layers"])
    elif isinstance(config.get("moe_layer_freq"), list):
        chosen = [i for i, flag in enumerate(config["moe_layer_freq"]) if flag]
    else:
        first = int(config.get("first_k_dense_replace") or config.get("moe_layer_start_index") or 0)
        every = int(config.get("moe_layer_freq") or config.get("moe_layer_interval") or 1)
        step = int(config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1)
        dense = set(config.get("mlp_only_layers") or ())
        chosen = [i for i in range(first, layers) if i % every == 0 and (i + 1) % step == 0 and i not in dense]
    if not chosen:
        raise UserError(f"{source}: its layer rules leave no layer with experts; give --like a trace or plan instead")
    return tuple(chosen)


def _first(config: dict, names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if config.get(name) is not None), None)
