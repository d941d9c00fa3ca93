"""The two transports of the p2p exchange, under one protocol: `Put` by a kernel's programs, `Copy` by copy engines.

Both write rows into the peers' receive buffers ``[W, bound, D]`` and answers into their return buffers, and end with
a signal to every rank.  They differ in who picks positions when, and so in where home finds the answers:

======== ================================= =============================================================
         put                               copy
======== ================================= =============================================================
position the token's number                dense, in token order
answers  at (token, choice | rank)         dense, in (rank, token, choice) order
host     knows no count                    waits for the headers with all counts (``dispatch_send``)
======== ================================= =============================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from epmoe.comm import Comm, PeerMemory
from epmoe.moe.alltoall import choice_index, rank_index
from epmoe.moe.exchange import ExchangeShape, Received, pairs_likely
from epmoe.ops.combine import weighted_sum
from epmoe.ops.moe_index import MoEIndex, build_index
from epmoe.ops.p2p_combine import combine_put
from epmoe.ops.p2p_copy import Packed, Sizes, pack_rows, send_signal
from epmoe.ops.p2p_dispatch import dispatch_put
from epmoe.ops.p2p_layout import COMBINE, DISPATCH, HEADER, Layout
from epmoe.ops.p2p_plan import CombinePlan, combine_plan
from epmoe.ops.p2p_ranks import Outgoing, PutOptions, Ranks
from epmoe.ops.p2p_signal import Place, wait_signals
from epmoe.ops.wire import from_wire, to_wire


@dataclass(frozen=True)
class Lane:
    """One micro-batch's buffers: this rank's, all ranks' (uint8, one a rank), and their addresses."""

    buffer: torch.Tensor
    peers: list[torch.Tensor]
    ranks: Ranks


