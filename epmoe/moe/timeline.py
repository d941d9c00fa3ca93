"""When each stage of a step ran, on the device's clock or the host's, as spans of this machine's monotonic clock.

On a GPU a stage lies between two timing events on the stream that it runs on; events recorded while a graph is captured
are external ones, which every replay sets anew.  On CPU compute is timed by the host, and a travelling stage ends
when its last collective does, seen by a callback: what of it lies beside compute was hidden.

A `Timeline` observes `moe.overlap.run_lanes`.  Nothing of this runs unless one was asked for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch

from epmoe.comm import Comm, Work
from epmoe.moe.overlap import Step

COMPUTE, TRAVEL = "compute", "travel"
COMMUNICATION = ("dispatch", "send", "combine")
WAITING = ("arrive", "sum")
MOST_SPANS = 200_000  # of one rank
UNREAD = 32  # steps whose times wait to be read; the device has long finished older ones


@dataclass(frozen=True)
class Span:
    """``row``: "compute" or "travel"; microseconds of the machine's monotonic clock."""

    step: int
    row: str
    lane: int
    layer: int
    stage: str
    begin: float
    end: float


@dataclass
class _Mark:
    """A stage that was issued: instants are events on a GPU, microseconds on CPU."""

    step: Step
    lane: int
    begin: torch.cuda.Event | float
    end: torch.cuda.Event | float | None = None
    flying: int = 0  # collectives under way


@dataclass
class Marks:
    """The stages of one forward pass, or of one graph."""

    marks: list[_Mark] = field(default_factory=list)
    number: int = -1  # the step to which the times now belong; -1: read


class Timeline:
    """Spans of one rank: ``spans`` grows up to ``MOST_SPANS``, then ``full``."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.on_gpu = comm, comm.device.type == "cuda"
        self.spans: list[Span] = []
        self.full = False
        self._now, self._capturing = Marks(), False
        self._open: list[_Mark] = []
        self._unread: deque[Marks] = deque()
        self._anchor: torch.cuda.Event | None = None
        self._anchor_us = 0.0
        if self.on_gpu:
            self._anchor = torch.cuda.Event(enable_timing=True)
            self._anchor.record()
            self._anchor.synchronize()
            self._anchor_us = _host_us()
        else:
            comm.on_work = self._started

    # -- what run_lanes calls -----------------------------------------------------------------------------------

    def begin(self, step: Step, lane: int) -> None:
        mark = _Mark(step, lane, self._instant())
        self._now.marks.append(mark)
        self._open.append(mark)

    def end(self, step: Step, lane: int) -> None:
        mark = self._open.pop()
        if not mark.flying:
            mark.end = self._instant()

    # -- what the engine calls ----------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Stages issued inside belong to the present step; inside `captured` they belong to the graph."""
        if self._capturing:
            yield
            return
        marks = self._now = Marks()
        yield
        self.ran(marks)

    @contextmanager
    def captured(self) -> Iterator[Marks]:
        """The stages issued inside, for a graph whose replays `before` and `ran` announce."""
        self._now, self._capturing = Marks(), True
        try:
            yield self._now
        finally:
            self._capturing = False

    def ran(self, marks: Marks) -> None:
        """``marks`` were launched in the present step (`before` comes before a second time)."""
        marks.number = self.comm.at.step
        self._unread.append(marks)
        if len(self._unread) > UNREAD:
            self._read(self._unread.popleft())

    def before(self, marks: Marks) -> None:
        """Call before a graph is replayed: its last replay's times are read while they are there."""
        while marks.number >= 0:
            self._read(self._unread.popleft())

    def read(self) -> list[Span]:
        """All spans; waits for the device."""
        while self._unread:
            self._read(self._unread.popleft())
        return self.spans

    # -- parts --------------------------------------------------------------------------------------------------

    def _instant(self) -> torch.cuda.Event | float:
        if not self.on_gpu:
            return _host_us()
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event

    def _started(self, work: Work) -> None:
        """A collective of the open travelling stage is under way (CPU)."""
        if not self._open:
            return
        mark = self._open[-1]
        mark.flying += 1
        work.get_future().add_done_callback(lambda _: setattr(mark, "end", max(_host_us(), mark.end or 0.0)))

    def _read(self, marks: Marks) -> None:
        number, marks.number = marks.number, -1
        for mark in marks.marks:
            if len(self.spans) >= MOST_SPANS:
                self.full = True
                return
            stage = mark.step.stage
            row = TRAVEL if stage.travels else COMPUTE
            if row == TRAVEL and not self.on_gpu and stage.name not in COMMUNICATION:
                row = COMPUTE  # one thread does it
            begin, end = self._us(mark.begin), self._us(mark.end)
            self.spans.append(Span(number, row, mark.lane, mark.step.layer, stage.name, begin, end))

    def _us(self, instant: torch.cuda.Event | float | None) -> float:
        if not self.on_gpu:
            return instant if instant is not None else _host_us()
        instant.synchronize()
        return self._anchor_us + self._anchor.elapsed_time(instant) * 1e3


