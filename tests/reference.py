"""What dispatch, experts and combine mean, as loops over tokens and choices; every exchange is tested against this."""

from __future__ import annotations

from collections.abc import Callable

import torch

ExpertOf = Callable[[int, torch.Tensor], torch.Tensor]  # (global slot, row in model dtype) -> row in float32


def exchange_exact(x_TD, slot_TK, weight_TK, expert: ExpertOf, add_TD=None) -> torch.Tensor:
    """Each (token, choice) is one row, rounded; the home multiplies and adds in choice order, and rounds once."""
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32)
    for t in range(slot_TK.shape[0]):
        for k in range(slot_TK.shape[1]):
            slot = int(slot_TK[t, k])
            if slot >= 0:
                y_TD[t] += weight_TK[t, k] * expert(slot, x_TD[t]).to(x_TD.dtype).float()
    return _finish(y_TD, x_TD.dtype, add_TD)


def exchange_reduce(x_TD, slot_TK, weight_TK, expert: ExpertOf, stride: int, add_TD=None) -> torch.Tensor:
    """Each (token, rank) is one row: the rank's weighted sum in choice order, rounded; the home adds in rank order.

    Args:
        stride: global slots per rank.
    """
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32)
    for t in range(slot_TK.shape[0]):
        slots = slot_TK[t].tolist()
        for rank in sorted({slot // stride for slot in slots if slot >= 0}):
            part_D = torch.zeros(x_TD.shape[1], dtype=torch.float32)
            for k, slot in enumerate(slots):
                if slot >= 0 and slot // stride == rank:
                    part_D += weight_TK[t, k] * expert(slot, x_TD[t]).to(x_TD.dtype).float()
            y_TD[t] += part_D.to(x_TD.dtype).float()
    return _finish(y_TD, x_TD.dtype, add_TD)


def _finish(y_TD: torch.Tensor, dtype: torch.dtype, add_TD: torch.Tensor | None) -> torch.Tensor:
    return y_TD.to(dtype) if add_TD is None else y_TD.to(dtype) + add_TD


def attention_reference(q_QHd, k_SHd, v_SHd, scale: float) -> torch.Tensor:
    """Causal attention in float64; the last query sees all S keys. Query head h reads key head ``h // (H / KVH)``."""
    Q, H, _ = q_QHd.shape
    S, kv_heads, _ = k_SHd.shape
    out = torch.empty(q_QHd.shape, dtype=torch.float64)
    for i in range(Q):
        seen = S - Q + i + 1
        for h in range(H):
            k, v = k_SHd[:seen, h * kv_heads // H].double(), v_SHd[:seen, h * kv_heads // H].double()
            out[i, h] = torch.softmax(k @ q_QHd[i, h].double() * scale, 0) @ v
    return out
