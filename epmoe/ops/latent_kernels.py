"""Triton kernel of `ops.latent`: paged multi-head latent attention in absorbed form, items as in `attention_work`.

One row of the cache is the key of every head and, in its first VALUE columns, also the value: it is loaded once for
both products.  Rows of a tile are (query, head).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.attention_kernels import LOG2E, finish, merge_parts, softmax_step, split_keys, takes_descriptor
from epmoe.ops.attention_work import FIELDS, Work
from epmoe.ops.grouped_gemm import rows_descriptor
from epmoe.ops.latent_products import attend_by_products
from epmoe.ops.launch import pdl_options, start_next_and_wait


@triton.jit
def _attend_latents(
    state, q_value, q_rope, position, start, stop, table_ptr, block_stride, cache, scale, tile: tl.constexpr,
    HIDE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add cached tokens ``start .. stop`` to (peak, total, acc); ``HIDE`` and ``PARTIAL`` as in `attention_kernels`.

    Args:
        cache: pointer to the cache and, where ``TMA``, descriptors of its value and rotary columns.
    """
    VALUE: tl.constexpr = tile[0]
    ROPE: tl.constexpr = tile[1]
    KEYS: tl.constexpr = tile[2]
    BLOCK_SIZE: tl.constexpr = tile[3]
    TMA: tl.constexpr = tile[4] and not PARTIAL
    cache_ptr, values, ropes = cache
    peak, total, acc = state
    ahead = 0
    if TMA:
        ahead = tl.load(table_ptr + start // BLOCK_SIZE * block_stride, mask=start < stop, other=0)
    for first in range(start, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        if TMA:
            line = ahead * BLOCK_SIZE + first % BLOCK_SIZE
            following = first + KEYS  # its block's number is under way while this tile is multiplied
            ahead = tl.load(table_ptr + following // BLOCK_SIZE * block_stride, mask=following < stop, other=0)
            value = values.load([line, 0])
            rope = ropes.load([line, VALUE])
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE * block_stride, mask=key < stop, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
            source = cache_ptr + slot[:, None] * (VALUE + ROPE)
            inside = (key < stop)[:, None]
            value = tl.load(source + tl.arange(0, VALUE)[None, :], mask=inside, other=0.0)
            rope = tl.load(source + VALUE + tl.arange(0, ROPE)[None, :], mask=inside, other=0.0)
        score = tl.dot(q_value, tl.trans(value), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(rope), score, input_precision="ieee") * (scale * LOG2E)
        if HIDE:
            score = tl.where((key[None, :] <= position[:, None]) & (key < stop)[None, :], score, float("-inf"))
        weight, keep, peak, total = softmax_step(score, peak, total)
        acc = tl.dot(weight.to(value.dtype), value, acc * keep[:, None], input_precision="ieee")
    return peak, total, acc


@triton.jit(do_not_specialize=["sequence_stride", "block_stride", "part_rows"])
def _latent_kernel(
    q_ptr,
    cache_ptr,
    values,
    ropes,
    out_ptr,
    part_ptr,
    lse_ptr,
    table_ptr,
    item_ptr,
    sequence_stride,
    block_stride,
    part_rows,
    scale,
    H: tl.constexpr,
    VALUE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    EXACT: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program: one item."""
    item = tl.program_id(0)
    about = item_ptr + item * FIELDS
    seq, token, first_row, rows = tl.load(about), tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
    context, start, stop = tl.load(about + 4), tl.load(about + 5), tl.load(about + 6)
    parts = tl.load(about + 8)
    start_next_and_wait(PDL)
    if seq >= 0:
        row = tl.arange(0, ROWS)
        position = context + (first_row + row) // H
        d = tl.arange(0, VALUE)
        live = (row < rows)[:, None] & (d < VALUE)[None, :]
        at = token.to(tl.int64) * H + first_row + row  # row of q and out as [T * H, ...]
        source = q_ptr + at[:, None] * (VALUE + ROPE)
        q_value = tl.load(source + d[None, :], mask=live, other=0.0)
        q_rope = tl.load(source + VALUE + tl.arange(0, ROPE)[None, :], mask=(row < rows)[:, None], other=0.0)
        table = table_ptr + seq.to(tl.int64) * sequence_stride
        nothing = tl.full([ROWS], float("-inf"), tl.float32)
        state = (nothing, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, VALUE], tl.float32))
        tile: tl.constexpr = (VALUE, ROPE, KEYS, BLOCK_SIZE, TMA)
        cache = (cache_ptr, values, ropes)
        whole = split_keys(start, stop, context + first_row // H + 1, KEYS, EXACT)
        state = _attend_latents(
            state, q_value, q_rope, position, start, whole, table, block_stride, cache, scale, tile, EXACT, False
        )
        state = _attend_latents(
            state, q_value, q_rope, position, whole, stop, table, block_stride, cache, scale, tile, True, True
        )
        out_at = out_ptr + at[:, None] * VALUE + d[None, :]
        spot = item.to(tl.int64) * part_rows
        finish(state, out_at, spot, row, rows, d, live, parts, part_ptr, lse_ptr, VALUE, SPLIT)


def latent_attention_triton(
    q_THd: torch.Tensor, cache_HBSd: torch.Tensor, batch, scale: float, value_dim: int, tiled: bool
) -> torch.Tensor:
    """`latent_attention` of `ops.latent` on the device; ``tiled`` takes the fixed tiling."""
    T, H, d = q_THd.shape
    assert cache_HBSd.is_contiguous() and cache_HBSd.shape[:2] == (1, 1), f"cache {cache_HBSd.shape}"
    for size in (value_dim, d - value_dim):
        assert size >= 16 and size & (size - 1) == 0, f"{d} columns of which {value_dim} are values: no powers of 2"
    out_THd = torch.empty((T, H, value_dim), dtype=q_THd.dtype, device=q_THd.device)
    for work in batch.work(1, H, tiled, latent=True):
        launch = attend_by_products if work.tiling.products else _launch
        launch(q_THd.contiguous(), cache_HBSd, out_THd, batch, work, scale)
    return out_THd


def _launch(q_THd, cache_HBSd, out_THd, batch, work: Work, scale: float) -> None:
    value_dim = out_THd.shape[2]
    tiling = work.tiling
    part, lse = work.scratch.buffers(1, value_dim)
    values = ropes = None
    if tma := takes_descriptor(cache_HBSd, tiling.keys):
        rows = cache_HBSd.view(-1, q_THd.shape[2])
        values = rows_descriptor(rows, tiling.keys, value_dim)
        ropes = rows_descriptor(rows, tiling.keys, q_THd.shape[2] - value_dim)
    _latent_kernel[work.item_XF.shape[0],](
        q_THd,
        cache_HBSd,
        values,
        ropes,
        out_THd,
        part,
        lse,
        batch.block_table_NP,
        work.item_XF,
        batch.block_table_NP.stride(0),
        batch.block_table_NP.stride(1),
        work.scratch.rows,
        scale,
        H=q_THd.shape[1],
        VALUE=value_dim,
        ROPE=q_THd.shape[2] - value_dim,
        BLOCK_SIZE=batch.block_size,
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        FIELDS=FIELDS,
        EXACT=tiling.exact,
        SPLIT=work.split,
        TMA=tma,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **pdl_options(q_THd),
    )
    if work.split:
        merge_parts(out_THd, part, lse, work)
