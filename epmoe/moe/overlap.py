"""The stages of a layer, and two micro-batches (lanes) that go through them in turn.

A lane is a generator that says before each piece of work which stage it is (``yield Step(stage, layer)``).  It keeps
the turn until a stage that needs rows which are under way; the other lane then computes meanwhile.  With an exchange
that travels on its own stream, a layer of two lanes reads, time from left to right::

    compute  attention 0 | shared 0, attention 1 | arrive, experts 0 | shared 1, arrive, experts 1 | sum 0, attention 0
    travel               | router, dispatch 0    | router, dispatch 1 | combine 0                   | combine 1

``router`` is on the exchange's stream: lane 1's runs beside lane 0's experts.  On CPU everything runs in the order of
issue and only the rows travel beside it.  Every rank runs the same number of lanes in a step (they agree on it
before), so the order of collectives is the same on all of them; a lane may be empty.

Memory.  A stretch of travelling stages begins by waiting for all the compute issued before it (but for ``send``, which
only goes on with what is on that stream), and a stage that joins waits for its lane's last stretch.  So what was
allocated on the travel stream may be dropped at any time: a lane lets go after ``sum``, and its next stretch starts
behind that.  What was allocated on the compute stream and is read by a travelling stage must be held until the lane's
next join.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import torch

from epmoe.comm import Position
from epmoe.ops.launch import sm_count

if TYPE_CHECKING:
    from epmoe.moe.exchange import Exchange

Result = TypeVar("Result")


@dataclass(frozen=True)
class Stage:
    """``travels``: on the exchange's stream.  ``joins``: needs what its lane sent last, so other lanes go first (once
    before several in a row)."""

    name: str
    travels: bool = False
    joins: bool = False


EMBED = Stage("embed")
ATTENTION = Stage("attention")
MLP = Stage("mlp")  # of a dense layer
ROUTER = Stage("router", travels=True)
DISPATCH = Stage("dispatch", travels=True)
SHARED = Stage("shared")
SEND = Stage("send", travels=True, joins=True)  # where the rows' sizes come with the other ranks' counts
ARRIVE = Stage("arrive", joins=True)  # of the dispatched rows
EXPERTS = Stage("experts")
COMBINE = Stage("combine", travels=True)
SUM = Stage("sum", joins=True)  # of the returned rows
HEAD = Stage("head")


class Step(NamedTuple):
    """What a lane does next; layer -1 is outside the layers."""

    stage: Stage
    layer: int


Lane = Generator[Step, None, Result]


class Observer(Protocol):
    """Sees stages begin and end, on the stream that they run on (see ``moe.timeline``)."""

    def begin(self, step: Step, lane: int) -> None: ...

    def end(self, step: Step, lane: int) -> None: ...


def open_travel(exchange: Exchange) -> torch.cuda.Stream | None:
    """The stream, of high priority, that travelling stages run on; ``None`` on CPU and where nothing travels."""
    comm = exchange.comm
    if comm.world == 1 or comm.device.type != "cuda":
        return None
    return torch.cuda.Stream(comm.device, priority=-1)


def free_sms(exchange: Exchange) -> int:
    """SMs that the exchange's kernels leave to persistent compute kernels beside them; 0: all."""
    taken = getattr(exchange, "ctas", 0)
    return sm_count(exchange.comm.device) - taken if taken else 0


@dataclass
class _Running(Generic[Result]):
    """A lane between turns: the step it has announced, and the event that its next join waits for."""

    number: int
    stages: Lane[Result]
    step: Step
    sent: torch.cuda.Event | None = None


def run_lanes(
    lanes: Sequence[Lane[Result]],
    at: Position,
    travel: torch.cuda.Stream | None = None,
    observer: Observer | None = None,
) -> list[Result]:
    """Give the lanes turns until all have returned; their results in order.

    Args:
        at: is kept at the stage that is being issued.
        travel: where travelling stages run; None: all in order of issue.
        observer: sees every stage; None costs nothing.
    """
    results: dict[int, Result] = {}
    running = [_Running(number, stages, next(stages)) for number, stages in enumerate(lanes)]
    while running:
        for lane in list(running):
            try:
                _take_turn(lane, at, travel, observer)
            except StopIteration as done:
                results[lane.number] = done.value
                running.remove(lane)
    return [results[number] for number in range(len(lanes))]


def _take_turn(lane: _Running, at: Position, travel: torch.cuda.Stream | None, observer: Observer | None) -> None:
    """Issue the announced step and those behind it, up to one that joins."""
    while True:
        step = lane.step
        at.layer, at.stage = step.layer, step.stage.name
        if travel is None:
            _issue(lane, observer)
        elif step.stage.travels:
            if not step.stage.joins:
                travel.wait_stream(torch.cuda.current_stream())
            _issue_stretch(lane, at, travel, observer)
        else:
            if step.stage.joins and lane.sent is not None:
                torch.cuda.current_stream().wait_event(lane.sent)
            _issue(lane, observer)
        if lane.step.stage.joins and not step.stage.joins:
            return


def _issue_stretch(lane: _Running, at: Position, travel: torch.cuda.Stream, observer: Observer | None) -> None:
    """Travelling steps in a row."""
    with torch.cuda.stream(travel):
        while lane.step.stage.travels:
            at.stage = lane.step.stage.name
            _issue(lane, observer)
        lane.sent = travel.record_event()


def _issue(lane: _Running, observer: Observer | None) -> None:
    """Run the announced step; the lane announces its next."""
    step = lane.step
    if observer is None:
        lane.step = next(lane.stages)
        return
    observer.begin(step, lane.number)
    try:
        lane.step = next(lane.stages)
    finally:
        observer.end(step, lane.number)
