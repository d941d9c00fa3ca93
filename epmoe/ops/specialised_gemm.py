"""The two grouped GEMMs for many pairs, warp-specialised for Hopper (Gluon, GPU only).

gate_up_gemm.py and down_gemm.py hold the other form of each, and say what they compute; the twin is `expert_mlp_ref`.
One program per SM: two warpgroups multiply tiles of 128 pairs x 256 weight rows, a producer fetches weights by TMA and
rows by TMA (second GEMM) or by a gather of four warps (first).  They meet at STAGES buffers, each with a *full* and an
*empty* barrier: the n-th use of a buffer waits for parity ``n & 1`` of *full* and the opposite of *empty*.  Loads thus
run on across tiles and under the epilogue.

With TAIL the last block of a slot may hold up to TAIL pairs more than 128 (`BlockSchedule`): these are multiplied
beside the 128, with the same weights as the left operand, and so is a block of at most TAIL pairs.  That saves a second
pass over the weights where slots have about 128 pairs; where they have more, it costs more power than it saves.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epmoe.ops.launch import is_hopper, pdl_options, sm_count
from epmoe.ops.moe_index import MoEIndex

ROWS, COLS, DEPTH = 128, 256, 64
LANES = 16  # elements: what the compiler must know to divide the width, for a gather by 16 bytes
STAGES = 4
# Gluon's names differ between Triton 3.6 and 3.9.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
gather_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _locate(tile, n_tiles, schedule, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Tile number -> slot, first pair, end of the block's pairs, column block (as in grouped_gemm.py)."""
    offset_ptr, block_offset_ptr, block_slot_ptr = schedule
    slot = gl.load(block_slot_ptr + tile // n_tiles)
    block = gl.load(block_offset_ptr + slot)
    blocks = gl.load(block_offset_ptr + slot + 1) - block
    local = tile - block * n_tiles
    group = local // (GROUP * n_tiles)
    height = gl.minimum(blocks - group * GROUP, GROUP)
    local -= group * GROUP * n_tiles
    mine = group * GROUP + local % height
    first = gl.load(offset_ptr + slot) + mine * ROWS
    stop = gl.where(mine == blocks - 1, gl.load(offset_ptr + slot + 1), first + ROWS)
    return slot, first, stop, local // height


@gluon.jit
def _rows(a, row_ptr, first, stop, width, ROWS: gl.constexpr, DEPTH: gl.constexpr):
    """Pointers to the hidden rows of a block's pairs; a thread has 16 bytes of every 16th row."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    pair = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.load(row_ptr + pair, mask=pair < stop, other=0)
    return a + row.to(gl.int64)[:, None] * width + k[None, :], (pair < stop)[:, None], k


@gluon.jit
def _gather(a, w_desc, row_ptr, bufs, full, empty, schedule, sizes, GROUP: gl.constexpr, TAIL: gl.constexpr):
    """The producer of the first GEMM; rows beyond the block's pairs are zeros."""
    a_bufs, t_bufs, w_bufs, out_bufs = bufs
    ROWS: gl.constexpr = a_bufs.shape[1]
    DEPTH: gl.constexpr = a_bufs.shape[2]
    COLS: gl.constexpr = w_bufs.shape[1]
    STAGES: gl.constexpr = a_bufs.shape[0]
    tiles, n_tiles, slot_rows, width, out_width = sizes
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, first, stop, n = _locate(tile, n_tiles, schedule, ROWS, GROUP)
        ptrs, live, k = _rows(a, row_ptr, first, stop, width, ROWS, DEPTH)
        few = stop - first <= TAIL
        tail = few | (stop - first > ROWS)
        if TAIL > 0:
            t_ptrs, t_live, t_k = _rows(a, row_ptr, first + gl.where(few, 0, ROWS), stop, width, TAIL, DEPTH)
        for at in range(0, width, DEPTH):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), COLS * DEPTH * 2)
            tma_load(w_desc, [slot * slot_rows + n * COLS, at], full.index(s), w_bufs.index(s))
            inside = (at + k < width)[None, :]
            if TAIL == 0:
                gather_load(a_bufs.index(s), ptrs, mask=live & inside)
            else:
                if not few:
                    gather_load(a_bufs.index(s), ptrs, mask=live & inside)
                if tail:
                    gather_load(t_bufs.index(s), t_ptrs, mask=t_live & (at + t_k < width)[None, :])
                t_ptrs += DEPTH
            async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            ptrs += DEPTH
            step += 1


