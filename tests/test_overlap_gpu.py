"""Two lanes and timelines on a GPU, also with ranks that share one (``pytest -m gpu``)."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
import torch
from drive import Script, all_blocks_free, drive, merge
from test_overlap import uneven_script
from tiny_checkpoints import save_tiny

from epmoe.comm import Comm
from epmoe.config import EngineConfig
from epmoe.engine.engine import Engine
from epmoe.model_config import ModelConfig
from epmoe.moe.timeline import hidden_of
from epmoe.ops.blas import blas_sms
from placement.plan import plan_from_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: no GPU")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("overlap"), "qwen2_moe", num_experts=10, top_k=3))


def settings(model: str, **more) -> dict:
    sizes = {"max_model_len": 128, "num_blocks": 64}
    return {"model": model, "device": "cuda", "deterministic": True, **sizes, **more}


def drive_here(comm: Comm, config: dict, script: Script):
    result = drive(comm, config, script)
    result.logits = {key: logits.cpu() for key, logits in result.logits.items()}
    return result


@pytest.mark.parametrize("exchange", ["alltoall", "p2p", "padded"])
def test_two_lanes_draw_the_same_bits(gpu_pair, model, exchange):
    prompts = [list(range(9, 9 + n)) for n in (90, 1, 30, 7)]
    requests = [(i, prompt, {"temperature": 0.0, "max_tokens": 6}) for i, prompt in enumerate(prompts)]
    script = Script(requests, arrive={1: 2}, want_logits=True)
    alone = drive_here(Comm(0, 1, torch.device("cuda", 0)), settings(model), script)
    shape = ModelConfig.from_folder(model).moe_shape
    rng = np.random.default_rng(5)
    plan = plan_from_ranks(shape, 2, np.stack([rng.permutation(np.arange(10) % 2) for _ in shape.moe_layers]))
    config = settings(model, ranks=2, plan=plan.to_json(), exchange=exchange, overlap="on")
    results = gpu_pair.run(drive_here, config, script, timeout_s=200)
    merged = merge(results)
    assert all_blocks_free(results) and merged.tokens == alone.tokens
    assert all(torch.equal(logits, alone.logits[key]) for key, logits in merged.logits.items())


def check_uneven(pool, model: str, seed: int, waves: int, how: dict) -> None:
    config = settings(model, ranks=2, max_batch_tokens=64, dtype="float32", **how)
    script = uneven_script(seed, waves)
    lanes, plain = (
        merge(pool.run(drive_here, config | {"overlap": overlap}, script, timeout_s=300)) for overlap in ("on", "off")
    )
    assert lanes.tokens == plain.tokens


@pytest.mark.soak
@pytest.mark.parametrize(
    "how",
    [
        {"exchange": "p2p"},
        {"exchange": "alltoall"},
        {"exchange": "p2p", "deterministic": False},  # steps with prompts are graphs too
    ],
    ids=["p2p", "alltoall", "graphs"],
)
def test_uneven_ranks_for_three_minutes(gpu_pair, model, how):
    """A minute each."""
    started, seed = time.monotonic(), 1
    while time.monotonic() - started < 60:
        check_uneven(gpu_pair, model, seed, 12, how)
        seed += 1
    print(f"{seed - 1} scripts")


def timed(comm: Comm, config: dict) -> tuple[list, list]:
    """Spans of a run, of its eager steps and its replayed ones."""
    engine = Engine(EngineConfig.from_dict(config), comm)
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    messages = [{"op": "add", "id": n, "prompt": [5, 6, 7], "params": params} for n in range(2)] + [{"op": "stop"}]
    replayed = set()
    while not engine.finished:
        before = engine.runner.graphs.replays if engine.runner.graphs else 0
        step = engine.steps
        engine.step(messages if comm.rank == 0 and step == 0 else [])
        if engine.runner.graphs and engine.runner.graphs.replays > before:
            replayed.add(step)
    spans = engine.runner.decoder.timeline.read()
    return [s for s in spans if s.step not in replayed], [s for s in spans if s.step in replayed]


def check_spans(spans: list) -> None:
    """Once per step, lane, layer and stage, in order of time on the lane."""
    seen = Counter((s.step, s.lane, s.layer, s.stage) for s in spans)
    assert spans and set(seen.values()) == {1}
    by_stage = {(s.step, s.lane, s.layer, s.stage): s for s in spans}
    for s in spans:
        assert s.end >= s.begin
        if s.stage == "experts":
            dispatch, combine = (by_stage[s.step, s.lane, s.layer, name] for name in ("dispatch", "combine"))
            assert dispatch.begin <= s.begin <= s.end <= combine.begin + 5


def test_timeline_of_graph_replays(model):
    config = settings(model, timeline=True)
    eager, replayed = timed(Comm(0, 1, torch.device("cuda", 0)), config)
    check_spans(eager)
    check_spans(replayed)
    starts = sorted((s.step, s.begin) for s in replayed if s.stage == "embed")
    assert len(starts) > 5 and all(a[1] < b[1] for a, b in zip(starts, starts[1:])), "replays share their times"


@pytest.mark.parametrize("exchange", ["p2p", "alltoall"])
def test_timeline_of_two_lanes(gpu_pair, model, exchange):
    config = settings(model, ranks=2, timeline=True, overlap="on", graphs=False, exchange=exchange)
    for spans, _ in gpu_pair.run(timed, config, timeout_s=200):
        check_spans(spans)
        assert {s.row for s in spans if s.stage in ("router", "dispatch", "combine")} == {"travel"}
        found = hidden_of(spans)[-1]
        assert 0 <= found.beside <= found.communication


def test_an_engine_sums_products_in_float32(model):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    Engine(EngineConfig.from_dict(settings(model)), Comm(0, 1, torch.device("cuda", 0)))
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_fewer_sms_for_blas_change_no_more_than_rounding():
    x, weight = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    want = torch.nn.functional.linear(x.double(), weight.double())
    for sms in (0, 16, 116):
        with blas_sms(sms):
            out = torch.nn.functional.linear(x, weight)
        assert float((out.double() - want).norm() / want.norm()) < 4e-3
