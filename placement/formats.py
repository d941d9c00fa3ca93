"""Plans in the files of other engines: SGLang, vLLM, vllm-ascend.

============ ==================================================================================================
format       file
============ ==================================================================================================
epmoe        this project's ``epmoe-plan/1``
sglang       ``--init-expert-location``: ``{"physical_to_logical_map": [model layer][slot]}`` and no other key (the
             object is passed on as arguments); rows of dense layers are there too and hold ``slot % E``
vllm         ``phy2log``: ``[MoE layer][slot]``, physical slot -> logical expert
vllm-ascend  ``expert_map.json``: ``{moe_layer_count, layer_list: [{layer_id, device_count, device_list:
             [{device_id, device_expert: [expert]}]}]}``
============ ==================================================================================================

In all of them slot p of P is on rank ``p // (P / W)``: every rank holds equally many experts in every layer. None of
them holds a replica rule, an affinity file or the model's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from placement.errors import UserError
from placement.plan import FORMAT as PLAN_FORMAT
from placement.plan import MoEShape, Plan, make_plan
from placement.recording import read_text
from placement.textfiles import parse_json

PLAN_FORMATS = ("epmoe", "sglang", "vllm", "vllm-ascend")


def write_plan(plan: Plan, kind: str, model_layers: int | None = None) -> str:
    """The file's text; ``model_layers`` is the model's number of layers where dense ones follow the last MoE layer."""
    if kind == "epmoe":
        return plan.to_json() + "\n"
    slot_LWS = rectangular(plan, kind)
    if kind == "vllm":
        return json.dumps(slot_LWS.reshape(len(slot_LWS), -1).tolist()) + "\n"
    if kind == "vllm-ascend":
        return json.dumps(_ascend(slot_LWS)) + "\n"
    if kind == "sglang":
        return json.dumps({"physical_to_logical_map": _all_layers(plan, slot_LWS, model_layers).tolist()}) + "\n"
    raise UserError(f"plan format {kind!r} is unknown; choose one of {', '.join(PLAN_FORMATS)}")


def lost_in(plan: Plan, kind: str) -> list[str]:
    """What a plan says that the format cannot hold, in words."""
    if kind == "epmoe":
        return []
    lost = ["the replica rule (the engine has its own)"] if plan.serve is not None else []
    return lost + ([f"the affinity file {plan.affinity}"] if plan.affinity else [])


def rectangular(plan: Plan, kind: str) -> np.ndarray:
    """int64 ``[L, W, slots]``; ``UserError`` where ranks or layers hold different numbers of experts."""
    sizes_LW = np.array([[len(held) for held in layer] for layer in plan.slots])
    if np.ptp(sizes_LW):
        layer, rank = np.argwhere(sizes_LW != sizes_LW[0, 0])[0]
        raise UserError(
            f"{kind} needs equally many experts on every rank and layer: layer {layer}, rank {rank} holds"
            f" {sizes_LW[layer, rank]}, layer 0, rank 0 holds {sizes_LW[0, 0]}; use a multiple of the GPUs as --slots"
        )
    return np.array(plan.slots, np.int64)


def read_plan(
    path: str | Path, shape: MoEShape | None = None, ranks: int | None = None, kind: str | None = None
) -> Plan:
    """A plan from any of the formats (found by its content unless ``kind`` is given).

    ``shape`` is the model's: the foreign files do not say how many choices a token has. ``ranks`` is needed for the two
    that list slots without ranks. An ``epmoe-plan/1`` needs neither and is checked against them where given.
    """
    source = str(path)
    text = read_text(Path(path))
    raw = parse_json(text, source, "give a plan file, whole")
    kind = kind or sniff_plan(raw, source)
    if kind == "epmoe":
        plan = Plan.from_json(text, source)
        if shape is not None:
            shape.require_same(plan.shape, "the model", source)
        if ranks is not None and ranks != plan.ranks:
            raise UserError(f"{source} is a plan for {plan.ranks} ranks, {ranks} were asked for; leave --gpus out")
        return plan
    if kind not in _READERS:
        raise UserError(f"plan format {kind!r} is unknown; choose one of {', '.join(PLAN_FORMATS)}")
    if shape is None:
        raise UserError(f"{source} does not say its model's shape; give --like a config.json, a trace or a plan")
    try:
        slots = _READERS[kind](raw, shape, ranks, source)
    except (TypeError, KeyError, ValueError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{source} is no {kind} plan ({type(error).__name__}: {error})") from None
    try:
        return make_plan(shape, len(slots[0]), slots, made_by=f"{kind} file")
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def sniff_plan(raw: object, source: str) -> str:
    """The format's name, from the parsed JSON."""
    if isinstance(raw, list):
        return "vllm"
    if isinstance(raw, dict):
        if raw.get("format") == PLAN_FORMAT:
            return "epmoe"
        if "physical_to_logical_map" in raw:
            return "sglang"
        if "phy2log" in raw:
            return "vllm"
        if "layer_list" in raw:
            return "vllm-ascend"
    raise UserError(f"{source} is no plan of a known format ({', '.join(PLAN_FORMATS)})")


