"""Attention over a paged KV cache, for any mix of prefill chunks and decodes.

Layout, one layer (P is the width of the block table, ``H = G * KVH`` query heads share KVH key heads)::

    cache_BSHd   [2, blocks, block_size, KVH, d]     keys, values
    q_THd        [T, H, d]   tokens of all sequences, concatenated in batch order

Worked example: block_size 4; sequence 0 has 6 cached tokens and asks for its last 2 (query_lens[0] = 2, kv_lens[0] = 6)
with blocks (7, 2): its keys are cache[0, 7, 0:4] and cache[0, 2, 0:2]; its queries stand at positions 4 and 5 and see
keys 0..4 and 0..5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from epmoe.ops.linear import TILE_ROWS

TILE_KEYS = 64


@dataclass(frozen=True)
class AttentionBatch:
    """Where each token of a step reads and writes. N sequences, T tokens.

    Args:
        query_lens: tokens of each sequence in this step (host ints, at least 1 each).
        kv_lens: cached tokens of each sequence once this step's are written (host ints).
        block_table_NP: int32 ``[N, P]`` cache blocks of each sequence; entries past its length are never read.
        position_T: int64 position of each token in its sequence.
        slot_T: int64 ``block * block_size + offset`` where each token's key and value go.
    """

    query_lens: list[int]
    kv_lens: list[int]
    block_table_NP: torch.Tensor
    position_T: torch.Tensor
    slot_T: torch.Tensor


def write_kv(cache_BSHd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, slot_T: torch.Tensor) -> None:
    """Store this step's keys and values in their slots."""
    flat = cache_BSHd.flatten(1, 2)
    flat[0].index_copy_(0, slot_T, k_THd)
    flat[1].index_copy_(0, slot_T, v_THd)


def paged_attention(
    q_THd: torch.Tensor, cache_BSHd: torch.Tensor, batch: AttentionBatch, scale: float, *, tiled: bool = False
) -> torch.Tensor:
    """Causal attention of this step's queries over their sequences' cached keys: ``[T, H, d]``.

    Args:
        tiled: fixed tiles of 16 rows x 64 keys from position 0 with a float32 online softmax, so that a query's bits
            do not depend on the batch or on how its prompt was cut into chunks.
    """
    if q_THd.shape[0] == 0:
        return q_THd
    attend = _attend_tiled if tiled else _attend
    out = torch.empty_like(q_THd)
    start = 0
    decodes: list[tuple[int, int]] = []  # (sequence, row): one query each, computed together below
    for n, (q_len, kv_len) in enumerate(zip(batch.query_lens, batch.kv_lens)):
        if q_len == 1:
            decodes.append((n, start))
        else:
            k, v = _gather(cache_BSHd, batch.block_table_NP[n : n + 1], kv_len)
            position = torch.arange(kv_len - q_len, kv_len, device=q_THd.device)[None]
            out[start : start + q_len] = attend(q_THd[start : start + q_len][None], k, v, position, scale)[0]
        start += q_len
    for group in _by_length(decodes, batch.kv_lens):
        sequences, rows = (list(column) for column in zip(*group))
        lens = [batch.kv_lens[n] for n in sequences]
        k, v = _gather(cache_BSHd, batch.block_table_NP[sequences], max(lens))
        position = torch.tensor(lens, device=q_THd.device)[:, None] - 1
        out[rows] = attend(q_THd[rows][:, None], k, v, position, scale)[:, 0]
    return out


