"""Small steps between CPU ranks: dispatch in one collective, and combine with exact sizes.

On gloo a collective costs as much time as some hundred kilobytes.  All ranks know a bound on the step's tokens, so the
rows travel at once, in blocks of that many rows with the counts in a header, and are made exact on arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epmoe.comm import Comm, Pending
from epmoe.moe.alltoall import AllToAll, Home, Route, Sizes, choice_index, rank_index
from epmoe.moe.exchange import ExchangeShape, Received, ranks_of
from epmoe.moe.padded import block_layout
from epmoe.ops.moe_index import build_index
from epmoe.ops.padded_rows import COUNT, BlockLayout, fill_blocks


@dataclass(frozen=True)
class SendingBlocks:
    """Rows on their way in blocks; ``rows_W`` and ``pairs_W`` are sent to each rank."""

    payload: Pending
    layout: BlockLayout
    rows_W: list[int]
    pairs_W: list[int]
    home: Home


class OneShot(AllToAll):
    """`AllToAll` without its exchange of counts; the host waits for the rows, so it is no GPU's choice."""

    name = "oneshot"

    def __init__(self, comm: Comm, shape: ExchangeShape) -> None:
        super().__init__(comm, shape)
        self.waits_for_counts = False
        self.begin_step(shape.max_tokens)

    def begin_step(self, tokens: int, exact: bool = False) -> None:
        self.layout = block_layout(self.shape, self.comm.world, tokens, exact=True)

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0) -> SendingBlocks:
        self.comm.at.stage = "dispatch"
        layout = self.layout
        assert len(x_TD) <= layout.rows, f"{len(x_TD)} tokens in a step of at most {layout.rows}"
        blocks = x_TD.new_empty((layout.world, layout.block_rows, layout.hidden))
        placed = fill_blocks(x_TD, slot_TK, weight_TK, layout, blocks)
        payload = self.comm.all_to_all_blocks(torch.empty_like(blocks), blocks)
        rank_TK = ranks_of(slot_TK, layout.slots_per_rank)
        index_TJ = rank_index(placed.sent_TW) if layout.reduce else choice_index(rank_TK)
        self._traffic.tokens += len(x_TD)
        return SendingBlocks(
            payload, layout, placed.rows_W.tolist(), placed.pairs_W.tolist(), Home(index_TJ, weight_TK)
        )

    def dispatch_send(self, sending: SendingBlocks) -> SendingBlocks:
        return sending

    def dispatch_end(self, sending: SendingBlocks, num_slots: int) -> tuple[Received, Route]:
        self.comm.at.stage = "dispatch"
        layout = sending.layout
        blocks = sending.payload.wait()
        words_W4, slot_WN, weight_WN = layout.header(blocks)
        count_W = words_W4[:, COUNT].contiguous()
        sizes = Sizes(sending.rows_W, sending.pairs_W, count_W.tolist(), (slot_WN >= 0).sum(1).tolist())
        row_C = torch.arange(layout.rows, device=blocks.device)
        row_R = (row_C < count_W[:, None]).flatten().nonzero()[:, 0]
        weight = None if weight_WN is None else weight_WN.reshape(-1, layout.top_k)[row_R]
        pairs = sum(sizes.received_pairs_W)
        received = Received(
            rows_RD=blocks.flatten(0, 1)[row_R + (row_R // layout.rows + 1) * layout.header_rows],
            R_cap=len(row_R),
            M_cap=pairs,
            M_likely=max(pairs, 1),
            count_W=count_W,
            index=build_index(slot_WN.reshape(-1, layout.top_k)[row_R], num_slots),
            weight_RK=weight,
        )
        self._count(sizes, [layout.block_rows * self.shape.row_bytes] * layout.world)
        return received, Route(received, sizes, sending.home)
