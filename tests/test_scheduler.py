"""The scheduler alone, on random scripts with made-up tokens, in the engine's order: schedule, launch, commit.

The made-up model draws a token from a request's id and position, so what a request must get is known beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epmoe.config import EngineConfig
from epmoe.engine.kv_cache import BlockPool
from epmoe.engine.request import Request, SamplingParams
from epmoe.engine.scheduler import Chunk, Scheduler

VOCABULARY = 50
STOP = 7  # the stop token of requests that have one


def drawn(request_id: int, position: int) -> int:
    return (request_id * 31 + position * 17) % VOCABULARY


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    max_tokens: int
    stops: bool = False
    abort_at: int | None = None

    def expected(self, request_id: int, max_model_len: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < self.max_tokens and len(self.prompt) + len(tokens) < max_model_len:
            tokens.append(drawn(request_id, len(self.prompt) + len(tokens)))
            if self.stops and tokens[-1] == STOP:
                break
        return tokens


@dataclass
class Simulation:
    """One rank's scheduler under a script; every invariant is checked in every step."""

    engine: EngineConfig
    arrivals: list[Arrival]
    lag: bool
    requests: dict[int, Request] = field(default_factory=dict)
    written: dict[int, dict[int, int]] = field(default_factory=dict)  # block -> offset -> token whose keys lie there

    def run(self) -> Scheduler:
        pool = BlockPool(self.engine.num_blocks, self.engine.block_size)
        self.pool, self.scheduler = pool, Scheduler(self.engine, pool, ())
        in_flight = None
        step, idle = 0, 0
        while len(self.requests) < len(self.arrivals) or self.scheduler.has_work or in_flight:
            had_work = self.scheduler.has_work
            chunks = self.scheduler.schedule()
            self.check_step(chunks)
            tokens = self.launch(chunks)
            if in_flight:
                self.scheduler.commit(*in_flight)
            in_flight = (chunks, tokens) if self.lag and chunks else None
            if not self.lag:
                self.scheduler.commit(chunks, tokens)
            idle = idle + 1 if had_work and not chunks else 0
            assert idle <= 2, f"step {step}: work waits and nothing runs"
            self.take_messages(step)
            self.check_blocks()
            step += 1
            assert step < 20_000, "no end"
        return self.scheduler

    def take_messages(self, step: int) -> None:
        for number, arrival in enumerate(self.arrivals):
            if arrival.step == step:
                params = SamplingParams(
                    temperature=0, max_tokens=arrival.max_tokens, stop_token_ids=(STOP,) if arrival.stops else ()
                )
                self.requests[number] = Request(number, list(arrival.prompt), params, seed=0)
                self.scheduler.add(self.requests[number])
        for number, arrival in enumerate(self.arrivals):
            if arrival.abort_at == step:
                request = self.requests[number]
                ended = request.finish_reason is not None
                assert self.scheduler.abort(number) is (None if ended else request)
                assert not request.blocks or ended

    def launch(self, chunks: list[Chunk]) -> list[int]:
        """Write each token where its keys go; all earlier ones must lie where the request's table says."""
        size = self.engine.block_size
        tokens = []
        for chunk in chunks:
            request = chunk.request
            ids = request.prompt + [drawn(request.id, p) for p in range(len(request.prompt), chunk.start + chunk.count)]
            for p in range(chunk.start, chunk.start + chunk.count):
                self.written.setdefault(request.blocks[p // size], {})[p % size] = hash(tuple(ids[: p + 1]))
            for p in range(chunk.start + chunk.count):
                held = self.written[request.blocks[p // size]].get(p % size)
                assert held == hash(tuple(ids[: p + 1])), f"request {request.id}: position {p} is overwritten"
            if chunk.samples:
                tokens.append(drawn(request.id, chunk.position))
        return tokens

    def check_step(self, chunks: list[Chunk]) -> None:
        running = self.scheduler.running
        assert sum(chunk.count for chunk in chunks) <= self.engine.max_batch_tokens
        assert len(running) <= self.engine.max_requests
        assert len({chunk.request.id for chunk in chunks}) == len(chunks), "a request runs twice in a step"
        assert all(chunk.count > 0 and chunk.request in running for chunk in chunks)
        rows = [request.row for request in running]
        assert len(set(rows)) == len(rows) and all(0 <= row < self.engine.max_requests for row in rows)
        for chunk in chunks:
            assert len(chunk.request.blocks) == self.pool.blocks_for(chunk.request.computed)
        if running and running[0].pending == 0:
            assert any(chunk.request is running[0] for chunk in chunks), "the oldest request did not advance"

    def check_blocks(self) -> None:
        holds: dict[int, int] = {}
        for request in self.requests.values():
            assert len(set(request.blocks)) == len(request.blocks), "a request holds a block twice"
            assert not (request.blocks and request.finish_reason), "an ended request holds blocks"
            for block in request.blocks:
                holds[block] = holds.get(block, 0) + 1
        assert self.pool.num_free == self.pool.num_blocks - len(holds), "a block is neither free nor held, or both"


def check_outcome(simulation: Simulation) -> None:
    scheduler = simulation.run()
    pool = simulation.pool
    assert pool.num_free == pool.num_blocks
    assert len(scheduler._rows) == simulation.engine.max_requests
    for number, arrival in enumerate(simulation.arrivals):
        request = simulation.requests[number]
        expected = arrival.expected(number, simulation.engine.max_model_len)
        assert request.finish_reason in ("abort", "stop", "length") and request.pending == 0
        if request.finish_reason == "abort":
            assert arrival.abort_at is not None and request.output == expected[: len(request.output)]
        else:
            assert request.output == expected, number
            stopped = arrival.stops and expected[-1] == STOP
            assert request.finish_reason == ("stop" if stopped else "length")


@st.composite
def simulations(draw, with_aborts: bool = True) -> Simulation:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    max_model_len = draw(st.integers(2, 40))
    fewest = -(-max_model_len // block_size)
    max_requests = draw(st.integers(1, 6))
    engine = EngineConfig(
        model="none",
        block_size=block_size,
        max_model_len=max_model_len,
        max_requests=max_requests,
        max_batch_tokens=draw(st.integers(max_requests, 48)),
        num_blocks=draw(st.integers(fewest, 3 * fewest)),
    )
    prefixes = [list(range(20)), [1] * 40, list(range(30, 0, -1))]
    arrivals = []
    for _ in range(draw(st.integers(1, 14))):
        length = draw(st.integers(1, max_model_len - 1))
        shared = draw(st.sampled_from(prefixes))[: draw(st.integers(0, length))]
        prompt = shared + draw(
            st.lists(st.integers(0, 3), min_size=length - len(shared), max_size=length - len(shared))
        )
        arrivals.append(
            Arrival(
                step=0,
                prompt=prompt,
                max_tokens=draw(st.integers(1, 30)),
                stops=draw(st.booleans()),
                abort_at=draw(st.none() | st.integers(0, 12)) if with_aborts else None,
            )
        )
    steps = sorted(draw(st.lists(st.integers(0, 25), min_size=len(arrivals), max_size=len(arrivals))))
    arrivals = [
        Arrival(step, a.prompt, a.max_tokens, a.stops, a.abort_at if a.abort_at is None else step + a.abort_at)
        for step, a in zip(steps, arrivals)
    ]
    return Simulation(engine, arrivals, lag=draw(st.booleans()))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(simulations())
def test_any_script_ends_well(simulation):
    check_outcome(simulation)


def crowded(lag: bool, **changes) -> Simulation:
    """Eight requests that outgrow a pool for one and a half of them."""
    keys = {"block_size": 4, "max_model_len": 40, "max_requests": 8, "max_batch_tokens": 16, "num_blocks": 15}
    engine = EngineConfig(model="none", **{**keys, **changes})
    return Simulation(engine, [Arrival(0, [n] * 9, 30) for n in range(8)], lag)


@pytest.mark.parametrize("lag", [False, True])
def test_preemption_happens_and_costs_no_token(lag):
    simulation = crowded(lag)
    check_outcome(simulation)
    assert simulation.scheduler.preemptions > 0


@pytest.mark.parametrize("lag", [False, True])
def test_first_come_first_served(lag):
    """Of equal requests, one that came earlier never ends later."""
    simulation = crowded(lag)
    ended: list[int] = []

    def note_ends():
        check_blocks()
        ended.extend(n for n, r in simulation.requests.items() if r.finish_reason and n not in ended)

    check_blocks, simulation.check_blocks = simulation.check_blocks, note_ends
    check_outcome(simulation)
    assert ended == sorted(ended) and len(ended) == 8


def test_a_long_prompt_does_not_hold_up_decodes():
    """While a prompt is cut into chunks, every running decode still gets its token in every step."""
    engine = EngineConfig(
        model="none", block_size=4, max_model_len=200, max_requests=4, max_batch_tokens=8, num_blocks=200
    )
    simulation = Simulation(
        engine, [Arrival(0, [1], 40), Arrival(0, [2], 40), Arrival(3, [3] * 120, 4), Arrival(3, [4] * 50, 4)], lag=False
    )
    counts: list[dict[int, int]] = []
    check = simulation.check_step
    simulation.check_step = lambda chunks: (counts.append({c.request.id: c.count for c in chunks}), check(chunks))
    check_outcome(simulation)
    chunked = [step for step in counts if step.get(2, 0) > 1]
    assert len(chunked) >= 120 // 8 and all(step.get(0) == step.get(1) == 1 for step in chunked)
    assert max(sum(step.values()) for step in counts) == 8


def test_an_equal_prefix_is_computed_once():
    engine = EngineConfig(
        model="none", block_size=4, max_model_len=40, max_requests=4, max_batch_tokens=64, num_blocks=40
    )
    prompt = list(range(21))
    simulation = Simulation(engine, [Arrival(0, prompt, 2), Arrival(6, prompt, 2), Arrival(6, [9] + prompt, 2)], False)
    computed: dict[int, int] = {}
    check = simulation.check_step

    def count(chunks):
        for chunk in chunks:
            computed[chunk.request.id] = computed.get(chunk.request.id, 0) + chunk.count
        check(chunks)

    simulation.check_step = count
    check_outcome(simulation)
    assert computed == {0: 22, 1: 22 - 20, 2: 23}


def test_an_endless_request_weighs_as_much_as_the_longest():
    """Otherwise its rank would look full for ever, and every later request would go to the others."""
    engine = EngineConfig(model="m", max_model_len=40, num_blocks=20)
    scheduler = Scheduler(engine, BlockPool(20, engine.block_size), ())
    scheduler.add(Request(0, [1] * 30, SamplingParams(max_tokens=5), seed=0))
    scheduler.add(Request(1, [1] * 30, SamplingParams(max_tokens=(1 << 63) - 1), seed=0))
    assert scheduler.queued_tokens() == 35 + 40
