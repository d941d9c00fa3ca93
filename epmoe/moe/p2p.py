"""The exchange by the devices themselves, over memory that all ranks of a host map (`comm.open_buffers`).

A rank writes rows straight to their place in its peers' buffers and then signals them (`ops.p2p_signal`); nothing
passes a host or a collective.  Two transports under one protocol (`moe.p2p_transports`), chosen by the step's agreed
size:

* put: a few programs of a kernel store the rows (`ops.p2p_dispatch`, `ops.p2p_combine`).  Static shapes, no count on
  the host: capturable.
* copy: rows are packed by destination, then the copy engines move one block a peer (`ops.p2p_copy`).  No SM is taken;
  the host must know the sizes, so ``dispatch_send`` waits for the counts, as in ``alltoall``.

It cannot overflow: a source sends a rank at most one row a token, and there is a place for each.  A lane's buffers are
free again when its combine has ended on all ranks, which is when a rank has all signals of that combine.

A peer that is late beyond ``limit_s``, or gone, ends the wait; the record says where (`P2P.raise_if_failed`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from epmoe.comm import Comm, PeerMemory, open_buffers
from epmoe.moe.by_size import Cost, wire_bytes
from epmoe.moe.exchange import LANES, ExchangeShape, Received, Traffic
from epmoe.moe.p2p_transports import Copy, Device, Put, open_lanes
from epmoe.moe.peer_order import matched_order
from epmoe.ops.launch import sm_count
from epmoe.ops.p2p_layout import MOST_TOKENS, POSITIONS, STATE, STEP, TOKENS, Layout
from epmoe.ops.p2p_ranks import PutOptions, peer_order
from epmoe.ops.p2p_signal import ABORT, GONE, HOST_WORDS, RECORD, Failure, read_failure
from epmoe.ops.wire import wire_bytes as bytes_on_wire

LIMIT_S = 300.0  # a peer may be compiling; one whose process ends is noticed at once
# Tokens. By itself put is faster at every size measured, but its shapes must do for all tokens at one rank.
COPY_FROM = 4096
# SMs of a transfer that no other lane computes beside, and from how many tokens on: sums of many rows are then as fast
# as the link.
WIDE, WIDE_FROM = 64, 256
MOST_RANKS = 63  # a bit each


class PeerFailed(RuntimeError):
    """A rank did not keep its side of an exchange; the message says which, and where."""


def p2p_unavailable(comm: Comm, shape: ExchangeShape) -> str | None:
    """Why this run cannot use p2p, as far as it shows without trying; None: `P2P` may be opened."""
    if comm.device.type != "cuda":
        return f"p2p needs GPUs, this run is on {comm.device.type}"
    if comm.world > MOST_RANKS:
        return f"p2p reaches up to {MOST_RANKS} ranks, this run has {comm.world}"
    if shape.max_tokens > MOST_TOKENS:
        return f"p2p moves up to {MOST_TOKENS} tokens a rank, the budget is {shape.max_tokens}"
    if shape.row_bytes % 16:
        return f"p2p moves 16 bytes at a time, a row has {shape.row_bytes}"
    return None


class P2P:
    """See the module's docstring and the contract in ``moe.exchange``.

    Args:
        memory: buffers already opened for all lanes, `buffer_size` bytes; without, they are opened here, by all ranks
            together (`comm.NoPeerMemory` where that cannot be).
        limit_s: how long a peer may be late.
        costs: measured ones of the transports, ``put`` and ``copy``, which then decide between them by size.
    """

    name = "p2p"
    capturable = True  # steps that graphs may hold are put
    may_overflow = False

    def __init__(
        self,
        comm: Comm,
        shape: ExchangeShape,
        memory: PeerMemory | None = None,
        limit_s: float = LIMIT_S,
        costs: Mapping[str, Cost] | None = None,
    ) -> None:
        self.comm, self.shape = comm, shape
        self.layout = layout = lane_layout(comm.world, shape)
        self.memory = memory or open_buffers(comm, buffer_size(comm.world, shape))
        self.host = torch.zeros(HOST_WORDS, dtype=torch.int64, pin_memory=comm.device.type == "cuda")
        order_1W = peer_order(comm.world, comm.rank, 1)
        self._order_1W = order_1W.to(comm.device)
        self.lanes = open_lanes(self.memory, layout, LANES, self._order_1W, comm.rank)
        self.device = device = Device(comm, shape, layout, self.lanes, order_1W[0].tolist(), self.host, limit_s)
        side = torch.cuda.Stream(comm.device) if comm.device.type == "cuda" else None
        wide = PutOptions(min(WIDE, sm_count(comm.device)))
        self.put, self.wide, self.copy = Put(device, PutOptions(), side), Put(device, wide, side), Copy(device)
        self.shares_sms = False
        words = self.memory.local[: LANES * layout.total].view(torch.int64).view(LANES, -1)
        self._step_L = words[:, layout.at("state") // 8 + STEP]
        self._gone: list[int] = []
        self.buffer_bytes = LANES * layout.total
        self.copy_from = first_copied(comm.world, shape, costs or {})
        self.bound = max(shape.max_tokens, 1)
        self.waits_for_counts = False  # the present step is copied

    @property
    def ctas(self) -> int:
        """SMs that a transfer takes beside compute in this step, if it shares them."""
        return 0 if self.waits_for_counts else self.put.options.programs

    def begin_step(self, tokens: int, exact: bool = False) -> None:
        assert tokens <= self.layout.tokens, f"{tokens} tokens, the buffers are for {self.layout.tokens}"
        self.bound = max(tokens, 1)
        self.waits_for_counts = tokens >= self.copy_from and tokens > self.shape.graph_tokens
        self._step_L.fill_(self.comm.at.step)

    def expect_traffic(self, rows_WW: np.ndarray) -> None:
        """Visit peers in rounds that suit these rows; without a forecast they rotate.  Captured graphs follow."""
        order_W = matched_order(rows_WW)[self.comm.rank]
        self._order_1W.copy_(torch.from_numpy(order_W))
        self.device.order_W[:] = order_W.tolist()

    def overflowed(self) -> None:
        return None

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0):
        self.comm.at.stage = "dispatch"
        assert len(x_TD) <= self.bound, f"{len(x_TD)} tokens in a step of at most {self.bound}"
        put = self.put if self.shares_sms or self.bound < WIDE_FROM else self.wide
        transport = self.copy if self.waits_for_counts else put
        return transport.dispatch_begin(x_TD, slot_TK, weight_TK, lane, self.bound)

    def dispatch_send(self, sending):
        return sending.by.dispatch_send(sending)

    def dispatch_end(self, sending, num_slots: int) -> tuple[Received, object]:
        self.comm.at.stage = "dispatch"
        return sending.by.dispatch_end(sending, num_slots)

    def combine_begin(self, out_MD: torch.Tensor, route):
        self.comm.at.stage = "combine"
        return route.by.combine_begin(out_MD, route)

    def combine_end(self, returning, add_TD: torch.Tensor | None = None) -> torch.Tensor:
        self.comm.at.stage = "combine"
        return returning.by.combine_end(returning, add_TD)

    def traffic(self) -> Traffic:
        """Counters kept by the send kernels, so that replays of a graph count too."""
        layout, total = self.layout, Traffic.none(self.comm.world)
        position = 4 * (1 + layout.top_k * (2 if layout.reduce else 1))
        for lane in self.lanes:
            state = layout.view(lane.buffer, "state", torch.int64, STATE).tolist()
            rows_W, _, pairs_W = layout.view(lane.buffer, "sent", torch.int64, 3, layout.world).cpu().numpy()
            back_W = rows_W if layout.reduce else pairs_W
            sent_W = rows_W * layout.sent_bytes
            moved_W = sent_W + state[POSITIONS] * position
            total += Traffic(rows_W, pairs_W, moved_W, back_W * layout.row_bytes, state[TOKENS], int(sent_W.sum()))
        return total

    def failure(self) -> Failure | None:
        """What a wait that gave up has recorded; what was computed since is void."""
        failure = read_failure(int(self.host[RECORD]))
        if failure is None or not self._gone:
            return failure
        waited_for_it = failure.peer in self._gone  # others may have ended since, because of the first
        return replace(failure, peer=failure.peer if waited_for_it else self._gone[0], reason=GONE)

    def raise_if_failed(self, patience_s: float = 0.0) -> None:
        failure = self._failure_within(patience_s)
        if failure is None and patience_s and self.comm.at.stage == "agree":
            # The ranks' agreement broke and no process is seen to have ended: what the device waits for is lost.
            self.host[ABORT] = 1
            failure = self._failure_within(1.0)
        if failure is not None:
            raise PeerFailed(str(failure))

    def _failure_within(self, patience_s: float) -> Failure | None:
        deadline = time.monotonic() + patience_s
        while (failure := self.failure()) is None and time.monotonic() < deadline:
            self.watch_peers()  # a process's sockets close before its end shows
            time.sleep(0.01)
        return failure

    def watch_peers(self) -> None:
        """Any thread, now and then: if a peer's process has ended, no wait of this rank goes on."""
        self._gone = self.memory.gone()
        if self._gone:
            self.host[ABORT] = 1


def first_copied(world: int, shape: ExchangeShape, costs: Mapping[str, Cost]) -> int:
    """Tokens of the smallest step that is copied: from there on ``costs`` say that the copy engines are no slower (a
    size beyond all steps if they never are), or `COPY_FROM` without."""
    if not {"put", "copy"} <= costs.keys():
        return COPY_FROM

    def copied(tokens: int) -> bool:
        wire = wire_bytes("p2p", shape, world, tokens)
        return costs["copy"].us(wire) <= costs["put"].us(wire)

    most = max(shape.max_tokens, 1)
    if not copied(most):
        return most + 1
    return bisect_left(range(most), True, lo=1, key=copied)  # a line crosses another once


def lane_layout(world: int, shape: ExchangeShape) -> Layout:
    tokens = max(shape.max_tokens, 1)
    sent = bytes_on_wire(shape.hidden) if shape.wire == "fp8" else 0
    return Layout(world, tokens, shape.top_k, shape.hidden, shape.dtype, shape.combine == "reduce", sent)


def buffer_size(world: int, shape: ExchangeShape) -> int:
    """Bytes of a rank's buffers, all lanes."""
    return LANES * lane_layout(world, shape).total
