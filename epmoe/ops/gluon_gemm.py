"""The grouped GEMMs for many pairs, warp-specialised for Hopper (Gluon, GPU only; grouped_gemm.py is the other form).

One program per SM: eight warps multiply tiles of 128 pairs x 256 weight rows; the producer (four warps that gather
hidden rows by ``cp.async`` for the first GEMM, one warp for the second) fetches the rest by TMA.  They meet at STAGES
buffers, each with a *full* and an *empty* barrier, so that loads run on across tiles and under the epilogue.
Phases: the n-th use of a buffer waits for parity ``n & 1`` of *full* and the opposite of *empty*.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from epmoe.ops.launch import sm_count
from epmoe.ops.moe_index import MoEIndex

ROWS, COLS, DEPTH = 128, 256, 64
# Gluon's names differ between Triton 3.6 and 3.9.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
gather_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
GATHER_WARPS = 4


@gluon.jit
def _locate(tile, n_tiles, schedule, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Tile number -> slot, first pair, end of the slot's pairs, column block (as in grouped_gemm.py)."""
    offset_ptr, block_offset_ptr, block_slot_ptr = schedule
    slot = gl.load(block_slot_ptr + tile // n_tiles)
    block = gl.load(block_offset_ptr + slot)
    blocks = gl.load(block_offset_ptr + slot + 1) - block
    local = tile - block * n_tiles
    group = local // (GROUP * n_tiles)
    height = gl.minimum(blocks - group * GROUP, GROUP)
    local -= group * GROUP * n_tiles
    first = gl.load(offset_ptr + slot) + (group * GROUP + local % height) * ROWS
    return slot, first, gl.load(offset_ptr + slot + 1), local // height


@gluon.jit
def _fetch(a, w_desc, row_ptr, a_bufs, w_bufs, full, empty, schedule, sizes, GATE: gl.constexpr, GROUP: gl.constexpr):
    """The producer: weights by TMA; activated rows by TMA too, but hidden rows (GATE) are gathered by ``cp.async``.

    A gathering thread copies 16 bytes of every 16th row; rows beyond the slot's pairs are zeros.
    """
    ROWS: gl.constexpr = a_bufs.shape[1]
    DEPTH: gl.constexpr = a_bufs.shape[2]
    COLS: gl.constexpr = w_bufs.shape[1]
    STAGES: gl.constexpr = a_bufs.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tiles, n_tiles, slot_rows, width, out_width = sizes
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, LAYOUT))
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, first, stop, n = _locate(tile, n_tiles, schedule, ROWS, GROUP)
        if GATE:
            row = gl.load(row_ptr + first + i, mask=first + i < stop, other=0)
            ptrs = a + row.to(gl.int64)[:, None] * width + k[None, :]
            live = (first + i < stop)[:, None]
        for at in range(0, width, DEPTH):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            if GATE:
                mbarrier.expect(full.index(s), COLS * DEPTH * 2)
            else:
                mbarrier.expect(full.index(s), (COLS + ROWS) * DEPTH * 2)
                tma_load(a, [first, at], full.index(s), a_bufs.index(s))
            tma_load(w_desc, [slot * slot_rows + n * COLS, at], full.index(s), w_bufs.index(s))
            if GATE:
                gather_load(a_bufs.index(s), ptrs, mask=live)
                async_copy.mbarrier_arrive(full.index(s), increment_count=False)
                ptrs += DEPTH
            step += 1


