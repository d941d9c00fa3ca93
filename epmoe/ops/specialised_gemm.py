"""The two grouped GEMMs for many pairs, warp-specialised for Hopper (Gluon, GPU only).

gate_up_gemm.py and down_gemm.py hold the other form of each, and say what they compute; the twin is `expert_mlp_ref`.
One program per SM: two warpgroups multiply tiles of 128 pairs x 256 weight rows, a producer fetches weights by TMA and
rows by TMA (second GEMM) or by a gather of four warps (first).  They meet at STAGES buffers, each with a *full* and an
*empty* barrier: the n-th use of a buffer waits for parity ``n & 1`` of *full* and the opposite of *empty*.  Loads thus
run on across tiles and under the epilogue.

The last block of a slot may be short.  One of at most 64 or 32 pairs is multiplied with the weights as the left
operand: tensor-core work then is that of 64 or 32 pairs.
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
def _fetch(a, w_desc, row_ptr, bufs, full, empty, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr):
    """The producer.  A gathering thread copies 16 bytes of every 16th row; rows beyond the slot's pairs are zeros."""
    a_bufs, w_bufs, out_bufs = bufs
    ROWS: gl.constexpr = a_bufs.shape[1]
    DEPTH: gl.constexpr = a_bufs.shape[2]
    COLS: gl.constexpr = w_bufs.shape[1]
    STAGES: gl.constexpr = a_bufs.shape[0]
    BYTES: gl.constexpr = DEPTH * (w_bufs.dtype.primitive_bitwidth // 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tiles, n_tiles, slot_rows, width, out_width = sizes
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, LAYOUT))
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, first, stop, n = _locate(tile, n_tiles, schedule, ROWS, GROUP)
        if ACT is not None:
            row = gl.load(row_ptr + first + i, mask=first + i < stop, other=0)
            ptrs = a + row.to(gl.int64)[:, None] * width + k[None, :]
            live = (first + i < stop)[:, None]
        for at in range(0, width, DEPTH):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            if ACT is not None:
                mbarrier.expect(full.index(s), COLS * BYTES)
            else:
                mbarrier.expect(full.index(s), (COLS + ROWS) * BYTES)
                tma_load(a, [first, at], full.index(s), a_bufs.index(s))
            tma_load(w_desc, [slot * slot_rows + n * COLS, at], full.index(s), w_bufs.index(s))
            if ACT is not None:
                gather_load(a_bufs.index(s), ptrs, mask=live & (at + k < width)[None, :])
                async_copy.mbarrier_arrive(full.index(s), increment_count=False)
                ptrs += DEPTH
            step += 1


