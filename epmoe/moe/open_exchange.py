"""Which exchange a run uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from epmoe.comm import Comm, NoPeerMemory
from epmoe.moe.alltoall import AllToAll
from epmoe.moe.by_size import GLOO, NCCL, BySize, Cost
from epmoe.moe.exchange import Exchange, ExchangeShape
from epmoe.moe.local import LocalExchange
from epmoe.moe.oneshot import OneShot
from epmoe.moe.padded import Padded
from placement.errors import UserError

KINDS = {"alltoall": AllToAll, "oneshot": OneShot, "padded": Padded}
PADDED_TOKENS = 512  # ``auto`` takes padded blocks up to here or as far as graphs go; W blocks of so many rows, twice


def open_exchange(
    comm: Comm, shape: ExchangeShape, choice: str = "auto", costs: Mapping[str, Cost] | None = None
) -> Exchange:
    """The exchange that ``choice`` names; one rank needs none.  All ranks call it together.

    Args:
        costs: measured ones, for ``auto`` and between the transports of p2p; defaults without.
    """
    if comm.world == 1:
        return LocalExchange(comm, shape)
    if choice == "auto":
        return _by_size(comm, shape, costs or {})
    if choice == "p2p":
        try:
            return _p2p(comm, shape, costs or {})
        except NoPeerMemory as error:
            raise UserError(f"exchange is 'p2p', which this run cannot use: {error}; use auto") from None
    return KINDS[choice](comm, shape)


def _p2p(comm: Comm, shape: ExchangeShape, costs: Mapping[str, Cost]) -> Exchange:
    """Raises `NoPeerMemory`, on all ranks alike, where ranks cannot reach each other's memory."""
    from epmoe.moe.p2p import P2P, p2p_unavailable  # kernels that CPU ranks need not load

    if why := p2p_unavailable(comm, shape):
        raise NoPeerMemory(why)
    return P2P(comm, shape, costs=costs)


def _by_size(comm: Comm, shape: ExchangeShape, costs: Mapping[str, Cost]) -> BySize:
    """CPU ranks: one collective or two for the dispatch.  GPUs: p2p where ranks reach each other's memory, else padded
    blocks for small steps and exact sizes for large ones."""
    defaults = NCCL if comm.device.type == "cuda" else GLOO
    options: list[Exchange] = [AllToAll(comm, shape)]
    notes = []
    if comm.device.type == "cuda":
        try:
            options.insert(0, _p2p(comm, shape, costs))
        except NoPeerMemory as error:
            notes.append(str(error))
            if comm.on_nccl:
                most = min(shape.max_tokens, max(PADDED_TOKENS, shape.graph_tokens))
                options.insert(0, Padded(comm, replace(shape, max_tokens=most)))
    else:
        options.insert(0, OneShot(comm, shape))
    return BySize(options, {**defaults, **costs}, notes)
