"""One run's ranks behind three verbs: add a request, read events, stop."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from epmoe.config import EngineConfig, RankInfo
from launch.failure import RankFailure
from launch.front import Addresses, Front
from launch.spawn import Ranks, write_inputs
from placement.errors import UserError

POLL_S = 0.05  # how soon a death is seen
END_S = 20.0  # for ranks to report and leave once the last request is done


@dataclass(frozen=True)
class Event:
    """New tokens of a request; ``finish_reason`` is set with the last ones."""

    id: int
    token_ids: list[int]
    finish_reason: str | None
    extra: object


class RankSet(Protocol):
    """The ranks as a session sees them, whoever started them."""

    def check(self, ending: bool = False) -> None: ...
    def finish(self, seconds: float) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Path, Addresses, EngineConfig, Callable[[str], None]], RankSet]


@dataclass(frozen=True)
class Starting:
    """How the ranks of a run come to be.

    ``start(run_dir, addresses, engine, say)`` starts them or tells them where to connect; ``local_world`` of the
    ``world`` ranks share this machine; ``interface`` is the address to listen on, ``None`` within one machine.
    """

    world: int
    local_world: int
    start: Start
    interface: str | None = None


class Session:
    """Ranks and sockets of one run; a context manager that leaves nothing behind.  ``say`` shows ranks' lines."""

    def __init__(self, starting: Starting, engine: EngineConfig, say: Callable[[str], None]) -> None:
        self.world = starting.world
        self.run_dir = _run_folder()
        self._front: Front | None = None
        self._ranks: RankSet | None = None
        self._next_id = 0
        self._events: list[Event] = []
        self.ready: dict[int, dict] = {}
        self._reached: tuple[str, int, int] | None = None  # phase of starting, done, total
        self.stats: dict[int, dict] = {}
        self.recorded: list[dict] = []  # the ranks' ``trace`` messages
        self.timeline: list[dict] = []  # their ``timeline`` messages
        try:
            self._front = Front(self.run_dir, starting.interface)
            self._ranks = starting.start(self.run_dir, self._front.addresses, engine, say)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _no_folder(str(self.run_dir), error) from None
            raise

    def wait_ready(self, progress: Callable[[str, int, int], None] = lambda *_: None) -> dict[int, dict]:
        """Block until every rank can serve; reports by rank. ``progress`` hears (phase, done, total)."""
        while len(self.ready) < self.world:
            self._pump(POLL_S)
            if self._reached is not None:
                progress(*self._reached)
                self._reached = None
        return self.ready

    def add(self, prompt: list[int], params: dict, sample: int = 0) -> int:
        """Queue a request, ``sample`` of its prompt's ``n``; its id."""
        id_ = self._next_id
        self._next_id += 1
        self._front.send({"op": "add", "id": id_, "prompt": prompt, "params": params, "sample": sample})
        return id_

    def abort(self, id_: int) -> None:
        """End a request at the next step; its last event says ``abort`` unless it finishes first."""
        self._front.send({"op": "abort", "id": id_})

    def events(self) -> list[Event]:
        """New events, after a short wait at most."""
        if not self._events:
            self._pump(POLL_S)
        events, self._events = self._events, []
        return events

    def stop(self) -> dict[int, dict]:
        """Let the ranks finish what they have and end; their statistics by rank."""
        self._front.send({"op": "stop"})
        deadline = time.monotonic() + END_S
        while len(self.stats) < self.world:
            if self._pump(POLL_S, ending=True):
                deadline = time.monotonic() + END_S
            if time.monotonic() > deadline:
                missing = min(set(range(self.world)) - self.stats.keys())
                raise RankFailure(missing, f"gave no statistics within {END_S:g} s of the end")
        self._ranks.finish(END_S)
        return self.stats

    def _pump(self, seconds: float, ending: bool = False) -> bool:
        """Sort what the ranks sent; whether there was anything."""
        messages = self._front.receive(seconds)
        for message in messages:
            if message["op"] == "tokens":
                self._events.extend(Event(*item) for item in message["items"])
            elif message["op"] == "ready":
                self.ready[message["rank"]] = message["report"]
            elif message["op"] == "progress":
                self._reached = message["phase"], message["done"], message["total"]
            elif message["op"] == "stats":
                self.stats[message["rank"]] = message["report"]
            elif message["op"] == "trace":
                self.recorded.append(message)
            elif message["op"] == "timeline":
                self.timeline.append(message)
        self._ranks.check(ending)
        return bool(messages)

    def close(self) -> None:
        """End everything at once; harmless after :meth:`stop`."""
        if self._ranks is not None:
            self._ranks.kill()
        if self._front is not None:
            self._front.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="epmoe-"))
    except OSError as error:
        raise _no_folder("a folder for the run", error) from None


def _no_folder(what: str, error: OSError) -> UserError:
    return UserError(f"cannot write {what}: {error.strerror or error}; make room, or set TMPDIR to a folder with some")


def spawned(ranks: int) -> Starting:
    """Ranks as child processes on this machine."""

    def start(run_dir: Path, addresses: Addresses, engine: EngineConfig, say: Callable[[str], None]) -> Ranks:
        store = f"file://{run_dir}/store"
        infos = [
            RankInfo(rank, ranks, rank, store, addresses.requests, addresses.outputs, str(run_dir))
            for rank in range(ranks)
        ]
        write_inputs(run_dir, engine, infos)
        return Ranks(run_dir, ranks, engine.threads or 1, say)

    return Starting(ranks, ranks, start)
