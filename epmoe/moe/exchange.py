"""Tokens to the ranks of their experts and back: the contract of every exchange.

::

    dispatch_begin(x_TD, slot_TK, weight_TK, lane) -> Sending      what does not need to know the other ranks
    dispatch_send(Sending)                         -> Sending      rows start to travel
    dispatch_end(Sending, num_slots)               -> Received, Route
    combine_begin(out_MD, Route)                   -> Returning    expert outputs start to travel
    combine_end(Returning, add_TD)                 -> y_TD

*Dispatch.*  A token is sent once per distinct rank that serves one of its choices, with the local slot of each choice
there (-1: elsewhere, or no expert).  A choice with slot -1 is sent nowhere, also if its weight is NaN.

*Combine, exact mode.*  The expert ranks return one unweighted row per (token, choice), rounded to the model dtype.
The home rank multiplies each by its float32 routing weight and adds in ascending choice order in float32, rounds once,
then adds ``add_TD`` in the model dtype: the same arithmetic wherever the experts lie.

*Combine, reduce mode.*  The weights travel with the rows.  Each rank adds weight * row over its choices of a token, in
ascending choice order in float32, rounded once to the model dtype: one row per (token, rank).  The home rank adds them
in ascending rank order in float32, rounds once, then adds ``add_TD``.

*Calls.*  Every rank makes every call for every MoE layer, in the same order, also with T = 0.  ``begin_step`` comes
before the first dispatch of a step, with sizes that all ranks agreed on.  The handles are frozen and carry all that
the next call needs; they are private to the exchange that made them, but for :class:`Received`.  Lanes 0 and 1 may be
under way at once; within a lane the calls come in the order above.  ``dispatch_send`` returns its argument where rows
are under way since ``dispatch_begin``; ``dispatch_end`` calls it if nobody has.  Where ``waits_for_counts`` is true it
blocks the host until the other ranks' counts are here, so the other lane's kernels should be queued before it.

*Where rows lie.*  ``Received`` has ``R_cap`` rows, of which those that no slot of the index points to are undefined
(they may hold NaN).  So are rows of ``out_MD`` from the last pair on.  Nothing needs a count on the host.

Worked example (W = 2, K = 2, two local slots a rank, so slots 0 1 | 2 3): token 0 chose slots (3, 0), token 1 chose
(1, 0).  Rank 0 is sent both tokens with local slots (-1, 0) and (1, 0), rank 1 token 0 with (1, -1).  In exact mode
rank 0 returns three rows (token 0 choice 1; token 1 choices 0 and 1), rank 1 one row (token 0 choice 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from epmoe.comm import Comm
from epmoe.ops.moe_index import MoEIndex
from epmoe.ops.wire import rounded

Combine = Literal["exact", "reduce"]
LANES = 2


@dataclass(frozen=True)
class ExchangeShape:
    """What buffers are sized from, the same on every rank.

    Args:
        slots_per_rank: stride of a rank in global slot numbers (``Plan.max_slots``).
        max_tokens: token budget of one rank and step; a lane never has more.
        combine: see the module's docstring.
        capacity_factor: of ``padded``: rows kept for each (source, destination) over the rows that even routing
            sends; 0 keeps a row for every token, which cannot overflow.
        graph_tokens: steps of up to so many tokens may be captured in a graph.
        wire: "model", or "fp8": rows are rounded to 8 bits on their way to the experts (``ops.wire``), at home and also
            where they stay, so that placement does not show.
    """

    slots_per_rank: int
    max_tokens: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    combine: Combine
    capacity_factor: float = 0.0
    graph_tokens: int = 0
    wire: str = "model"

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    def as_sent(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Rows as the experts are to see them, for an exchange that sends them in the model dtype."""
        return x_TD if self.wire == "model" else rounded(x_TD)


@dataclass(frozen=True)
class Received:
    """Rows this rank's experts work on; M = (row, local choice) pairs sorted by local slot.

    ``R_cap`` and ``M_cap`` are host ints that bound the rows and the pairs; everything else is on the device:
    ``count_W`` rows from each rank (int32), ``index`` (``offset_L1``, ``row_M``, ``pos_RK``), and ``weight_RK`` in
    reduce mode only.  ``M_likely`` (host) is how many pairs to expect: tiles are chosen from it.  ``slot_RK``: in
    place of an index; the experts are then to return each row's weighted sum, ``[R, D]``, not its pairs' outputs.
    """

    rows_RD: torch.Tensor
    R_cap: int
    M_cap: int
    M_likely: int
    count_W: torch.Tensor
    index: MoEIndex | None
    weight_RK: torch.Tensor | None
    slot_RK: torch.Tensor | None = None


