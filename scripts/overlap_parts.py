"""A step over p2p in parts: its compute with nothing sent, and its travel with nothing computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epmoe.moe.exchange import Received, pairs_likely
from epmoe.moe.layer import Routing
from epmoe.moe.p2p import P2P
from epmoe.moe.p2p_transports import PutRoute, PutSending
from epmoe.ops.combine import weighted_sum
from epmoe.ops.p2p_combine import combine_put
from epmoe.ops.p2p_layout import COMBINE, DISPATCH
from scripts import overlap_bench_lib as lib


@dataclass(frozen=True)
class Ran:
    """What one layer of one lane sent and returned."""

    x_TD: torch.Tensor
    routing: Routing
    sending: PutSending
    out_MD: torch.Tensor
    route: PutRoute


def run_layer(rank: lib.Rank, x_TD: torch.Tensor, lane: int, num_sms: int) -> Ran:
    """A layer over the real exchange, by put; all ranks run it together."""
    exchange, moe = rank.exchange, rank.moe[0]
    routing = moe.route(x_TD)
    sending = exchange.dispatch_begin(x_TD, routing.slot_TK, routing.weight_TK, lane)
    received, route = exchange.dispatch_end(sending, rank.slots)
    out_MD = moe.experts(received, num_sms)
    exchange.combine_end(exchange.combine_begin(out_MD, route))
    return Ran(x_TD, routing, sending, out_MD, route)


def travel(exchange: P2P, lanes: Sequence[Ran]) -> None:
    """A layer's dispatches and combines, one after another; each ends when its rows are here."""
    device = exchange.put.device
    for lane, ran in enumerate(lanes):
        exchange.dispatch_begin(ran.x_TD, ran.routing.slot_TK, ran.routing.weight_TK, lane)
        device.wait(lane, DISPATCH, exchange.bound)
        ranks = device.lanes[lane].ranks
        combine_put(ranks, device.layout, ran.out_MD, ran.route.plan, exchange.bound, exchange.put.options)
        device.wait(lane, COMBINE, exchange.bound)


class Still:
    """The contract of ``moe.exchange`` over the rows that lie in the buffers since ``lanes`` ran: no row moves and
    nobody is waited for; index, plan and sums are made as ever."""

    name = "still"
    waits_for_counts = may_overflow = False
    capturable = True

    def __init__(self, exchange: P2P, lanes: Sequence[Ran]) -> None:
        self.exchange, self.lanes = exchange, lanes
        self.comm, self.shape, self.ctas = exchange.comm, exchange.shape, exchange.ctas

    def begin_step(self, tokens: int, exact: bool = False) -> None:
        pass

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0) -> PutSending:
        return self.lanes[lane].sending

    def dispatch_send(self, sending: PutSending) -> PutSending:
        return sending

    def dispatch_end(self, sending: PutSending, num_slots: int) -> tuple[Received, PutRoute]:
        put, lane, bound, top_k = self.exchange.put, sending.lane, sending.bound, self.shape.top_k
        rows_RD, index, weight_RK = put.device.arrived(lane, bound, num_slots)
        most = len(rows_RD) * min(top_k, num_slots)
        none_W = index.offset_L1[:0]
        received = Received(rows_RD, len(rows_RD), most, pairs_likely(bound, top_k), none_W, index, weight_RK)
        return received, PutRoute(sending, received, *put._plan(lane, received, bound))

    def combine_begin(self, out_MD: torch.Tensor, route: PutRoute) -> PutRoute:
        if route.planned is not None:
            torch.cuda.current_stream().wait_event(route.planned)
        return route

    def combine_end(self, route: PutRoute, add_TD: torch.Tensor | None = None) -> torch.Tensor:
        sending, device, shape = route.sending, self.exchange.put.device, self.shape
        layout = device.layout
        rows = layout.tokens * layout.answers
        returned_ND = device.view(sending.lane, "returned", shape.dtype, rows, shape.hidden)
        return weighted_sum(returned_ND, sending.index_TJ, None if layout.reduce else sending.weight_TK, add_TD)
