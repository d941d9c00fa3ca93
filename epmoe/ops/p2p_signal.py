"""Signals between ranks: how a send kernel ends, and the kernel that waits.

A send kernel's programs write with plain stores; each then passes a block barrier and adds to the rank's ``done``
counter (acq_rel, device scope), and the last one writes ``epoch << 32 | bound << 16 | rows`` to every rank (release,
system scope): ``rows`` it sent to that rank, ``bound`` all ranks must have agreed on.
Everything that any program wrote is thereby visible to whoever acquires that word.  A send kernel never waits, a wait
kernel never sends: with every rank's sends ahead of its waits in stream order, no rank can starve another.

Epochs are counted on the device, one counter for what was sent and one for what was waited for, so that a replayed
graph and eager steps mix.  They wrap at 32 bits and are compared by their difference.

The wait kernel gives up when the host's abort word is set or its time is over.  It then writes one 64-bit record (see
`Failure`) to host memory, marks the lane failed so that later waits return at once, and ends: no kernel spins on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epmoe.ops.launch import pdl_options
from epmoe.ops.p2p_layout import DISPATCH, DONE, FAILED, POSITIONS, SENT, STEP, TOKENS, WAITED, Layout
from epmoe.ops.p2p_ranks import Ranks

ABORT, RECORD, HOST_WORDS = 0, 1, 8
STAGES = ("dispatch", "combine", "counts")
TIMEOUT, ABORTED, DISAGREE = 1, 2, 3
GONE = 4  # found by the host
REASONS = {
    TIMEOUT: "sent no signal in time",
    ABORTED: "was waited for when the run was aborted",
    DISAGREE: "sent another size than was agreed",
    GONE: "is gone, its process has ended",
}
_FAILED, _STEP, _WAITED = tl.constexpr(FAILED), tl.constexpr(STEP), tl.constexpr(WAITED)
_ABORT, _RECORD = tl.constexpr(ABORT), tl.constexpr(RECORD)
_SENT, _DONE, _DISPATCH = tl.constexpr(SENT), tl.constexpr(DONE), tl.constexpr(DISPATCH)
_TOKENS, _POSITIONS = tl.constexpr(TOKENS), tl.constexpr(POSITIONS)


@dataclass(frozen=True)
class Failure:
    """What a wait kernel recorded.

    The word: 1 << 63 | step (31 bits) << 32 | (layer + 1) << 16 | stage << 14 | reason << 12 | peer.
    """

    step: int
    layer: int
    stage: str
    peer: int
    reason: int

    def __str__(self) -> str:
        layer = f", layer {self.layer}" if self.layer >= 0 else ""
        return f"step {self.step}{layer}, {self.stage}: rank {self.peer} {REASONS[self.reason]}"


def read_failure(word: int) -> Failure | None:
    """The record in a host word, or None where there is none yet."""
    if word == 0:
        return None
    word &= (1 << 63) - 1
    stage = STAGES[(word >> 14) & 3]
    return Failure(word >> 32, ((word >> 16) & 0xFFFF) - 1, stage, word & 0xFFF, (word >> 12) & 3)


@triton.jit
def _clock_ns():
    """The device's wall clock, in ns; it ticks about every microsecond."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _read_acquire(ptr):
    """Words of other ranks; what these wrote before them is visible from here on."""
    text: tl.constexpr = "ld.acquire.sys.global.b64 $0, [$1];"
    return tl.inline_asm_elementwise(text, "=l,l", [ptr], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def finish_send(
    table_ptr, me, state_at, sent_at, signal_at, direction, tokens, bound,
    W: tl.constexpr, W2: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """End of every send kernel: the last of a rank's C programs signals all W ranks."""
    base = tl.load(table_ptr + me)
    state_ptr = (base + state_at).to(tl.pointer_type(tl.int64))
    w = tl.arange(0, W2)
    # Words that nobody else writes meanwhile are read before the last program is known.
    epoch = (tl.load(state_ptr + _SENT + direction) + 1) & 0xFFFFFFFF
    all_tokens = tl.load(state_ptr + _TOKENS) + tokens
    all_positions = tl.load(state_ptr + _POSITIONS) + bound
    sent_ptr = (base + sent_at).to(tl.pointer_type(tl.int64)) + w
    before = tl.load(sent_ptr + W, mask=w < W, other=0)
    peer = tl.load(table_ptr + w, mask=w < W, other=0)
    word = tl.zeros([W2], tl.int64) + ((epoch << 32) | (bound.to(tl.int64) << 16))
    tl.debug_barrier()
    done = tl.atomic_add(state_ptr + _DONE + direction, 1, sem="acq_rel", scope="gpu")
    if done == C - 1:
        if direction == _DISPATCH:
            rows = tl.load(sent_ptr, mask=w < W, other=0)
            word |= rows - before
        signal_ptr = (peer + signal_at + (direction * W + me) * 8).to(tl.pointer_type(tl.int64))
        tl.debug_barrier()
        tl.atomic_xchg(signal_ptr, word, mask=w < W, sem="release", scope="sys")
        # This rank's own words, for its later kernels: ahead of the signal they would hold it up.
        if direction == _DISPATCH:
            tl.store(sent_ptr + W, rows, mask=w < W)
            tl.store(state_ptr + _TOKENS, all_tokens)
            tl.store(state_ptr + _POSITIONS, all_positions)
        tl.store(state_ptr + _SENT + direction, epoch)
        tl.store(state_ptr + _DONE + direction, 0)


@triton.jit(do_not_specialize=["first_rank", "bound", "limit_ns", "layer"])
def _wait_kernel(
    table_ptr,
    host_ptr,
    count_ptr,
    first_rank,
    state_at,
    signal_at,
    direction,
    bound,
    limit_ns,
    layer,
    W: tl.constexpr,
    W2: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Wait for every rank's signal of this epoch; one warp, one lane a peer.

    It may start while the kernel ahead (the put) still runs, reads only words that older kernels or other ranks wrote,
    and writes when that kernel has ended.  The kernel behind may start when the signals are there: earlier it would
    hold SMs while rows travel."""
    me = first_rank + tl.program_id(0)
    base = tl.load(table_ptr + me)
    state_ptr = (base + state_at).to(tl.pointer_type(tl.int64))
    epoch = ((tl.load(state_ptr + _WAITED + direction) + 1) & 0xFFFFFFFF).to(tl.int32)
    step = tl.load(state_ptr + _STEP)
    going = (tl.load(state_ptr + _FAILED) == 0).to(tl.int32)
    w = tl.arange(0, W2)
    signal_ptr = (base + signal_at + (direction * W + tl.minimum(w, W - 1)) * 8).to(tl.pointer_type(tl.int64))
    begin = tl.zeros([], tl.int64)
    if ON_DEVICE:
        begin = _clock_ns()
    spins = 0
    reason = 0
    peer = 0
    while going != 0:
        word = tl.load(signal_ptr, volatile=True)
        late = (((word >> 32).to(tl.int32) - epoch) < 0) & (w < W)
        if tl.sum(late.to(tl.int32), 0) == 0:
            going = 0
        spins += 1
        if ((spins & 63) == 0) & (going != 0):  # host memory is far away
            over = spins >= limit_ns
            if ON_DEVICE:
                over = _clock_ns() - begin > limit_ns
            if tl.load(host_ptr + _ABORT, volatile=True) != 0:
                reason = 2
            elif over:
                reason = 1
            if reason != 0:
                going = 0
                peer = tl.min(tl.where(late, w, W2), 0)
    word = _read_acquire(signal_ptr) if ON_DEVICE else tl.load(signal_ptr)
    if PDL:
        if reason == 0:  # a wait behind one that failed must see that
            gdc_launch_dependents()
        gdc_wait()
    tl.store(state_ptr + _WAITED + direction, epoch.to(tl.int64))
    tl.store(count_ptr + tl.program_id(0) * W + w, (word & 0xFFFF).to(tl.int32), mask=w < W)
    wrong = (((word >> 16) & 0xFFFF).to(tl.int32) != bound) & (w < W)
    disagree = (reason == 0) & (tl.sum(wrong.to(tl.int32), 0) != 0)
    if tl.load(state_ptr + _FAILED, mask=disagree, other=1) == 0:
        reason = 3
        peer = tl.min(tl.where(wrong, w, W2), 0)
    if reason != 0:
        tl.store(state_ptr + _FAILED, 1)
        if tl.load(host_ptr + _RECORD, volatile=True) == 0:
            low = ((layer + 1) << 16) | (direction << 14) | (reason << 12) | peer
            record = ((step | 0x80000000) << 32) | low.to(tl.int64)
            tl.store(host_ptr + _RECORD, record)


@dataclass(frozen=True)
class Place:
    """Where a wait stands and how long it may take; named in its record."""

    layer: int
    limit_s: float


def wait_signals(
    ranks: Ranks, host: torch.Tensor, layout: Layout, direction: int, bound: int, place: Place
) -> torch.Tensor:
    """Launch the wait for all ranks' signals of ``direction``, as each of ``ranks``.

    Args:
        host: int64 ``[HOST_WORDS]`` in pinned memory: the abort word and the record.
        bound: what every rank must have agreed on.

    Returns:
        int32 ``[number, W]``: rows that each rank sent.
    """
    table_W = ranks.table_W
    count_VW = torch.empty((ranks.number, layout.world), dtype=torch.int32, device=table_W.device)
    interpreted = not table_W.is_cuda
    _wait_kernel[(ranks.number,)](
        table_W,
        host,
        count_VW,
        ranks.first,
        layout.at("state"),
        layout.at("signal"),
        direction,
        bound,
        128 if interpreted else int(place.limit_s * 1e9),  # the interpreter counts polls
        place.layer,
        W=layout.world,
        W2=triton.next_power_of_2(layout.world),
        ON_DEVICE=not interpreted,
        num_warps=1,
        **pdl_options(table_W),
    )
    return count_VW
