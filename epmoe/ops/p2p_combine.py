"""The experts' rows back to their homes by a few programs: the way back of the ``put`` transport.

In exact mode one row per (token, choice), in reduce mode one weighted sum per (token, rank), float32 in ascending
choice order, rounded once.  `p2p_plan` has listed the pairs with their destinations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, wait_for_inputs
from epmoe.ops.p2p_layout import Layout
from epmoe.ops.p2p_plan import CombinePlan
from epmoe.ops.p2p_ranks import MAX_BLOCK, USUAL, PutOptions, Ranks
from epmoe.ops.p2p_signal import finish_send


@triton.jit(do_not_specialize=["first_rank", "cap", "rows_cap", "bound"])
def _combine_kernel(
    table_ptr,
    out_ptr,
    source_ptr,
    address_ptr,
    weight_ptr,
    total_ptr,
    first_rank,
    cap,
    rows_cap,
    bound,
    state_at,
    sent_at,
    signal_at,
    W: tl.constexpr,
    W2: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    U: tl.constexpr,
    REDUCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns a run of entries, so that all peers are served at once.

    Exact: entry e's row goes to its address.  Reduce: neighbouring entries with one address are summed and stored once;
    a program owns the rows whose first entry lies in its run: it skips the tail of a row begun before and finishes its
    own last row beyond the run's end.
    """
    wait_for_inputs(PDL)
    v = tl.program_id(0) // C
    cta = tl.program_id(0) % C
    out_ptr += v.to(tl.int64) * rows_cap * D
    source_ptr += v.to(tl.int64) * cap
    address_ptr += v.to(tl.int64) * cap
    if REDUCE:
        weight_ptr += v.to(tl.int64) * cap
    total = tl.load(total_ptr + v)
    per = (total + C - 1) // C
    start = tl.minimum(cta * per, total)
    end = tl.minimum(cta * per + per, total)
    if REDUCE:
        start = _row_start(address_ptr, start, total)
        end = _row_start(address_ptr, end, total)
    for c0 in tl.static_range(0, D, BLOCK):
        col = c0 + tl.arange(0, BLOCK)
        sum_D = tl.zeros([BLOCK], tl.float32)
        following = _entries(source_ptr, address_ptr, weight_ptr, start, end, total, U, REDUCE)
        for e0 in range(start, end, U):
            sources, weights, targets, lasts = following
            parts = ()
            for u in tl.static_range(U):  # all of a tile's loads come first
                width = tl.where(e0 + u < end, D, 0)
                row = sources[u].to(tl.int64) * D
                parts += (tl.load(out_ptr + row + col, mask=col < width, other=0.0, eviction_policy="evict_first"),)
            following = _entries(source_ptr, address_ptr, weight_ptr, e0 + U, end, total, U, REDUCE)
            for u in tl.static_range(U):
                value = parts[u]
                if REDUCE:
                    sum_D += value.to(tl.float32) * weights[u]
                    value = sum_D.to(value.dtype)
                    sum_D = tl.where(lasts[u], 0.0, sum_D)
                to = tl.multiple_of(targets[u].to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
                tl.store(to + col, value, mask=col < tl.where(lasts[u], D, 0))
    finish_send(table_ptr, first_rank + v, state_at, sent_at, signal_at, 1, 0, bound, W, W2, C)


@triton.jit
def _entries(source_ptr, address_ptr, weight_ptr, e0, end, total, U: tl.constexpr, REDUCE: tl.constexpr):
    """Sources, weights, addresses of U entries, and whether each ends a row.  They are read a tile ahead: a tile waits
    for one load, not for two in a row."""
    sources, weights, targets, lasts = (), (), (), ()
    target = tl.load(address_ptr + e0, mask=e0 < end, other=0)
    for u in tl.static_range(U):
        inside = e0 + u < end
        sources += (tl.load(source_ptr + e0 + u, mask=inside, other=0),)
        weights += (tl.load(weight_ptr + e0 + u, mask=inside, other=0.0) if REDUCE else 0.0,)
        behind = tl.load(address_ptr + e0 + u + 1, mask=inside & (e0 + u + 1 < total), other=0)
        targets += (target,)
        lasts += (inside & (behind != target) if REDUCE else inside,)
        target = behind
    return sources, weights, targets, lasts


@triton.jit
def _row_start(address_ptr, e, total):
    """The first entry at or behind ``e`` that begins a row."""
    going = (e > 0) & (e < total)
    while going:
        here = tl.load(address_ptr + e)
        before = tl.load(address_ptr + e - 1)
        if here == before:
            e += 1
            going = e < total
        else:
            going = e < 0
    return e


def combine_put(
    ranks: Ranks,
    layout: Layout,
    out_MD: torch.Tensor,
    plan: CombinePlan,
    bound: int,
    options: PutOptions = USUAL,
) -> None:
    """Return the experts' rows (``[V * M_cap, D]``, model dtype) to their homes and signal all ranks."""
    columns = min(triton.next_power_of_2(layout.hidden), 2 * MAX_BLOCK)
    _combine_kernel[(ranks.number * options.programs,)](
        ranks.table_W,
        out_MD,
        plan.source_E,
        plan.address_E,
        plan.weight_E,
        plan.total_V,
        ranks.first,
        plan.source_E.numel() // ranks.number,
        out_MD.shape[0] // ranks.number,
        bound,
        *layout.for_signals,
        W=layout.world,
        W2=triton.next_power_of_2(layout.world),
        C=options.programs,
        D=layout.hidden,
        BLOCK=columns,
        U=options.summed if layout.reduce else options.moved(columns == 2 * MAX_BLOCK),
        REDUCE=layout.reduce,
        num_warps=options.warps or max(4, min(16, columns // 256)),
        **pdl_options(out_MD),
    )