def _by_length(decodes: list[tuple[int, int]], kv_lens: list[int]) -> list[list[tuple[int, int]]]:
    """Group sequences whose lengths are within a factor of two, so that padding at most doubles the keys read."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for n, row in decodes:
        groups.setdefault(max(6, kv_lens[n].bit_length()), []).append((n, row))
    return list(groups.values())


def _gather(cache_BSHd: torch.Tensor, table_NP: torch.Tensor, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[N, S, KVH, d]`` of the first ``kv_len`` positions of each sequence."""
    _, _, block_size, heads, dim = cache_BSHd.shape
    table = table_NP[:, : -(-kv_len // block_size)].long()
    picked = cache_BSHd.flatten(2).index_select(1, table.flatten())
    shape = (2, table.shape[0], table.shape[1] * block_size, heads, dim)
    k, v = picked.view(shape)[:, :, :kv_len]
    return k, v


def _attend(q_NQHd, k_NSHd, v_NSHd, position_NQ, scale: float) -> torch.Tensor:
    """One SDPA call; query heads of a key head are folded into rows, so keys are never repeated in memory."""
    N, Q, H, d = q_NQHd.shape
    S, kv_heads = k_NSHd.shape[1:3]
    group = H // kv_heads
    seen = torch.arange(S, device=q_NQHd.device) <= position_NQ[..., None]  # [N, Q, S]
    mask = seen[:, None, None].expand(N, 1, group, Q, S).reshape(N, 1, group * Q, S)
    v_NSHd = v_NSHd.masked_fill(~seen[:, -1, :, None, None], 0)  # stale blocks may hold NaN, and 0 * NaN is NaN
    k_NSHd = k_NSHd.masked_fill(~seen[:, -1, :, None, None], 0)
    rows = q_NQHd.view(N, Q, kv_heads, group, d).permute(0, 2, 3, 1, 4).reshape(N, kv_heads, group * Q, d)
    out = functional.scaled_dot_product_attention(
        rows, k_NSHd.transpose(1, 2), v_NSHd.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return out.view(N, kv_heads, group, Q, d).permute(0, 3, 1, 2, 4).reshape(N, Q, H, d)


def _attend_tiled(q_NQHd, k_NSHd, v_NSHd, position_NQ, scale: float) -> torch.Tensor:
    """Online softmax (Milakov & Gimelshein 2018) over key tiles in order; a tile a row cannot see changes no bit."""
    N, Q, H, d = q_NQHd.shape
    S, kv_heads = k_NSHd.shape[1:3]
    group = H // kv_heads
    rows = Q * group
    tiles = -(-rows // TILE_ROWS)
    pad_rows, pad_keys = tiles * TILE_ROWS - rows, -S % TILE_KEYS

    def by_head(x_NSHd):  # [N * KVH, S padded, d] float32
        return functional.pad(x_NSHd.float().transpose(1, 2).flatten(0, 1), (0, 0, 0, pad_keys))

    q = q_NQHd.float().view(N, Q, kv_heads, group, d).transpose(1, 2).reshape(N * kv_heads, rows, d)
    q = functional.pad(q, (0, 0, 0, pad_rows)).view(-1, TILE_ROWS, d)  # [N * KVH * tiles, 16, d]
    row_position = position_NQ[:, None, :, None].expand(N, kv_heads, Q, group).reshape(N * kv_heads, rows)
    row_position = functional.pad(row_position, (0, pad_rows)).view(-1, TILE_ROWS, 1)
    k, v = by_head(k_NSHd), by_head(v_NSHd)
    live = torch.arange(S + pad_keys, device=q.device) <= position_NQ[:, -1:]  # keys past the last query are stale
    live = live.repeat_interleave(kv_heads, 0)[..., None]
    k, v = k.masked_fill(~live, 0), v.masked_fill(~live, 0)

    peak = q.new_full((q.shape[0], TILE_ROWS, 1), -torch.inf)
    total = torch.zeros_like(peak)
    acc = torch.zeros_like(q)
    for start in range(0, S + pad_keys, TILE_KEYS):
        keys = torch.arange(start, start + TILE_KEYS, device=q.device)
        k_tile = k[:, start : start + TILE_KEYS].repeat_interleave(tiles, 0)
        v_tile = v[:, start : start + TILE_KEYS].repeat_interleave(tiles, 0)
        score = torch.bmm(q, k_tile.transpose(1, 2)) * scale
        score = score.masked_fill(keys > row_position, -torch.inf)
        new_peak = torch.maximum(peak, score.amax(-1, keepdim=True))
        keep = torch.exp(peak - new_peak)
        weight = torch.exp(score - new_peak)
        total = total * keep + weight.sum(-1, keepdim=True)
        acc = acc * keep + torch.bmm(weight, v_tile)
        peak = new_peak
    out = (acc / total).view(N * kv_heads, tiles * TILE_ROWS, d)[:, :rows]
    out = out.view(N, kv_heads, Q, group, d).transpose(1, 2).reshape(N, Q, H, d)
    return out.to(q_NQHd.dtype)
