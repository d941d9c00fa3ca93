"""The exchange with exact sizes, on any backend: counts in one collective, rows and metadata as bytes in another, one
to combine.

On CUDA ``dispatch_send`` blocks the host until the counts are here, so that all gathers have exact sizes; it waits for
nothing else on the stream that it is called on (see ``moe.overlap``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from epmoe.comm import Comm, Pending
from epmoe.moe.exchange import ExchangeShape, RaisesItself, Received, Traffic, ranks_hit, ranks_of
from epmoe.ops.combine import weighted_sum
from epmoe.ops.moe_index import build_index


@dataclass(frozen=True)
class Home:
    """What the home rank keeps of a dispatch to put the answer together."""

    index_TJ: torch.Tensor  # int32: row of the answer for (token, choice) in exact mode, (token, rank) in reduce; or -1
    weight_TK: torch.Tensor  # float32 routing weights


@dataclass(frozen=True)
class Sizes:
    """Rows, and (row, choice) pairs among them, to and from each rank."""

    rows_W: list[int]
    pairs_W: list[int]
    received_rows_W: list[int]
    received_pairs_W: list[int]


@dataclass(frozen=True)
class Sending:
    """Counts on their way to the expert ranks, then rows; ``sizes`` and ``payload`` are filled by ``dispatch_send``."""

    counts: Pending
    counts_W2: torch.Tensor
    hit_TW: torch.Tensor
    x_TD: torch.Tensor
    slot_TK: torch.Tensor
    rank_TK: torch.Tensor
    home: Home
    sizes: Sizes | None = None
    payload: Pending | None = None
    received_W: torch.Tensor | None = None


@dataclass(frozen=True)
class Route:
    """The way back for the rows of one dispatch."""

    received: Received
    sizes: Sizes
    home: Home


@dataclass(frozen=True)
class Returning:
    """Expert outputs on their way home."""

    payload: Pending
    home: Home


class AllToAll(RaisesItself):
    """See the module's docstring and the contract in ``moe.exchange``."""

    name = "alltoall"
    capturable = may_overflow = False
    buffer_bytes = 0

    def __init__(self, comm: Comm, shape: ExchangeShape) -> None:
        self.comm, self.shape = comm, shape
        self.waits_for_counts = comm.device.type == "cuda"
        self._traffic = Traffic.none(comm.world)

    def begin_step(self, tokens: int, exact: bool = False) -> None:
        pass

    def overflowed(self) -> None:
        return None

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0) -> Sending:
        comm, reduce = self.comm, self.shape.combine == "reduce"
        x_TD = self.shape.as_sent(x_TD)
        comm.at.stage = "dispatch"
        rank_TK = ranks_of(slot_TK, self.shape.slots_per_rank)
        hit_TW = ranks_hit(rank_TK, comm.world)
        pairs_W = (rank_TK[..., None] == torch.arange(comm.world, device=x_TD.device)).sum((0, 1))
        counts_W2 = torch.stack((hit_TW.sum(0), pairs_W), 1)
        counts = comm.all_to_all(counts_W2, [1] * comm.world, [1] * comm.world)
        index_TJ = rank_index(hit_TW) if reduce else choice_index(rank_TK)
        self._traffic.tokens += len(x_TD)
        return Sending(counts, counts_W2, hit_TW, x_TD, slot_TK, rank_TK, Home(index_TJ, weight_TK))

    def dispatch_send(self, sending: Sending) -> Sending:
        if sending.payload is not None:
            return sending
        self.comm.at.stage = "dispatch"
        theirs_W2 = sending.counts.wait()
        sizes = Sizes(*torch.cat((sending.counts_W2, theirs_W2), 1).T.tolist())
        dest_R, token_R = torch.nonzero_static(sending.hit_TW.T, size=sum(sizes.rows_W)).unbind(1)
        here_RK = sending.rank_TK[token_R] == dest_R[:, None]
        local_RK = torch.where(here_RK, sending.slot_TK[token_R] % self.shape.slots_per_rank, -1).int()
        columns = [sending.x_TD[token_R], local_RK]
        if self.shape.combine == "reduce":
            columns.append(sending.home.weight_TK[token_R])
        wire = _pack(columns)
        payload = self.comm.all_to_all(wire, sizes.rows_W, sizes.received_rows_W)
        received_W = theirs_W2[:, 0].int()
        self._count(sizes, [count * wire.shape[1] + 16 for count in sizes.rows_W])
        return replace(sending, sizes=sizes, payload=payload, received_W=received_W)

    def dispatch_end(self, sending: Sending, num_slots: int) -> tuple[Received, Route]:
        sending = self.dispatch_send(sending)
        self.comm.at.stage = "dispatch"
        shape, sizes = self.shape, sending.sizes
        buffer = sending.payload.wait()
        widths = [(shape.dtype, shape.hidden), (torch.int32, shape.top_k)]
        if shape.combine == "reduce":
            widths.append((torch.float32, shape.top_k))
        rows_RD, local_RK, *weight = _unpack(buffer, widths)
        pairs = sum(sizes.received_pairs_W)
        received = Received(
            rows_RD=rows_RD.contiguous(),
            R_cap=len(buffer),
            M_cap=pairs,
            M_likely=max(pairs, 1),
            count_W=sending.received_W,
            index=build_index(local_RK.contiguous(), num_slots),
            weight_RK=weight[0].contiguous() if weight else None,
        )
        return received, Route(received, sizes, sending.home)

    def combine_begin(self, out_MD: torch.Tensor, route: Route) -> Returning:
        self.comm.at.stage = "combine"
        received, sizes = route.received, route.sizes
        pos_RK = received.index.pos_RK
        if self.shape.combine == "exact":
            flat_N = pos_RK.flatten()
            pair_M = torch.nonzero_static(flat_N >= 0, size=received.M_cap)[:, 0]
            rows = out_MD[flat_N[pair_M].long()]
            send, receive = sizes.received_pairs_W, sizes.pairs_W
        else:
            rows = weighted_sum(out_MD, pos_RK, received.weight_RK)
            send, receive = sizes.received_rows_W, sizes.rows_W
        self._traffic.combine_bytes_W += [count * self.shape.row_bytes for count in send]
        return Returning(self.comm.all_to_all(rows, send, receive), route.home)

    def combine_end(self, returning: Returning, add_TD: torch.Tensor | None = None) -> torch.Tensor:
        self.comm.at.stage = "combine"
        home = returning.home
        weight_TK = home.weight_TK if self.shape.combine == "exact" else None
        return weighted_sum(returning.payload.wait(), home.index_TJ, weight_TK, add_TD)

    def traffic(self) -> Traffic:
        return self._traffic

    def _count(self, sizes: Sizes, bytes_W: list[int]) -> None:
        self._traffic.rows_W += sizes.rows_W
        self._traffic.hidden_bytes += sum(sizes.rows_W) * self.shape.row_bytes
        self._traffic.pairs_W += sizes.pairs_W
        self._traffic.dispatch_bytes_W += bytes_W


