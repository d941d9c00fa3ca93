"""Takes requests in on their home ranks, and moves those whose probe says so: alike on every rank."""

from __future__ import annotations

from epmoe.config import EngineConfig
from epmoe.engine.agreement import HEADER_MOVES, Header
from epmoe.engine.home import RankLoad, assign_home, rank_loads
from epmoe.engine.probe import ProbeScores
from epmoe.engine.request import Request, SamplingParams
from epmoe.engine.scheduler import Scheduler, longest
from epmoe.trace import RoutingRecorder
from placement.homes import Affinity, score_prompt


class Intake:
    """One rank's part in it: its scheduler takes the requests whose home it is."""

    def __init__(
        self,
        engine: EngineConfig,
        rank: int,
        scheduler: Scheduler,
        affinity: Affinity | None,
        probes: ProbeScores | None,
        recorder: RoutingRecorder | None,
    ) -> None:
        self.engine, self.rank, self.scheduler = engine, rank, scheduler
        self.affinity, self.probes, self.recorder = affinity, probes, recorder
        self.moved = 0  # requests that left this rank for a better home
        self._undecided: dict[int, dict] = {}  # messages of requests under probe, on every rank, by request id
        self._decided: list[tuple[int, int]] = []  # (request id, home) to be announced by this rank

    def announce(self) -> tuple[tuple[int, int], ...]:
        """The homes that this rank has decided on and not yet said, as many as a header holds."""
        said, self._decided = self._decided[:HEADER_MOVES], self._decided[HEADER_MOVES:]
        return tuple(said)

    def forget(self, number: int) -> None:
        """A request that is aborted."""
        if self._undecided.pop(number, None) is not None:
            self.probes.forget(number)

    def add(self, message: dict, loads: list[RankLoad]) -> None:
        """A new request: every rank calls this alike, its home takes it in. ``loads`` is kept up to date."""
        prompt = message["prompt"]
        tokens = longest(len(prompt), message["params"]["max_tokens"], self.engine)
        known = self.affinity is not None and len(self.affinity.token_rank_VW) > 0
        affinity_W = score_prompt(prompt, self.affinity.token_rank_VW) if known else None
        home = assign_home(tokens, loads, self.engine.block_size, affinity_W)
        before, blocks = loads[home], self.scheduler.pool.blocks_for(tokens)
        loads[home] = RankLoad(before.queued_tokens + tokens, before.free_blocks - blocks)
        probe = self.engine.probe_tokens if self.probes is not None else 0
        if 0 < probe < len(prompt):
            self._undecided[message["id"]] = message
        if home == self.rank:
            self._adopt(message, probe if probe < len(prompt) else 0)

    def _adopt(self, message: dict, probe: int = 0) -> None:
        """Become the home of a request."""
        params = SamplingParams.from_dict(message["params"])
        seed = params.seed if params.seed is not None else self.engine.seed * 0x9E3779B1 + message["id"]
        request = Request(message["id"], message["prompt"], params, seed, message.get("sample", 0), self.rank)
        request.probe = probe
        self.scheduler.add(request)

    def settle(self, headers: list[Header]) -> None:
        """Move requests to the homes that were announced, then decide for the probes that this rank has finished."""
        for number, home in (pair for header in headers for pair in header.homes):
            message = self._undecided.pop(number, None)
            if message is None:  # aborted meanwhile
                continue
            here = next((r for r in [*self.scheduler.running, *self.scheduler.waiting] if r.id == number), None)
            if here is not None and home == self.rank:
                here.probe = 0
            elif here is not None:
                self.scheduler.withdraw(number)
                self.moved += 1
                if self.recorder is not None:
                    self.recorder.forget(number)
            elif home == self.rank:
                self._adopt(message)
        if self.probes is None:
            return
        announced = {number for number, _ in self._decided}
        loads = rank_loads(headers)
        for request in self.scheduler.running:
            if request.probe and request.computed == request.probe and request.id not in announced:
                self._decided.append((request.id, self._home_after_probe(request, loads)))

    def _home_after_probe(self, request: Request, loads: list[RankLoad]) -> int:
        """Its best rank by the routing of its probe, among those with room; the request does not weigh on its rank."""
        tokens = longest(len(request.prompt), request.params.max_tokens, self.engine)
        own = loads[self.rank]
        loads = list(loads)
        loads[self.rank] = RankLoad(own.queued_tokens - tokens, own.free_blocks + len(request.blocks))
        return assign_home(tokens, loads, self.engine.block_size, self.probes.take(request.id).numpy())
