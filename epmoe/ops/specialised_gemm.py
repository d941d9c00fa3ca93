"""The two grouped GEMMs for many pairs, warp-specialised for Hopper (Gluon, GPU only).

gate_up_gemm.py and down_gemm.py hold the other form of each, and say what they compute; the twin is `expert_mlp_ref`.
One program per SM: two warpgroups multiply tiles of 128 pairs x 256 weight rows, a producer fetches weights by TMA and
rows by TMA (second GEMM) or by a gather of four warps (first).  They meet at STAGES buffers, each with a *full* and an
*empty* barrier: the n-th use of a buffer waits for parity ``n & 1`` of *full* and the opposite of *empty*.  Loads thus
run on across tiles and under the epilogue.  A region of its own, in which one warp makes these barriers ready, and the
producer as the first partition keep barriers of some warps away from where others wait for all: that leaves few of the
reports that racecheck makes of such kernels, on the compiler's hand-over to a region (scripts/racecheck_handover.py).

With TAIL the last block of a slot may hold up to TAIL pairs more than 128 (`BlockSchedule`): these are multiplied
beside the 128, with the same weights as the left operand, and so is a block of at most TAIL pairs.  That saves a block
for most of the slots that have a few pairs more than a multiple of 128.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epmoe.ops.launch import is_hopper, pdl_options, sm_count
from epmoe.ops.moe_index import MoEIndex
from epmoe.ops.specialised_load import load
from epmoe.ops.specialised_multiply import multiply

ROWS, COLS, DEPTH = 128, 256, 64
LANES = 16  # elements: what the compiler must know to divide the width, for a gather by 16 bytes
STAGES = 4


@gluon.jit
def _first_half(out, bufs, barriers, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr, TAIL: gl.constexpr):
    multiply(out, bufs, barriers, schedule, sizes, ACT, GROUP, TAIL, 0)


@gluon.jit
def _second_half(out, bufs, barriers, schedule, sizes, ACT: gl.constexpr, GROUP: gl.constexpr, TAIL: gl.constexpr):
    multiply(out, bufs, barriers, schedule, sizes, ACT, GROUP, TAIL, 1)


@gluon.jit
def _wait():
    pass


@gluon.jit
def _prepare(full, empty, ARRIVALS: gl.constexpr):
    STAGES: gl.constexpr = full.shape[0]
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=ARRIVALS)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()  # TMA, of the async proxy, is to find the barriers ready


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
    GATHERING: gl.constexpr = 0 if ACT is None else gl.num_warps() * 32
    gl.warp_specialize([(_wait, ()), (_wait, ()), (_prepare, (full, empty, 1 + GATHERING))], [4, 1], [168, 168])
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sizes = (L, slot_rows, width, out_width)
    bufs = (a_bufs, t_bufs, w_bufs, out_bufs)
    barriers = (full, empty)
    out = (out_desc, out_ptr)
    gl.warp_specialize(
        [
            (load, (a, t_desc, w_desc, row_ptr, bufs, barriers, schedule, sizes, ACT is not None, GROUP, TAIL)),
            (_first_half, (out, bufs, barriers, schedule, sizes, ACT, GROUP, TAIL)),
            (_second_half, (out, bufs, barriers, schedule, sizes, ACT, GROUP, TAIL)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
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
        REGISTERS=208 if act else 232,
        num_warps=4,
        **({"PDL": False} if num_sms else pdl_options(out)),
    )
    return out