def choice_index(rank_TK: torch.Tensor) -> torch.Tensor:
    """int32 ``[T, K]``: row of each (token, choice) in the answer, which comes in (rank, token, choice) order."""
    flat = rank_TK.flatten()
    order = torch.argsort(flat, stable=True)  # choices that go nowhere (-1) come first
    nowhere = (flat < 0).sum()
    index = torch.empty_like(flat, dtype=torch.int64)
    index[order] = torch.arange(flat.numel(), device=flat.device) - nowhere
    return index.clamp(min=-1).int().view_as(rank_TK)


def rank_index(hit_TW: torch.Tensor) -> torch.Tensor:
    """int32 ``[T, W]``: row of each (token, rank) in the answer, which comes in (rank, token) order; -1: none."""
    flat = hit_TW.T.flatten()
    return torch.where(flat, flat.cumsum(0) - 1, -1).int().view(hit_TW.shape[1], -1).T


def _pack(columns: list[torch.Tensor]) -> torch.Tensor:
    """Rows of several tensors side by side as bytes, padded to 16 so that any dtype can be viewed in place."""
    widths = [(column.dtype, column.shape[1]) for column in columns]
    size = sum(width * dtype.itemsize for dtype, width in widths)
    buffer = torch.zeros((len(columns[0]), size + -size % 16), dtype=torch.uint8, device=columns[0].device)
    for view, column in zip(_unpack(buffer, widths), columns):
        view.copy_(column)
    return buffer


def _unpack(buffer: torch.Tensor, widths: list[tuple[torch.dtype, int]]) -> list[torch.Tensor]:
    """Views of the packed columns; the inverse of :func:`_pack`."""
    out, start = [], 0
    for dtype, width in widths:
        size = width * dtype.itemsize
        out.append(buffer[:, start : start + size].view(dtype))
        start += size
    return out
