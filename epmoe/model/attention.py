"""The attention half of a layer: projections, norms, rotary, paged attention, output projection."""

from __future__ import annotations

import torch

from epmoe.model.weights import AttentionWeights
from epmoe.model_config import ModelConfig
from epmoe.ops.attention import AttentionBatch, paged_attention
from epmoe.ops.linear import linear
from epmoe.ops.norm import rms_norm
from epmoe.ops.qkv import HeadNorm, split_qkv


def attend(
    x_TD: torch.Tensor,
    weights: AttentionWeights,
    cache_HBSd: torch.Tensor,
    batch: AttentionBatch,
    cos_sin_T2h: torch.Tensor,
    static: tuple[ModelConfig, bool],
) -> torch.Tensor:
    """Grouped-query attention of this step's tokens: ``[T, D]`` -> ``[T, D]``; writes their keys and values.

    Args:
        cache_HBSd: this layer's cache, see ``ops.attention``.
        cos_sin_T2h: rotary table rows at the tokens' positions.
        static: the model's config, and whether arithmetic is row-invariant.
    """
    config, tiled = static
    eps, d = config.rms_norm_eps, config.head_dim
    qkv = linear(x_TD, weights.qkv, weights.qkv_bias, tiled=tiled)
    if config.qk_norm == "full":
        q, k, v = qkv.split((config.num_heads * d, config.num_kv_heads * d, config.num_kv_heads * d), -1)
        qkv = torch.cat((rms_norm(q, weights.q_norm, eps), rms_norm(k, weights.k_norm, eps), v), -1)
    if config.clip_qkv is not None:
        qkv = qkv.clamp(-config.clip_qkv, config.clip_qkv)
    norm = HeadNorm(weights.q_norm, weights.k_norm, eps) if config.qk_norm == "head" else None
    q_THd = split_qkv(qkv, cache_HBSd, batch.slot_T, cos_sin_T2h, norm)
    out = paged_attention(q_THd, cache_HBSd, batch, d**-0.5, tiled=tiled)
    return linear(out.flatten(1), weights.o, weights.o_bias, tiled=tiled)
