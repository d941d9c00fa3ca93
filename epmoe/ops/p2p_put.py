"""Rows into the peers' memory by a few programs: the ``put`` transport of the p2p exchange.

``dispatch_put``: each token's row is read once and stored to every rank that serves one of its choices, at position
(home rank, token) of that rank's buffer; every position's metadata is written, -1 where nothing is sent, so the
receiver needs no count and no compaction.  ``combine_put`` returns the experts' rows: in exact mode one row per
(token, choice), in reduce mode one weighted sum per (token, rank), float32 in ascending choice order, rounded once.

C programs a rank (grid ranks x C, rank = program id // C).  A put is bound by latency, not by instructions: rows move
in tiles of U rows, 16 bytes a thread, all loads of a tile ahead of its stores.  (Reading a tile ahead, through shared
memory by Triton's ``num_stages`` or in registers, was slower: measured on H200.)  For the combine, `combine_plan` lists
the pairs with their destinations ahead of time, so that no row's load waits for a chain of others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, wait_for_inputs
from epmoe.ops.p2p_layout import Layout
from epmoe.ops.p2p_signal import finish_send

MAX_BLOCK = 4096  # 4-byte words of a row that move at once


@dataclass(frozen=True)
class PutOptions:
    """How a put runs: programs per rank, wide rows of a tile, rows of a tile that are summed, warps (0: from the row's
    width)."""

    programs: int = 16
    rows: int = 8
    summed: int = 4
    warps: int = 0


@dataclass(frozen=True)
class Ranks:
    """The ranks of one launch: ``first`` .. ``first + number - 1``; inputs of several ranks lie behind one another."""

    table_W: torch.Tensor
    order_VW: torch.Tensor
    """int32: in which order each launched rank visits its peers; at most 63 ranks."""
    first: int
    number: int


def peer_order(world: int, first: int, number: int) -> torch.Tensor:
    """int32 ``[number, W]``: each launched rank visits its peers from its right neighbour on, itself last."""
    rank_V1 = torch.arange(first, first + number, dtype=torch.int32)[:, None]
    return (rank_V1 + 1 + torch.arange(world, dtype=torch.int32)) % world


def virtual_ranks(layout: Layout, device: torch.device) -> tuple[torch.Tensor, Ranks]:
    """All W ranks in this process, for tests and benches: zeroed buffers uint8 ``[W, total]`` and their `Ranks`."""
    buffer_WB = torch.zeros((layout.world, layout.total), dtype=torch.uint8, device=device)
    table_W = torch.tensor([buffer.data_ptr() for buffer in buffer_WB], dtype=torch.int64, device=device)
    return buffer_WB, Ranks(table_W, peer_order(layout.world, 0, layout.world).to(device), 0, layout.world)


@triton.jit
def _store_metadata(
    table_ptr, order_ptr, slot_ptr, weight_ptr, index_ptr, me, v, cta, T, bound, slots_per_rank, slot_at, token_at,
    weight_at, sent_at, W: tl.constexpr, W2: tl.constexpr, C: tl.constexpr, K: tl.constexpr, REDUCE: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Slots, tokens and weights of all ``bound`` positions to every rank; home's index of its choices (exact).

    The last programs begin: they have the fewest rows."""
    sent_ptr = (tl.load(table_ptr + me) + sent_at).to(tl.pointer_type(tl.int64))
    for start in range((C - 1 - cta) * B, bound * K, C * B):
        i = start + tl.arange(0, B)
        t = i // K
        here = i < T * K
        inside = i < bound * K
        slot = tl.load(slot_ptr + v.to(tl.int64) * T * K + i, mask=here, other=-1)
        if not REDUCE:
            tl.store(index_ptr + v.to(tl.int64) * T * K + i, tl.where(slot >= 0, i, -1), mask=here)
        rank = tl.where(slot >= 0, slot // slots_per_rank, -1)
        local = slot % slots_per_rank
        pairs = tl.histogram(tl.maximum(rank, 0), W2, mask=rank >= 0)
        w2 = tl.arange(0, W2)
        tl.atomic_add(sent_ptr + 2 * W + w2, pairs.to(tl.int64), mask=w2 < W, sem="relaxed")
        if REDUCE:
            weight = tl.load(weight_ptr + v.to(tl.int64) * T * K + i, mask=here, other=0.0)
        for n in range(W):
            w = tl.load(order_ptr + n)
            base = tl.load(table_ptr + w)
            at = (me * bound * K).to(tl.int64) + i
            peer_slot = (base + slot_at).to(tl.pointer_type(tl.int32))
            tl.store(peer_slot + at, tl.where(rank == w, local, -1), mask=inside)
            peer_token = (base + token_at).to(tl.pointer_type(tl.int32))
            tl.store(peer_token + me * bound + t, t, mask=inside & (i % K == 0))
            if REDUCE:
                peer_weight = (base + weight_at).to(tl.pointer_type(tl.float32))
                tl.store(peer_weight + at, weight, mask=inside & (rank == w))


@triton.jit
def _count_rows(
    slot_ptr, index_ptr, sent_ptr, v, cta, T, slots_per_rank, W: tl.constexpr, W2: tl.constexpr, C: tl.constexpr,
    K: tl.constexpr, REDUCE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Rows to each rank; home's index of its answers (reduce)."""
    for start in range((C - 1 - cta) * B, T * W, C * B):
        i = start + tl.arange(0, B)
        t = i // W
        w = i % W
        hit = i < 0
        for k in tl.static_range(K):
            slot = tl.load(slot_ptr + (v * T + t).to(tl.int64) * K + k, mask=t < T, other=-1)
            hit |= (slot >= 0) & (slot // slots_per_rank == w)
        if REDUCE:
            tl.store(index_ptr + v.to(tl.int64) * T * W + i, tl.where(hit, i, -1), mask=t < T)
        w2 = tl.arange(0, W2)
        tl.atomic_add(sent_ptr + w2, tl.histogram(w, W2, mask=hit).to(tl.int64), mask=w2 < W, sem="relaxed")


@triton.jit(do_not_specialize=["first_rank", "T", "bound", "slots_per_rank"])
def _dispatch_kernel(
    table_ptr,
    order_ptr,
    x_ptr,
    slot_ptr,
    weight_ptr,
    index_ptr,
    first_rank,
    T,
    bound,
    slots_per_rank,
    state_at,
    sent_at,
    signal_at,
    slot_at,
    token_at,
    weight_at,
    rows_at,
    W: tl.constexpr,
    W2: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    U: tl.constexpr,
    REDUCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rank ``first_rank + v`` sends its T tokens; x in 4-byte words ``[V, T, WORDS]``."""
    wait_for_inputs(PDL)
    v = tl.program_id(0) // C
    cta = tl.program_id(0) % C
    me = first_rank + v
    order_ptr += v * W
    _store_metadata(
        table_ptr, order_ptr, slot_ptr, weight_ptr, index_ptr, me, v, cta, T, bound, slots_per_rank, slot_at, token_at,
        weight_at, sent_at, W, W2, C, K, REDUCE, 1024,
    )  # fmt: skip
    sent_ptr = (tl.load(table_ptr + me) + sent_at).to(tl.pointer_type(tl.int64))
    _count_rows(slot_ptr, index_ptr, sent_ptr, v, (cta + 1) % C, T, slots_per_rank, W, W2, C, K, REDUCE, 1024)
    x_ptr += v.to(tl.int64) * T * WORDS
    own_slot_ptr = slot_ptr + v.to(tl.int64) * T * K
    for c0 in tl.static_range(0, WORDS, BLOCK):
        col = c0 + tl.arange(0, BLOCK)
        for t0 in range(cta, T, C * U):
            t = t0 + tl.arange(0, U) * C
            row = t.to(tl.int64) * WORDS
            move = (t < T)[:, None] & (col < WORDS)[None, :]
            words = tl.load(x_ptr + row[:, None] + col[None, :], mask=move, eviction_policy="evict_first")
            hit = tl.zeros([U], tl.int64)  # bit w: goes to rank w
            for k in tl.static_range(K):
                slot = tl.load(own_slot_ptr + t * K + k, mask=t < T, other=-1)
                rank = (tl.maximum(slot, 0) // slots_per_rank).to(tl.int64)
                hit |= (slot >= 0).to(tl.int64) << rank
            at = (me * bound + t).to(tl.int64) * WORDS
            for n in tl.static_range(W):
                w = tl.load(order_ptr + n)
                peer = (tl.load(table_ptr + w) + rows_at).to(tl.pointer_type(tl.int32))
                peer = tl.multiple_of(peer, 16)
                mask = (((hit >> w) & 1) != 0)[:, None] & move
                tl.store(peer + at[:, None] + col[None, :], words, mask=mask)
    finish_send(table_ptr, me, state_at, sent_at, signal_at, 0, T, bound, W, W2, C)


def dispatch_put(
    ranks: Ranks,
    layout: Layout,
    x_TD: torch.Tensor,
    slot_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    bound: int,
    slots_per_rank: int,
    options: PutOptions = PutOptions(),
) -> torch.Tensor:
    """Send ``x_TD`` to the ranks of ``slot_TK`` and signal all ranks; returns home's index of the answer.

    Args:
        x_TD: rows as they are sent, ``[V * T, D]`` in the model dtype or ``[V * T, sent_bytes]`` uint8.
        slot_TK: int32 global slots or -1.
        weight_TK: float32; travels in reduce mode.
        bound: positions written at each rank, >= T, the same on all ranks.

    Returns:
        int32 ``[V * T, J]``: row of home's ``returned`` region for each choice (exact) or rank (reduce), -1 = none.
    """
    rows = x_TD.shape[0]
    index_TJ = torch.empty((rows, layout.answers), dtype=torch.int32, device=x_TD.device)
    words = layout.sent_bytes // 4
    block, warps, unroll = _tile(words, options)
    _dispatch_kernel[(ranks.number * options.programs,)](
        ranks.table_W,
        ranks.order_VW,
        x_TD.contiguous().view(torch.int32),
        slot_TK.contiguous(),
        weight_TK.contiguous(),
        index_TJ,
        ranks.first,
        rows // ranks.number,
        bound,
        slots_per_rank,
        layout.at("state"),
        layout.at("sent"),
        layout.at("signal"),
        layout.at("slot"),
        layout.at("token"),
        layout.at("weight"),
        layout.at("rows"),
        W=layout.world,
        W2=triton.next_power_of_2(layout.world),
        C=options.programs,
        K=layout.top_k,
        WORDS=words,
        BLOCK=block,
        U=unroll,
        REDUCE=layout.reduce,
        num_warps=warps,
        **pdl_options(x_TD),
    )
    return index_TJ


def _tile(words: int, options: PutOptions) -> tuple[int, int, int]:
    """Columns, warps and rows of a tile: narrow rows get more rows, so that as many bytes are under way."""
    block = min(triton.next_power_of_2(words), MAX_BLOCK)
    unroll = options.rows * (MAX_BLOCK // block) if block >= 512 else options.rows * 8
    warps = options.warps or max(4, min(16, block * unroll // 2048))
    return block, warps, unroll


@dataclass(frozen=True)
class CombinePlan:
    """Where the experts' rows go: entries in (row, choice) order; device tensors with room for the cap.

    ``source_E`` int32 pair of each entry, ``address_E`` int64 where its row goes, ``weight_E`` float32 or None.  In
    reduce mode entries of one row are neighbours and share their address.  ``total_V`` int32 entries of each rank.
    """

    source_E: torch.Tensor
    address_E: torch.Tensor
    weight_E: torch.Tensor | None
    total_V: torch.Tensor


@triton.jit(do_not_specialize=["first_rank", "bound", "chunks"])
def _plan_kernel(
    table_ptr,
    pos_ptr,
    weight_ptr,
    source_ptr,
    address_ptr,
    entry_weight_ptr,
    total_ptr,
    first_rank,
    bound,
    chunks,
    token_at,
    returned_at,
    W: tl.constexpr,
    K: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    REDUCE: tl.constexpr,
    B: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program c of rank v lists chunk c of the pairs; it counts those of the chunks before it itself."""
    wait_for_inputs(PDL)
    v = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    me = first_rank + v
    pairs = W * bound * K
    start = v.to(tl.int64) * pairs
    before = tl.zeros([STEP], tl.int32)
    for at in range(0, chunk * B, STEP):
        i = at + tl.arange(0, STEP)
        before += tl.load(pos_ptr + start + i, mask=i < chunk * B, other=-1) >= 0
    first = tl.sum(before, 0)
    i = chunk * B + tl.arange(0, B)
    pos = tl.load(pos_ptr + start + i, mask=i < pairs, other=-1)
    here = pos >= 0
    count = tl.cumsum(here.to(tl.int32), 0)
    entry = start + first + count - 1
    tl.store(source_ptr + entry, pos, mask=here)
    row = i // K
    home = row // bound
    base = tl.load(table_ptr + me)
    token = tl.load((base + token_at).to(tl.pointer_type(tl.int32)) + row, mask=here, other=0)
    peer = tl.load(table_ptr + home, mask=here, other=0)
    if REDUCE:
        answer = token * W + me
        tl.store(entry_weight_ptr + entry, tl.load(weight_ptr + start + i, mask=here), mask=here)
    else:
        answer = token * K + i % K
    tl.store(address_ptr + entry, peer + returned_at + answer.to(tl.int64) * ROW_BYTES, mask=here)
    if chunk == chunks - 1:
        tl.store(total_ptr + v, first + tl.sum(here.to(tl.int32), 0))


def combine_plan(
    ranks: Ranks, layout: Layout, pos_RK: torch.Tensor, weight_RK: torch.Tensor | None, bound: int
) -> CombinePlan:
    """List where each pair's row goes; ``pos_RK`` int32 ``[V * W * bound, K]`` from the index of the received rows.

    ``weight_RK`` float32 of the same shape, in reduce mode.
    """
    pairs, device = pos_RK.numel(), pos_RK.device
    source_E = torch.empty(pairs, dtype=torch.int32, device=device)
    address_E = torch.empty(pairs, dtype=torch.int64, device=device)
    weight_E = torch.empty(pairs, dtype=torch.float32, device=device) if layout.reduce else None
    total_V = torch.zeros(ranks.number, dtype=torch.int32, device=device)
    chunks = triton.cdiv(pairs // ranks.number, 1024)
    if chunks:
        _plan_kernel[(ranks.number * chunks,)](
            ranks.table_W,
            pos_RK,
            weight_RK,
            source_E,
            address_E,
            weight_E,
            total_V,
            ranks.first,
            bound,
            chunks,
            layout.at("token"),
            layout.at("returned"),
            W=layout.world,
            K=layout.top_k,
            ROW_BYTES=layout.row_bytes,
            REDUCE=layout.reduce,
            B=1024,
            STEP=4096,
            num_warps=4,
            **pdl_options(pos_RK),
        )
    return CombinePlan(source_E, address_E, weight_E, total_V)


@triton.jit(do_not_specialize=["first_rank", "cap", "rows_cap", "bound"])
def _combine_kernel(
    table_ptr,
    out_ptr,
    source_ptr,
    address_ptr,
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
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    U: tl.constexpr,
    PDL: tl.constexpr,
):
    """Exact: entry e's row goes to its address.  A program owns a run of entries: all peers are served at once."""
    wait_for_inputs(PDL)
    v = tl.program_id(0) // C
    cta = tl.program_id(0) % C
    out_ptr += v.to(tl.int64) * rows_cap * WORDS
    source_ptr += v.to(tl.int64) * cap
    address_ptr += v.to(tl.int64) * cap
    total = tl.load(total_ptr + v)
    per = (total + C - 1) // C
    end = tl.minimum(cta * per + per, total)
    for c0 in tl.static_range(0, WORDS, BLOCK):
        col = c0 + tl.arange(0, BLOCK)
        for e0 in range(cta * per, end, U):
            e = e0 + tl.arange(0, U)
            move = (e < end)[:, None] & (col < WORDS)[None, :]
            row = tl.load(source_ptr + e, mask=e < end, other=0).to(tl.int64) * WORDS
            words = tl.load(out_ptr + row[:, None] + col[None, :], mask=move, eviction_policy="evict_first")
            address = tl.load(address_ptr + e, mask=e < end, other=0)
            to = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
            tl.store(to[:, None] + col[None, :], words, mask=move)
    finish_send(table_ptr, first_rank + v, state_at, sent_at, signal_at, 1, 0, bound, W, W2, C)


@triton.jit(do_not_specialize=["first_rank", "cap", "rows_cap", "bound"])
def _reduce_kernel(
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
    PDL: tl.constexpr,
):
    """Reduce: neighbouring entries with one address are summed and stored once.

    A program owns the rows whose first entry lies in its run: it skips the tail of a row begun before and finishes its
    own last row beyond the run's end.
    """
    wait_for_inputs(PDL)
    v = tl.program_id(0) // C
    cta = tl.program_id(0) % C
    out_ptr += v.to(tl.int64) * rows_cap * D
    source_ptr += v.to(tl.int64) * cap
    address_ptr += v.to(tl.int64) * cap
    weight_ptr += v.to(tl.int64) * cap
    total = tl.load(total_ptr + v)
    per = (total + C - 1) // C
    start = _row_start(address_ptr, tl.minimum(cta * per, total), total)
    end = _row_start(address_ptr, tl.minimum(cta * per + per, total), total)
    for c0 in tl.static_range(0, D, BLOCK):
        col = c0 + tl.arange(0, BLOCK)
        sum_D = tl.zeros([BLOCK], tl.float32)
        for e0 in range(start, end, U):
            sources, weights, targets, lasts = _entries(source_ptr, address_ptr, weight_ptr, e0, end, total, U)
            parts = ()
            for u in tl.static_range(U):  # all of a tile's loads come first
                width = tl.where(e0 + u < end, D, 0)
                row = sources[u].to(tl.int64) * D
                parts += (tl.load(out_ptr + row + col, mask=col < width, other=0.0, eviction_policy="evict_first"),)
            for u in tl.static_range(U):
                sum_D += parts[u].to(tl.float32) * weights[u]
                width = tl.where(lasts[u], D, 0)
                to = tl.multiple_of(targets[u].to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
                tl.store(to + col, sum_D.to(out_ptr.dtype.element_ty), mask=col < width)
                sum_D = tl.where(lasts[u], 0.0, sum_D)
    finish_send(table_ptr, first_rank + v, state_at, sent_at, signal_at, 1, 0, bound, W, W2, C)


@triton.jit
def _entries(source_ptr, address_ptr, weight_ptr, e0, end, total, U: tl.constexpr):
    """Sources, weights, addresses of U entries and whether each is the last of its row."""
    sources, weights, targets, lasts = (), (), (), ()
    for u in tl.static_range(U):
        inside = e0 + u < end
        sources += (tl.load(source_ptr + e0 + u, mask=inside, other=0),)
        weights += (tl.load(weight_ptr + e0 + u, mask=inside, other=0.0),)
        address = tl.load(address_ptr + e0 + u, mask=inside, other=0)
        behind = tl.load(address_ptr + e0 + u + 1, mask=inside & (e0 + u + 1 < total), other=0)
        targets += (address,)
        lasts += (inside & (behind != address),)
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
    options: PutOptions = PutOptions(),
) -> None:
    """Return the experts' rows (``[V * M_cap, D]``, model dtype) to their homes and signal all ranks."""
    cap, rows_cap = plan.source_E.numel() // ranks.number, out_MD.shape[0] // ranks.number
    common = {"W": layout.world, "W2": triton.next_power_of_2(layout.world), "C": options.programs}
    grid = (ranks.number * options.programs,)
    sizes = (ranks.first, cap, rows_cap, bound, layout.at("state"), layout.at("sent"), layout.at("signal"))
    words = layout.row_bytes // 4
    block, warps, unroll = _tile(words, options)
    if layout.reduce:
        columns = min(triton.next_power_of_2(layout.hidden), 2 * MAX_BLOCK)
        _reduce_kernel[grid](
            ranks.table_W,
            out_MD,
            plan.source_E,
            plan.address_E,
            plan.weight_E,
            plan.total_V,
            *sizes,
            **common,
            D=layout.hidden,
            BLOCK=columns,
            U=options.summed,
            num_warps=options.warps or max(4, min(32, columns // 256)),
            **pdl_options(out_MD),
        )
    else:
        _combine_kernel[grid](
            ranks.table_W,
            out_MD.view(torch.int32),
            plan.source_E,
            plan.address_E,
            plan.total_V,
            *sizes,
            **common,
            WORDS=words,
            BLOCK=block,
            U=unroll,
            num_warps=warps,
            **pdl_options(out_MD),
        )
