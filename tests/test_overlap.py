"""Two lanes: how a step is cut, in which order lanes run, and that they change no bit."""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from drive import Script, all_blocks_free, drive, merge
from tiny_checkpoints import save_tiny

from epmoe.comm import Comm, Position
from epmoe.engine.request import Request, SamplingParams
from epmoe.engine.scheduler import Chunk, most_in_lane, split_lanes
from epmoe.model_config import ModelConfig
from epmoe.moe.overlap import (
    ARRIVE,
    ATTENTION,
    COMBINE,
    DISPATCH,
    EXPERTS,
    HEAD,
    ROUTER,
    SEND,
    SHARED,
    SUM,
    Step,
    run_lanes,
)
from placement.plan import plan_from_ranks


def chunk(number: int, count: int) -> Chunk:
    request = Request(number, [1] * 500, SamplingParams(), 0)
    return Chunk(request, 3, count, True, 3 + count)


SMALL = [list(counts) for length in (2, 3, 4) for counts in itertools.product((1, 2, 3, 4), repeat=length)]


@pytest.mark.parametrize("counts", [[], [1], [2], [500], [1, 500], [500, 1], [7, 1, 1, 30, 2, 2], *SMALL])
def test_a_step_is_cut_in_order_and_about_the_middle(counts):
    chunks = [chunk(n, count) for n, count in enumerate(counts)]
    lanes = split_lanes(chunks)
    assert len(lanes) == 2
    positions = [(c.request.id, p) for lane in lanes for c in lane for p in range(c.start, c.start + c.count)]
    assert positions == [(c.request.id, p) for c in chunks for p in range(c.start, c.start + c.count)]
    drawn = [(c.request.id, c.position) for lane in lanes for c in lane if c.samples]
    assert drawn == [(c.request.id, c.position) for c in chunks]
    sizes = [sum(c.count for c in lane) for lane in lanes]
    assert abs(sizes[0] - sizes[1]) <= max(1, sum(sizes) // 8)
    assert max(sizes) <= most_in_lane(sum(sizes)) or not sum(sizes)


def test_lanes_keep_the_turn_until_they_need_their_rows():
    seen, at = [], Position()

    def lane(name: str, layers: int):
        for layer in range(layers):
            for stage in (ATTENTION, ROUTER, DISPATCH, ARRIVE, EXPERTS, COMBINE, SUM):
                yield Step(stage, layer)
                assert (at.layer, at.stage) == (layer, stage.name)
                seen.append(f"{name}{layer} {stage.name}")
        yield Step(HEAD, -1)
        return name

    assert run_lanes([lane("a", 2), lane("b", 1), lane("c", 0)], at) == ["a", "b", "c"]
    there, back, over = (ATTENTION, ROUTER, DISPATCH), (ARRIVE, EXPERTS, COMBINE), (SUM,)
    turns = [("a0", there), ("b0", there), ("a0", back), ("b0", back), ("a0", over), ("a1", there)]
    turns += [("b0", over), ("a1", back), ("a1", over)]
    assert seen == [f"{name} {stage.name}" for name, stages in turns for stage in stages]


@pytest.mark.parametrize("world", [2, 3])
def test_two_lanes_draw_the_same_bits(tmp_path, rank_pool, world):
    """Ranks with one token, none, and many; a long prompt that is cut within a chunk."""
    model = str(save_tiny(tmp_path, "qwen2_moe", num_experts=10, top_k=3))
    lengths = [90, 1] if world == 2 else [90, 1, 7, 7, 30]
    requests = [(i, list(range(9, 9 + n)), {"temperature": 0.0, "max_tokens": 5}) for i, n in enumerate(lengths)]
    config = {"model": model, "max_model_len": 128, "num_blocks": 64, "deterministic": True}
    script = Script(requests, arrive={1: 2}, want_logits=True)
    alone = drive(Comm(0, 1, torch.device("cpu")), config, script)
    shape = ModelConfig.from_folder(model).moe_shape
    rng = np.random.default_rng(world)
    plan = plan_from_ranks(shape, world, np.stack([rng.permutation(np.arange(10) % world) for _ in shape.moe_layers]))
    config |= {"ranks": world, "plan": plan.to_json(), "overlap": "on"}
    results = rank_pool(world).run(drive, config, script)
    merged = merge(results)
    assert all_blocks_free(results)
    assert merged.tokens == alone.tokens
    assert all(torch.equal(logits, alone.logits[key]) for key, logits in merged.logits.items())


def uneven_script(seed: int, waves: int) -> Script:
    """Waves of 1 to 3 requests, of one token or a full batch of them, so that on three ranks some often have none."""
    rng = np.random.default_rng(seed)
    requests, arrive = [], {}
    for wave in range(waves):
        for _ in range(int(rng.integers(1, 4))):
            length = int(rng.choice([1, 1, 2, 40, 90]))
            prompt = rng.integers(9, 300, length).tolist()
            requests.append((len(requests), prompt, {"temperature": 0.0, "max_tokens": int(rng.integers(1, 4))}))
            arrive[len(requests) - 1] = 6 * wave
    return Script(requests, arrive)


def check_uneven(rank_pool, folder, seed: int, waves: int, exchange: str) -> None:
    config = {"model": str(folder), "ranks": 3, "max_model_len": 128, "num_blocks": 64, "max_batch_tokens": 64}
    config |= {"deterministic": True, "exchange": exchange}
    script = uneven_script(seed, waves)
    results = rank_pool(3).run(drive, config | {"overlap": "on"}, script, timeout_s=300)
    steps = list(zip(*(result.tokens_by_step for result in results)))
    assert any(sorted(step)[0] == 0 and sorted(step)[1] == 1 and sorted(step)[2] > 30 for step in steps), steps
    assert merge(results).tokens == merge(rank_pool(3).run(drive, config, script, timeout_s=300)).tokens
    assert all_blocks_free(results)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"num_hidden_layers": 2, "mlp_only_layers": []}
    return save_tiny(tmp_path_factory.mktemp("uneven"), "qwen3_moe", seed=4, **sizes)


