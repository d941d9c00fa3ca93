"""The stages of a layer, and two micro-batches (lanes) that go through them in turn.

A lane is a generator that says before each piece of work which stage it is (``yield Step(stage, layer)``).  It keeps
the turn until a stage that needs rows which are under way; the other lane then computes meanwhile.  With an exchange
that travels on its own stream, a layer of two lanes reads, time from left to right::

    compute  attention 0 | shared 0, attention 1 | arrive, experts 0 | shared 1, arrive, experts 1 | sum 0, attention 0
    travel               | router, dispatch 0    | router, dispatch 1 | combine 0                   | combine 1

``router`` is on the exchange's stream: lane 1's runs beside lane 0's experts.  On CPU everything runs in the order of
issue and only the rows travel beside it.  Every rank runs the same number of lanes in a step (they agree on it
before), so the order of collectives is the same on all of them; a lane may be empty.

Where the rows' sizes must first come to the host (``send``), turns are shorter and lane 0 is one ahead, so that rows do
not queue behind the other lane's router or combine, and the host waits only when compute has been queued.
Order of issue::

    attention 0, router dispatch 0 | attention 1, send 0 | router dispatch 1, arrive experts 0 | send 1, combine 0 | ..

Memory.  A travelling stage waits for its own lane's compute so far, a stage that joins for what its lane sent last.
So what was allocated on the travel stream and is read by compute must be held until the lane's next ``dispatch`` (the
last layer's until every lane is through), and what was allocated on the compute stream and is read by a travelling
stage until the lane's next join.
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
    """``travels``: on the exchange's stream.  ``joins``: needs what its lane sent last."""

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
TURNS = (ARRIVE, SUM)  # stages before which the other lanes have their turn
SHORT_TURNS = (ROUTER, SEND, ARRIVE, COMBINE, SUM)


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
    """A lane between turns: the step it has announced, how far its compute has come (which its next travelling stage
    waits for), and the end of what it sent last (which its next join waits for)."""

    number: int
    stages: Lane[Result]
    step: Step
    ready: torch.cuda.Event | None = None
    sent: torch.cuda.Event | None = None


def run_lanes(
    lanes: Sequence[Lane[Result]],
    at: Position,
    travel: torch.cuda.Stream | None = None,
    observer: Observer | None = None,
    short_turns: bool = False,
) -> list[Result]:
    """Give the lanes turns until all have returned; their results in order.

    Args:
        at: is kept at the stage that is being issued.
        travel: where travelling stages run; None: all in order of issue.
        observer: sees every stage; None costs nothing.
        short_turns: the lanes have ``send`` stages.
    """
    results: dict[int, Result] = {}
    running = [_Running(number, stages, next(stages)) for number, stages in enumerate(lanes)]
    turns = SHORT_TURNS if short_turns else TURNS
    ahead = running[:-1] if short_turns else []
    while running:
        for lane in [*ahead, *running]:
            try:
                _take_turn(lane, turns, at, (travel, observer))
            except StopIteration as done:
                results[lane.number] = done.value
                running.remove(lane)
        ahead = []
    return [results[number] for number in range(len(lanes))]


def _take_turn(lane: _Running, turns: Sequence[Stage], at: Position, places: tuple) -> None:
    """Issue the announced step and those behind it, up to one before which another turn begins."""
    travel, observer = places
    while True:
        step = lane.step
        at.layer, at.stage = step.layer, step.stage.name
        if travel is None:
            _issue(lane, observer)
        elif step.stage.travels:
            _issue_travelling(lane, travel, observer)
        else:
            if step.stage.joins and lane.sent is not None:
                torch.cuda.current_stream().wait_event(lane.sent)
            _issue(lane, observer)
            if lane.step.stage.travels and not lane.step.stage.joins:
                lane.ready = torch.cuda.current_stream().record_event()
        if lane.step.stage in turns:
            return


def _issue_travelling(lane: _Running, travel: torch.cuda.Stream, observer: Observer | None) -> None:
    """A step on the travel stream, behind its lane's compute; ``send`` goes on with what is on that stream."""
    if not lane.step.stage.joins and lane.ready is not None:
        travel.wait_event(lane.ready)
        lane.ready = None
    with torch.cuda.stream(travel):
        _issue(lane, observer)
        if not lane.step.stage.travels or lane.step.stage.joins:
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
