"""Rows grouped by destination, for the copy engines: the ``copy`` transport of the p2p exchange.

``pack_rows`` lays this rank's rows out in local memory, a block for each destination in token order (its own block at
once in its receive buffer), writes their metadata straight to the peers, then a header with the sizes, and signals.
Once the headers are on the host (`Sizes`), one copy a peer moves each block, and ``send_signal`` ends the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, wait_for_inputs
from epmoe.ops.p2p_layout import HEADER, Layout
from epmoe.ops.p2p_ranks import MAX_BLOCK, Outgoing, Ranks
from epmoe.ops.p2p_signal import finish_send

SIGNAL = tl.constexpr(HEADER)


@dataclass(frozen=True)
class Packed:
    """Rows by destination.  ``at_TW`` int32: a token's place in each block, counted from 1; ``hit_TW`` whether it is
    there; ``rank_TK`` the rank of each choice or -1; ``counts_4W`` int32: rows, pairs, first row, first pair of each
    block."""

    rows_ND: torch.Tensor
    hit_TW: torch.Tensor
    rank_TK: torch.Tensor
    counts_4W: torch.Tensor


@dataclass(frozen=True)
class Sizes:
    """What the host knows before rows move: this rank's blocks to each rank, and the others' to this one with the
    places of its answers there."""

    rows_W: list[int]
    first_W: list[int]
    received_rows_W: list[int]
    received_pairs_W: list[int]
    answer_row_W: list[int]
    answer_pair_W: list[int]

    @staticmethod
    def of(counts_8W: torch.Tensor) -> Sizes:
        """From `Packed.counts_4W` over the header region's four columns."""
        rows_W, _, first_W, _, *received = counts_8W.tolist()
        return Sizes(rows_W, first_W, *received)


