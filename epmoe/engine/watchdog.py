"""Notices a rank that no longer moves, and says where it stands."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import astuple

from epmoe.comm import Position


class Stalled(RuntimeError):
    """No progress for too long.  ``waiting``: in a collective, so that the cause is probably another rank."""


def watch(
    at: Position,
    limit_s: float,
    report: Callable[[Stalled], None],
    look: Callable[[], None] = lambda: None,
    poll_s: float = 0.5,
) -> threading.Event:
    """Start a thread that ends the process once ``at`` has not changed for ``limit_s`` seconds.

    Args:
        at: the position that the step loop keeps up to date (an idle loop still counts steps).
        report: called with the error first (it writes the error file).
        look: called at every poll; looks after what may keep this rank from moving.

    Returns:
        set it to stop watching.
    """
    done = threading.Event()

    def run() -> None:
        seen, still = astuple(at), 0.0
        while not done.wait(poll_s):
            look()
            now = astuple(at)
            still = still + poll_s if now == seen else 0.0
            seen = now
            if still >= limit_s:
                report(Stalled(f"no progress for {still:.0f} s; raise --stall-seconds if a step may take that long"))
                os._exit(1)

    threading.Thread(target=run, name="watchdog", daemon=True).start()
    return done
