"""The exchange by the devices themselves, over memory that all ranks of a host map (`comm.open_buffers`).

A rank writes rows straight to their place in its peers' buffers and then signals them (`ops.p2p_signal`); nothing
passes a host or a collective.  Two transports under one protocol, chosen by the step's agreed size:

* put: a few programs of a kernel store the rows (`ops.p2p_put`).  Static shapes, no count on the host: capturable.
* copy: rows are packed by destination, then the copy engines move one block a peer (`ops.p2p_copy`).  No SM is taken;
  the host must know the sizes, so ``dispatch_send`` waits for the counts, as in ``alltoall``.

It cannot overflow: a source sends a rank at most one row a token, and there is a place for each.  A lane's buffers are
free again when its combine has ended on all ranks, which is when a rank has all signals of that combine.

A peer that is late beyond ``limit_s``, or gone, ends the wait; the record says where (`P2P.raise_if_failed`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from epmoe.comm import Comm, NoPeerMemory, PeerMemory, open_buffers
from epmoe.moe.exchange import LANES, ExchangeShape, Received, Traffic, pairs_likely
from epmoe.ops.combine import weighted_sum
from epmoe.ops.moe_index import build_index
from epmoe.ops.p2p_layout import COMBINE, DISPATCH, MOST_TOKENS, POSITIONS, STATE, STEP, TOKENS, Layout
from epmoe.ops.p2p_put import CombinePlan, PutOptions, Ranks, combine_plan, combine_put, dispatch_put, peer_order
from epmoe.ops.p2p_signal import ABORT, GONE, HOST_WORDS, RECORD, Failure, Place, read_failure, wait_signals

LIMIT_S = 60.0


@dataclass(frozen=True)
class Sending:
    """Rows on their way to the expert ranks; ``index_TJ`` says where the answers will lie."""

    lane: int
    bound: int
    x_TD: torch.Tensor
    weight_TK: torch.Tensor
    index_TJ: torch.Tensor


@dataclass(frozen=True)
class Route:
    """The way back for the rows of one dispatch."""

    sending: Sending
    plan: CombinePlan


@dataclass(frozen=True)
class Lane:
    """One micro-batch's buffers."""

    buffer: torch.Tensor
    ranks: Ranks


class PeerFailed(RuntimeError):
    """A rank did not keep its side of an exchange; the message says which, and where."""


def p2p_unavailable(comm: Comm, shape: ExchangeShape) -> str | None:
    """Why this run cannot use p2p, as far as it shows without trying; None: `P2P` may be opened."""
    if comm.device.type != "cuda":
        return f"p2p needs GPUs, this run is on {comm.device.type}"
    if shape.max_tokens > MOST_TOKENS:
        return f"p2p moves up to {MOST_TOKENS} tokens a rank, the budget is {shape.max_tokens}"
    if shape.row_bytes % 16:
        return f"p2p moves 16 bytes at a time, a row has {shape.row_bytes}"
    return None


