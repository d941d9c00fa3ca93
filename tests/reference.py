"""What attention means, in float64."""

from __future__ import annotations

import torch


def attention_reference(q_QHd, k_SHd, v_SHd, scale: float) -> torch.Tensor:
    """Causal attention in float64; the last query sees all S keys. Query head h reads key head ``h // (H / KVH)``."""
    Q, H, _ = q_QHd.shape
    S, kv_heads, _ = k_SHd.shape
    out = torch.empty((Q, H, v_SHd.shape[-1]), dtype=torch.float64)
    for i in range(Q):
        seen = S - Q + i + 1
        for h in range(H):
            k, v = k_SHd[:seen, h * kv_heads // H].double(), v_SHd[:seen, h * kv_heads // H].double()
            out[i, h] = torch.softmax(k @ q_QHd[i, h].double() * scale, 0) @ v
    return out
