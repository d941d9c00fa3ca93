"""Counts and records what the routers choose, off the hot path: only real tokens, bounded in memory."""

from __future__ import annotations

import torch


class ExpertLoads:
    """(token, choice) pairs per (MoE layer, expert) on this home rank, counted on the device."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.load_LE = torch.zeros((num_layers, num_experts), dtype=torch.int64, device=device)

    def __call__(self, moe_layer: int, expert_TK: torch.Tensor) -> None:
        flat = expert_TK.flatten().long()
        self.load_LE[moe_layer].index_add_(0, flat, torch.ones_like(flat))