class P2P:
    """See the module's docstring and the contract in ``moe.exchange``.

    Args:
        memory: buffers already opened for all lanes, `buffer_size` bytes; opened here (a collective) without.
        order_W: the order in which this rank visits its peers; from its right neighbour on without.
        limit_s: how long a peer may be late.
    """

    name = "p2p"
    may_overflow = False

    def __init__(
        self,
        comm: Comm,
        shape: ExchangeShape,
        memory: PeerMemory | None = None,
        order_W: torch.Tensor | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.comm, self.shape, self.limit_s = comm, shape, limit_s
        self.options = PutOptions()
        self.layout = lane_layout(comm.world, shape)
        self.memory = memory or open_buffers(comm, buffer_size(comm.world, shape))
        order = peer_order(comm.world, comm.rank, 1) if order_W is None else order_W.view(1, -1).int()
        order = order.to(comm.device)
        self.lanes = [_lane(self.memory, self.layout, n, order, comm.rank) for n in range(LANES)]
        self.host = torch.zeros(HOST_WORDS, dtype=torch.int64, pin_memory=comm.device.type == "cuda")
        words = self.memory.local[: LANES * self.layout.total].view(torch.int64).view(LANES, -1)
        self._step_L = words[:, self.layout.at("state") // 8 + STEP]
        self.buffer_bytes = LANES * self.layout.total
        self.bound = max(shape.max_tokens, 1)
        self._gone: int | None = None

    @property
    def ctas(self) -> int:
        """SMs that a transfer takes beside compute."""
        return self.options.programs

    @property
    def capturable(self) -> bool:
        return True

    @property
    def waits_for_counts(self) -> bool:
        return False

    def begin_step(self, tokens: int, exact: bool = False) -> None:
        assert tokens <= self.layout.tokens, f"{tokens} tokens, the buffers are for {self.layout.tokens}"
        self.bound = max(tokens, 1)
        self._step_L.fill_(self.comm.at.step)

    def overflowed(self) -> None:
        return None

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0) -> Sending:
        self.comm.at.stage = "dispatch"
        assert len(x_TD) <= self.bound, f"{len(x_TD)} tokens in a step of at most {self.bound}"
        index_TJ = dispatch_put(
            self.lanes[lane].ranks, self.layout, x_TD, slot_TK, weight_TK, self.bound, self.shape.slots_per_rank,
            self.options,
        )  # fmt: skip
        return Sending(lane, self.bound, x_TD, weight_TK, index_TJ)

    def dispatch_send(self, sending: Sending) -> Sending:
        return sending

    def dispatch_end(self, sending: Sending, num_slots: int) -> tuple[Received, Route]:
        self.comm.at.stage = "dispatch"
        shape, layout, lane = self.shape, self.layout, self.lanes[sending.lane]
        count_VW = self._wait(lane, DISPATCH, sending.bound)
        rows, top_k = layout.world * sending.bound, shape.top_k
        index = build_index(layout.view(lane.buffer, "slot", torch.int32, rows, top_k), num_slots)
        weight_RK = layout.view(lane.buffer, "weight", torch.float32, rows, top_k) if layout.reduce else None
        plan = combine_plan(lane.ranks, layout, index.pos_RK, weight_RK, sending.bound)
        received = Received(
            rows_RD=layout.view(lane.buffer, "rows", shape.dtype, rows, shape.hidden),
            R_cap=rows,
            M_cap=rows * min(top_k, num_slots),
            M_likely=pairs_likely(sending.bound, top_k),
            count_W=count_VW[0],
            index=index,
            weight_RK=weight_RK,
        )
        return received, Route(sending, plan)

    def combine_begin(self, out_MD: torch.Tensor, route: Route) -> Sending:
        self.comm.at.stage = "combine"
        sending = route.sending
        combine_put(self.lanes[sending.lane].ranks, self.layout, out_MD, route.plan, sending.bound, self.options)
        return sending

    def combine_end(self, returning: Sending, add_TD: torch.Tensor | None = None) -> torch.Tensor:
        self.comm.at.stage = "combine"
        layout, lane = self.layout, self.lanes[returning.lane]
        self._wait(lane, COMBINE, returning.bound)
        rows = layout.tokens * layout.answers
        returned_ND = layout.view(lane.buffer, "returned", self.shape.dtype, rows, self.shape.hidden)
        return weighted_sum(returned_ND, returning.index_TJ, None if layout.reduce else returning.weight_TK, add_TD)

    def traffic(self) -> Traffic:
        """Counters kept by the send kernels, so that replays of a graph count too."""
        layout, total = self.layout, Traffic.none(self.comm.world)
        position = 4 * (1 + layout.top_k * (2 if layout.reduce else 1))
        for lane in self.lanes:
            state = layout.view(lane.buffer, "state", torch.int64, STATE).tolist()
            rows_W, _, pairs_W = layout.view(lane.buffer, "sent", torch.int64, 3, layout.world).cpu().numpy()
            back_W = rows_W if layout.reduce else pairs_W
            moved_W = rows_W * layout.row_bytes + state[POSITIONS] * position
            total += Traffic(rows_W, pairs_W, moved_W, back_W * layout.row_bytes, state[TOKENS])
        return total

    def failure(self) -> Failure | None:
        """What a wait that gave up has recorded; what was computed since is void."""
        failure = read_failure(int(self.host[RECORD]))
        if failure is not None and self._gone is not None:
            return replace(failure, peer=self._gone, reason=GONE)
        return failure

    def raise_if_failed(self) -> None:
        """To be called when results have come from the device and before they count."""
        failure = self.failure()
        if failure is not None:
            raise PeerFailed(str(failure))

    def watch_peers(self) -> None:
        """Any thread, now and then: if a peer's process has ended, no wait of this rank goes on."""
        self._gone = self.memory.gone()
        if self._gone is not None:
            self.host[ABORT] = 1

    def _wait(self, lane: Lane, direction: int, bound: int) -> torch.Tensor:
        place = Place(self.comm.at.layer, self.limit_s)
        ranks = (self.comm.rank, 1)
        return wait_signals(lane.ranks.table_W, self.host, self.layout, direction, bound, place, ranks)


def lane_layout(world: int, shape: ExchangeShape) -> Layout:
    tokens = max(shape.max_tokens, 1)
    return Layout(world, tokens, shape.top_k, shape.hidden, shape.dtype, shape.combine == "reduce")


def buffer_size(world: int, shape: ExchangeShape) -> int:
    """Bytes of a rank's buffers, all lanes."""
    return LANES * lane_layout(world, shape).total


def _lane(memory: PeerMemory, layout: Layout, n: int, order_1W: torch.Tensor, rank: int) -> Lane:
    start = n * layout.total
    ranks = Ranks(memory.table_W + start, order_1W, rank, 1)
    return Lane(memory.local[start : start + layout.total], ranks)


__all__ = ["P2P", "NoPeerMemory", "PeerFailed", "buffer_size", "p2p_unavailable"]
