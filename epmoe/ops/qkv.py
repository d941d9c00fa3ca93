"""Between the qkv projection and attention: per-head norms, rotary, and the write to the KV cache, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from epmoe.ops.attention import write_kv
from epmoe.ops.launch import pdl_options, start_next_and_wait
from epmoe.ops.norm import rms_norm_ref
from epmoe.ops.rotary import rotate_ref


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm weights ``[d]`` of query and key heads."""

    q_d: torch.Tensor
    k_d: torch.Tensor
    eps: float


def split_qkv_ref(
    qkv_TX: torch.Tensor,
    cache_HBSd: torch.Tensor,
    slot_T: torch.Tensor,
    cos_sin_T2h: torch.Tensor,
    norm: HeadNorm | None = None,
) -> torch.Tensor:
    """Queries ready for attention, ``[T, H, d]``; keys and values go to their cache slots.

    Args:
        qkv_TX: ``[T, (H + 2 KVH) d]``, query heads first, then key heads, then value heads.
        cache_HBSd: one layer's cache, see ``ops.attention``.
        slot_T: int64 cache slot of each token.
        cos_sin_T2h: rotary table rows at the tokens' positions, see ``ops.rotary``.
        norm: applied to each query and key head before the rotation.
    """
    kv_heads, d = cache_HBSd.shape[1], cache_HBSd.shape[-1]
    heads_THd = qkv_TX.unflatten(-1, (-1, d))
    q, k, v = heads_THd.split((heads_THd.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if norm is not None:
        q, k = rms_norm_ref(q, norm.q_d, norm.eps), rms_norm_ref(k, norm.k_d, norm.eps)
    write_kv(cache_HBSd, rotate_ref(k, cos_sin_T2h), v, slot_T)
    return rotate_ref(q, cos_sin_T2h)


@triton.jit
def _rotated(x_ptr, head, d, live, weight_ptr, eps, cos_sin_ptr, token, D: tl.constexpr, HALF: tl.constexpr):
    """Heads of one token, normed if there is a weight, rotated: float32 ``[heads, D2]``."""
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    x = tl.load(x_ptr + head[:, None] * D + d[None, :], mask=live, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + head[:, None] * D + partner[None, :], mask=live, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * scale * tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        other = other * scale * tl.load(weight_ptr + partner, mask=d < D, other=0.0).to(tl.float32)[None, :]
    turns = d < 2 * HALF
    angle = cos_sin_ptr + token * 2 * HALF + d % HALF
    cos = tl.load(angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=turns, other=0.0).to(tl.float32)
    return x * cos[None, :] + other * tl.where(d < HALF, -sin, sin)[None, :]


@triton.jit
def _qkv_kernel(
    qkv_ptr,
    q_ptr,
    cache_ptr,
    slot_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    head_stride,
    value_stride,
    H: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    H2: tl.constexpr,
    KVH2: tl.constexpr,
    D2: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program t: all heads of token t."""
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    source = qkv_ptr + token * (H + 2 * KVH) * D
    d = tl.arange(0, D2)
    head = tl.arange(0, H2)
    live = (head < H)[:, None] & (d < D)[None, :]
    q = _rotated(source, head, d, live, q_weight_ptr, eps, cos_sin_ptr, token, D, HALF)
    tl.store(q_ptr + (token * H + head[:, None]) * D + d[None, :], q, mask=live)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:  # padding tokens have no slot
        kv_head = tl.arange(0, KVH2)
        kv_live = (kv_head < KVH)[:, None] & (d < D)[None, :]
        k = _rotated(source + H * D, kv_head, d, kv_live, k_weight_ptr, eps, cos_sin_ptr, token, D, HALF)
        spot = cache_ptr + kv_head[:, None].to(tl.int64) * head_stride + slot * D + d[None, :]
        tl.store(spot, k, mask=kv_live)
        v = tl.load(source + (H + KVH + kv_head[:, None]) * D + d[None, :], mask=kv_live, other=0.0)
        tl.store(spot + value_stride, v, mask=kv_live)


def split_qkv_triton(
    qkv_TX: torch.Tensor,
    cache_HBSd: torch.Tensor,
    slot_T: torch.Tensor,
    cos_sin_T2h: torch.Tensor,
    norm: HeadNorm | None = None,
) -> torch.Tensor:
    """`split_qkv_ref` on the device; intermediate values stay float32, and a slot of -1 writes nothing."""
    T, width = qkv_TX.shape
    kv_heads, d = cache_HBSd.shape[1], cache_HBSd.shape[-1]
    heads = width // d - 2 * kv_heads
    q_THd = torch.empty((T, heads, d), dtype=qkv_TX.dtype, device=qkv_TX.device)
    if T:
        _qkv_kernel[T,](
            qkv_TX.contiguous(),
            q_THd,
            cache_HBSd,
            slot_T,
            cos_sin_T2h,
            norm.q_d if norm else None,
            norm.k_d if norm else None,
            norm.eps if norm else 0.0,
            cache_HBSd.stride(1),
            cache_HBSd.stride(0),
            H=heads,
            KVH=kv_heads,
            D=d,
            HALF=cos_sin_T2h.shape[-1],
            H2=triton.next_power_of_2(heads),
            KVH2=triton.next_power_of_2(kv_heads),
            D2=triton.next_power_of_2(d),
            **pdl_options(qkv_TX),
        )
    return q_THd


def split_qkv(
    qkv_TX: torch.Tensor,
    cache_HBSd: torch.Tensor,
    slot_T: torch.Tensor,
    cos_sin_T2h: torch.Tensor,
    norm: HeadNorm | None = None,
) -> torch.Tensor:
    """`split_qkv_ref`; the kernel on CUDA."""
    return (split_qkv_triton if qkv_TX.is_cuda else split_qkv_ref)(qkv_TX, cache_HBSd, slot_T, cos_sin_T2h, norm)
