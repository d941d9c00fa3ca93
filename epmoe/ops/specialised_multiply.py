"""Multiplying warpgroups of specialised_gemm.py: the products of one tile, and its results to memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from epmoe.ops.specialised_load import count_tiles, locate

tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def _accumulate(
    bufs,
    barriers,
    step,
    width,
    WHOLE: gl.constexpr,
    TAIL: gl.constexpr,
    GATHERED: gl.constexpr,
    HALF: gl.constexpr,
):
    """Half of a tile's products: 64 of the 128 pairs by all weight rows (WHOLE), 128 weight rows by the TAIL pairs.

    One step's products stay in flight while the next buffer is awaited.
    """
    a_bufs, t_bufs, w_bufs, out_bufs = bufs
    full, empty = barriers
    STAGES: gl.constexpr = a_bufs.shape[0]
    COLS: gl.constexpr = w_bufs.shape[1]
    if WHOLE:
        acc = gl.zeros([64, COLS], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16]))
    if TAIL > 0:
        tail = gl.zeros([128, TAIL], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16]))
    for at in range(0, width, a_bufs.shape[2]):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        if GATHERED:
            fence_async_shared()  # the gathered rows were not written by the async proxy, which wgmma reads with
        weights = w_bufs.index(s)
        if WHOLE:
            rows = a_bufs.index(s).slice(HALF * 64, 64)
            acc = warpgroup_mma(rows, weights.permute((1, 0)), acc, use_acc=at > 0, is_async=True)
        if TAIL > 0:
            mine = weights.slice(HALF * 128, 128)
            tail = warpgroup_mma(mine, t_bufs.index(s).permute((1, 0)), tail, use_acc=at > 0, is_async=True)
        if WHOLE and TAIL > 0:
            acc, tail = warpgroup_mma_wait(num_outstanding=2, deps=[acc, tail])
        elif WHOLE:
            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
        else:
            tail = warpgroup_mma_wait(num_outstanding=1, deps=[tail])
        if at > 0:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    if WHOLE and TAIL > 0:
        acc, tail = warpgroup_mma_wait(num_outstanding=0, deps=[acc, tail])
    elif WHOLE:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    else:
        tail = warpgroup_mma_wait(num_outstanding=0, deps=[tail])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    if WHOLE and TAIL > 0:
        return acc, tail, step
    elif WHOLE:
        return acc, step
    else:
        return tail, step


@gluon.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) in four instructions; with a full division it is twelve, and nothing multiplies meanwhile."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 t;
        mul.ftz.f32 t, $1, 0fBFB8AA3B;  // -1 / log(2)
        ex2.approx.ftz.f32 t, t;
        add.ftz.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t; }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _activate(gate, up, ACT: gl.constexpr):
    if ACT == "silu":
        return gate * _sigmoid(gate) * up
    elif ACT == "relu":
        return gl.maximum(gate, 0.0) * up
    elif ACT == "gelu":
        return 0.5 * gate * (1.0 + gl.erf(gate * 0.7071067811865476)) * up
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * _sigmoid(2.0 * inner) * up


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
def multiply(
    out,
    bufs,
    barriers,
    schedule,
    sizes,
    ACT: gl.constexpr,
    GROUP: gl.constexpr,
    TAIL: gl.constexpr,
    HALF: gl.constexpr,
):
    """One of the two multiplying warpgroups."""
    a_bufs, t_bufs, w_bufs, out_bufs = bufs
    full, empty = barriers
    ROWS: gl.constexpr = a_bufs.shape[1]
    GATHERED: gl.constexpr = ACT is not None
    buf = out_bufs.index(HALF)
    L, slot_rows, width, out_width = sizes
    tiles, n_tiles = count_tiles(schedule, L, slot_rows, w_bufs.shape[1])
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, first, stop, n = locate(tile, n_tiles, schedule, ROWS, GROUP)
        mine = first + HALF * 64
        if TAIL == 0:
            acc, step = _accumulate(bufs, barriers, step, width, True, 0, GATHERED, HALF)
            _finish_whole(acc, out, buf, mine, stop, n, out_width, ACT)
        else:
            if stop - first > ROWS:
                acc, tail, step = _accumulate(bufs, barriers, step, width, True, TAIL, GATHERED, HALF)
                _finish_whole(acc, out, buf, mine, stop, n, out_width, ACT)
                _finish_tail(tail, out, buf, first + ROWS, stop, n, out_width, ACT, HALF)
            elif stop - first > TAIL:
                acc, step = _accumulate(bufs, barriers, step, width, True, 0, GATHERED, HALF)
                _finish_whole(acc, out, buf, mine, stop, n, out_width, ACT)
            else:
                tail, step = _accumulate(bufs, barriers, step, width, False, TAIL, GATHERED, HALF)
                _finish_tail(tail, out, buf, first, stop, n, out_width, ACT, HALF)
    if ACT is None:
        tma.store_wait(0)
