"""Which graph a step runs, and the buffers its inputs travel in."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from epmoe.config import EngineConfig
from epmoe.engine.agreement import HEADER_MOVES, Header, Kind, agreed_kind, graph_sizes, padded_size, prompt_sizes
from epmoe.engine.graphs import Captured, Parts, StepGraphs
from epmoe.engine.prompt_graphs import halves
from epmoe.engine.request import Request, SamplingParams
from epmoe.engine.scheduler import Chunk
from epmoe.engine.staging import HostCopy, Staging, buffer_bytes, views


@pytest.mark.parametrize("most", [1, 2, 3, 8, 64, 100, 256, 1000])
def test_padding_wastes_little(most):
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most
    for count in range(1, most + 1):
        size = padded_size(count, sizes)
        assert count <= size <= max(count + 7, 1.25 * count)
    assert padded_size(1, sizes) == 1, "one sequence has kernels of its own"


def header(tokens: int, decodes: bool, homes=()) -> Header:
    return Header(3, tokens, int(decodes), 1, 100, 7, 0, homes)


def test_all_ranks_run_the_same_kind_of_step():
    """A graph only if every rank can, of the busiest rank's size; a rank without tokens can."""
    engine = EngineConfig("model", device="cuda", max_requests=64)
    assert agreed_kind([header(5, True), header(0, True)], engine, True) == Kind(1, 8, 8)
    assert agreed_kind([header(5, True), header(9, False)], engine, True) == Kind(1, 16, prompt=True)
    assert agreed_kind([header(5, True), header(9, False)], engine, False) == Kind(1, 9)
    assert agreed_kind([header(5, True), header(64, True)], engine, True) == Kind(1, 64, 64)
    assert agreed_kind([header(5, True), header(6, True)], engine, False) == Kind(1, 6)
    assert agreed_kind([header(0, True), header(0, True)], engine, True) is None
    two = EngineConfig("model", device="cuda", max_requests=64, overlap="on")
    assert agreed_kind([header(5, False), header(1500, True)], two, True) == Kind(2, 768, prompt=True)
    assert agreed_kind([header(5, False), header(9, True)], two, False).lanes == 2
    for without in ({"deterministic": True}, {"record_tokens": 5}, {"probe_tokens": 5}):
        assert not agreed_kind([header(9, False)], replace(engine, **without), True).prompt


