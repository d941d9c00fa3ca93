"""The exchange with static shapes: fixed capacity per (source, destination), two collectives of equal blocks, no host.

True counts travel in every block's header, with one word that says whether any block of its source overflows: every
rank hears from every source, so all see the same flag.  Rows that do not fit are dropped; the step must then run again
with exact sizes.  With a row for every token (``capacity_factor`` 0) nothing can overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from epmoe.comm import Comm, Pending
from epmoe.moe.exchange import LANES, ExchangeShape, RaisesItself, Received, Traffic
from epmoe.ops.combine import weighted_sum
from epmoe.ops.moe_index import build_index
from epmoe.ops.padded_answers import pack_answers
from epmoe.ops.padded_rows import COUNT, OVERFLOW, BlockLayout, Packed, pack_rows


@dataclass(frozen=True)
class Sending:
    """Blocks on their way to the expert ranks."""

    payload: Pending
    packed: Packed
    weight_TK: torch.Tensor
    layout: BlockLayout
    lane: int


@dataclass(frozen=True)
class Route:
    """The way back for the rows of one dispatch."""

    received: Received
    sending: Sending


@dataclass(frozen=True)
class Returning:
    """Blocks of answers on their way home."""

    payload: Pending
    sending: Sending


class Padded(RaisesItself):
    """See the module's docstring and the contract in ``moe.exchange``.

    A lane has one buffer to send from and one to receive in; each is used by dispatch, then by combine.
    """

    name = "padded"
    waits_for_counts = False

    def __init__(self, comm: Comm, shape: ExchangeShape) -> None:
        self.comm, self.shape = comm, shape
        self.capturable = comm.device.type == "cuda" and (comm.on_nccl or comm.world == 1)
        self.begin_step(shape.max_tokens, exact=True)
        size = buffer_rows(self.layout)
        options = {"dtype": shape.dtype, "device": comm.device}
        self._buffers = [[torch.empty((size, shape.hidden), **options) for _ in range(2)] for _ in range(LANES)]
        self.buffer_bytes = LANES * 2 * size * shape.row_bytes
        self._over = torch.zeros(1, dtype=torch.bool, device=comm.device)
        self._sum_5W = torch.zeros((5, comm.world), dtype=torch.int64, device=comm.device)  # of `Packed.count_5W`

    def begin_step(self, tokens: int, exact: bool = False) -> None:
        self.layout = block_layout(self.shape, self.comm.world, tokens, exact)
        most = block_layout(self.shape, self.comm.world, tokens, True)
        self.bound = most.rows
        self.may_overflow = self.layout.rows < most.rows or self.layout.answers < most.answers
        if self.may_overflow:
            self._over.zero_()

    def overflowed(self) -> torch.Tensor:
        return self._over

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0) -> Sending:
        self.comm.at.stage = "dispatch"
        layout, (send, receive) = self.layout, self._buffers[lane]
        x_TD = self.shape.as_sent(x_TD)
        assert len(x_TD) <= self.bound, f"{len(x_TD)} tokens in a step of at most {self.bound}"
        blocks = _blocks(send, layout.block_rows, layout)
        packed = pack_rows(x_TD, slot_TK, weight_TK, layout, blocks)
        payload = self.comm.all_to_all_blocks(_blocks(receive, layout.block_rows, layout), blocks)
        return Sending(payload, packed, weight_TK, layout, lane)

    def dispatch_send(self, sending: Sending) -> Sending:
        return sending

    def dispatch_end(self, sending: Sending, num_slots: int) -> tuple[Received, Route]:
        self.comm.at.stage = "dispatch"
        layout, packed = sending.layout, sending.packed
        blocks = sending.payload.wait()
        words_W4, slot_WN, weight_WN = layout.header(blocks)
        if self.may_overflow:
            self._over |= words_W4[:, OVERFLOW].any()
            packed.count_5W[0].clamp_(max=layout.rows)  # the others were not sent
        self._sum_5W += packed.count_5W  # on the device: replays of a graph count too
        rows, top_k = layout.world * layout.block_rows, layout.top_k
        slot_WBK = torch.full((layout.world, layout.block_rows, top_k), -1, dtype=torch.int32, device=blocks.device)
        slot_WBK[:, layout.header_rows :] = slot_WN.view(layout.world, -1, top_k)
        weight_RK = None
        if weight_WN is not None:
            weight_WBK = torch.empty(slot_WBK.shape, dtype=torch.float32, device=blocks.device)
            weight_WBK[:, layout.header_rows :] = weight_WN.view(layout.world, -1, top_k)
            weight_RK = weight_WBK.view(rows, top_k)
        received = Received(
            rows_RD=blocks.view(rows, -1),
            R_cap=rows,
            M_cap=layout.world * layout.rows * min(top_k, num_slots),
            M_likely=max(1, layout.rows * top_k),
            count_W=words_W4[:, COUNT].clamp(max=layout.rows),
            index=build_index(slot_WBK.view(rows, top_k), num_slots),
            weight_RK=weight_RK,
        )
        return received, Route(received, sending)

    def combine_begin(self, out_MD: torch.Tensor, route: Route) -> Returning:
        self.comm.at.stage = "combine"
        layout, pos_RK = route.sending.layout, route.received.index.pos_RK
        send, receive = self._buffers[route.sending.lane]
        blocks = _blocks(send, layout.answers, layout)
        if layout.reduce:
            rows_RD = weighted_sum(out_MD, pos_RK, route.received.weight_RK)
            blocks.copy_(rows_RD.view(layout.world, layout.block_rows, -1)[:, layout.header_rows :])
        else:
            pack_answers(out_MD, pos_RK, layout, blocks)
        payload = self.comm.all_to_all_blocks(_blocks(receive, layout.answers, layout), blocks)
        return Returning(payload, route.sending)

    def combine_end(self, returning: Returning, add_TD: torch.Tensor | None = None) -> torch.Tensor:
        self.comm.at.stage = "combine"
        sending = returning.sending
        weight_TK = None if sending.layout.reduce else sending.weight_TK
        rows_ND = returning.payload.wait().view(-1, sending.layout.hidden)
        return weighted_sum(rows_ND, sending.packed.index_TJ, weight_TK, add_TD)

    def traffic(self) -> Traffic:
        rows, pairs, tokens, sent, returned = self._sum_5W.cpu().numpy()
        size = self.shape.row_bytes
        return Traffic(rows, pairs, sent * size, returned * size, int(tokens[0]), int(rows.sum()) * size)


def block_layout(shape: ExchangeShape, world: int, tokens: int, exact: bool) -> BlockLayout:
    """Capacities for a step of at most ``tokens`` tokens a rank: a row for every token, or ``capacity_factor`` times
    what even routing sends to each rank."""
    rows = max(tokens, 1)
    most_pairs = min(shape.top_k, shape.slots_per_rank)
    answers = rows * most_pairs
    if shape.capacity_factor and not exact:
        hit = 1 - (1 - 1 / world) ** shape.top_k
        rows = ceil(min(rows, shape.capacity_factor * rows * hit))
        answers = ceil(min(rows * most_pairs, shape.capacity_factor * tokens * shape.top_k / world))
    reduce = shape.combine == "reduce"
    answers = rows if reduce else max(answers, 1)
    return BlockLayout(world, rows, answers, shape.top_k, shape.hidden, shape.dtype, shape.slots_per_rank, reduce)


def buffer_rows(layout: BlockLayout) -> int:
    """Rows of one of a lane's buffers."""
    return layout.world * max(layout.block_rows, layout.answers)


def _blocks(buffer: torch.Tensor, rows: int, layout: BlockLayout) -> torch.Tensor:
    return buffer[: layout.world * rows].view(layout.world, rows, -1)