@dataclass
class Traffic:
    """Counters of one rank since the start, for reports; W entries by peer, this rank included.

    ``rows_W`` rows sent on dispatch, ``pairs_W`` (token, choice) pairs among them; ``dispatch_bytes_W`` and
    ``combine_bytes_W`` bytes on the wire, padding and metadata included; ``tokens`` dispatched; ``hidden_bytes`` of the
    dispatched ones are hidden rows.
    """

    rows_W: np.ndarray
    pairs_W: np.ndarray
    dispatch_bytes_W: np.ndarray
    combine_bytes_W: np.ndarray
    tokens: int = 0
    hidden_bytes: int = 0

    @staticmethod
    def none(world: int) -> Traffic:
        return Traffic(*(np.zeros(world, np.int64) for _ in range(4)))

    def __add__(self, other: Traffic) -> Traffic:
        mine, theirs = vars(self), vars(other)
        return Traffic(**{key: mine[key] + theirs[key] for key in mine})

    def __sub__(self, other: Traffic) -> Traffic:
        mine, theirs = vars(self), vars(other)
        return Traffic(**{key: mine[key] - theirs[key] for key in mine})

    def report(self) -> dict:
        """As JSON; ``fan_out`` is distinct ranks per token, ``padding`` the share of dispatched bytes that are no
        hidden rows."""
        sent = int(self.dispatch_bytes_W.sum())
        return {
            "tokens": self.tokens,
            "rows": self.rows_W.tolist(),
            "pairs": self.pairs_W.tolist(),
            "dispatch_bytes": self.dispatch_bytes_W.tolist(),
            "combine_bytes": self.combine_bytes_W.tolist(),
            "fan_out": int(self.rows_W.sum()) / max(self.tokens, 1),
            "padding": 1 - self.hidden_bytes / sent if sent else 0.0,
        }


class Exchange(Protocol):
    """The contract.

    Attributes:
        comm, shape: this rank's groups, and what the exchange was opened for.
        name: "local", "alltoall", "oneshot", "padded", "p2p", or "auto": one of them by the step's size.
        capturable: the calls between ``begin_step`` and the end of a step may be captured in a CUDA graph and replayed
            after ``begin_step`` with the same arguments.
        waits_for_counts: ``dispatch_send`` blocks the host.
        may_overflow: the present step may drop rows; ``overflowed`` then says so, and the step must run again after
            ``begin_step(tokens, exact=True)`` before anything of it counts.
        buffer_bytes: held for the engine's life, allocated when the exchange is opened.
        shares_sms: another lane computes beside the transfers of the present step; set before its first stage.
    """

    comm: Comm
    shape: ExchangeShape
    name: str
    capturable: bool
    waits_for_counts: bool
    may_overflow: bool
    buffer_bytes: int
    shares_sms: bool

    def expect_traffic(self, rows_WW: np.ndarray) -> None:
        """Expected rows from each rank (first index) to each, the same figures on all ranks: the order in which peers
        are visited may follow.  Not while a step is under way."""
        ...

    def begin_step(self, tokens: int, exact: bool = False) -> None:
        """All ranks agreed that no lane of any rank has more than ``tokens`` tokens in this step.

        Args:
            exact: sizes that cannot overflow (a step that runs again).
        """
        ...

    def overflowed(self) -> torch.Tensor | None:
        """bool ``[1]`` on the device, the same on all ranks: rows were dropped since ``begin_step``; None: never."""
        ...

    def dispatch_begin(self, x_TD: torch.Tensor, slot_TK: torch.Tensor, weight_TK: torch.Tensor, lane: int = 0) -> Any:
        """Args: hidden rows in the model dtype; int32 global slot of each choice or -1; float32 routing weights."""
        ...

    def dispatch_send(self, sending: Any) -> Any: ...

    def dispatch_end(self, sending: Any, num_slots: int) -> tuple[Received, Any]:
        """Args: ``num_slots``: this rank's slots in this layer."""
        ...

    def combine_begin(self, out_MD: torch.Tensor, route: Any) -> Any:
        """Args: expert outputs in pair order, model dtype, unweighted."""
        ...

    def combine_end(self, returning: Any, add_TD: torch.Tensor | None = None) -> torch.Tensor: ...

    def traffic(self) -> Traffic:
        """Counters since the start; waits for the device."""
        ...

    def raise_if_failed(self, patience_s: float = 0.0) -> None:
        """To be called when a step's results have come from the device and before they count: a rank failed.

        Args:
            patience_s: how long to wait for a peer's end to show, and for this rank's device to notice.
        """
        ...

    def watch_peers(self) -> None:
        """From any thread, a few times a second: if a peer has ended, nothing on this rank's device waits for it."""
        ...


def can_capture(exchange: Exchange) -> bool:
    """Whether the present step's calls may be captured in a graph, and are right whatever it replays."""
    now = getattr(exchange, "current", exchange)  # of "auto"
    return now.capturable and not now.waits_for_counts and not now.may_overflow


class RaisesItself:
    """Of exchanges over collectives: a rank that fails makes the collectives of its peers raise, and the order of peers
    is theirs."""

    def expect_traffic(self, rows_WW: np.ndarray) -> None:
        pass

    def raise_if_failed(self, patience_s: float = 0.0) -> None:
        pass

    def watch_peers(self) -> None:
        pass


def ranks_of(slot_TK: torch.Tensor, slots_per_rank: int) -> torch.Tensor:
    """The rank of each choice's slot; -1 for no expert."""
    return torch.div(slot_TK, slots_per_rank, rounding_mode="floor")


def ranks_hit(rank_TK: torch.Tensor, world: int) -> torch.Tensor:
    """bool ``[T, W]``: the ranks that serve at least one choice of a token."""
    hit = torch.zeros((rank_TK.shape[0], world + 1), dtype=torch.bool, device=rank_TK.device)
    return hit.scatter_(1, rank_TK.long() + 1, True)[:, 1:]  # column 0 collects the choices that go nowhere


def pairs_likely(tokens: int, top_k: int) -> int:
    """Pairs a rank's experts see when every rank has ``tokens`` tokens and routing is even."""
    return max(tokens * top_k, 1)
