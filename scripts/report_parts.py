"""Parts of a report, one after another in the same rank processes, none of which can spoil the others.

Every part has a share of the time that is left.  One that fails or outlives its time costs the processes, not the
report: what it had found is kept, and the parts behind it get fresh ranks.
"""

from __future__ import annotations

import json
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rank_group import RankGroup

from epmoe.comm import Comm

DONE = ""  # the ranks are through with all parts
GRACE = 5  # seconds over its time before a part's ranks are killed


@dataclass(frozen=True)
class Part:
    """``function(comm, save, seconds, *values)`` on every rank returns what the report shows; ``save`` takes what is
    known so far. ``share``: of the time, against the other parts'."""

    name: str
    share: float
    function: Callable
    values: tuple = ()


def run_parts(where: tuple[int, str], parts: Sequence[Part], ends: float, keep: Callable[[dict], None]) -> None:
    """All parts on ``where`` = (ranks, device), to the end or until ``ends`` (of the monotonic clock).

    ``keep`` gets ``{name: {"seconds", "found"}}`` whenever something new is known.
    """
    left = list(parts)
    while left:
        if time.monotonic() > ends - 2:
            keep({part.name: _record(0.0, None, "no time was left") for part in left})
            return
        name, why = _run_group(where, left, ends, keep)
        if not why:
            return
        print(f"   {name} cut short: {why}", flush=True)
        names = [part.name for part in left]
        left = left[names.index(name) + 1 :] if name in names else left[1:]


def _run_group(where: tuple[int, str], parts: list[Part], ends: float, keep: Callable) -> tuple[str, str]:
    """(part that ended the ranks before their time, why); empty if all parts are through."""
    with tempfile.TemporaryDirectory() as folder:
        answer, seen = Path(folder) / "answer.json", ""
        started = time.monotonic()
        state: dict = {"at": parts[0].name, "until": started + max(60, (ends - started) / 2), "parts": {}}
        ranks, why = RankGroup(*where, _serve_parts, parts, ends, str(answer)), None
        try:
            while why is None:
                try:
                    why = "" if ranks.ended(0.3) else None
                except Exception as error:  # of any kind, in a rank
                    why = str(error)[-3000:] or type(error).__name__
                text = answer.read_text(encoding="utf-8") if answer.is_file() else seen
                if text != seen:
                    seen, state = text, json.loads(text)
                    keep(state["parts"])
                if state["at"] == DONE:
                    return DONE, ""
                if why is None and time.monotonic() > min(state["until"], ends) + GRACE:
                    why = "it did not end within its time"
        finally:
            ranks.close()
        if why:
            known = state["parts"].get(state["at"], {})
            keep({state["at"]: _record(known.get("seconds", 0.0), known.get("found"), why)})
        return state["at"], why


def _record(seconds: float, found: object, failed: str = "") -> dict:
    return {"seconds": round(seconds, 1), "found": found} | ({"failed": failed} if failed else {})


def _serve_parts(comm: Comm, parts: list[Part], ends: float, answer: str) -> None:
    """One rank: all parts in order; rank 0 writes down where it is and what is known."""
    state: dict = {"at": "", "until": 0.0, "parts": {}}
    compiled = count_compiles()

    def write() -> None:
        if comm.rank == 0:
            Path(answer + ".new").write_text(json.dumps(state, default=float), encoding="utf-8")
            Path(answer + ".new").rename(answer)

    def known(name: str, began: float, found: object) -> None:
        state["parts"][name] = _record(time.monotonic() - began, found)
        if compiled:
            kernels = {"kernels": len(compiled), "seconds": round(sum(each for _, each in compiled), 1)}
            state["parts"][name]["compiled"] = kernels
        write()

    for number, part in enumerate(parts):
        began = time.monotonic()
        seconds = max(1.0, (ends - began) * part.share / sum(each.share for each in parts[number:]))
        state |= {"at": part.name, "until": began + seconds}
        compiled.clear()
        save = partial(known, part.name, began)
        write()
        if comm.rank == 0:
            print(f"-- {part.name}, at most {seconds:.0f} s", flush=True)
        try:
            save(part.function(comm, save, seconds, *part.values))
        except Exception:
            if comm.rank == 0:
                print(traceback.format_exc(limit=-4), flush=True)
            raise
        comm.all_gather_headers(np.zeros(1, np.int64))  # no rank begins the next part before all have ended this one
        if comm.rank == 0:
            print(f"   {part.name} took {time.monotonic() - began:.1f} s, {told(compiled)}", flush=True)
    state["at"] = DONE
    write()


def count_compiles() -> list[tuple[str, float]]:
    """(kernel, seconds) of every Triton kernel that this process compiles from now on, as it goes."""
    found: list[tuple[str, float]] = []
    try:
        from triton import knobs
    except ImportError:  # none here, or one without such a hook
        return found

    def listen(*, src, times, cache_hit: bool, **_) -> None:
        if not cache_hit:
            found.append((src.name, times.total / 1e6))

    knobs.compilation.listener = listen
    return found


def told(compiled: list[tuple[str, float]]) -> str:
    by_name: dict[str, list[float]] = {}
    for name, seconds in compiled:
        by_name.setdefault(name, []).append(seconds)
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:6]
    kernels = ", ".join(f"{name} {len(times)} x {sum(times) / len(times):.1f}" for name, times in most)
    return f"{sum(seconds for _, seconds in compiled):.1f} s of them compiling {len(compiled)} kernels ({kernels})"