@gluon.jit
def _store(value, out_ptr, first, stop, column, width, STRIDE: gl.constexpr):
    """Rows of one slot, 16 bytes a thread; every run of 64 columns lies STRIDE columns after the one before."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    value = gl.convert_layout(value, LAYOUT)
    pair = first + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    column += j // 64 * STRIDE + j % 64
    ptrs = out_ptr + pair.to(gl.int64)[:, None] * width + column[None, :]
    gl.store(ptrs, value, mask=(pair < stop)[:, None] & (column < width)[None, :])


@gluon.jit
def _products(a_bufs, w_bufs, full, empty, step, width, ROWS: gl.constexpr, GATE: gl.constexpr):
    """wgmma over one tile's buffers, one product left in flight: the last buffer is not given back yet."""
    DEPTH: gl.constexpr = a_bufs.shape[2]
    COLS: gl.constexpr = w_bufs.shape[1]
    STAGES: gl.constexpr = a_bufs.shape[0]
    DOWN: gl.constexpr = 8 if ROWS == 128 else 4  # warps along the rows, each 16 of them
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, 8 // DOWN], [16, COLS * DOWN // 8, 16])
    acc = gl.zeros([ROWS, COLS], gl.float32, layout=MMA)
    for at in range(0, width, DEPTH):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        if GATE:
            fence_async_shared()  # the gathered rows were not written by the async proxy, which wgmma reads with
        rows = a_bufs.index(s)
        if a_bufs.shape[1] > ROWS:
            rows = rows.slice(0, ROWS)
        acc = warpgroup_mma(rows, w_bufs.index(s).permute((1, 0)), acc, use_acc=at > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
        if at > 0:
            thread_barrier()  # both warpgroups are through with the buffer before
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    return acc, step


@gluon.jit
def _tile(
    out_ptr,
    a_bufs,
    w_bufs,
    full,
    empty,
    schedule,
    sizes,
    place,
    following,
    step,
    TILE: gl.constexpr,
    GATE: gl.constexpr,
    GROUP: gl.constexpr,
):
    """One tile of TILE pairs; the place of the following one is looked up under the last product."""
    ROWS: gl.constexpr = a_bufs.shape[1]
    COLS: gl.constexpr = w_bufs.shape[1]
    STAGES: gl.constexpr = a_bufs.shape[0]
    tiles, n_tiles, slot_rows, width, out_width = sizes
    slot, first, stop, n = place
    acc, step = _products(a_bufs, w_bufs, full, empty, step, width, TILE, GATE)
    ahead = _locate(following, n_tiles, schedule, ROWS, GROUP)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    thread_barrier()
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    # Two halves of 64 in every 128 columns, both in one thread's registers: gate and up of a feature, or plain columns.
    left, right = acc.reshape([TILE, COLS // 128, 2, 64]).permute([0, 1, 3, 2]).split()
    if GATE:
        value = (left / (1.0 + gl.exp(-left)) * right).to(out_ptr.dtype.element_ty).reshape([TILE, COLS // 2])
        _store(value, out_ptr, first, stop, n * (COLS // 2), out_width, 64)
    else:
        left = left.to(out_ptr.dtype.element_ty).reshape([TILE, COLS // 2])
        _store(left, out_ptr, first, stop, n * COLS, out_width, 128)
        right = right.to(out_ptr.dtype.element_ty).reshape([TILE, COLS // 2])
        _store(right, out_ptr, first, stop, n * COLS + 64, out_width, 128)
    return ahead, step


@gluon.jit
def _multiply(out_ptr, a_bufs, w_bufs, full, empty, schedule, sizes, GATE: gl.constexpr, GROUP: gl.constexpr):
    """Eight warps: products, then the epilogue while the loads of the next tile run on.

    A block of at most half the rows takes a half tile.
    """
    ROWS: gl.constexpr = a_bufs.shape[1]
    HALF: gl.constexpr = ROWS // 2
    tiles, n_tiles, slot_rows, width, out_width = sizes
    step = 0
    place = _locate(gl.minimum(gl.program_id(0), gl.maximum(tiles - 1, 0)), n_tiles, schedule, ROWS, GROUP)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        ahead = gl.minimum(tile + gl.num_programs(0), tiles - 1)
        if place[2] - place[1] > HALF:
            place, step = _tile(
                out_ptr, a_bufs, w_bufs, full, empty, schedule, sizes, place, ahead, step, ROWS, GATE, GROUP
            )
        else:
            place, step = _tile(
                out_ptr, a_bufs, w_bufs, full, empty, schedule, sizes, place, ahead, step, HALF, GATE, GROUP
            )


@gluon.jit(do_not_specialize=["L"])
def grouped_gemm_kernel(
    a,
    w_desc,
    out_ptr,
    row_ptr,
    schedule,
    L,
    slot_rows,
    width,
    out_width,
    GATE: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    GATHER: gl.constexpr,
    REGISTERS: gl.constexpr,
    A_LAYOUT: gl.constexpr,
):
    """``GATE``: ``out[m] = silu(x[row[m]] @ gate.T) * (x[row[m]] @ up.T)``; else ``out[m] = a[m] @ down.T``.

    ``slot_rows`` weight rows per slot, ``width`` columns of the reduction, ``out_width`` of the result.
    """
    a_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, ROWS, DEPTH], A_LAYOUT)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, COLS, DEPTH], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1 + GATHER * 32)
        mbarrier.init(empty.index(s), count=1)
    n_tiles = (slot_rows + COLS - 1) // COLS
    tiles = gl.load(schedule[1] + L) * n_tiles
    sizes = (tiles, n_tiles, slot_rows, width, out_width)
    gl.warp_specialize(
        [
            (_multiply, (out_ptr, a_bufs, w_bufs, full, empty, schedule, sizes, GATE, GROUP)),
            (_fetch, (a, w_desc, row_ptr, a_bufs, w_bufs, full, empty, schedule, sizes, GATE, GROUP)),
        ],
        [GATHER if GATE else 1],
        [REGISTERS],
    )


def gluon_gemm(a, index: MoEIndex, weight_LND: torch.Tensor, gate: bool, form: tuple, num_sms: int = 0):
    """One grouped GEMM over blocks of 128 pairs; ``form`` = (stages, group); `takes_specialised` says for which.

    Args:
        a: ``gate``: hidden rows ``[R, D]``; else activated features ``[M, F]`` in pair order.
        weight_LND: gate_up ``[L, 2F, D]`` with ``F % 64 == 0``, or down ``[L, D, F]``.

    Returns:
        ``[M, F]`` (silu(gate) * up) or ``[M, D]``, in pair order, rounded to the model dtype.
    """
    assert index.blocks.rows == ROWS, index.blocks.rows
    slots, rows, width = weight_LND.shape
    stages, group = form
    element = gl.bfloat16 if a.dtype == torch.bfloat16 else gl.float16
    out_width = rows // 2 if gate else rows
    out = a.new_empty((index.row_M.numel(), out_width))
    w_layout = gl.NVMMASharedLayout.get_default_for([COLS, DEPTH], element)
    a_layout = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], element)
    w_desc = TensorDescriptor.from_tensor(weight_LND.view(-1, width), [COLS, DEPTH], w_layout)
    if not gate:
        a = TensorDescriptor.from_tensor(a, [ROWS, DEPTH], a_layout)
    sms = sm_count(out.device)
    grouped_gemm_kernel[(min(num_sms, sms) if num_sms else sms,)](
        a,
        w_desc,
        out,
        index.row_M,
        (index.offset_L1, index.blocks.offset_L1, index.blocks.slot_B),
        slots,
        rows,
        width,
        out_width,
        GATE=gate,
        GROUP=group,
        ROWS=ROWS,
        COLS=COLS,
        DEPTH=DEPTH,
        STAGES=stages,
        GATHER=GATHER_WARPS if gate else 0,
        REGISTERS=80 if gate else 24,
        A_LAYOUT=a_layout,
        num_warps=8,
    )
    return out
