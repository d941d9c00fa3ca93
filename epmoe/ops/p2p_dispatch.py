"""Rows to the ranks of their experts by a few programs: the way there of the ``put`` transport.

Each token's row is read once and stored to every rank that serves one of its choices, at position (home rank, token) of
that rank's buffer; every position's metadata is written, -1 where nothing is sent, so the receiver needs no count and
no compaction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, wait_for_inputs
from epmoe.ops.p2p_layout import Layout
from epmoe.ops.p2p_ranks import USUAL, Outgoing, PutOptions, Ranks, tile
from epmoe.ops.p2p_signal import finish_send


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


def dispatch_put(ranks: Ranks, layout: Layout, sent: Outgoing, options: PutOptions = USUAL) -> torch.Tensor:
    """Send rows to the ranks of their slots and signal all ranks; returns home's index of the answer.

    Returns:
        int32 ``[V * T, J]``: row of home's ``returned`` region for each choice (exact) or rank (reduce), -1 = none.
    """
    x_TD = sent.x_TD
    index_TJ = torch.empty((len(x_TD), layout.answers), dtype=torch.int32, device=x_TD.device)
    words = layout.sent_bytes // 4
    block, warps, unroll = tile(words, options)
    _dispatch_kernel[(ranks.number * options.programs,)](
        ranks.table_W,
        ranks.order_VW,
        *sent.for_kernels,
        index_TJ,
        ranks.first,
        len(x_TD) // ranks.number,
        sent.bound,
        sent.slots_per_rank,
        *layout.for_signals,
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
