"""Blocks of pairs: what one tile of a grouped GEMM multiplies, none across two slots.

The example of moe_index.py with blocks of 2 pairs: ``offset_L1 = [0, 1, 3]`` and ``slot_B = [0, 1, 1, 2, ...]``:
block 0 is slot 0's, blocks 1 and 2 are slot 1's, L marks the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import wait_for_inputs


@dataclass(frozen=True)
class BlockSchedule:
    """Which slot each block of ``rows`` pairs belongs to; int32 on the device.

    A slot's blocks start every ``rows`` pairs; its last block may hold ``tail`` more.
    """

    rows: int
    offset_L1: torch.Tensor
    """First block of each slot; the last entry is the number of blocks."""
    slot_B: torch.Tensor
    """Slot of each block, L from the number of blocks on; its length bounds the number of blocks."""
    tail: int = 0


def block_schedule_ref(offset_L1: torch.Tensor, rows: int, pairs: int, tail: int = 0) -> BlockSchedule:
    """Blocks of ``rows`` pairs, none across two slots; ``pairs`` bounds ``offset_L1[L]``."""
    count_L = offset_L1.diff()
    num_slots = count_L.numel()
    block_L = (torch.maximum(count_L - tail, count_L.clamp(max=1)) + rows - 1) // rows
    first_L1 = torch.zeros_like(offset_L1)
    first_L1[1:] = block_L.cumsum(0)
    block_B = torch.arange(max_blocks(pairs, num_slots, rows), device=offset_L1.device)
    slot_B = torch.searchsorted(first_L1[1:], block_B, right=True).int()
    return BlockSchedule(rows, first_L1, slot_B, tail)


def max_blocks(pairs: int, num_slots: int, rows: int) -> int:
    """The most blocks that ``pairs`` pairs can make: each active slot may own one short block."""
    return pairs // rows + min(pairs, num_slots)


def block_rows(pairs: int, num_slots: int) -> int:
    """Rows of a GEMM tile for that many pairs: the mean per slot, rounded up to a power of two in 16..128."""
    return min(max(triton.next_power_of_2(triton.cdiv(pairs, max(num_slots, 1))), 16), 128)


@triton.jit
def write_schedule(count, block_offset_ptr, block_slot_ptr, blocks, L, rows, tail):
    """The first block of each slot, and the slot of each block: all slots write their i-th block together."""
    each = tl.arange(0, count.shape[0])
    length = (tl.maximum(count - tail, tl.minimum(count, 1)) + rows - 1) // rows
    end = tl.cumsum(length, 0)
    tl.store(block_offset_ptr, 0)
    tl.store(block_offset_ptr + 1 + each, end, mask=each < L)
    for i in range(tl.max(length, 0)):
        tl.store(block_slot_ptr + end - length + i, each, mask=i < length)
    for start in range(tl.sum(length, 0), blocks, 128):
        b = start + tl.arange(0, 128)
        tl.store(block_slot_ptr + b, tl.zeros_like(b) + L, mask=b < blocks)


@triton.jit(do_not_specialize=["blocks", "L", "rows", "tail"])
def schedule_kernel(
    offset_ptr,
    block_offset_ptr,
    block_slot_ptr,
    blocks,
    L,
    rows,
    tail,
    L2: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    each = tl.arange(0, L2)
    end = tl.load(offset_ptr + 1 + each, mask=each < L, other=0)
    count = end - tl.load(offset_ptr + each, mask=each < L, other=0)
    write_schedule(count, block_offset_ptr, block_slot_ptr, blocks, L, rows, tail)