@gluon.jit
def _fetch(a, t_desc, w_desc, bufs, full, empty, schedule, sizes, GROUP: gl.constexpr, TAIL: gl.constexpr):
    """The producer of the second GEMM, all by TMA: rows beyond the block's pairs are the next block's, or garbage."""
    a_bufs, t_bufs, w_bufs, out_bufs = bufs
    ROWS: gl.constexpr = a_bufs.shape[1]
    DEPTH: gl.constexpr = a_bufs.shape[2]
    COLS: gl.constexpr = w_bufs.shape[1]
    STAGES: gl.constexpr = a_bufs.shape[0]
    tiles, n_tiles, slot_rows, width, out_width = sizes
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, first, stop, n = _locate(tile, n_tiles, schedule, ROWS, GROUP)
        few = stop - first <= TAIL
        for at in range(0, width, DEPTH):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            if TAIL == 0:
                mbarrier.expect(full.index(s), (COLS + ROWS) * DEPTH * 2)
                tma_load(a, [first, at], full.index(s), a_bufs.index(s))
            else:
                if few:
                    mbarrier.expect(full.index(s), (COLS + TAIL) * DEPTH * 2)
                    tma_load(t_desc, [first, at], full.index(s), t_bufs.index(s))
                else:
                    if stop - first > ROWS:
                        mbarrier.expect(full.index(s), (COLS + TAIL + ROWS) * DEPTH * 2)
                        tma_load(t_desc, [first + ROWS, at], full.index(s), t_bufs.index(s))
                    else:
                        mbarrier.expect(full.index(s), (COLS + ROWS) * DEPTH * 2)
                    tma_load(a, [first, at], full.index(s), a_bufs.index(s))
            tma_load(w_desc, [slot * slot_rows + n * COLS, at], full.index(s), w_bufs.index(s))
            step += 1


