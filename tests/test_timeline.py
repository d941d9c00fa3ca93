"""Timelines: what counts as hidden, the trace file, and that a run on CPU ranks shows every stage of every layer."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from cli import Run
from drive import Script
from tiny_checkpoints import save_tiny

from epmoe.comm import Comm
from epmoe.config import EngineConfig
from epmoe.engine.engine import Engine
from epmoe.engine.worker import timeline_messages
from epmoe.moe.overlap import ATTENTION, Step
from epmoe.moe.timeline import COMPUTE, TRAVEL, UNREAD, Span, Timeline, hidden_of
from launch.timeline import spans_by_rank, summary, write_timeline

LAYER = ("attention", "router", "dispatch", "shared", "arrive", "experts", "combine", "sum")


def span(stage: str, begin: float, end: float, lane: int = 0, layer: int = 0) -> Span:
    row = TRAVEL if stage in ("dispatch", "combine") else COMPUTE
    return Span(0, row, lane, layer, stage, begin, end)


def test_what_lies_beside_compute_is_hidden():
    spans = [span("dispatch", 0, 10), span("attention", 2, 5, lane=1), span("router", 4, 8, lane=1)]
    found = hidden_of([*spans, span("combine", 20, 30, layer=1)])
    assert (found[0].communication, found[0].beside, found[0].share) == (10, 6, 0.6)
    assert (found[1].communication, found[1].beside) == (10, 0)
    assert (found[-1].communication, found[-1].beside) == (20, 6)


def test_waiting_for_rows_is_no_compute():
    spans = [span("dispatch", 0, 10), span("arrive", 1, 12), span("experts", 12, 20), span("sum", 2, 8, lane=1)]
    assert hidden_of(spans)[0].beside == 0


def test_communication_of_two_lanes_at_once_counts_once():
    spans = [span("dispatch", 0, 10), span("dispatch", 5, 15, lane=1), span("attention", 0, 30)]
    assert hidden_of(spans)[-1].communication == hidden_of(spans)[-1].beside == 15


def test_steps_are_read_as_they_go(monkeypatch):
    """However long a run is, what a timeline holds is bounded, and it says that it is full."""
    monkeypatch.setattr("epmoe.moe.timeline.MOST_SPANS", 50)
    timeline = Timeline(Comm(0, 1, torch.device("cpu")))
    for step in range(200):
        timeline.comm.at.step = step
        with timeline.forward():
            timeline.begin(Step(ATTENTION, 0), 0)
            timeline.end(Step(ATTENTION, 0), 0)
    assert timeline.full and len(timeline._unread) <= UNREAD
    assert [span.step for span in timeline.read()] == list(range(50))


def _drive(comm: Comm, config: dict, script: Script) -> list[dict]:
    engine = Engine(EngineConfig.from_dict(config), comm)
    messages = [{"op": "add", "id": n, "prompt": prompt, "params": params} for n, prompt, params in script.requests]
    messages.append({"op": "stop"})
    while not engine.finished:
        engine.step(messages if comm.rank == 0 and engine.steps == 0 else [])
    return [{"rank": comm.rank, **message} for message in timeline_messages(engine)]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_run_shows_every_stage_of_every_layer(tmp_path, rank_pool, overlap):
    model = str(save_tiny(tmp_path, "qwen2_moe", num_experts=6, top_k=2))
    config = {"model": model, "ranks": 2, "max_model_len": 64, "num_blocks": 16, "overlap": overlap, "timeline": True}
    script = Script([(n, list(range(5, 25)), {"temperature": 0.0, "max_tokens": 3}) for n in range(2)])
    messages = [message for part in rank_pool(2).run(_drive, config, script) for message in part]
    path = tmp_path / "timeline.json"
    assert "stages" in write_timeline(str(path), messages)
    text = "\n".join(summary(spans_by_rank(messages)))
    assert "communication hidden" in text and "by layer" in text
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in spans)
    lanes = {"off": {0}, "on": {0, 1}}[overlap]
    steps = {event["args"]["step"] for event in spans}
    layers = {event["args"]["layer"] for event in spans if event["name"] == "dispatch"}
    seen = Counter(
        (event["pid"], event["args"]["step"], event["args"]["lane"], event["args"]["layer"], event["name"])
        for event in spans
    )
    assert set(seen.values()) == {1}
    for rank in (0, 1):
        for layer in layers:
            for name in LAYER:
                found = {(step, lane) for pid, step, lane, at, stage in seen if (pid, at, stage) == (rank, layer, name)}
                assert {step for step, _ in found} == steps and {lane for _, lane in found} == lanes, name
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {"rank 0", "rank 1"}


def test_without_a_timeline_nothing_is_kept(tmp_path):
    model = str(save_tiny(tmp_path, "qwen2_moe"))
    engine = Engine(EngineConfig(model, max_model_len=64, num_blocks=16), Comm(0, 1, torch.device("cpu")))
    assert engine.runner.decoder.timeline is None and engine.comm.on_work is None
    assert list(timeline_messages(engine)) == []


def test_generate_writes_a_timeline_and_says_what_was_hidden(tmp_path):
    file = tmp_path / "timeline.json"
    prompt = ["--prompt", "The sea", "--max-tokens", "2"]
    run = Run(tmp_path / "run", "generate", "--model", "demo", "--ranks", "2", "--timeline", str(file), *prompt)
    assert run.end() == 0, run.err
    assert "communication hidden: " in run.out and "by layer: 0 " in run.out and "fan-out " in run.out
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"attention", "dispatch", "experts", "combine", "head"} <= {event["name"] for event in events}
