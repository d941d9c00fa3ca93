"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over a paged cache, in absorbed form.

One row of the cache serves all heads: the compressed latent, then the rotated key columns that the heads share.  With
the up-projections absorbed into the queries and the outputs, a head's key is the whole row and its value the latent::

    cache_HBSd   [1, 1, blocks, block_size, 576]    512 latent columns, 64 rotary ones
    q_THd        [T, H, 576]                        queries times the keys' up-projection, rotary part last
    result       [T, H, 512]                        to be multiplied by the values' up-projection

Batches are those of `ops.attention` and `ops.decode_batch` (there with ``kv_heads=1, group=H, latent=True``).
"""

from __future__ import annotations

import torch

from epmoe.ops.attention import AttentionBatch, attend_group
from epmoe.ops.latent_kernels import latent_attention_triton


def latent_attention(
    q_THd: torch.Tensor,
    cache_HBSd: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    value_dim: int,
    *,
    tiled: bool = False,
) -> torch.Tensor:
    """Causal attention of this step's absorbed queries over their sequences' cached rows: ``[T, H, value_dim]``.

    Args:
        scale: ``1 / sqrt`` of the head size before absorption (192 in DeepSeek-V2 and V3), times any rope correction.
        tiled: as in `ops.attention.paged_attention`.
    """
    attend = latent_attention_triton if q_THd.is_cuda else latent_attention_ref
    return attend(q_THd, cache_HBSd, batch, scale, value_dim, tiled)


def latent_attention_ref(
    q_THd: torch.Tensor, cache_HBSd: torch.Tensor, batch: AttentionBatch, scale: float, value_dim: int, tiled: bool
) -> torch.Tensor:
    """`latent_attention` in torch, the path on CPU."""
    T, H, _ = q_THd.shape
    out_THd = q_THd.new_empty(T, H, value_dim)
    for group in batch.groups:
        (rows_HnSd,) = group.gather(cache_HBSd)
        attend_group(q_THd, (rows_HnSd, rows_HnSd[..., :value_dim]), out_THd, group, (scale, tiled))
    return out_THd
