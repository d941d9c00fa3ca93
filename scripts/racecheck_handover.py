#!/usr/bin/env python3
"""What racecheck says of warp-specialised kernels that have nothing to race: its reports there are the tool's own.

    compute-sanitizer --tool racecheck scripts/racecheck_handover.py plain      0 hazards
    compute-sanitizer --tool racecheck scripts/racecheck_handover.py partial    hundreds, of the compiler's hand-over
    compute-sanitizer --tool racecheck scripts/racecheck_handover.py inside     hundreds, of its end

`warp_specialize` hands work to the other warps through shared memory: the first four warps write a byte of state for
each warp, and values that are captured; all warps of the block meet at ``barrier.sync 1``; the others read. At the
kernel's end the same hand-over sends them home. The first two kernels do just that. ``partial`` has, before it,
barriers among the first four warps (``bar.sync 0, 128``) while the others already wait at barrier 1: then racecheck
(2025.3.1, H200) takes the reads for unordered, though no access and no barrier of the hand-over has changed.
``inside`` has such barriers in the region, while the others wait at an mbarrier, and is reported at its end.
Initialising mbarriers, loads behind one thread and storing results compile to such barriers: a kernel is reported
unless it keeps them away from the hand-over, as epmoe/ops/specialised_gemm.py does for most.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _pass_barriers(i, buf):
    """Each thread reads what it wrote: correct with or without the barriers that the compiler puts here."""
    for _ in gl.static_range(4):
        buf.store(i)
        i = buf.load(LAYOUT)
    return i


@gluon.jit
def _put(out_ptr, value, PART: gl.constexpr):
    i = gl.arange(0, 128, layout=LAYOUT)
    gl.store(out_ptr + (gl.program_id(0) * 2 + PART) * 128 + i, i * 0 + value)


@gluon.jit
def _first(out_ptr, value):
    _put(out_ptr, value, 0)


@gluon.jit
def _second(out_ptr, value):
    _put(out_ptr, value, 1)


@gluon.jit
def handover_kernel(in_ptr, out_ptr, PARTIAL: gl.constexpr):
    value = gl.load(in_ptr)
    if PARTIAL:
        i = gl.arange(0, 128, layout=LAYOUT)
        buf = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        value += gl.max(_pass_barriers(i + value, buf), 0) * 0
    gl.warp_specialize([(_first, (out_ptr, value)), (_second, (out_ptr, value))], [4], [88])


@gluon.jit
def _nothing():
    pass


@gluon.jit
def _prepare(leave):
    mbarrier.init(leave, count=1)
    fence_async_shared()


@gluon.jit
def _give(out_ptr, value, buf, leave):
    i = gl.arange(0, 128, layout=LAYOUT)
    _put(out_ptr, value + _pass_barriers(i, buf) * 0, 0)
    mbarrier.arrive(leave, count=1)


@gluon.jit
def _take(out_ptr, value, leave):
    _put(out_ptr, value, 1)
    mbarrier.wait(leave, 0)


@gluon.jit
def inside_kernel(out_ptr, value):
    leave = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    buf = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(_nothing, ()), (_nothing, ()), (_prepare, (leave,))], [4, 1], [88, 88])
    gl.warp_specialize(
        [
            (_give, (out_ptr, value, buf, leave)),
            (_take, (out_ptr, value, leave)),
            (_take, (out_ptr, value, leave)),
        ],
        [4, 4],
        [88, 88],
    )


MODES = ("plain", "partial", "inside")


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in MODES:
        print(__doc__)
        return 2
    mode, programs = sys.argv[1], 264
    value = torch.tensor([3], device="cuda", dtype=torch.int32)
    out = torch.zeros(programs * 2, 128, device="cuda", dtype=torch.int32)
    if mode in ("plain", "partial"):
        handover_kernel[(programs,)](value, out, mode == "partial", num_warps=4)
    else:
        inside_kernel[(programs,)](out, 3, num_warps=4)
    right = bool((out == 3).all())
    print(mode, "right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
