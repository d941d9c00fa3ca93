"""Two micro-batches (lanes) through the layers, each computing while the other's rows travel.

A lane is a generator that stops (``yield``) whenever it has rows under way.  Resuming the lanes in turn gives::

    lane 0  attend route send | ........... | experts return | ............. | add, attend route send | ...
    lane 1  ................. | attend      | .............. | experts       | ...................... |
                                route send                     return

Every rank runs the same number of lanes in a step (they agree on it before), so the order of collectives is the same
on all of them; a lane may be empty.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")


def interleave(lanes: Sequence[Generator[None, None, Result]]) -> list[Result]:
    """Resume the lanes in turn until all have returned; their results in order."""
    results: dict[int, Result] = {}
    while len(results) < len(lanes):
        for number, lane in enumerate(lanes):
            if number in results:
                continue
            try:
                next(lane)
            except StopIteration as done:
                results[number] = done.value
    return [results[number] for number in range(len(lanes))]
