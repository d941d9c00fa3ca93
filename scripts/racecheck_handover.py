#!/usr/bin/env python3
"""What racecheck says of a warp-specialised kernel that has nothing to race: its reports there are the tool's own.

    compute-sanitizer --tool racecheck scripts/racecheck_handover.py plain      0 hazards
    compute-sanitizer --tool racecheck scripts/racecheck_handover.py partial    hundreds, of the compiler's hand-over

`warp_specialize` hands work to the other warps through shared memory: the first four warps write a byte of state
for each warp, and values that are captured; all warps of the block meet at ``barrier.sync 1``; the others read.  Both
kernels do just that.  ``partial`` has, before it, barriers among the first four warps (``bar.sync 0, 128``) while the
others already wait at barrier 1: then racecheck (2025.3.1, H200) takes the reads for unordered, though no access and no
barrier of the hand-over has changed.  Initialising mbarriers and storing results compile to such barriers: a kernel is
reported unless it keeps them away from the hand-over, as epmoe/ops/specialised_gemm.py does.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _put(out_ptr, value, PART: gl.constexpr):
    i = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
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
        # Each thread reads what it wrote: correct with or without the barriers that the compiler puts here.
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        i = gl.arange(0, 128, layout=LAYOUT)
        buf = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        for _ in gl.static_range(4):
            buf.store(i + value)
            i = buf.load(LAYOUT)
        value += gl.max(i, 0) * 0
    gl.warp_specialize([(_first, (out_ptr, value)), (_second, (out_ptr, value))], [4], [88])


def main() -> int:
    if sys.argv[1:] not in (["plain"], ["partial"]):
        print(__doc__)
        return 2
    value = torch.tensor([3], device="cuda", dtype=torch.int32)
    out = torch.zeros(264 * 2, 128, device="cuda", dtype=torch.int32)
    handover_kernel[(264,)](value, out, sys.argv[1] == "partial", num_warps=4)
    right = bool((out == 3).all())
    print(sys.argv[1], "right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