@dataclass(frozen=True)
class Device:
    """What both transports work with on this rank."""

    comm: Comm
    shape: ExchangeShape
    layout: Layout
    lanes: list[Lane]
    order_W: list[int]
    host: torch.Tensor
    limit_s: float

    def wait(self, lane: int, direction: int, bound: int) -> torch.Tensor:
        """Wait, on the device, for all ranks' signals; int32 ``[W]`` rows that each sent."""
        place = Place(self.comm.at.layer, self.limit_s)
        return wait_signals(self.lanes[lane].ranks, self.host, self.layout, direction, bound, place)[0]

    def view(self, lane: int, region: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return self.layout.view(self.lanes[lane].buffer, region, dtype, *shape)

    def outgoing(self, x_TD, slot_TK, weight_TK, bound: int) -> Outgoing:
        """Rows as they travel: in the model dtype, or rounded to bytes of 8-bit values and scales."""
        rows_TD = x_TD if self.shape.wire == "model" else to_wire(x_TD)
        return Outgoing(rows_TD, slot_TK, weight_TK, bound, self.shape.slots_per_rank)

    def arrived(self, lane: int, bound: int, num_slots: int) -> tuple[torch.Tensor, MoEIndex, torch.Tensor | None]:
        """Rows received, their index by local slot and, in reduce mode, their weights."""
        rows, shape = self.layout.world * bound, self.shape
        slot_RK = self.view(lane, "slot", torch.int32, rows, shape.top_k)
        index = build_index(slot_RK, num_slots)
        weight_RK = None
        if self.layout.reduce:
            weight_RK = self.view(lane, "weight", torch.float32, rows, shape.top_k)
        if shape.wire == "model":
            return self.view(lane, "rows", shape.dtype, rows, shape.hidden), index, weight_RK
        wire_RB = self.view(lane, "rows", torch.uint8, rows, self.layout.sent_bytes)
        return from_wire(wire_RB, slot_RK, shape.hidden, shape.dtype), index, weight_RK

    def answer(self, lane: int, bound: int, index_TJ, weight_TK, add_TD) -> torch.Tensor:
        self.wait(lane, COMBINE, bound)
        layout = self.layout
        returned_ND = self.view(lane, "returned", self.shape.dtype, layout.tokens * layout.answers, self.shape.hidden)
        return weighted_sum(returned_ND, index_TJ, None if layout.reduce else weight_TK, add_TD)


@dataclass(frozen=True)
class PutSending:
    """Rows on their way; ``index_TJ`` says where the answers will lie."""

    by: Put
    lane: int
    bound: int
    rows_TD: torch.Tensor
    weight_TK: torch.Tensor
    index_TJ: torch.Tensor


@dataclass(frozen=True)
class PutRoute:
    """The way back for the rows of one dispatch; held until the answers are here, so that the side stream's reads and
    allocations are over when it goes."""

    sending: PutSending
    received: Received
    plan: CombinePlan
    planned: torch.cuda.Event | None

    @property
    def by(self) -> Put:
        return self.sending.by


@dataclass(frozen=True)
class Put:
    """Static shapes and no count on the host: may be captured.

    ``side``: where the way back is planned beside the experts; on CPU none.
    """

    device: Device
    options: PutOptions
    side: torch.cuda.Stream | None

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int, bound: int) -> PutSending:
        device = self.device
        sent = device.outgoing(x_TD, slot_TK, weight_TK, bound)
        index_TJ = dispatch_put(device.lanes[lane].ranks, device.layout, sent, self.options)
        return PutSending(self, lane, bound, sent.x_TD, weight_TK, index_TJ)

    def dispatch_send(self, sending: PutSending) -> PutSending:
        return sending

    def dispatch_end(self, sending: PutSending, num_slots: int) -> tuple[Received, PutRoute]:
        device, lane, bound = self.device, sending.lane, sending.bound
        count_W = device.wait(lane, DISPATCH, bound)
        rows_RD, index, weight_RK = device.arrived(lane, bound, num_slots)
        rows, top_k = len(rows_RD), device.shape.top_k
        most, likely = rows * min(top_k, num_slots), pairs_likely(bound, top_k)
        received = Received(rows_RD, rows, most, likely, count_W, index, weight_RK)
        return received, PutRoute(sending, received, *self._plan(lane, received, bound))

    def combine_begin(self, out_MD: torch.Tensor, route: PutRoute) -> PutRoute:
        device, sending = self.device, route.sending
        if route.planned is not None:
            torch.cuda.current_stream().wait_event(route.planned)
        ranks = device.lanes[sending.lane].ranks
        combine_put(ranks, device.layout, out_MD, route.plan, sending.bound, self.options)
        return route

    def combine_end(self, route: PutRoute, add_TD: torch.Tensor | None) -> torch.Tensor:
        sending = route.sending
        return self.device.answer(sending.lane, sending.bound, sending.index_TJ, sending.weight_TK, add_TD)

    def _plan(self, lane: int, received: Received, bound: int) -> tuple[CombinePlan, torch.cuda.Event | None]:
        arguments = (
            self.device.lanes[lane].ranks,
            self.device.layout,
            received.index.pos_RK,
            received.weight_RK,
            bound,
        )
        if self.side is None:
            return combine_plan(*arguments), None
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            return combine_plan(*arguments), self.side.record_event()


@dataclass(frozen=True)
class CopySending:
    """Rows packed, headers on their way; ``sizes`` is filled by ``dispatch_send``."""

    by: Copy
    lane: int
    bound: int
    packed: Packed
    weight_TK: torch.Tensor
    sizes: Sizes | None = None


@dataclass(frozen=True)
class CopyRoute:
    """The way back for the rows of one dispatch."""

    sending: CopySending
    received: Received
    plan: CombinePlan | None

    @property
    def by(self) -> Copy:
        return self.sending.by


