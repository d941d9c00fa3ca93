"""Latent decode of many heads as two matrix products, for `ops.latent`: all heads of a sequence are one tile.

One program that kept the sums of 128 heads x 512 columns would fill the registers of an SM with them and multiply
nothing while it takes exponents.  So a first launch multiplies queries and keys, ``KEYS`` keys a program, and stores
their softmax weights, relative to the peak of each row over those keys, with that peak and their total; a second one
multiplies the weights of an item's keys by their values, ``COLUMNS`` columns a program.  Each is an ordinary product
with large tiles; the second one's come by tensor descriptor where blocks of the cache are as long as a step.  Weights
take ``rows * keys`` elements of memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.attention_kernels import LOG2E, finish, merge_parts, takes_descriptor
from epmoe.ops.attention_work import FIELDS, PRODUCT_KEYS, Work
from epmoe.ops.grouped_gemm import rows_descriptor
from epmoe.ops.launch import pdl_options, start_next_and_wait

COLUMNS = 256
STEP = 64  # keys


@triton.jit(do_not_specialize=["sequence_stride", "block_stride", "most_keys"])
def _weights_kernel(
    q_ptr,
    cache_ptr,
    weight_ptr,
    peak_ptr,
    total_ptr,
    table_ptr,
    item_ptr,
    first_ptr,
    sequence_stride,
    block_stride,
    most_keys,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (sequence's first item, KEYS keys).  Weights and statistics lie at the sequence's first item."""
    item = tl.load(first_ptr + tl.program_id(0))
    about = item_ptr + tl.maximum(item, 0) * FIELDS
    seq, token, rows, parts = tl.load(about), tl.load(about + 1), tl.load(about + 3), tl.load(about + 8)
    stop = tl.load(about + (parts - 1) * FIELDS + 6)
    tile = tl.program_id(1)
    start_next_and_wait(PDL)
    if (item >= 0) & (seq >= 0) & (tile * KEYS < stop):
        row = tl.arange(0, ROWS)
        key = tile * KEYS + tl.arange(0, KEYS)
        table = table_ptr + seq.to(tl.int64) * sequence_stride
        block = tl.load(table + key // BLOCK_SIZE * block_stride, mask=key < stop, other=0)
        source = cache_ptr + (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE)[:, None] * D
        query = q_ptr + (token.to(tl.int64) * H + row)[:, None] * D
        live = (row < rows)[:, None]
        score = tl.zeros([ROWS, KEYS], tl.float32)
        for first in range(0, D, DEPTH):
            d = first + tl.arange(0, DEPTH)
            q = tl.load(query + d[None, :], mask=live, other=0.0)
            k = tl.load(source + d[None, :])  # of keys past the end: whatever, hidden below
            score = tl.dot(q, tl.trans(k), score, input_precision="ieee")
        score = tl.where((key < stop)[None, :], score * (scale * LOG2E), float("-inf"))
        peak = tl.max(score, 1)
        weight = tl.exp2(score - peak[:, None])
        at = item.to(tl.int64) * ROWS + row
        tl.store(weight_ptr + at[:, None] * most_keys + key[None, :], weight.to(weight_ptr.dtype.element_ty))
        spot = (item * (most_keys // KEYS) + tile) * ROWS + row
        tl.store(peak_ptr + spot, peak)
        tl.store(total_ptr + spot, tl.sum(weight, 1))


@triton.jit
def _add_values(
    acc, peak, start, stop, table_ptr, block_stride, cache, weights, peaks_ptr, tile: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add weights times values of keys ``start .. stop``; ``PARTIAL``: the last step is not whole, and what lies beyond
    it may never have been written, and hold NaN.

    Args:
        cache: pointer to the cache, to this program's columns of it, its width, and where ``TMA`` the descriptor of its
            rows and this program's first column.
        weights: pointer to the tile's weights by row, and where ``TMA`` their descriptor and the tile's first row.
        peaks_ptr: by row, of the tile's first keys.
    """
    ROWS: tl.constexpr = tile[0]
    COLUMNS: tl.constexpr = tile[1]
    KEYS: tl.constexpr = tile[2]
    STEP: tl.constexpr = tile[3]
    BLOCK_SIZE: tl.constexpr = tile[4]
    D: tl.constexpr = tile[5]
    TMA: tl.constexpr = tile[6] and not PARTIAL
    cache_ptr, values, column = cache
    weight_ptr, weight_rows, first_row = weights
    d = column + tl.arange(0, COLUMNS)
    ahead = 0
    if TMA:
        ahead = tl.load(table_ptr + start // BLOCK_SIZE * block_stride, mask=start < stop, other=0)
    ahead_peak = tl.load(peaks_ptr + tl.minimum(start, tl.maximum(stop - 1, 0)) // KEYS * ROWS)
    for first in range(start, stop, STEP):
        key = first + tl.arange(0, STEP)
        share = tl.exp2(ahead_peak - peak)
        following = tl.minimum(first + STEP, stop - 1)  # its block's number and peaks come while this one is multiplied
        ahead_peak = tl.load(peaks_ptr + following // KEYS * ROWS)
        if TMA:
            value = values.load([ahead * BLOCK_SIZE + first % BLOCK_SIZE, column])
            ahead = tl.load(table_ptr + following // BLOCK_SIZE * block_stride)
            weight = weight_rows.load([first_row, first])
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE * block_stride, mask=key < stop, other=0)
            source = cache_ptr + (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE)[:, None] * D + d[None, :]
            value = tl.load(source, mask=(key < stop)[:, None], other=0.0)
            weight = tl.load(weight_ptr + key[None, :])
        acc = tl.dot((weight * share[:, None]).to(value.dtype), value, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["sequence_stride", "block_stride", "part_rows", "most_keys"])
def _values_kernel(
    weight_ptr,
    weight_rows,
    peak_ptr,
    total_ptr,
    cache_ptr,
    values,
    out_ptr,
    part_ptr,
    lse_ptr,
    table_ptr,
    item_ptr,
    sequence_stride,
    block_stride,
    part_rows,
    most_keys,
    H: tl.constexpr,
    D: tl.constexpr,
    VALUE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STEP: tl.constexpr,
    FIELDS: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (item, COLUMNS columns of the values), the columns of an item side by side."""
    item = tl.program_id(0) // (VALUE // COLUMNS)
    column = tl.program_id(0) % (VALUE // COLUMNS) * COLUMNS
    about = item_ptr + item * FIELDS
    seq, token, rows = tl.load(about), tl.load(about + 1), tl.load(about + 3)
    start, stop, part, parts = tl.load(about + 5), tl.load(about + 6), tl.load(about + 7), tl.load(about + 8)
    start_next_and_wait(PDL)
    if seq >= 0:
        row = tl.arange(0, ROWS)
        spot = (item - part) * (most_keys // KEYS) * ROWS + row
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for tile in range(start // KEYS, tl.cdiv(stop, KEYS)):
            tile_peak = tl.load(peak_ptr + spot + tile * ROWS)
            new_peak = tl.maximum(peak, tile_peak)
            more = tl.load(total_ptr + spot + tile * ROWS) * tl.exp2(tile_peak - new_peak)
            total = total * tl.exp2(peak - new_peak) + more
            peak = new_peak
        table = table_ptr + seq.to(tl.int64) * sequence_stride
        first_row = (item - part) * ROWS
        cache = (cache_ptr, values, column)
        weights = (weight_ptr + (first_row + row).to(tl.int64)[:, None] * most_keys, weight_rows, first_row)
        shape: tl.constexpr = (ROWS, COLUMNS, KEYS, STEP, BLOCK_SIZE, D, TMA)
        whole = start + (stop - start) // STEP * STEP
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        acc = _add_values(
            acc, peak, start, whole, table, block_stride, cache, weights, peak_ptr + spot, shape, False
        )  # fmt: skip
        acc = _add_values(acc, peak, whole, stop, table, block_stride, cache, weights, peak_ptr + spot, shape, True)
        d = column + tl.arange(0, COLUMNS)
        live = (row < rows)[:, None] & (d < VALUE)[None, :]
        out_at = out_ptr + (token.to(tl.int64) * H + row)[:, None] * VALUE + d[None, :]
        place = item.to(tl.int64) * part_rows
        finish((peak, total, acc), out_at, place, row, rows, d, live, parts, part_ptr, lse_ptr, VALUE, SPLIT)


def attend_by_products(q_THd, cache_HBSd, out_THd, batch, work: Work, scale: float) -> None:
    """One launch of `ops.latent_kernels` whose tiling says ``products``: sequences of one query each."""
    tiling, items = work.tiling, work.item_XF.shape[0]
    _, H, D = q_THd.shape
    value_dim = out_THd.shape[2]
    most_keys = triton.cdiv(work.longest, PRODUCT_KEYS) * PRODUCT_KEYS
    weights = torch.empty((items, tiling.rows, most_keys), dtype=q_THd.dtype, device=q_THd.device)
    shape = (2, items, most_keys // PRODUCT_KEYS, tiling.rows)
    peak, total = torch.empty(shape, dtype=torch.float32, device=q_THd.device)
    part, lse = work.scratch.buffers(1, value_dim)
    columns = min(COLUMNS, value_dim)
    table = batch.block_table_NP
    stages = 2 if q_THd.dtype == torch.float32 else tiling.stages
    values = weight_rows = None
    if tma := takes_descriptor(cache_HBSd, STEP):
        values = rows_descriptor(cache_HBSd.view(-1, D), STEP, columns)
        weight_rows = rows_descriptor(weights.view(-1, most_keys), tiling.rows, STEP)
    common = {"H": H, "D": D, "BLOCK_SIZE": batch.block_size, "ROWS": tiling.rows, "KEYS": PRODUCT_KEYS}
    common |= {"FIELDS": FIELDS, "num_warps": tiling.warps, "num_stages": stages, **pdl_options(q_THd)}
    _weights_kernel[work.first_Y.shape[0], most_keys // PRODUCT_KEYS](
        q_THd,
        cache_HBSd,
        weights,
        peak,
        total,
        table,
        work.item_XF,
        work.first_Y,
        table.stride(0),
        table.stride(1),
        most_keys,
        scale,
        DEPTH=min(64, value_dim, D - value_dim),
        **common,
    )
    _values_kernel[items * (value_dim // columns),](
        weights,
        weight_rows,
        peak,
        total,
        cache_HBSd,
        values,
        out_THd,
        part,
        lse,
        table,
        work.item_XF,
        table.stride(0),
        table.stride(1),
        work.scratch.rows,
        most_keys,
        VALUE=value_dim,
        COLUMNS=columns,
        STEP=STEP,
        SPLIT=work.split,
        TMA=tma,
        **common,
    )
    if work.split:
        merge_parts(out_THd, part, lse, work)
