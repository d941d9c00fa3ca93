"""Triton kernel of `ops.attention`: paged attention, items as cut by `ops.attention_work`.

Rows of a tile are (query, query head of the group), so one load of keys serves all G query heads of a key head.
Where a tile's keys are in several parts, a second launch adds them, in ascending order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.attention_work import FIELDS, Tiling, Work
from epmoe.ops.grouped_gemm import rows_descriptor
from epmoe.ops.launch import has_hopper_features, pdl_options, sm_count, start_next_and_wait

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_step(score, peak, total):
    """Online softmax (Milakov & Gimelshein 2018) in base 2: weights, and the sums' shrinkage, new peak and total."""
    new_peak = tl.maximum(peak, tl.max(score, 1))
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen no key yet
    keep = tl.exp2(peak - safe)
    weight = tl.exp2(score - safe[:, None])
    return weight, keep, new_peak, total * keep + tl.sum(weight, 1)


@triton.jit
def split_keys(start, stop, seen, KEYS: tl.constexpr, EXACT: tl.constexpr):
    """Where whole tiles of keys end: those that every row sees, or in exact mode those that are written."""
    whole = stop if EXACT else tl.minimum(seen, stop)
    return start + tl.maximum(whole - start, 0) // KEYS * KEYS


@triton.jit
def _attend_keys(
    state, q, position, start, stop, table_ptr, block_stride, cache, scale, tile: tl.constexpr, HIDE: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add keys ``start .. stop`` to (peak, total, acc).

    Args:
        cache: pointer to the head's first key, elements from keys to values, and where ``TMA`` the descriptor of the
            cache as rows, the head's first row, and the rows from keys to values.
        HIDE: rows may not see all keys.
        PARTIAL: the last tile is not whole; what lies beyond it may never have been written, and hold NaN.
    """
    D: tl.constexpr = tile[0]
    D2: tl.constexpr = tile[1]
    KEYS: tl.constexpr = tile[2]
    BLOCK_SIZE: tl.constexpr = tile[3]
    TMA: tl.constexpr = tile[4] and not PARTIAL
    k_ptr, value_stride, rows, head_row, value_rows = cache
    peak, total, acc = state
    d = tl.arange(0, D2)
    ahead = 0
    if TMA:
        ahead = tl.load(table_ptr + start // BLOCK_SIZE * block_stride, mask=start < stop, other=0)
    for first in range(start, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        inside = (key < stop)[:, None] & (d < D)[None, :]
        if TMA:
            line = head_row + ahead * BLOCK_SIZE + first % BLOCK_SIZE
            following = first + KEYS  # its block's number is under way while this tile is multiplied
            ahead = tl.load(table_ptr + following // BLOCK_SIZE * block_stride, mask=following < stop, other=0)
            k = rows.load([line, 0])
        else:
            if PARTIAL:
                block = tl.load(table_ptr + key // BLOCK_SIZE * block_stride, mask=key < stop, other=0)
            else:
                block = tl.load(table_ptr + key // BLOCK_SIZE * block_stride)
            slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
            source = k_ptr + slot[:, None] * D + d[None, :]
            if PARTIAL or D != D2:
                k = tl.load(source, mask=inside, other=0.0)
            else:
                k = tl.load(source)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        if HIDE:
            score = tl.where((key[None, :] <= position[:, None]) & (key < stop)[None, :], score, float("-inf"))
        weight, keep, peak, total = softmax_step(score, peak, total)
        if TMA:
            v = rows.load([line + value_rows, 0])
        elif PARTIAL or D != D2:
            v = tl.load(source + value_stride, mask=inside, other=0.0)
        else:
            v = tl.load(source + value_stride)
        acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return peak, total, acc


@triton.jit
def finish(state, out_at, spot, row, rows, d, live, parts, part_ptr, lse_ptr, D: tl.constexpr, SPLIT: tl.constexpr):
    """Write a tile's result if it has one part, else this part of it and its log2 sums from ``spot`` on."""
    peak, total, acc = state
    some = total > 0
    result = acc / tl.where(some, total, 1.0)[:, None]
    if SPLIT:
        if parts > 1:
            lse = tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
            tl.store(part_ptr + (spot + row)[:, None] * D + d[None, :], result, mask=live)
            tl.store(lse_ptr + spot + row, lse, mask=row < rows)
        else:
            tl.store(out_at, result, mask=live)
    else:
        tl.store(out_at, result, mask=live)


@triton.jit(do_not_specialize=["part_rows"])
def _merge_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    item_ptr,
    first_ptr,
    part_rows,
    KVH: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    FIELDS: tl.constexpr,
    RUN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile, key head, RUN rows): each row's parts, weighted by their share of the softmax."""
    item = tl.load(first_ptr + tl.program_id(0))
    head = tl.program_id(1)
    about = item_ptr + tl.maximum(item, 0) * FIELDS
    token, first_row, rows, parts = tl.load(about + 1), tl.load(about + 2), tl.load(about + 3), tl.load(about + 8)
    start_next_and_wait(PDL)
    if (item >= 0) & (parts > 1) & (tl.program_id(2) * RUN < rows):
        row = tl.program_id(2) * RUN + tl.arange(0, RUN)
        d = tl.arange(0, D2)
        n = tl.arange(0, AT_ONCE)
        spot = ((item + n).to(tl.int64) * KVH + head)[None, :] * part_rows + row[:, None]
        live = (row < rows)[:, None]
        peak = tl.full([RUN], float("-inf"), tl.float32)
        total = tl.zeros([RUN], tl.float32)
        acc = tl.zeros([RUN, D2], tl.float32)
        for begin in range(0, parts, AT_ONCE):
            at = spot + begin * KVH * part_rows
            inside = live & (n < parts - begin)[None, :]
            lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))
            whole = inside[:, :, None] & (d < D)[None, None, :]
            part = tl.load(part_ptr + at[:, :, None] * D + d[None, None, :], mask=whole, other=0.0)
            new_peak = tl.maximum(peak, tl.max(lse, 1))  # part 0 holds key 0, which every row sees
            safe = tl.where(row < rows, new_peak, 0.0)
            weight = tl.exp2(lse - safe[:, None])
            keep = tl.exp2(peak - safe)
            total = total * keep + tl.sum(weight, 1)
            acc = acc * keep[:, None] + tl.sum(weight[:, :, None] * part, 1)
            peak = new_peak
        row += first_row
        out_row = ((token + row // G).to(tl.int64) * KVH + head) * G + row % G
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + out_row[:, None] * D + d[None, :], result, mask=live & (d < D)[None, :])


@triton.jit(do_not_specialize=["sequence_stride", "block_stride", "part_rows"])
def _attend_kernel(
    q_ptr,
    cache_ptr,
    cache_rows,
    out_ptr,
    part_ptr,
    lse_ptr,
    table_ptr,
    item_ptr,
    sequence_stride,
    block_stride,
    head_stride,
    value_stride,
    part_rows,
    scale,
    KVH: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    EXACT: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (item, key head), the heads of an item side by side: items without work come last and start last."""
    item, head = tl.program_id(0) // KVH, tl.program_id(0) % KVH
    about = item_ptr + item * FIELDS
    seq, token, first_row, rows = tl.load(about), tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
    context, start, stop = tl.load(about + 4), tl.load(about + 5), tl.load(about + 6)
    parts = tl.load(about + 8)
    start_next_and_wait(PDL)
    if seq >= 0:
        row = tl.arange(0, ROWS)
        query = (first_row + row) // G
        d = tl.arange(0, D2)
        live = (row < rows)[:, None] & (d < D)[None, :]
        at = ((token + query).to(tl.int64) * KVH + head) * G + (first_row + row) % G  # row of q and out as [T * H, D]
        q = tl.load(q_ptr + at[:, None] * D + d[None, :], mask=live, other=0.0)
        table = table_ptr + seq.to(tl.int64) * sequence_stride
        k_ptr = cache_ptr + head.to(tl.int64) * head_stride
        cache = (
            k_ptr,
            value_stride,
            cache_rows,
            head * (head_stride // D).to(tl.int32),
            (value_stride // D).to(tl.int32),
        )
        nothing = tl.full([ROWS], float("-inf"), tl.float32)
        state = (nothing, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D2], tl.float32))
        position = context + query
        tile: tl.constexpr = (D, D2, KEYS, BLOCK_SIZE, TMA)
        whole = split_keys(start, stop, context + first_row // G + 1, KEYS, EXACT)
        state = _attend_keys(
            state, q, position, start, whole, table, block_stride, cache, scale, tile, EXACT, False
        )  # fmt: skip
        state = _attend_keys(state, q, position, whole, stop, table, block_stride, cache, scale, tile, True, True)
        out_at = out_ptr + at[:, None] * D + d[None, :]
        spot = (item.to(tl.int64) * KVH + head) * part_rows
        finish(state, out_at, spot, row, rows, d, live, parts, part_ptr, lse_ptr, D, SPLIT)


def paged_attention_triton(q_THd: torch.Tensor, cache_HBSd: torch.Tensor, batch, scale: float, tiled: bool):
    """`paged_attention` of `ops.attention` on the device; ``tiled`` takes the fixed tiling."""
    out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
    group = q_THd.shape[1] // cache_HBSd.shape[1]
    assert cache_HBSd[0, 0].is_contiguous(), f"cache strides {cache_HBSd.stride()}"
    for work in batch.work(cache_HBSd.shape[1], group, tiled):
        _launch(q_THd.contiguous(), cache_HBSd, out_THd, batch, work, scale)
    return out_THd


def _launch(q_THd, cache_HBSd, out_THd, batch, work: Work, scale: float) -> None:
    _, kv_heads, _, block_size, D = cache_HBSd.shape
    part, lse = work.scratch.buffers(kv_heads, D)
    tiling = work.tiling
    tma = triton.next_power_of_2(D) == D and takes_descriptor(cache_HBSd, tiling.keys)
    _attend_kernel[work.item_XF.shape[0] * kv_heads,](
        q_THd,
        cache_HBSd,
        rows_descriptor(cache_HBSd.view(-1, D), tiling.keys, D) if tma else None,
        out_THd,
        part,
        lse,
        batch.block_table_NP,
        work.item_XF,
        batch.block_table_NP.stride(0),
        batch.block_table_NP.stride(1),
        cache_HBSd.stride(1),
        cache_HBSd.stride(0),
        work.scratch.rows,
        scale,
        KVH=kv_heads,
        G=q_THd.shape[1] // kv_heads,
        D=D,
        D2=max(16, triton.next_power_of_2(D)),
        BLOCK_SIZE=block_size,
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        FIELDS=FIELDS,
        EXACT=tiling.exact,
        SPLIT=work.split,
        TMA=tma,
        num_warps=tiling.warps,
        num_stages=pipeline_stages(tiling, q_THd.dtype, tma),
        maxnreg=tiling.registers if q_THd.dtype != torch.float32 else None,
        **pdl_options(q_THd),
    )
    if work.split:
        merge_parts(out_THd, part, lse, work)


def merge_parts(out_THd: torch.Tensor, part: torch.Tensor, lse: torch.Tensor, work: Work) -> None:
    """Add the parts of the tiles that have several."""
    _, kv_heads, rows, D = part.shape
    width = triton.next_power_of_2(D)
    tiles = work.first_Y.shape[0]
    many = tiles * kv_heads * triton.cdiv(rows, 8) >= sm_count(out_THd.device) and not work.tiling.exact
    run = 8 if width <= 128 or many else 1  # wide rows one by one where SMs would be left over
    _merge_kernel[tiles, kv_heads, triton.cdiv(rows, run)](
        part,
        lse,
        out_THd,
        work.item_XF,
        work.first_Y,
        rows,
        KVH=kv_heads,
        G=out_THd.shape[1] // kv_heads,
        D=D,
        D2=width,
        FIELDS=FIELDS,
        RUN=run,
        AT_ONCE=min(32, 16384 // (run * width)),
        num_warps=8,
        **pdl_options(out_THd),
    )


def pipeline_stages(tiling: Tiling, dtype: torch.dtype, tma: bool) -> int:
    """Loads through pointers spend two stages on the block numbers; float32 tiles fill the memory of two."""
    if dtype == torch.float32:
        return 2
    return tiling.stages if tma else tiling.stages + 2


def takes_descriptor(cache_HBSd: torch.Tensor, keys: int) -> bool:
    """Whether tiles of so many keys lie within one block and rows are such as TMA takes."""
    block_size, d = cache_HBSd.shape[3:]
    whole = block_size % keys == 0 and d * cache_HBSd.element_size() % 16 == 0
    device = cache_HBSd.device
    return whole and cache_HBSd.is_contiguous() and (device.type == "cpu" or has_hopper_features(device))