@gluon.jit
def _products(bufs, full, empty, step, width, PAIRS: gl.constexpr, GATHERED: gl.constexpr, HALF: gl.constexpr):
    """This warpgroup's products of one tile, one of them left in flight while the next buffer is awaited.

    All 128 pairs: half of the pairs by all weight rows.  Fewer: half of the weight rows by the first PAIRS pairs.
    """
    a_bufs, w_bufs, out_bufs = bufs
    STAGES: gl.constexpr = a_bufs.shape[0]
    WHOLE: gl.constexpr = a_bufs.shape[1] == PAIRS
    H: gl.constexpr = a_bufs.shape[1] // 2 if WHOLE else w_bufs.shape[1] // 2
    WIDE: gl.constexpr = w_bufs.shape[1] if WHOLE else PAIRS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    acc = gl.zeros([H, WIDE], gl.float32, layout=MMA)
    for at in range(0, width, a_bufs.shape[2]):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        if GATHERED:
            fence_async_shared()  # the gathered rows were not written by the async proxy, which wgmma reads with
        if WHOLE:
            left = a_bufs.index(s).slice(HALF * H, H)
            right = w_bufs.index(s).permute((1, 0))
        else:
            left = w_bufs.index(s).slice(HALF * H, H)
            right = a_bufs.index(s).slice(0, PAIRS).permute((1, 0))
        acc = warpgroup_mma(left, right, acc, use_acc=at > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
        if at > 0:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc, step


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
def _finish_short(acc, out_ptr, first, stop, n, width, ACT: gl.constexpr, HALF: gl.constexpr):
    """acc [128 weight rows, pairs]; its two halves of 64 rows lie in one thread's registers."""
    COLUMNWISE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    left, right = acc.reshape([2, 64, acc.shape[1]]).permute([1, 2, 0]).split()
    if ACT is not None:
        value = _activate(left, right, ACT).to(dtype).permute([1, 0])
        _store(value, out_ptr, first, stop, n * 128 + HALF * 64, width, COLUMNWISE)
    else:
        column = n * 256 + HALF * 128
        _store(left.to(dtype).permute([1, 0]), out_ptr, first, stop, column, width, COLUMNWISE)
        _store(right.to(dtype).permute([1, 0]), out_ptr, first, stop, column + 64, width, COLUMNWISE)


@gluon.jit
def _multiply(out, bufs, full, empty, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr):
    """One of the two multiplying warpgroups."""
    a_bufs, w_bufs, out_bufs = bufs
    ROWS: gl.constexpr = a_bufs.shape[1]
    GATHERED: gl.constexpr = ACT is not None
    buf = out_bufs.index(HALF)
    tiles, n_tiles, slot_rows, width, out_width = sizes
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, first, stop, n = _locate(tile, n_tiles, schedule, ROWS, GROUP)
        if stop - first > 64:
            acc, step = _products(bufs, full, empty, step, width, ROWS, GATHERED, HALF)
            _finish_whole(acc, out, buf, first + HALF * 64, stop, n, out_width, ACT)
        elif stop - first > 32:
            acc64, step = _products(bufs, full, empty, step, width, 64, GATHERED, HALF)
            _finish_short(acc64, out[1], first, stop, n, out_width, ACT, HALF)
        else:
            acc32, step = _products(bufs, full, empty, step, width, 32, GATHERED, HALF)
            _finish_short(acc32, out[1], first, stop, n, out_width, ACT, HALF)
    if ACT is None:
        tma.store_wait(0)


@gluon.jit
def _first_half(out, bufs, full, empty, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr):
    _multiply(out, bufs, full, empty, schedule, sizes, ACT, GROUP, 0)


@gluon.jit
def _second_half(out, bufs, full, empty, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr):
    _multiply(out, bufs, full, empty, schedule, sizes, ACT, GROUP, 1)


@gluon.jit(do_not_specialize=["L"])
def specialised_gemm_kernel(
    a,
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
    STAGES: gl.constexpr,
    A_LAYOUT: gl.constexpr,
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
    bufs = (a_bufs, w_bufs, out_bufs)
    out = (out_desc, out_ptr)
    gl.warp_specialize(
        [
            (_first_half, (out, bufs, full, empty, schedule, sizes, ACT, GROUP)),
            (_second_half, (out, bufs, full, empty, schedule, sizes, ACT, GROUP)),
            (_fetch, (a, w_desc, row_ptr, bufs, full, empty, schedule, sizes, ACT, GROUP)),
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
    """One grouped GEMM over blocks of 128 pairs, in pair order, rounded to the model dtype.

    Args:
        a: with ``act`` hidden rows ``[R, D]``; else activated features ``[M, F]`` in pair order.
        weight_LND: gate_up ``[L, 2F, D]`` with ``F % 64 == 0``, or down ``[L, D, F]``; bf16 or fp16.
        act: activation of the first GEMM, whose result is ``[M, F]``; None for the second, ``[M, D]``.
        group: pair blocks whose tiles run side by side.
    """
    assert (index.blocks.rows, index.blocks.tail) == (ROWS, 0), index.blocks
    slots, rows, width = weight_LND.shape
    assert width % LANES == 0, width
    a = a if a.data_ptr() % 16 == 0 else a.clone()
    element = gl.bfloat16 if a.dtype == torch.bfloat16 else gl.float16
    out = a.new_empty((index.row_M.numel(), rows // 2 if act else rows))
    a_layout, w_layout, out_layout = (
        gl.NVMMASharedLayout.get_default_for([n, DEPTH], element) for n in (ROWS, COLS, 64)
    )
    sms = sm_count(out.device)
    specialised_gemm_kernel[(min(num_sms, sms) if num_sms else sms,)](
        a if act else TensorDescriptor.from_tensor(a, [ROWS, DEPTH], a_layout),
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
        STAGES=STAGES,
        A_LAYOUT=a_layout,
        GATHER_WARPS=4 if act else 1,
        REGISTERS=(208, 88) if act else (240, 24),
        num_warps=4,
        **({"PDL": False} if num_sms else pdl_options(out)),
    )
    return out
