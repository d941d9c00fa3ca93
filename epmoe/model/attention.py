"""The attention half of a layer: projections, per-head norms, rotary, paged attention, output projection."""

from __future__ import annotations

import torch

from epmoe.config import ModelConfig
from epmoe.model.weights import AttentionWeights
from epmoe.ops.attention import AttentionBatch, paged_attention, write_kv
from epmoe.ops.linear import linear
from epmoe.ops.norm import rms_norm
from epmoe.ops.rotary import rotate


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
    H, KVH, d = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = linear(x_TD, weights.qkv, weights.qkv_bias, tiled=tiled)
    q, k, v = qkv.split((H * d, KVH * d, KVH * d), -1)
    if config.qk_norm == "full":
        q = rms_norm(q, weights.q_norm, config.rms_norm_eps)
        k = rms_norm(k, weights.k_norm, config.rms_norm_eps)
    if config.clip_qkv is not None:
        q, k, v = (part.clamp(-config.clip_qkv, config.clip_qkv) for part in (q, k, v))
    q, k, v = q.unflatten(-1, (H, d)), k.unflatten(-1, (KVH, d)), v.unflatten(-1, (KVH, d))
    if config.qk_norm == "head":
        q = rms_norm(q, weights.q_norm, config.rms_norm_eps)
        k = rms_norm(k, weights.k_norm, config.rms_norm_eps)
    q, k = rotate(q, cos_sin_T2h), rotate(k, cos_sin_T2h)
    write_kv(cache_HBSd, k, v, batch.slot_T)
    out = paged_attention(q, cache_HBSd, batch, d**-0.5, tiled=tiled)
    return linear(out.flatten(1), weights.o, weights.o_bias, tiled=tiled)
