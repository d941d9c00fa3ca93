"""Which exchange a run uses."""

from __future__ import annotations

from epmoe.comm import Comm
from epmoe.moe.alltoall import AllToAll
from epmoe.moe.exchange import Exchange, ExchangeShape
from epmoe.moe.local import LocalExchange
from epmoe.moe.oneshot import OneShot
from epmoe.moe.padded import Padded

KINDS = {"alltoall": AllToAll, "padded": Padded, "oneshot": OneShot}


def open_exchange(comm: Comm, shape: ExchangeShape, choice: str = "auto") -> Exchange:
    """The exchange that ``choice`` names; one rank needs none."""
    if comm.world == 1:
        return LocalExchange(comm, shape)
    return KINDS.get(choice, AllToAll)(comm, shape)
