"""The two grouped GEMMs on block-scaled 8-bit weights for many pairs, warp-specialised for Hopper (Gluon, GPU only).

experts_fp8.py holds the other form and the twin; specialised_gemm.py explains the barriers.  One program per SM: a warp
fetches 128 pairs and 256 weight rows by TMA, two warpgroups multiply 64 pairs each.  A step of 128 along the reduction
is summed by the tensor cores for 128 weight rows at a time, scaled, and added: while one warpgroup adds, products of
the other one run.  Of ``gate_up`` the first 128 rows in shared memory are gate, the others up, of the same features.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epmoe.ops.fp8 import BLOCK, quantize_pairs
from epmoe.ops.launch import pdl_options, sm_count
from epmoe.ops.moe_index import MoEIndex
from epmoe.ops.specialised_gemm import _activate, _locate, tma_load

ROWS, PART, STAGES = 128, 64, 4


@gluon.jit
def _fetch(a_desc, w_desc, bufs, full, empty, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr):
    """The producer; of gate_up's four runs of 64 weight rows (gate, up, gate, up) the inner two change places."""
    a_bufs, w_bufs = bufs
    STAGES: gl.constexpr = a_bufs.shape[0]
    tiles, n_tiles, slot_rows, steps, out_width = sizes
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, first, stop, n = _locate(tile, n_tiles, schedule, 128, GROUP)
        at_row = slot * slot_rows + n * 256
        for step in range(steps):
            s = count % STAGES
            mbarrier.wait(empty.index(s), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), (128 + 256) * 128)
            tma_load(a_desc, [first, step * 128], full.index(s), a_bufs.index(s))
            for part in gl.static_range(4):
                into = w_bufs.index(s).slice(part * 64, 64)
                if ACT is None:
                    tma_load(w_desc, [at_row + part * 64, step * 128], full.index(s), into)
                else:
                    tma_load(w_desc, [at_row + (part // 2 + part % 2 * 2) * 64, step * 128], full.index(s), into)
            count += 1


@gluon.jit
def _products(operands, scale_ptrs, full, empty, count, place, HALF: gl.constexpr):
    """Two scaled sums ``[64 pairs, 128 weight rows]`` of one tile."""
    a_bufs, w_bufs = operands
    a_scale_ptr, left_scale_ptr, right_scale_ptr = scale_ptrs
    first, stop, steps = place
    STAGES: gl.constexpr = a_bufs.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    pair = first + HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    live = pair < stop
    a_scale_ptrs = a_scale_ptr + pair.to(gl.int64) * steps
    left = gl.zeros([64, 128], gl.float32, layout=MMA)
    right = gl.zeros([64, 128], gl.float32, layout=MMA)
    none = gl.zeros([64, 128], gl.float32, layout=MMA)
    a_scale = gl.load(a_scale_ptrs, mask=live, other=0.0)
    left_scale, right_scale = gl.load(left_scale_ptr), gl.load(right_scale_ptr)
    for step in range(steps):
        s = count % STAGES
        # The next step's scales are under way while this step multiplies.
        ahead = gl.minimum(step + 1, steps - 1)
        next_a_scale = gl.load(a_scale_ptrs + ahead, mask=live, other=0.0)
        next_left_scale, next_right_scale = gl.load(left_scale_ptr + ahead), gl.load(right_scale_ptr + ahead)
        mbarrier.wait(full.index(s), (count // STAGES) & 1)
        rows = a_bufs.index(s).slice(HALF * 64, 64)
        part = warpgroup_mma(rows, w_bufs.index(s).slice(0, 128).permute((1, 0)), none, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=[part])
        left += part * (a_scale * left_scale)[:, None]
        part = warpgroup_mma(rows, w_bufs.index(s).slice(128, 128).permute((1, 0)), none, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=[part])
        mbarrier.arrive(empty.index(s), count=1)
        right += part * (a_scale * right_scale)[:, None]
        a_scale, left_scale, right_scale = next_a_scale, next_left_scale, next_right_scale
        count += 1
    return left, right, pair, count


@gluon.jit
def _store(value, out_ptr, first, stop, column, width):
    LANES: gl.constexpr = 128 // value.dtype.primitive_bitwidth  # 16 bytes
    ROWWISE: gl.constexpr = gl.BlockedLayout([1, LANES], [4, 8], [4, 1], [1, 0])
    value = gl.convert_layout(value, ROWWISE)
    pair = first + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, ROWWISE))
    j = column + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, ROWWISE))
    ptrs = out_ptr + pair.to(gl.int64)[:, None] * width + j[None, :]
    gl.store(ptrs, value, mask=(pair < stop)[:, None] & (j < width)[None, :])


@gluon.jit
def _multiply(
    out, scales, bufs, full, empty, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr
):
    """One of the two multiplying warpgroups."""
    out_ptr, out_scale_ptr = out
    a_scale_ptr, w_scale_ptr = scales
    tiles, n_tiles, slot_rows, steps, out_width = sizes
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, first, stop, n = _locate(tile, n_tiles, schedule, 128, GROUP)
        if ACT is None:
            block = slot.to(gl.int64) * (slot_rows // 128) + n * 2
            other = gl.where(n * 2 + 1 < slot_rows // 128, 1, 0)
        else:
            block = slot.to(gl.int64) * (slot_rows // 128) + n
            other = n_tiles
        left_ptr = w_scale_ptr + block * steps
        scale_ptrs = (a_scale_ptr, left_ptr, left_ptr + other * steps)
        left, right, pair, count = _products(bufs, scale_ptrs, full, empty, count, (first, stop, steps), HALF)
        if ACT is None:
            dtype: gl.constexpr = out_ptr.dtype.element_ty
            _store(left.to(dtype), out_ptr, first + HALF * 64, stop, n * 256, out_width)
            _store(right.to(dtype), out_ptr, first + HALF * 64, stop, n * 256 + 128, out_width)
        else:
            value = _activate(left, right, ACT)
            largest = gl.maximum(gl.max(gl.abs(value), 1), 1e-12)
            stored = (value * (448.0 / largest)[:, None]).to(gl.float8e4nv)
            _store(stored, out_ptr, first + HALF * 64, stop, n * 128, out_width)
            gl.store(out_scale_ptr + pair.to(gl.int64) * n_tiles + n, largest / 448.0, mask=pair < stop)


@gluon.jit
def _first_half(out, scales, bufs, full, empty, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr):
    _multiply(out, scales, bufs, full, empty, schedule, sizes, ACT, GROUP, 0)


@gluon.jit
def _second_half(out, scales, bufs, full, empty, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr):
    _multiply(out, scales, bufs, full, empty, schedule, sizes, ACT, GROUP, 1)


@gluon.jit(do_not_specialize=["L"])
def specialised_fp8_kernel(
    a_desc,
    a_scale_ptr,
    w_desc,
    w_scale_ptr,
    out_ptr,
    out_scale_ptr,
    schedule,
    L,
    slot_rows,
    width,
    out_width,
    ACT: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """``ACT``: ``out[m] = act(a[m] @ gate.T) * (a[m] @ up.T)``, quantised; None: ``out[m] = a[m] @ down.T``.

    ``slot_rows`` weight rows per slot, ``width`` columns of the reduction, ``out_width`` of the result.
    """
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 128, 128], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 256, 128], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n_tiles = (slot_rows + 255) // 256
    tiles = gl.load(schedule[1] + L) * n_tiles
    sizes = (tiles, n_tiles, slot_rows, width // 128, out_width)
    bufs, scales, out = (a_bufs, w_bufs), (a_scale_ptr, w_scale_ptr), (out_ptr, out_scale_ptr)
    gl.warp_specialize(
        [
            (_first_half, (out, scales, bufs, full, empty, schedule, sizes, ACT, GROUP)),
            (_second_half, (out, scales, bufs, full, empty, schedule, sizes, ACT, GROUP)),
            (_fetch, (a_desc, w_desc, bufs, full, empty, schedule, sizes, ACT, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


def _run(a: tuple, index: MoEIndex, weight: tuple, out: tuple, act: str | None, group: int, num_sms: int) -> None:
    """``a``, ``weight`` and ``out``: values and their scales."""
    assert (index.blocks.rows, index.blocks.tail) == (ROWS, 0), index.blocks
    slots, rows, width = weight[0].shape
    a_layout, w_layout = (gl.NVMMASharedLayout.get_default_for([n, BLOCK], gl.float8e4nv) for n in (ROWS, PART))
    sms = sm_count(out[0].device)
    specialised_fp8_kernel[(min(num_sms, sms) if num_sms else sms,)](
        TensorDescriptor.from_tensor(a[0], [ROWS, BLOCK], a_layout),
        a[1],
        TensorDescriptor.from_tensor(weight[0].view(-1, width), [PART, BLOCK], w_layout),
        weight[1],
        *out,
        (index.offset_L1, index.blocks.offset_L1, index.blocks.slot_B),
        slots,
        rows,
        width,
        out[0].shape[1],
        ACT=act,
        GROUP=group,
        STAGES=STAGES,
        num_warps=4,
        **({"PDL": False} if num_sms else pdl_options(out[0])),
    )


def specialised_gate_up_fp8(rows_RD, index: MoEIndex, weights, act: str, group: int, num_sms: int = 0) -> tuple:
    """As `experts_fp8.gate_up_fp8_triton`, over blocks of 128 pairs; the rows are copied, quantised, in pair order."""
    a = quantize_pairs(rows_RD, index)
    pairs, features = a[0].shape[0], weights.down.shape[2]
    out = a[0].new_empty((pairs, features)), a[1].new_empty((pairs, features // BLOCK))
    _run(a, index, (weights.gate_up, weights.gate_up_scale), out, act, group, num_sms)
    return out


def specialised_down_fp8(act: tuple, index: MoEIndex, weights, dtype, group: int, num_sms: int = 0) -> torch.Tensor:
    """As `experts_fp8.down_fp8_triton`, over blocks of 128 pairs."""
    out_MD = act[0].new_empty((act[0].shape[0], weights.down.shape[1]), dtype=dtype)
    _run(act, index, (weights.down, weights.down_scale), (out_MD, None), None, group, num_sms)
    return out_MD