@pytest.mark.parametrize("budget", [1, 3, 16, 100, 2048, 8192, 10_000])
def test_steps_with_prompts_are_padded_little(budget):
    sizes = prompt_sizes(budget)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == budget
    for count in range(1, budget + 1, max(1, budget // 500)):
        assert count <= padded_size(count, sizes) <= max(16, 2 * count, count + budget // 8 + 1)


@pytest.mark.parametrize("counts", [[], [1], [2], [5, 1], [1, 1, 1], [3, 9, 1, 4]])
def test_halves_of_a_step_are_even_and_in_order(counts):
    chunks = [
        Chunk(Request(n, [1] * 50, SamplingParams(), 0), 3, count, True, 3 + count) for n, count in enumerate(counts)
    ]
    parts = halves(chunks)
    sizes = [sum(chunk.count for chunk in part) for part in parts]
    assert sum(sizes) == sum(counts) and 0 <= sizes[0] - sizes[1] <= 1
    places = [(c.request.id, p) for part in parts for c in part for p in range(c.start, c.start + c.count)]
    assert places == [(c.request.id, p) for c in chunks for p in range(c.start, c.start + c.count)]
    assert [c.request.id for part in parts for c in part if c.samples] == [c.request.id for c in chunks]


def test_headers_travel_whole():
    for homes in ((), tuple((n, n % 3) for n in range(HEADER_MOVES))):
        assert Header.unpack(header(9, True, homes).pack()) == header(9, True, homes)


def test_inputs_arrive_as_they_were():
    arrays = [np.arange(5), np.array([[1.5, 2.5]], np.float32), np.zeros((0, 3), np.int32), np.array([True, False])]
    for array, tensor in zip(arrays, Staging(torch.device("cpu")).upload(arrays)):
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
    buffer = torch.zeros(buffer_bytes(arrays), dtype=torch.uint8)
    parts = views(buffer, arrays)
    for part, array in zip(parts, arrays):
        part.copy_(torch.from_numpy(array))
    assert [part.data_ptr() % 16 for part in parts if part.numel()] == [buffer.data_ptr() % 16] * 3
    for part, array in zip(parts, arrays):
        assert np.array_equal(part.numpy(), array), "parts of one buffer overlap"


class Told(StepGraphs[str]):
    """Graphs whose steps say what happens to them."""

    def __init__(self, told: list) -> None:
        exchange = SimpleNamespace(comm=SimpleNamespace(at=SimpleNamespace(stage="")))
        decoder = SimpleNamespace(timeline=None, exchange=exchange)
        super().__init__(Parts(decoder, torch.empty(0), None, None, torch.empty(0), None))
        self.told = told

    def _step(self, at: Captured[str]) -> int:
        self.told.append(at.inputs)
        return len(self.told)


def made(events: list) -> SimpleNamespace:
    return SimpleNamespace(replay=lambda: events.append("replay"), reset=lambda: events.append("freed"))


@pytest.fixture
def told(monkeypatch) -> list:
    """What happens on a device that is not there."""
    events: list = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made(events))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, capture_error_mode: nullcontext())
    return events


def test_a_size_is_eager_then_captured_then_replayed(told):
    graphs, array = Told(told), np.zeros(3, np.int64)
    small, large = (graphs._keep(size, [array], lambda views, size=size: f"step of {size}") for size in (1, 2))
    assert graphs._captured == {1: small, 2: large} and small.buffer.numel() >= array.nbytes
    assert graphs._run(small) == 1 and (graphs.replays, graphs.late) == (0, 0)
    assert graphs._run(small) == 2, "a replay returns what its capture did"
    assert graphs._run(large) == 4 and graphs._run(small) == 2
    assert told == ["step of 1", "step of 1", "replay", "step of 2", "replay"]
    assert (graphs.replays, graphs.late) == (2, 1)


def test_graphs_are_freed_at_the_end(told):
    """Those that captured collectives hold their communicator: NCCL waits for them before it frees it."""
    graphs = Told(told)
    captured, warm = (graphs._keep(size, [], lambda views, size=size: f"step of {size}") for size in (1, 2))
    for at in (captured, captured, warm):
        graphs._run(at)
    told.clear()
    graphs.close()
    assert told == ["freed"] and not graphs._captured


def test_a_timeline_that_comes_later_captures_once_more(told):
    timeline = SimpleNamespace(
        captured=lambda: nullcontext("marks"),
        before=lambda marks: told.append(f"before {marks}"),
        ran=lambda marks: told.append(f"ran {marks}"),
    )
    graphs = Told(told)
    at = graphs._keep(1, [], lambda views: "step")
    for _ in range(2):
        graphs._run(at)
    graphs.decoder.timeline = timeline
    told.clear()
    for _ in range(2):
        graphs._run(at)
    assert told == ["step", *2 * ["before marks", "replay", "ran marks"]] and graphs.late == 2


@pytest.mark.gpu
def test_buffers_take_turns_on_a_gpu():
    """Many uploads in a row into one place, each read by the device after the host has moved on."""
    staging = Staging(torch.device("cuda"))
    place = torch.zeros(buffer_bytes([np.zeros(1000, np.int64)]), dtype=torch.uint8, device="cuda")
    (there,) = views(place, [np.zeros(1000, np.int64)])
    kept = []
    for n in range(50):
        staging.refill(place, [np.full(1000, n)])
        torch.cuda._sleep(100_000)
        kept.append(HostCopy(there + 1))
    assert [copy.numpy().tolist() for copy in kept] == [[n + 1] * 1000 for n in range(50)]
