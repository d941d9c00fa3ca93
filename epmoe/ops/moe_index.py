"""From choices to expert order: which row each expert's GEMM reads, and where each choice's result lies.

Example, 3 rows, K = 2, 2 local slots, -1 = the choice lives elsewhere::

    slot_RK   = [[1, -1], [0, 1], [1, 0]]
    offset_L1 = [0, 2, 5]                  slot 0 owns pairs 0..1, slot 1 owns pairs 2..4
    row_M     = [1, 2, 0, 1, 2, -]         row of each pair; the last entry is undefined
    pos_RK    = [[2, -1], [0, 3], [4, 1]]  pair of each choice

The GEMMs' schedule of blocks of pairs (block_schedule.py) is made by the same kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from epmoe.ops.block_schedule import BlockSchedule, block_rows, max_blocks, schedule_kernel, write_schedule
from epmoe.ops.launch import pdl_options, wait_for_inputs

CHUNK, RUN = 128, 1024
ONE_KERNEL_PAIRS = 1024
SCAN_RUNS = 16


@dataclass(frozen=True)
class MoEIndex:
    """Pairs (row, choice) sorted by local slot, stable in (row, choice) order; all int32 and on the device."""

    offset_L1: torch.Tensor
    """First pair of each slot; the last entry is the number of pairs."""
    row_M: torch.Tensor
    """Row of each pair, ``[R * K]``; undefined from ``offset_L1[L]`` on."""
    pos_RK: torch.Tensor
    """Pair of each choice, -1 where the choice has no local slot."""
    blocks: BlockSchedule | None = None
    """Schedule of the grouped GEMMs; None on CPU."""


def build_index_ref(slot_RK: torch.Tensor, num_slots: int) -> MoEIndex:
    """Index of ``slot_RK`` (int32 ``[R, K]``, local slot or -1); R = 0 is legal."""
    slot_N = slot_RK.reshape(-1)
    here_N = slot_N >= 0
    key_N = slot_N.where(here_N, num_slots).long()
    order_N = torch.argsort(key_N, stable=True)
    count_L = torch.bincount(key_N, minlength=num_slots + 1)[:num_slots]
    offset_L1 = torch.zeros(num_slots + 1, dtype=torch.int32, device=slot_RK.device)
    offset_L1[1:] = count_L.cumsum(0)
    pos_N = torch.empty_like(slot_N)
    pos_N[order_N] = torch.arange(slot_N.numel(), dtype=slot_N.dtype, device=slot_N.device)
    pos_N.masked_fill_(~here_N, -1)
    return MoEIndex(offset_L1, (order_N // max(slot_RK.shape[1], 1)).int(), pos_N.view(slot_RK.shape))


@triton.jit
def _histogram(slot_ptr, start, stop, L2: tl.constexpr, STEP: tl.constexpr):
    """Pairs of each slot among pairs start..stop."""
    count = tl.zeros([L2], tl.int32)
    for at in range(start, stop, STEP):
        i = at + tl.arange(0, STEP)
        slot = tl.load(slot_ptr + i, mask=i < stop, other=-1)
        count += tl.histogram(tl.maximum(slot, 0), L2, mask=slot >= 0)
    return count


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(slot_ptr, count_ptr, pairs, L2: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr):
    """count[r, l]: pairs of slot l in run r."""
    wait_for_inputs(PDL)
    run = tl.program_id(0)
    count = _histogram(slot_ptr, run * RUN, min(run * RUN + RUN, pairs), L2, RUN)
    tl.store(count_ptr + run * L2 + tl.arange(0, L2), count)


@triton.jit(do_not_specialize=["runs"])
def _scan_kernel(count_ptr, runs, L2: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr):
    """count[r, l] -> the pairs of slot l in runs before r; row ``runs`` gets those of all runs."""
    wait_for_inputs(PDL)
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], tl.int32)
    for start in range(0, runs, 32):
        r = start + tl.arange(0, 32)
        ptrs = count_ptr + r[:, None] * L2 + column[None, :]
        count = tl.load(ptrs, mask=(r < runs)[:, None], other=0)
        tl.store(ptrs, total[None, :] + tl.cumsum(count, 0) - count, mask=(r < runs)[:, None])
        total += tl.sum(count, 0)
    tl.store(count_ptr + runs * L2 + column, total)


@triton.jit
def _sum_counts(count_ptr, start, stop, L2: tl.constexpr):
    total = tl.zeros([L2], tl.int32)
    for chunk in range(start, stop, 16):
        c = chunk + tl.arange(0, 16)[:, None]
        total += tl.sum(tl.load(count_ptr + c * L2 + tl.arange(0, L2)[None, :], mask=c < stop, other=0), 0)
    return total


@triton.jit(do_not_specialize=["pairs", "blocks", "K", "L", "rows", "tail"])
def _place_kernel(
    slot_ptr,
    count_ptr,
    offset_ptr,
    row_ptr,
    pos_ptr,
    block_offset_ptr,
    block_slot_ptr,
    pairs,
    blocks,
    K,
    L,
    rows,
    tail,
    L2: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    SCANNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program c places the pairs of chunk c: first pair of the slot + earlier pairs of it.

    Earlier pairs are counted from the runs' counts, then in this run, then in this chunk.  With many runs a kernel
    between has summed their counts; without ``count_ptr`` (few pairs) every program counts all pairs itself.
    """
    wait_for_inputs(PDL)
    chunk = tl.program_id(0)
    if count_ptr is None:
        before = _histogram(slot_ptr, 0, chunk * CHUNK, L2, CHUNK)
        count = before + _histogram(slot_ptr, chunk * CHUNK, pairs, L2, CHUNK)
    elif SCANNED:
        run = chunk * CHUNK // RUN
        before = tl.load(count_ptr + run * L2 + tl.arange(0, L2))
        count = tl.load(count_ptr + tl.cdiv(pairs, RUN) * L2 + tl.arange(0, L2))
        before += _histogram(slot_ptr, run * RUN, chunk * CHUNK, L2, CHUNK)
    else:
        run = chunk * CHUNK // RUN
        before = _sum_counts(count_ptr, 0, run, L2)
        count = before + _sum_counts(count_ptr, run, tl.cdiv(pairs, RUN), L2)
        before += _histogram(slot_ptr, run * RUN, chunk * CHUNK, L2, CHUNK)
    end = tl.cumsum(count, 0)
    each = tl.arange(0, L2)
    if chunk == 0:
        tl.store(offset_ptr, 0)
        tl.store(offset_ptr + 1 + each, end, mask=each < L)
        write_schedule(count, block_offset_ptr, block_slot_ptr, blocks, L, rows, tail)

    i = chunk * CHUNK + tl.arange(0, CHUNK)
    slot = tl.load(slot_ptr + i, mask=i < pairs, other=-1)
    rank = tl.gather(end - count + before, tl.maximum(slot, 0), 0)
    for start in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, pairs), STEP):
        j = start + tl.arange(0, STEP)
        other = tl.load(slot_ptr + j, mask=j < pairs, other=-1)
        rank += tl.sum(((other[None, :] == slot[:, None]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    here = slot >= 0
    tl.store(pos_ptr + i, tl.where(here, rank, -1), mask=i < pairs)
    tl.store(row_ptr + rank, i // K, mask=here)


def build_index_triton(slot_RK: torch.Tensor, num_slots: int, rows: int | None = None, tail: int = 0) -> MoEIndex:
    """`build_index_ref` in one kernel (more pairs: two, then three), with the schedule of ``rows`` and ``tail``."""
    slot_RK = slot_RK.contiguous()
    pairs, device = slot_RK.numel(), slot_RK.device
    rows = rows or block_rows(pairs, num_slots)
    blocks = max_blocks(pairs, num_slots, rows)
    fresh = torch.zeros if pairs == 0 else torch.empty
    offset_L1, block_offset_L1 = fresh((2, num_slots + 1), dtype=torch.int32, device=device)
    row_M, pos_RK = torch.empty(pairs, dtype=torch.int32, device=device), torch.empty_like(slot_RK)
    slot_B = torch.empty(blocks, dtype=torch.int32, device=device)
    if pairs:
        small = pairs <= ONE_KERNEL_PAIRS
        runs, bins = triton.cdiv(pairs, RUN), max(triton.next_power_of_2(num_slots), 16)
        count = None if small else torch.empty((runs + 1, bins), dtype=torch.int32, device=device)
        options = pdl_options(slot_RK)
        scanned = not small and runs >= SCAN_RUNS
        if not small:
            _count_kernel[(runs,)](slot_RK, count, pairs, L2=bins, RUN=RUN, num_warps=8, **options)
        if scanned:
            _scan_kernel[(bins // 16,)](count, runs, L2=bins, COLS=16, num_warps=4, **options)
        _place_kernel[(triton.cdiv(pairs, CHUNK),)](
            slot_RK,
            count,
            offset_L1,
            row_M,
            pos_RK,
            block_offset_L1,
            slot_B,
            pairs,
            blocks,
            K=slot_RK.shape[1],
            L=num_slots,
            L2=bins,
            CHUNK=CHUNK,
            STEP=32,
            RUN=RUN,
            SCANNED=scanned,
            rows=rows,
            tail=tail,
            num_warps=4,
            **options,
        )
    return MoEIndex(offset_L1, row_M, pos_RK, BlockSchedule(rows, block_offset_L1, slot_B, tail))


def with_block_rows(index: MoEIndex, rows: int, tail: int = 0) -> MoEIndex:
    """The same index with a schedule of blocks of ``rows`` pairs: one small kernel if it has another one."""
    if index.blocks is not None and (index.blocks.rows, index.blocks.tail) == (rows, tail):
        return index
    slots, device = index.offset_L1.numel() - 1, index.offset_L1.device
    blocks = max_blocks(index.row_M.numel(), slots, rows)
    schedule = BlockSchedule(
        rows, torch.empty_like(index.offset_L1), torch.empty(blocks, dtype=torch.int32, device=device), tail
    )
    schedule_kernel[(1,)](
        index.offset_L1,
        schedule.offset_L1,
        schedule.slot_B,
        blocks,
        L=slots,
        L2=max(triton.next_power_of_2(slots), 16),
        rows=rows,
        tail=tail,
        **pdl_options(index.offset_L1),
    )
    return replace(index, blocks=schedule)


def build_index(slot_RK: torch.Tensor, num_slots: int) -> MoEIndex:
    """`build_index_ref`; the kernels on CUDA."""
    return (build_index_triton if slot_RK.is_cuda else build_index_ref)(slot_RK, num_slots)