def _host_us() -> float:
    return time.perf_counter_ns() / 1e3


@dataclass(frozen=True)
class Hidden:
    """Microseconds of communication, and how many of them lay beside compute of the same rank."""

    communication: float
    beside: float

    @property
    def share(self) -> float:
        return self.beside / self.communication if self.communication else 0.0


def hidden_of(spans: Iterable[Span]) -> dict[int, Hidden]:
    """By layer, for one rank's spans; key -1 is all layers together.

    The router is no communication, wherever it runs; ``arrive`` and ``sum`` are no compute, since most of them may be
    waiting for rows of other ranks.
    """
    spans = list(spans)
    moved = [span for span in spans if span.row == TRAVEL and span.stage in COMMUNICATION]
    busy = [span for span in spans if span.row == COMPUTE and span.stage not in WAITING]
    compute = _union([(span.begin, span.end) for span in busy])
    layers: dict[int, list[tuple[float, float]]] = {}
    for span in moved:
        layers.setdefault(span.layer, []).append((span.begin, span.end))
    found = {layer: _hidden(_union(each), compute) for layer, each in layers.items()}
    found[-1] = _hidden(_union([(span.begin, span.end) for span in moved]), compute)
    return found


def _union(stretches: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _hidden(moved: list[tuple[float, float]], compute: list[tuple[float, float]]) -> Hidden:
    """Both merged and ascending."""
    beside, at = 0.0, 0
    for begin, end in moved:
        while at < len(compute) and compute[at][1] <= begin:
            at += 1
        k = at
        while k < len(compute) and compute[k][0] < end:
            beside += min(end, compute[k][1]) - max(begin, compute[k][0])
            k += 1
    return Hidden(sum(end - begin for begin, end in moved), beside)


def chrome_events(rank: int, spans: Iterable[Span]) -> list[dict]:
    """One rank's spans in Chrome's trace format (Perfetto reads it): a process per rank, a thread per stream and lane
    where they may overlap in time."""
    events: list[dict] = [_named("process_name", rank, 0, f"rank {rank}")]
    threads: dict[tuple[str, int], int] = {}
    for span in spans:
        lane = span.lane if span.row == TRAVEL else 0
        key = (span.row, lane)
        if key not in threads:
            threads[key] = len(threads)
            name = span.row if not lane else f"{span.row}, lane {lane}"
            events.append(_named("thread_name", rank, threads[key], name))
        events.append(
            {
                "name": span.stage,
                "ph": "X",
                "pid": rank,
                "tid": threads[key],
                "ts": span.begin,
                "dur": max(span.end - span.begin, 0.0),
                "args": {key: value for key, value in asdict(span).items() if key in ("step", "lane", "layer")},
            }
        )
    return events


def _named(kind: str, pid: int, tid: int, name: str) -> dict:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
