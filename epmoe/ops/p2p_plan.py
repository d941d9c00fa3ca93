"""Where the experts' rows go: the way back, listed beside the experts so that no put waits for a chain of loads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, wait_for_inputs
from epmoe.ops.p2p_layout import Layout
from epmoe.ops.p2p_ranks import Ranks


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
