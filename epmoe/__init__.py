"""Expert-parallel inference for mixture-of-experts language models.

Shape letters, as suffixes of tensor names (``x_TD`` is ``[T, D]``):

====  ==========================================  ====  =====================================
T     tokens on this rank                         E     logical experts of a layer
K     choices per token (top-k)                   S     slots of a layer over all ranks
N     T * K                                       L     local slots of a layer on this rank
R     rows received by this rank                  W     ranks
M     (row, local choice) pairs                   B     KV blocks
D     hidden size                                 H     attention heads
F     expert intermediate size
====  ==========================================  ====  =====================================

Home rank: the rank that owns a request's KV cache.  Slot: a place for one expert's weights; a replicated expert has
several slots, on distinct ranks.  Row: one hidden vector on the wire.  Fan-out: the number of distinct ranks a
token's K experts live on.  Maps are named by direction: ``slot_expert`` is slot -> expert.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LLM", "RankFailure", "SamplingParams", "UserError"]


def __getattr__(name: str) -> Any:
    """The Python API on first use: ranks import this package and must not load it."""
    if name == "__version__":
        from placement import __version__ as found
    elif name == "LLM":
        from launch.llm import LLM as found
    elif name == "RankFailure":
        from launch.failure import RankFailure as found
    elif name == "SamplingParams":
        from epmoe.engine.request import SamplingParams as found
    elif name == "UserError":
        from placement.errors import UserError as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
