"""Tokens to the ranks of their experts and back.

::

    dispatch_begin(x_TD, slot_TK, weight_TK, lane) -> Sending     dispatch_end(Sending, num_slots) -> Received, Route
    combine_begin(out_MD, Route) -> Returning                     combine_end(Returning, add_TD)   -> y_TD

A token is sent once per distinct rank that serves one of its choices, with the local slot of each choice there (-1:
elsewhere).  In ``exact`` mode the expert ranks return one unweighted row per (token, choice) and the home rank
multiplies by the routing weights and adds in choice order; in ``reduce`` mode the weights travel and each rank returns
one weighted sum per token, added at home in ascending rank order.  The handles are frozen and carry all that the next
call needs; nothing stays on the exchange.

Worked example (W = 2, K = 2, two local slots a rank, so slots 0 1 | 2 3): token 0 chose slots (3, 0), token 1 chose
(1, 0).  Rank 0 is sent both tokens with local slots (-1, 0) and (1, 0), rank 1 token 0 with (1, -1).  In exact mode
rank 0 returns three rows (token 0 choice 1; token 1 choices 0 and 1), rank 1 one row (token 0 choice 0).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch

from epmoe.comm import Comm, Pending
from epmoe.ops.combine import weighted_sum
from epmoe.ops.moe_index import MoEIndex, build_index

Combine = Literal["exact", "reduce"]


@dataclass(frozen=True)
class Sending:
    """Rows on their way to the expert ranks."""

    payload: Pending
    rows_W: list[int]  # rows this rank sends to each rank
    pairs_W: list[int]  # (row, choice) pairs among them
    received_rows_W: list[int]
    received_pairs_W: list[int]
    home: Home


@dataclass(frozen=True)
class Home:
    """What the home rank keeps of a dispatch to put the answer together."""

    index_TJ: torch.Tensor  # int32: row of the answer for (token, choice) in exact mode, (token, rank) in reduce; or -1
    weight_TK: torch.Tensor  # float32 routing weights
    dtype: torch.dtype
    hidden: int
    lane: int


@dataclass(frozen=True)
class Received:
    """Rows this rank's experts work on; M = (row, local choice) pairs sorted by local slot.

    ``R_cap`` and ``M_cap`` are host ints (here exact); everything else is on the device: ``count_W`` rows from each
    rank, ``index`` (``offset_L1``, ``row_M``, ``pos_RK``), and ``weight_RK`` in reduce mode only.
    """

    rows_RD: torch.Tensor
    R_cap: int
    M_cap: int
    count_W: torch.Tensor
    index: MoEIndex
    weight_RK: torch.Tensor | None


@dataclass(frozen=True)
class Route:
    """The way back for the rows of one dispatch."""

    received: Received
    sending: Sending


@dataclass(frozen=True)
class Returning:
    """Expert outputs on their way home."""

    payload: Pending
    home: Home


class Exchange(Protocol):
    """The contract; ``sent_rows`` counts the rows sent to each rank since the start (read for reports only)."""

    comm: Comm
    sent_rows: np.ndarray

    def dispatch_begin(
        self, x_TD: torch.Tensor, slot_TK: torch.Tensor, weight_TK: torch.Tensor, lane: int = 0
    ) -> Sending | Local: ...

    def dispatch_end(self, sending, num_slots: int) -> tuple[Received, Route | Local]: ...

    def combine_begin(self, out_MD: torch.Tensor, route) -> Returning | Local: ...

    def combine_end(self, returning, add_TD: torch.Tensor | None = None) -> torch.Tensor: ...


@dataclass(frozen=True)
class Local:
    """Handle of :class:`LocalExchange` in every stage; later stages fill the later fields."""

    rows_TD: torch.Tensor
    slot_TK: torch.Tensor
    weight_TK: torch.Tensor
    pos_TK: torch.Tensor | None = None
    out_MD: torch.Tensor | None = None


class LocalExchange:
    """One rank: nothing travels.  The answer's rows are the experts' rows, so both combine modes are the same sum."""

    def __init__(self, comm: Comm) -> None:
        assert comm.world == 1, f"{comm.world} ranks need an exchange that reaches them"
        self.comm = comm
        self.sent_rows = np.zeros(1, np.int64)

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0) -> Local:
        self.sent_rows += len(x_TD)
        return Local(x_TD, slot_TK, weight_TK)

    def dispatch_end(self, sending: Local, num_slots: int) -> tuple[Received, Local]:
        rows_TD, index = sending.rows_TD, build_index(sending.slot_TK, num_slots)
        T, K = sending.slot_TK.shape
        received = Received(rows_TD, T, T * K, torch.tensor([T]), index, None)
        return received, replace(sending, pos_TK=index.pos_RK)

    def combine_begin(self, out_MD: torch.Tensor, route: Local) -> Local:
        return replace(route, out_MD=out_MD)

    def combine_end(self, returning: Local, add_TD: torch.Tensor | None = None) -> torch.Tensor:
        return weighted_sum(returning.out_MD, returning.pos_TK, returning.weight_TK, add_TD)


def open_exchange(comm: Comm, slots_per_rank: int, combine: Combine) -> Exchange:
    """The exchange for this many ranks."""
    return LocalExchange(comm) if comm.world == 1 else AllToAll(comm, slots_per_rank, combine)


class AllToAll:
    """Exact sizes on any backend: counts in one collective, rows and metadata as bytes in another, one to combine.

    Args:
        comm: this rank's groups.
        slots_per_rank: stride of a rank in global slot numbers (``Plan.max_slots``).
        combine: see the module's docstring.
    """

    def __init__(self, comm: Comm, slots_per_rank: int, combine: Combine) -> None:
        self.comm = comm
        self.slots_per_rank = slots_per_rank
        self.combine = combine
        self.sent_rows = np.zeros(comm.world, np.int64)

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0) -> Sending:
        """Start sending ``x_TD`` to the ranks that serve ``slot_TK``.

        Args:
            x_TD: hidden rows in the model dtype.
            slot_TK: int32 global slot of each choice; -1 is no expert (padding) and is sent nowhere.
            weight_TK: float32 routing weights.
        """
        comm, reduce = self.comm, self.combine == "reduce"
        comm.at.stage = "dispatch"
        rank_TK = torch.div(slot_TK, self.slots_per_rank, rounding_mode="floor")
        hit_TW = _ranks_hit(rank_TK, comm.world)
        dest_R, token_R = hit_TW.T.nonzero(as_tuple=True)
        here_RK = rank_TK[token_R] == dest_R[:, None]
        local_RK = torch.where(here_RK, slot_TK[token_R] % self.slots_per_rank, -1).int()
        columns = [x_TD[token_R], local_RK] + ([weight_TK[token_R]] if reduce else [])
        sizes_W2 = torch.stack((hit_TW.sum(0), torch.bincount(rank_TK[rank_TK >= 0], minlength=comm.world)), 1)
        theirs_W2 = comm.all_to_all(sizes_W2, [1] * comm.world, [1] * comm.world).wait()
        rows_W, pairs_W = sizes_W2.T.tolist()
        received_rows_W, received_pairs_W = theirs_W2.T.tolist()
        self.sent_rows += rows_W
        payload = comm.all_to_all(_pack(columns), rows_W, received_rows_W)
        index_TJ = _rank_index(hit_TW) if reduce else _choice_index(rank_TK)
        home = Home(index_TJ, weight_TK, x_TD.dtype, x_TD.shape[1], lane)
        return Sending(payload, rows_W, pairs_W, received_rows_W, received_pairs_W, home)

    def dispatch_end(self, sending: Sending, num_slots: int) -> tuple[Received, Route]:
        """Wait for the rows and index them by local slot (this rank has ``num_slots`` of them in this layer)."""
        self.comm.at.stage = "dispatch"
        top_k = sending.home.weight_TK.shape[1]
        buffer = sending.payload.wait()
        widths = [(sending.home.dtype, sending.home.hidden), (torch.int32, top_k)]
        if self.combine == "reduce":
            widths.append((torch.float32, top_k))
        rows_RD, local_RK, *weight = _unpack(buffer, widths)
        received = Received(
            rows_RD=rows_RD.contiguous(),
            R_cap=len(buffer),
            M_cap=sum(sending.received_pairs_W),
            count_W=torch.tensor(sending.received_rows_W, device=buffer.device),
            index=build_index(local_RK.contiguous(), num_slots),
            weight_RK=weight[0].contiguous() if weight else None,
        )
        return received, Route(received, sending)

    def combine_begin(self, out_MD: torch.Tensor, route: Route) -> Returning:
        """Start returning expert outputs (``[M, D]``, model dtype, unweighted) to the home ranks."""
        self.comm.at.stage = "combine"
        received, sending = route.received, route.sending
        pos_RK = received.index.pos_RK
        if self.combine == "exact":
            rows = out_MD[pos_RK[pos_RK >= 0].long()]
            payload = self.comm.all_to_all(rows, sending.received_pairs_W, sending.pairs_W)
        else:
            rows = weighted_sum(out_MD, pos_RK, received.weight_RK)
            payload = self.comm.all_to_all(rows, sending.received_rows_W, sending.rows_W)
        return Returning(payload, sending.home)

    def combine_end(self, returning: Returning, add_TD: torch.Tensor | None = None) -> torch.Tensor:
        """The MoE layer's output ``[T, D]``: the routed sum, rounded once, plus ``add_TD`` (shared experts)."""
        self.comm.at.stage = "combine"
        home = returning.home
        weight_TK = home.weight_TK if self.combine == "exact" else None
        return weighted_sum(returning.payload.wait(), home.index_TJ, weight_TK, add_TD)


def _ranks_hit(rank_TK: torch.Tensor, world: int) -> torch.Tensor:
    """bool ``[T, W]``: the ranks that serve at least one choice of a token."""
    hit = torch.zeros((rank_TK.shape[0], world + 1), dtype=torch.bool, device=rank_TK.device)
    return hit.scatter_(1, rank_TK.long() + 1, True)[:, 1:]  # column 0 collects the choices that go nowhere


def _choice_index(rank_TK: torch.Tensor) -> torch.Tensor:
    """int32 ``[T, K]``: row of each (token, choice) in the answer, which comes in (rank, token, choice) order."""
    flat = rank_TK.flatten()
    order = torch.argsort(flat, stable=True)  # choices that go nowhere (-1) come first
    nowhere = (flat < 0).sum()
    index = torch.empty_like(flat, dtype=torch.int64)
    index[order] = torch.arange(flat.numel(), device=flat.device) - nowhere
    return index.clamp(min=-1).int().view_as(rank_TK)


def _rank_index(hit_TW: torch.Tensor) -> torch.Tensor:
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
