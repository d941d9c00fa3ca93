"""Triton kernels of `ops.attention`: paged attention with split keys, and the cache write fused with rotary.

Rows of a tile are (query, query head of the group), so one load of keys serves all G query heads of a key head.  A
sequence's keys are cut into splits of a fixed number of tiles; splits are summed in ascending order.  With one tile
shape and one split length for prefill and decode (``Tiling.fixed``) a row's bits depend on its own sequence only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Tiling:
    """Rows and keys of a tile, keys of a split (a multiple of ``keys``), warps."""

    rows: int
    keys: int
    split: int
    warps: int = 4


FIXED = Tiling(16, 64, 512)


def choose_tiling(max_rows: int, tiles: int, max_keys: int, num_sms: int) -> Tiling:
    """Tiles for a step whose longest sequence has ``max_rows`` (query, head) rows and ``max_keys`` keys.

    Few tiles (decode) are split so that every SM has work; many tiles (prefill) are not split at all.
    """
    if max_rows > 16:
        return Tiling(min(128, max(32, triton.next_power_of_2(max_rows))), 64, triton.cdiv(max_keys, 64) * 64, 8)
    splits = max(1, min(triton.cdiv(2 * num_sms, max(tiles, 1)), triton.cdiv(max_keys, 256)))
    return Tiling(16, 64, triton.cdiv(triton.cdiv(max_keys, splits), 64) * 64)


@triton.jit
def _attend_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    table_ptr,
    query_start_ptr,
    kv_len_ptr,
    tile_ptr,
    table_stride,
    head_stride,
    value_stride,
    rows_total,
    split_keys,
    scale,
    KVH: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (tile, key head, split): one tile of rows against one split of its sequence's keys."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = tl.load(tile_ptr + 2 * tile)
    first_row = tl.load(tile_ptr + 2 * tile + 1)
    query_start = tl.load(query_start_ptr + seq)
    q_len = tl.load(query_start_ptr + seq + 1) - query_start
    kv_len = tl.load(kv_len_ptr + seq)

    row = first_row + tl.arange(0, ROWS)
    live = row < q_len * G
    query = row // G
    position = kv_len - q_len + query
    d = tl.arange(0, D2)
    at = ((query_start + query).to(tl.int64) * KVH + head) * G + row % G  # row of q and out as [T * H, D]
    q = tl.load(q_ptr + at[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)

    last = kv_len - q_len + tl.minimum(first_row + ROWS - 1, q_len * G - 1) // G  # last position a row may see
    stop = tl.minimum(split * split_keys + split_keys, last + 1)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D2], tl.float32)
    for start in range(split * split_keys, stop, KEYS):
        key = start + tl.arange(0, KEYS)
        block = tl.load(table_ptr + seq.to(tl.int64) * table_stride + key // BLOCK_SIZE, mask=key < kv_len, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        source = cache_ptr + head * head_stride + slot[:, None] * D + d[None, :]
        inside = (key < kv_len)[:, None] & (d < D)[None, :]
        k = tl.load(source, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that sees no key of this split yet
        keep = tl.exp2(peak - safe)
        weight = tl.exp2(score - safe[:, None])
        v = tl.load(source + value_stride, mask=inside, other=0.0)
        total = total * keep + tl.sum(weight, 1)
        acc = acc * keep[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    some = total > 0
    result = acc / tl.where(some, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out_ptr + at[:, None] * D + d[None, :], result, mask=live[:, None] & (d < D)[None, :])
    else:
        spot = split * rows_total.to(tl.int64) + at
        tl.store(part_ptr + spot[:, None] * D + d[None, :], result, mask=live[:, None] & (d < D)[None, :])
        lse = tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + spot, lse, mask=live)


@triton.jit
def _merge_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    rows_total,
    D: tl.constexpr,
    D2: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program r: row r's splits, weighted by their share of the softmax, in ascending order."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D2)
    peak = tl.max(tl.load(lse_ptr + tl.arange(0, SPLITS) * rows_total.to(tl.int64) + row), 0)
    total = 0.0
    acc = tl.zeros([D2], tl.float32)
    for split in range(SPLITS):
        spot = split * rows_total.to(tl.int64) + row
        weight = tl.exp2(tl.load(lse_ptr + spot) - peak)
        part = tl.load(part_ptr + spot * D + d, mask=d < D, other=0.0)
        acc += tl.where(weight > 0, weight * part, 0.0)
        total += weight
    tl.store(out_ptr + row * D + d, acc / total, mask=d < D)


def paged_attention_triton(q_THd: torch.Tensor, cache_HBSd: torch.Tensor, batch, scale: float, tiled: bool):
    """`paged_attention` of `ops.attention` on the device; ``tiled`` takes the fixed tiling."""
    T, H, D = q_THd.shape
    out_THd = torch.empty_like(q_THd)
    if T == 0:
        return out_THd
    kv_heads = cache_HBSd.shape[1]
    group = H // kv_heads
    on = batch.on_device(group, tiled)
    tiling, tiles = on.tiling, on.tile_X2.shape[0]
    splits = triton.next_power_of_2(triton.cdiv(max(batch.kv_lens), tiling.split))
    part = lse = out_THd
    if splits > 1:
        part = torch.empty((splits, T * H, D), dtype=torch.float32, device=q_THd.device)
        lse = torch.empty((splits, T * H), dtype=torch.float32, device=q_THd.device)
    assert cache_HBSd[0, 0].is_contiguous(), f"cache strides {cache_HBSd.stride()}"
    _attend_kernel[tiles, kv_heads, splits](
        q_THd.contiguous(),
        cache_HBSd,
        out_THd,
        part,
        lse,
        batch.block_table_NP,
        on.query_start_N1,
        on.kv_len_N,
        on.tile_X2,
        batch.block_table_NP.stride(0),
        cache_HBSd.stride(1),
        cache_HBSd.stride(0),
        T * H,
        tiling.split,
        scale,
        KVH=kv_heads,
        G=group,
        D=D,
        D2=max(16, triton.next_power_of_2(D)),
        BLOCK_SIZE=batch.block_size,
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        SPLITS=splits,
        num_warps=tiling.warps,
    )
    if splits > 1:
        grid = (T * H,)
        _merge_kernel[grid](part, lse, out_THd, T * H, D=D, D2=triton.next_power_of_2(D), SPLITS=splits, num_warps=2)
    return out_THd