@pytest.mark.parametrize("exchange", ["alltoall", "padded"])
def test_ranks_with_one_token_none_and_a_full_batch(rank_pool, folder, exchange):
    check_uneven(rank_pool, folder, seed=1, waves=10, exchange=exchange)


@pytest.mark.soak
def test_uneven_ranks_for_ten_minutes(rank_pool, folder):
    started, seed = time.monotonic(), 100
    while time.monotonic() - started < 600:
        check_uneven(rank_pool, folder, seed, waves=40, exchange=("alltoall", "padded", "auto")[seed % 3])
        seed += 1


class FakeStream:
    """Knows, for what is issued on it next, how far every stream must have come (a vector clock)."""

    def __init__(self, name: str) -> None:
        self.name, self.after = name, {name: 0}

    def issue(self) -> dict[str, int]:
        self.after[self.name] += 1
        return dict(self.after)

    def record_event(self) -> dict[str, int]:
        return dict(self.after)

    def wait_event(self, event: dict[str, int]) -> None:
        for name, count in event.items():
            self.after[name] = max(self.after.get(name, 0), count)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())


def test_hosts_wait_for_counts_when_compute_is_queued():
    seen = []

    def lane(number: int):
        for layer in range(2):
            for stage in (ATTENTION, ROUTER, DISPATCH, SEND, ARRIVE, EXPERTS, COMBINE, SUM):
                yield Step(stage, layer)
                seen.append((number, layer, stage.name))
        yield Step(HEAD, -1)

    run_lanes([lane(0), lane(1)], Position(), short_turns=True)
    for layer in (0, 1):
        for number, running in ((0, (1, layer, "attention")), (1, (0, layer, "experts"))):
            at = seen.index((number, layer, "send"))
            assert seen.index((number, layer, "dispatch")) < seen.index(running) < at
            other_combine = (0, layer, "combine")
            assert at < seen.index(other_combine), "rows would queue behind a combine that waits for experts"
        assert seen.index((0, layer, "send")) < seen.index((1, layer, "router"))


@pytest.mark.parametrize("counts", [False, True])
def test_streams_order_what_needs_order_and_nothing_more(monkeypatch, counts):
    """On fake streams: a stage is behind those of its lane that it needs, and beside the other lane's."""
    current = [FakeStream("compute")]
    travel = FakeStream("travel")

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    issued: dict[tuple, tuple[str, dict]] = {}
    send = (SEND,) if counts else ()
    stages = (ATTENTION, ROUTER, DISPATCH, SHARED, *send, ARRIVE, EXPERTS, COMBINE, SUM)

    def lane(number: int):
        for layer in range(2):
            for stage in stages:
                yield Step(stage, layer)
                issued[number, layer, stage.name] = current[-1].name, current[-1].issue()
        yield Step(HEAD, -1)

    run_lanes([lane(0), lane(1)], Position(), travel, short_turns=counts)

    def behind(later: tuple, earlier: tuple) -> bool:
        stream, clock = issued[earlier]
        return issued[later][1].get(stream, 0) >= clock[stream]

    for number, layer in itertools.product((0, 1), (0, 1)):
        for earlier, later in itertools.pairwise(stages):
            if later is not SHARED and earlier is not SHARED:
                assert behind((number, layer, later.name), (number, layer, earlier.name)), (earlier, later)
        assert behind((number, layer, "sum"), (number, layer, "shared"))
        assert not behind((number, layer, "shared"), (number, layer, "router"))
        for name in ("router", "dispatch", "combine", *(stage.name for stage in send)):
            assert issued[number, layer, name][0] == "travel"
    assert behind((0, 1, "attention"), (0, 0, "sum"))
    assert not behind((1, 0, "attention"), (0, 0, "dispatch"))
    assert not behind((0, 0, "experts"), (1, 0, "router")) and not behind((1, 0, "dispatch"), (0, 0, "experts"))
    assert not behind((1, 0, "experts"), (0, 0, "combine")) and not behind((0, 1, "attention"), (1, 0, "combine"))
    if counts:
        assert not behind((0, 0, "send"), (1, 0, "attention")) and not behind((1, 0, "send"), (0, 0, "experts"))
