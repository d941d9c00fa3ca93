"""Small steps between CPU ranks: dispatch in one collective, and combine with exact sizes.

On gloo a collective costs as much time as some hundred kilobytes.  All ranks know a bound on the step's tokens, so the
rows travel at once, in blocks of that many rows with the counts in a header, and are made exact on arrival.  The few
integers of a step are worked on in numpy, whose calls cost a fraction of torch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from epmoe.comm import Comm, Pending
from epmoe.moe.alltoall import AllToAll, Home, Route, Sizes
from epmoe.moe.exchange import ExchangeShape, Received
from epmoe.moe.padded import block_layout
from epmoe.ops.moe_index import build_index
from epmoe.ops.padded_rows import COUNT, BlockLayout


@dataclass(frozen=True)
class SendingBlocks:
    """Rows on their way in blocks; ``rows_W`` and ``pairs_W`` are sent to each rank."""

    payload: Pending
    layout: BlockLayout
    rows_W: list[int]
    pairs_W: list[int]
    home: Home


class OneShot(AllToAll):
    """`AllToAll` without its exchange of counts, for CPU ranks."""

    name = "oneshot"

    def __init__(self, comm: Comm, shape: ExchangeShape) -> None:
        assert comm.device.type == "cpu", "the host reads every row's slots"
        super().__init__(comm, shape)
        self.begin_step(shape.max_tokens)

    def begin_step(self, tokens: int, exact: bool = False) -> None:
        self.layout = block_layout(self.shape, self.comm.world, tokens, exact=True)

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0) -> SendingBlocks:
        self.comm.at.stage = "dispatch"
        x_TD = self.shape.as_sent(x_TD)
        layout = self.layout
        assert len(x_TD) <= layout.rows, f"{len(x_TD)} tokens in a step of at most {layout.rows}"
        blocks_WBD = x_TD.new_empty((layout.world, layout.block_rows, layout.hidden))
        words_W4, slot_WN, weight_WN = layout.header(blocks_WBD)
        slot_WCK = slot_WN.view(layout.world, layout.rows, -1).numpy()
        slot, first = slot_TK.numpy(), layout.header_rows
        rank_TK = slot // layout.slots_per_rank
        rows_W, pairs_W, token_R = [], [], []
        for rank in range(layout.world):
            here_TK = rank_TK == rank
            token_r = here_TK.any(1).nonzero()[0]
            rows = len(token_r)
            token = torch.from_numpy(token_r)
            torch.index_select(x_TD, 0, token, out=blocks_WBD[rank, first : first + rows])
            slot_WCK[rank, :rows] = np.where(here_TK, slot - rank * layout.slots_per_rank, -1)[token_r]
            if weight_WN is not None:
                weight_WN[rank].view(layout.rows, -1)[:rows] = weight_TK[token]
            rows_W.append(rows)
            pairs_W.append(int(here_TK.sum()))
            token_R.append(token_r)
        words_W4[:, COUNT] = torch.tensor(rows_W, dtype=torch.int32)
        payload = self.comm.all_to_all_blocks(torch.empty_like(blocks_WBD), blocks_WBD)
        index_TJ = torch.from_numpy(_row_index(token_R, len(x_TD)) if layout.reduce else _pair_index(rank_TK))
        self._traffic.tokens += len(x_TD)
        return SendingBlocks(payload, layout, rows_W, pairs_W, Home(index_TJ, weight_TK))

    def dispatch_send(self, sending: SendingBlocks) -> SendingBlocks:
        return sending

    def dispatch_end(self, sending: SendingBlocks, num_slots: int) -> tuple[Received, Route]:
        self.comm.at.stage = "dispatch"
        layout, first = sending.layout, sending.layout.header_rows
        blocks_WBD = sending.payload.wait()
        words_W4, slot_WN, weight_WN = layout.header(blocks_WBD)
        count_W = words_W4[:, COUNT].tolist()
        slot_WCK = slot_WN.view(layout.world, layout.rows, -1).numpy()
        slots = [slot_WCK[rank, :rows] for rank, rows in enumerate(count_W)]
        sizes = Sizes(sending.rows_W, sending.pairs_W, count_W, [int((each >= 0).sum()) for each in slots])
        weight_RK = None
        if weight_WN is not None:
            weight_WCK = weight_WN.view(layout.world, layout.rows, -1)
            weight_RK = torch.cat([weight_WCK[rank, :rows] for rank, rows in enumerate(count_W)])
        pairs = sum(sizes.received_pairs_W)
        received = Received(
            rows_RD=torch.cat([blocks_WBD[rank, first : first + rows] for rank, rows in enumerate(count_W)]),
            R_cap=sum(count_W),
            M_cap=pairs,
            M_likely=max(pairs, 1),
            count_W=words_W4[:, COUNT],
            index=build_index(torch.from_numpy(np.concatenate(slots)), num_slots),
            weight_RK=weight_RK,
        )
        self._count(sizes, [layout.block_rows * self.shape.row_bytes] * layout.world)
        return received, Route(received, sizes, sending.home)


def _pair_index(rank_TK: np.ndarray) -> np.ndarray:
    """`choice_index` in numpy."""
    flat_N = rank_TK.ravel()
    order = flat_N.argsort(kind="stable")  # choices that go nowhere (-1) come first
    index_N = np.empty(len(flat_N), np.int32)
    index_N[order] = np.arange(len(flat_N), dtype=np.int32) - int((flat_N < 0).sum())
    return np.maximum(index_N, -1).reshape(rank_TK.shape)


def _row_index(token_R: list[np.ndarray], tokens: int) -> np.ndarray:
    """`rank_index` in numpy, from the tokens that were sent to each rank."""
    index_TW, before = np.full((tokens, len(token_R)), -1, np.int32), 0
    for rank, token_r in enumerate(token_R):
        index_TW[token_r, rank] = np.arange(before, before + len(token_r))
        before += len(token_r)
    return index_TW