# -- writers --------------------------------------------------------------------------------------------------------


def _ascend(slot_LWS: np.ndarray) -> dict:
    layers = [
        {
            "layer_id": layer,
            "device_count": len(ranks),
            "device_list": [{"device_id": d, "device_expert": held} for d, held in enumerate(ranks)],
        }
        for layer, ranks in enumerate(slot_LWS.tolist())
    ]
    return {"moe_layer_count": len(layers), "layer_list": layers}


def _all_layers(plan: Plan, slot_LWS: np.ndarray, model_layers: int | None) -> np.ndarray:
    """int64 ``[model layers, P]``: SGLang counts dense layers too; their rows are the trivial map."""
    last = plan.shape.moe_layers[-1] + 1
    total = last if model_layers is None else model_layers
    if total < last:
        raise UserError(f"the plan has MoE layer {last - 1}, so there are more than {total} layers; fix --model-layers")
    slots = slot_LWS.reshape(len(slot_LWS), -1)
    table = np.tile(np.arange(slots.shape[1]) % plan.shape.num_experts, (total, 1))
    table[list(plan.shape.moe_layers)] = slots
    return table


# -- readers: [layer][rank][experts] --------------------------------------------------------------------------------


def _read_sglang(raw: object, shape: MoEShape, ranks: int | None, source: str) -> list:
    if set(raw) != {"physical_to_logical_map"}:
        raise UserError(f"{source} has the keys {sorted(raw)}; SGLang takes only physical_to_logical_map")
    table = _table(raw["physical_to_logical_map"], source)
    if len(table) != shape.num_layers:
        last = shape.moe_layers[-1]
        if len(table) <= last:
            raise UserError(f"{source} has {len(table)} layers, the model's last MoE layer is {last}; wrong model?")
        table = table[list(shape.moe_layers)]
    return _by_rank(table, ranks, source)


def _read_vllm(raw: object, shape: MoEShape, ranks: int | None, source: str) -> list:
    table = _table(raw["phy2log"] if isinstance(raw, dict) else raw, source)
    if table.ndim == 1:  # one row for every layer
        table = np.tile(table, (shape.num_layers, 1))
    return _by_rank(table, ranks, source)


def _read_ascend(raw: object, shape: MoEShape, ranks: int | None, source: str) -> list:
    layers = sorted(raw["layer_list"], key=lambda layer: layer["layer_id"])
    if raw["moe_layer_count"] != len(layers) or [x["layer_id"] for x in layers] != list(range(len(layers))):
        raise UserError(f"{source}: moe_layer_count {raw['moe_layer_count']} and the layer_ids disagree; is it whole?")
    slots = []
    for layer in layers:
        devices = sorted(layer["device_list"], key=lambda device: device["device_id"])
        if (count := layer["device_count"]) != len(devices):
            raise UserError(f"{source}: layer {layer['layer_id']} has {len(devices)} of {count} devices; is it whole?")
        held = [device["device_expert"] for device in devices]
        if not all(isinstance(expert, int) for experts in held for expert in experts):
            raise UserError(f"{source}: device_expert of layer {layer['layer_id']} must be lists of integers")
        slots.append(held)
    if ranks is not None and len(slots[0]) != ranks:
        raise UserError(f"{source} is for {len(slots[0])} devices, {ranks} were asked for; leave --gpus out")
    return slots


_READERS: dict[str, Callable[[object, MoEShape, int | None, str], list]] = {
    "sglang": _read_sglang,
    "vllm": _read_vllm,
    "vllm-ascend": _read_ascend,
}


def _table(raw: object, source: str) -> np.ndarray:
    table = np.asarray(raw)  # ragged rows raise ValueError
    if table.ndim not in (1, 2) or not table.size or not np.issubdtype(table.dtype, np.integer):
        raise UserError(f"{source}: the map is {table.dtype} {table.shape}, expected integers [layers, slots]")
    return table


def _by_rank(table_LP: np.ndarray, ranks: int | None, source: str) -> list:
    if ranks is None:
        raise UserError(f"{source} lists slots without saying on how many GPUs; give --gpus")
    if ranks < 1 or table_LP.shape[1] % ranks:
        raise UserError(f"{source}: {table_LP.shape[1]} slots cannot be shared equally by {ranks} GPUs; check --gpus")
    return table_LP.reshape(len(table_LP), ranks, -1).tolist()