@dataclass(frozen=True)
class Copy:
    """Takes no SM while rows travel between GPUs; the host must know every block's size."""

    device: Device

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int, bound: int) -> CopySending:
        device = self.device
        sent = device.outgoing(x_TD, slot_TK, weight_TK, bound)
        packed = pack_rows(device.lanes[lane].ranks, device.layout, sent)
        return CopySending(self, lane, bound, packed, weight_TK)

    def dispatch_send(self, sending: CopySending) -> CopySending:
        if sending.sizes is not None:
            return sending
        device, layout = self.device, self.device.layout
        device.wait(sending.lane, HEADER, sending.bound)
        header_W4 = device.view(sending.lane, "header", torch.int32, layout.world, 4)
        sizes = Sizes.of(torch.cat((sending.packed.counts_4W, header_W4.T)).cpu())
        lane = device.lanes[sending.lane]
        start = device.comm.rank * sending.bound
        for w in device.order_W[:-1]:
            count, first = sizes.rows_W[w], sizes.first_W[w]
            block = sending.packed.rows_ND[first : first + count]
            self._target(lane, w, "rows", start, block).copy_(block)
        send_signal(lane.ranks, layout, DISPATCH, len(sending.weight_TK), sending.bound)
        return replace(sending, sizes=sizes)

    def dispatch_end(self, sending: CopySending, num_slots: int) -> tuple[Received, CopyRoute]:
        device, lane, sending = self.device, sending.lane, self.dispatch_send(sending)
        count_W = device.wait(lane, DISPATCH, sending.bound)
        rows_RD, index, weight_RK = device.arrived(lane, sending.bound, num_slots)
        plan = None
        if not device.layout.reduce:
            plan = combine_plan(device.lanes[lane].ranks, device.layout, index.pos_RK, None, sending.bound)
        pairs = sum(sending.sizes.received_pairs_W)
        index = replace(index, row_M=index.row_M[:pairs])
        received = Received(rows_RD, len(rows_RD), pairs, max(pairs, 1), count_W, index, weight_RK)
        return received, CopyRoute(sending, received, plan)

    def combine_begin(self, out_MD: torch.Tensor, route: CopyRoute) -> CopySending:
        device, sending, received = self.device, route.sending, route.received
        sizes, lane = sending.sizes, device.lanes[sending.lane]
        if device.layout.reduce:
            sums_RD = weighted_sum(out_MD, received.index.pos_RK, received.weight_RK)
            for w in device.order_W:
                first, count = w * sending.bound, sizes.received_rows_W[w]
                block = sums_RD[first : first + count]
                self._target(lane, w, "returned", sizes.answer_row_W[w], block).copy_(block)
        else:
            for w in device.order_W:
                first, count = sum(sizes.received_pairs_W[:w]), sizes.received_pairs_W[w]
                block = out_MD.index_select(0, route.plan.source_E[first : first + count])
                self._target(lane, w, "returned", sizes.answer_pair_W[w], block).copy_(block)
        send_signal(lane.ranks, device.layout, COMBINE, 0, sending.bound)
        return sending

    def combine_end(self, sending: CopySending, add_TD: torch.Tensor | None) -> torch.Tensor:
        packed = sending.packed
        index_TJ = rank_index(packed.hit_TW) if self.device.layout.reduce else choice_index(packed.rank_TK)
        return self.device.answer(sending.lane, sending.bound, index_TJ, sending.weight_TK, add_TD)

    def _target(self, lane: Lane, w: int, region: str, row: int, block: torch.Tensor) -> torch.Tensor:
        """Where a block of rows goes: rank w's region from row ``row`` on."""
        end = row + len(block)
        return self.device.layout.view(lane.peers[w], region, block.dtype, end, block.shape[1])[row:]


def open_lanes(memory: PeerMemory, layout: Layout, count: int, order_1W: torch.Tensor, rank: int) -> list[Lane]:
    """Lane n's buffers lie behind those of the lanes before it."""
    lanes = []
    for start in range(0, count * layout.total, layout.total):
        peers = [peer[start : start + layout.total] for peer in memory.peers]
        lanes.append(Lane(peers[rank], peers, Ranks(memory.table_W + start, order_1W, rank, 1)))
    return lanes