@gluon.jit
def _wait_full(full, step, STAGES: gl.constexpr, GATHERED: gl.constexpr):
    s = step % STAGES
    mbarrier.wait(full.index(s), (step // STAGES) & 1)
    if GATHERED:
        fence_async_shared()  # the gathered rows were not written by the async proxy, which wgmma reads with
    return s


@gluon.jit
def _whole(bufs, full, empty, step, width, GATHERED: gl.constexpr, HALF: gl.constexpr):
    """Half of the 128 pairs by all weight rows; one product stays in flight while the next buffer is awaited."""
    a_bufs, t_bufs, w_bufs, out_bufs = bufs
    STAGES: gl.constexpr = a_bufs.shape[0]
    COLS: gl.constexpr = w_bufs.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    acc = gl.zeros([64, COLS], gl.float32, layout=MMA)
    for at in range(0, width, a_bufs.shape[2]):
        s = _wait_full(full, step, STAGES, GATHERED)
        rows = a_bufs.index(s).slice(HALF * 64, 64)
        acc = warpgroup_mma(rows, w_bufs.index(s).permute((1, 0)), acc, use_acc=at > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
        if at > 0:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc, step


@gluon.jit
def _tail_alone(bufs, full, empty, step, width, GATHERED: gl.constexpr, HALF: gl.constexpr):
    """Half of the weight rows by the tail's pairs."""
    a_bufs, t_bufs, w_bufs, out_bufs = bufs
    STAGES: gl.constexpr = a_bufs.shape[0]
    TAIL: gl.constexpr = t_bufs.shape[1]
    SIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    acc = gl.zeros([128, TAIL], gl.float32, layout=SIDE)
    for at in range(0, width, a_bufs.shape[2]):
        s = _wait_full(full, step, STAGES, GATHERED)
        weights = w_bufs.index(s).slice(HALF * 128, 128)
        acc = warpgroup_mma(weights, t_bufs.index(s).permute((1, 0)), acc, use_acc=at > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
        if at > 0:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc, step


@gluon.jit
def _both(bufs, full, empty, step, width, GATHERED: gl.constexpr, HALF: gl.constexpr):
    """`_whole` and `_tail_alone` over the same weights."""
    a_bufs, t_bufs, w_bufs, out_bufs = bufs
    STAGES: gl.constexpr = a_bufs.shape[0]
    COLS: gl.constexpr = w_bufs.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    TAIL: gl.constexpr = t_bufs.shape[1]
    SIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    acc = gl.zeros([64, COLS], gl.float32, layout=MMA)
    tail = gl.zeros([128, TAIL], gl.float32, layout=SIDE)
    for at in range(0, width, a_bufs.shape[2]):
        s = _wait_full(full, step, STAGES, GATHERED)
        rows = a_bufs.index(s).slice(HALF * 64, 64)
        weights = w_bufs.index(s)
        acc = warpgroup_mma(rows, weights.permute((1, 0)), acc, is_async=True)
        tail = warpgroup_mma(weights.slice(HALF * 128, 128), t_bufs.index(s).permute((1, 0)), tail, is_async=True)
        acc, tail = warpgroup_mma_wait(num_outstanding=2, deps=[acc, tail])
        if at > 0:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    acc, tail = warpgroup_mma_wait(num_outstanding=0, deps=[acc, tail])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc, tail, step


@gluon.jit
def _activate(gate, up, ACT: gl.constexpr):
    if ACT == "silu":
        return gate / (1.0 + gl.exp(-gate)) * up
    elif ACT == "relu":
        return gl.maximum(gate, 0.0) * up
    elif ACT == "gelu":
        return 0.5 * gate * (1.0 + gl.erf(gate * 0.7071067811865476)) * up
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + gl.exp(-2.0 * inner)) * up


@gluon.jit
def _store(value, out_ptr, first, stop, column, width, LAYOUT: gl.constexpr):
    value = gl.convert_layout(value, LAYOUT)
    pair = first + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    j = column + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    ptrs = out_ptr + pair.to(gl.int64)[:, None] * width + j[None, :]
    gl.store(ptrs, value, mask=(pair < stop)[:, None] & (j < width)[None, :])


@gluon.jit
def _store_whole(value, out, buf, first, stop, column, width, ACT: gl.constexpr):
    """64 pairs x 64 columns; plain rows by TMA, which runs on under the next tile, unless pairs are missing."""
    ROWWISE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    out_desc, out_ptr = out
    if ACT is not None:
        _store(value, out_ptr, first, stop, column, width, ROWWISE)
    else:
        tma.store_wait(0)
        buf.store(value)
        fence_async_shared()
        if stop - first >= value.shape[0]:
            tma_store(out_desc, [first, column], buf)
        else:
            _store(buf.load(ROWWISE), out_ptr, first, stop, column, width, ROWWISE)


@gluon.jit
def _finish_whole(acc, out, buf, first, stop, n, width, ACT: gl.constexpr):
    """acc [64 pairs, 256 weight rows]: two halves of 64 in every 128 lie in one thread's registers."""
    dtype: gl.constexpr = out[1].dtype.element_ty
    left, right = acc.reshape([acc.shape[0], 2, 2, 64]).permute([0, 1, 3, 2]).split()
    if ACT is not None:
        one, two = _activate(left, right, ACT).to(dtype).permute([0, 2, 1]).split()
        _store_whole(one, out, buf, first, stop, n * 128, width, ACT)
        _store_whole(two, out, buf, first, stop, n * 128 + 64, width, ACT)
    else:
        one, three = left.to(dtype).permute([0, 2, 1]).split()
        two, four = right.to(dtype).permute([0, 2, 1]).split()
        _store_whole(one, out, buf, first, stop, n * 256, width, ACT)
        _store_whole(two, out, buf, first, stop, n * 256 + 64, width, ACT)
        _store_whole(three, out, buf, first, stop, n * 256 + 128, width, ACT)
        _store_whole(four, out, buf, first, stop, n * 256 + 192, width, ACT)


@gluon.jit
def _finish_tail(acc, out, buf, first, stop, n, width, ACT: gl.constexpr, HALF: gl.constexpr):
    """acc [128 weight rows, pairs]; its two halves of 64 rows lie in one thread's registers."""
    ROWWISE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    out_ptr = out[1]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    left, right = acc.reshape([2, 64, acc.shape[1]]).permute([1, 2, 0]).split()
    if ACT is not None:
        value = _activate(left, right, ACT).to(dtype).permute([1, 0])
        _store(value, out_ptr, first, stop, n * 128 + HALF * 64, width, ROWWISE)
    else:
        column = n * 256 + HALF * 128
        turned = buf.slice(0, acc.shape[1])
        tma.store_wait(0)
        turned.permute((1, 0)).store(left.to(dtype))
        _store(turned.load(ROWWISE), out_ptr, first, stop, column, width, ROWWISE)
        turned.permute((1, 0)).store(right.to(dtype))
        _store(turned.load(ROWWISE), out_ptr, first, stop, column + 64, width, ROWWISE)


@gluon.jit
def _multiply(
    out,
    bufs,
    full,
    empty,
    schedule,
    sizes,
    ACT: gl.constexpr,
    GROUP: gl.constexpr,
    TAIL: gl.constexpr,
    HALF: gl.constexpr,
):
    """One of the two multiplying warpgroups."""
    a_bufs, t_bufs, w_bufs, out_bufs = bufs
    ROWS: gl.constexpr = a_bufs.shape[1]
    GATHERED: gl.constexpr = ACT is not None
    buf = out_bufs.index(HALF)
    tiles, n_tiles, slot_rows, width, out_width = sizes
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, first, stop, n = _locate(tile, n_tiles, schedule, ROWS, GROUP)
        mine = first + HALF * 64
        if TAIL == 0:
            acc, step = _whole(bufs, full, empty, step, width, GATHERED, HALF)
            _finish_whole(acc, out, buf, mine, stop, n, out_width, ACT)
        else:
            if stop - first > ROWS:
                acc, tail, step = _both(bufs, full, empty, step, width, GATHERED, HALF)
                _finish_whole(acc, out, buf, mine, stop, n, out_width, ACT)
                _finish_tail(tail, out, buf, first + ROWS, stop, n, out_width, ACT, HALF)
            elif stop - first > TAIL:
                acc, step = _whole(bufs, full, empty, step, width, GATHERED, HALF)
                _finish_whole(acc, out, buf, mine, stop, n, out_width, ACT)
            else:
                tail, step = _tail_alone(bufs, full, empty, step, width, GATHERED, HALF)
                _finish_tail(tail, out, buf, first, stop, n, out_width, ACT, HALF)
    if ACT is None:
        tma.store_wait(0)


@gluon.jit
def _first_half(out, bufs, full, empty, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr, TAIL: gl.constexpr):
    _multiply(out, bufs, full, empty, schedule, sizes, ACT, GROUP, TAIL, 0)


@gluon.jit
def _second_half(out, bufs, full, empty, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr, TAIL: gl.constexpr):
    _multiply(out, bufs, full, empty, schedule, sizes, ACT, GROUP, TAIL, 1)


@gluon.jit
def _load(
    a,
    t_desc,
    w_desc,
    row_ptr,
    bufs,
    full,
    empty,
    schedule,
    sizes,
    ACT: gl.constexpr,
    GROUP: gl.constexpr,
    TAIL: gl.constexpr,
):
    if ACT is not None:
        _gather(a, w_desc, row_ptr, bufs, full, empty, schedule, sizes, GROUP, TAIL)
    else:
        _fetch(a, t_desc, w_desc, bufs, full, empty, schedule, sizes, GROUP, TAIL)


@gluon.jit(do_not_specialize=["L"])
def specialised_gemm_kernel(
    a,
    t_desc,
    w_desc,
    out_desc,
    out_ptr,
    row_ptr,
    schedule,
    L,
    slot_rows,
    width,
    out_width,
    ACT: gl.constexpr,
    GROUP: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    A_LAYOUT: gl.constexpr,
    T_LAYOUT: gl.constexpr,
    GATHER_WARPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """``ACT``: ``out[m] = act(x[row[m]] @ gate.T) * (x[row[m]] @ up.T)``; None: ``out[m] = a[m] @ down.T``.

    ``slot_rows`` weight rows per slot, ``width`` columns of the reduction, ``out_width`` of the result.
    """
    COLS: gl.constexpr = w_desc.block_shape[0]
    DEPTH: gl.constexpr = w_desc.block_shape[1]
    a_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 128, DEPTH], A_LAYOUT)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, COLS, DEPTH], w_desc.layout)
    t_bufs = a_bufs
    if TAIL > 0:
        t_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, TAIL, DEPTH], T_LAYOUT)
    out_bufs = a_bufs
    if ACT is None:
        out_bufs = gl.allocate_shared_memory(w_desc.dtype, [2, 64, 64], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1 + (0 if ACT is None else GATHER_WARPS * 32))
        mbarrier.init(empty.index(s), count=2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n_tiles = (slot_rows + COLS - 1) // COLS
    tiles = gl.load(schedule[1] + L) * n_tiles
    sizes = (tiles, n_tiles, slot_rows, width, out_width)
    bufs = (a_bufs, t_bufs, w_bufs, out_bufs)
    out = (out_desc, out_ptr)
    gl.warp_specialize(
        [
            (_first_half, (out, bufs, full, empty, schedule, sizes, ACT, GROUP, TAIL)),
            (_second_half, (out, bufs, full, empty, schedule, sizes, ACT, GROUP, TAIL)),
            (_load, (a, t_desc, w_desc, row_ptr, bufs, full, empty, schedule, sizes, ACT, GROUP, TAIL)),
        ],
        [4, GATHER_WARPS],
        REGISTERS,
    )


def takes_specialised(device: torch.device, hidden: int) -> bool:
    """Besides `takes_descriptors`."""
    return is_hopper(device) and hidden % LANES == 0


def specialised_gemm(
    a: torch.Tensor, index: MoEIndex, weight_LND: torch.Tensor, act: str | None, group: int, num_sms: int = 0
) -> torch.Tensor:
    """One grouped GEMM over blocks of 128 pairs (and a tail of 0 or 32), in pair order, rounded to the model dtype.

    Args:
        a: with ``act`` hidden rows ``[R, D]``; else activated features ``[M, F]`` in pair order.
        weight_LND: gate_up ``[L, 2F, D]`` with ``F % 64 == 0``, or down ``[L, D, F]``; bf16 or fp16.
        act: activation of the first GEMM, whose result is ``[M, F]``; None for the second, ``[M, D]``.
        group: pair blocks whose tiles run side by side.
    """
    tail = index.blocks.tail
    assert index.blocks.rows == ROWS and tail in (0, 32), index.blocks
    slots, rows, width = weight_LND.shape
    assert width % LANES == 0, width
    a = a if a.data_ptr() % 16 == 0 else a.clone()
    element = gl.bfloat16 if a.dtype == torch.bfloat16 else gl.float16
    out = a.new_empty((index.row_M.numel(), rows // 2 if act else rows))
    a_layout, w_layout, out_layout, t_layout = (
        gl.NVMMASharedLayout.get_default_for([n, DEPTH], element) for n in (ROWS, COLS, 64, tail or 32)
    )
    sms = sm_count(out.device)
    specialised_gemm_kernel[(min(num_sms, sms) if num_sms else sms,)](
        a if act else TensorDescriptor.from_tensor(a, [ROWS, DEPTH], a_layout),
        None if act or not tail else TensorDescriptor.from_tensor(a, [tail, DEPTH], t_layout),
        TensorDescriptor.from_tensor(weight_LND.view(-1, width), [COLS, DEPTH], w_layout),
        None if act else TensorDescriptor.from_tensor(out, [64, 64], out_layout),
        out,
        index.row_M,
        (index.offset_L1, index.blocks.offset_L1, index.blocks.slot_B),
        slots,
        rows,
        width,
        out.shape[1],
        ACT=act,
        GROUP=group,
        TAIL=tail,
        STAGES=STAGES,
        A_LAYOUT=a_layout,
        T_LAYOUT=t_layout,
        GATHER_WARPS=4 if act else 1,
        REGISTERS=(208, 88) if act else (240, 24),
        num_warps=4,
        **({"PDL": False} if num_sms else pdl_options(out)),
    )
    return out
