"""The exchange of one rank: nothing travels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from epmoe.comm import Comm
from epmoe.moe.exchange import ExchangeShape, RaisesItself, Received, Traffic
from epmoe.ops.combine import weighted_sum
from epmoe.ops.moe_index import build_index


@dataclass(frozen=True)
class Local:
    """Handle of :class:`LocalExchange` in every stage; later stages fill the later fields."""

    rows_TD: torch.Tensor
    slot_TK: torch.Tensor
    weight_TK: torch.Tensor
    pos_TK: torch.Tensor | None = None
    out_MD: torch.Tensor | None = None
    summed: bool = False


class LocalExchange(RaisesItself):
    """The answer's rows are the experts' rows, so both combine modes are the same sum; in reduce mode the experts form
    that of a single token themselves, in one kernel with their second product.  There is no traffic to count."""

    name = "local"
    capturable = True
    waits_for_counts = may_overflow = False
    buffer_bytes = 0

    def __init__(self, comm: Comm, shape: ExchangeShape) -> None:
        assert comm.world == 1, f"{comm.world} ranks need an exchange that reaches them"
        self.comm, self.shape = comm, shape
        self._count_W: dict[int, torch.Tensor] = {}  # by number of rows

    def begin_step(self, tokens: int, exact: bool = False) -> None:
        pass

    def overflowed(self) -> None:
        return None

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0) -> Local:
        return Local(self.shape.as_sent(x_TD), slot_TK, weight_TK)

    def dispatch_send(self, sending: Local) -> Local:
        return sending

    def dispatch_end(self, sending: Local, num_slots: int) -> tuple[Received, Local]:
        rows_TD, slot_TK = sending.rows_TD, sending.slot_TK
        T, K = slot_TK.shape
        if T not in self._count_W:
            self._count_W[T] = torch.full((1,), T, dtype=torch.int32, device=rows_TD.device)
        bounds = (rows_TD, T, T * K, T * K, self._count_W[T])
        if self.shape.combine == "reduce" and T == 1 and rows_TD.is_cuda:
            return Received(*bounds, None, sending.weight_TK, slot_TK), replace(sending, summed=True)
        index = build_index(slot_TK, num_slots)
        return Received(*bounds, index, None), replace(sending, pos_TK=index.pos_RK)

    def combine_begin(self, out_MD: torch.Tensor, route: Local) -> Local:
        return replace(route, out_MD=out_MD)

    def combine_end(self, returning: Local, add_TD: torch.Tensor | None = None) -> torch.Tensor:
        if returning.summed:
            return returning.out_MD if add_TD is None else returning.out_MD + add_TD
        return weighted_sum(returning.out_MD, returning.pos_TK, returning.weight_TK, add_TD)

    def traffic(self) -> Traffic:
        return Traffic.none(1)
