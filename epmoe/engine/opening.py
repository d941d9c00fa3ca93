"""What an engine is made from: its plan and affinity, checked against the model, and the sizes of its parts."""

from __future__ import annotations

import os

import torch

from epmoe.config import EngineConfig
from epmoe.engine.agreement import MOST_IN_GRAPH
from epmoe.model_config import ModelConfig
from epmoe.moe.exchange import ExchangeShape
from placement.errors import UserError
from placement.homes import Affinity
from placement.plan import Plan, linear_plan


def exchange_shape(engine: EngineConfig, model: ModelConfig, plan: Plan) -> ExchangeShape:
    """What the exchange sizes its buffers from; the same on every rank."""
    return ExchangeShape(
        slots_per_rank=plan.max_slots,
        max_tokens=engine.max_batch_tokens,
        hidden=model.hidden_size,
        top_k=model.top_k,
        dtype=getattr(torch, engine.dtype),
        combine=engine.combine,
        capacity_factor=engine.capacity_factor,
        wire=engine.wire,
        graph_tokens=min(engine.max_requests, MOST_IN_GRAPH) if engine.graphs else 0,
    )


def read_affinity(engine: EngineConfig, model: ModelConfig, world: int) -> Affinity | None:
    """The plan's affinity file, checked against the model and the number of ranks."""
    if engine.affinity is None:
        return None
    affinity = Affinity.load(engine.affinity)
    want = (len(model.moe_layers), model.num_experts, world)
    if affinity.expert_rank_LEW.shape != want:
        found = affinity.expert_rank_LEW.shape
        raise UserError(f"{engine.affinity}: expert_rank has shape {found}, this model on {world} ranks needs {want}")
    return affinity


def read_plan(engine: EngineConfig, model: ModelConfig, world: int) -> Plan:
    """The engine's plan, checked against the model; the linear one if none is given."""
    if engine.plan is None:
        return linear_plan(model.moe_shape, world)
    plan = Plan.from_json(engine.plan, "the plan")
    model.moe_shape.require_same(plan.shape, "the model", "the plan")
    assert plan.ranks == world, f"plan for {plan.ranks} ranks on {world}"
    return plan


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the GPU, or on the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