@triton.jit(do_not_specialize=["me", "T", "bound", "slots_per_rank"])
def _pack_kernel(
    table_ptr, x_ptr, slot_ptr, weight_ptr, hit_ptr, at_ptr, counts_ptr, rows_ptr, me, T, bound, slots_per_rank,
    slot_at, token_at, weight_at, rows_at, W: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, REDUCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t places token t in every block it goes to, and marks position t of every shorter block as no row."""
    wait_for_inputs(PDL)
    t = tl.program_id(0)
    k = tl.arange(0, K2)
    here = t < T
    slot = tl.load(slot_ptr + t * K + k, mask=k < tl.where(here, K, 0), other=-1)
    rank = tl.where(slot >= 0, slot // slots_per_rank, -1)
    local = slot % slots_per_rank
    for w in range(W):
        base = tl.load(table_ptr + w)
        peer_slot = (base + slot_at).to(tl.pointer_type(tl.int32))
        count = tl.load(counts_ptr + w)
        hit = tl.load(hit_ptr + t * W + w, mask=here, other=0) != 0
        place = tl.load(at_ptr + t * W + w, mask=here, other=1) - 1
        position = me * bound + place
        tl.store(peer_slot + position * K + k, tl.where(rank == w, local, -1), mask=k < tl.where(hit, K, 0))
        tl.store(peer_slot + (me * bound + t) * K + k, tl.full([K2], -1, tl.int32), mask=k < tl.where(t >= count, K, 0))
        peer_token = (base + token_at).to(tl.pointer_type(tl.int32))
        tl.store(peer_token + position, t, mask=hit)
        if REDUCE:
            peer_weight = (base + weight_at).to(tl.pointer_type(tl.float32))
            weight = tl.load(weight_ptr + t * K + k, mask=(rank == w) & (k < K), other=0.0)
            tl.store(peer_weight + position * K + k, weight, mask=k < tl.where(hit, K, 0))
        row = (tl.load(counts_ptr + 2 * W + w) + place).to(tl.int64)
        staged = rows_ptr.to(tl.int64) + row * (WORDS * 4)
        own = base + rows_at + position.to(tl.int64) * (WORDS * 4)
        to = tl.multiple_of(tl.where(w == me, own, staged).to(tl.pointer_type(tl.int32)), 16)
        for c0 in tl.static_range(0, WORDS, BLOCK):
            col = c0 + tl.arange(0, BLOCK)
            words = tl.load(x_ptr + t.to(tl.int64) * WORDS + col, mask=col < tl.where(hit, WORDS, 0))
            tl.store(to + col, words, mask=col < tl.where(hit, WORDS, 0))


@triton.jit(do_not_specialize=["me", "tokens", "bound"])
def _header_kernel(
    table_ptr, counts_ptr, me, tokens, bound, state_at, sent_at, signal_at, header_at, W: tl.constexpr,
    W2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tell every rank the sizes of its block, count them, signal."""
    wait_for_inputs(PDL)
    w = tl.arange(0, W2)
    n = tl.arange(0, 4)
    inside = w < W
    value = tl.load(counts_ptr + n[None, :] * W + w[:, None], mask=inside[:, None], other=0)
    peer = tl.load(table_ptr + w, mask=inside, other=0)
    header = (peer + header_at + me * 16).to(tl.pointer_type(tl.int32))
    tl.store(header[:, None] + n[None, :], value, mask=inside[:, None])
    sent = (tl.load(table_ptr + me) + sent_at).to(tl.pointer_type(tl.int64)) + w
    rows, pairs = tl.load(counts_ptr + w, mask=inside, other=0), tl.load(counts_ptr + W + w, mask=inside, other=0)
    tl.store(sent, tl.load(sent, mask=inside, other=0) + rows, mask=inside)
    tl.store(sent + 2 * W, tl.load(sent + 2 * W, mask=inside, other=0) + pairs, mask=inside)
    finish_send(table_ptr, me, state_at, sent_at, signal_at, SIGNAL, tokens, bound, W, W2, 1)


@triton.jit(do_not_specialize=["me", "tokens", "bound"])
def _signal_kernel(
    table_ptr, me, tokens, bound, state_at, sent_at, signal_at, direction: tl.constexpr, W: tl.constexpr,
    W2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    finish_send(table_ptr, me, state_at, sent_at, signal_at, direction, tokens, bound, W, W2, 1)


def pack_rows(ranks: Ranks, layout: Layout, sent: Outgoing) -> Packed:
    """See the module's docstring; tokens of one rank.  Signals ``HEADER``."""
    x_TD, bound, world, device = sent.x_TD, sent.bound, layout.world, sent.x_TD.device
    T = len(x_TD)
    rank_TK = torch.div(sent.slot_TK, sent.slots_per_rank, rounding_mode="floor")
    chosen_TKW = rank_TK[..., None] == torch.arange(world, device=device)
    hit_TW = chosen_TKW.any(1)
    at_TW = hit_TW.cumsum(0, dtype=torch.int32)
    counts_4W = torch.zeros((4, world), dtype=torch.int32, device=device)
    counts_4W[0] = hit_TW.sum(0)
    counts_4W[1] = chosen_TKW.sum((0, 1))
    counts_4W[2:] = counts_4W[:2].cumsum(1) - counts_4W[:2]
    rows_ND = x_TD.new_empty((T * min(layout.top_k, world), x_TD.shape[1]))
    words = layout.sent_bytes // 4
    block = min(triton.next_power_of_2(words), MAX_BLOCK)
    _pack_kernel[(bound,)](
        ranks.table_W,
        *sent.for_kernels,
        hit_TW.view(torch.uint8),
        at_TW,
        counts_4W,
        rows_ND.view(torch.int32),
        ranks.first,
        T,
        bound,
        sent.slots_per_rank,
        layout.at("slot"),
        layout.at("token"),
        layout.at("weight"),
        layout.at("rows"),
        W=world,
        K=layout.top_k,
        K2=triton.next_power_of_2(layout.top_k),
        WORDS=words,
        BLOCK=block,
        REDUCE=layout.reduce,
        num_warps=max(1, min(16, block // 128)),
        **pdl_options(x_TD),
    )
    _header_kernel[(1,)](
        ranks.table_W,
        counts_4W,
        ranks.first,
        T,
        bound,
        *layout.for_signals,
        layout.at("header"),
        W=world,
        W2=triton.next_power_of_2(world),
        num_warps=1,
        **pdl_options(x_TD),
    )
    return Packed(rows_ND, hit_TW, rank_TK, counts_4W)


def send_signal(ranks: Ranks, layout: Layout, direction: int, tokens: int, bound: int) -> None:
    """Signal all ranks that what is ahead on this stream has arrived."""
    _signal_kernel[(1,)](
        ranks.table_W,
        ranks.first,
        tokens,
        bound,
        *layout.for_signals,
        direction=direction,
        W=layout.world,
        W2=triton.next_power_of_2(layout.world),
        num_warps=1,
        **pdl_options(ranks.table_W),
    )
