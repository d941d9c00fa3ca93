"""Steps with prompts as CUDA graphs (``pytest -m gpu``): the tokens of steps launched from the host, in both lanes."""

from __future__ import annotations

from collections import Counter

import prompt_cases
import pytest
import torch
from drive import Script, all_blocks_free, drive, merge
from tiny_checkpoints import CALM, save_tiny

from epmoe.comm import Comm
from epmoe.config import EngineConfig
from epmoe.engine.engine import Engine
from epmoe.moe.timeline import Timeline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: no GPU")]
LENGTHS = (90, 1, 30, 7, 64, 33, 2, 80) * 3
BOUND = 1e-6  # of a position's largest logit, between two float32 runs; 6e-7 is seen
PROMPTS = [list(range(9 + number, 9 + number + length)) for number, length in enumerate(LENGTHS)]
SCRIPT = Script(
    [(n, prompt, {"temperature": 0.0, "max_tokens": 5}) for n, prompt in enumerate(PROMPTS)],
    arrive={n: 2 * (n // 2) for n in range(len(PROMPTS))},
    want_logits=True,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Scores reach 30: attention in float32 is 2e-6 off, logits 1e-5, also those of transformers.  Tokens count."""
    return str(save_tiny(tmp_path_factory.mktemp("prompts"), "qwen2_moe", num_experts=10, top_k=3))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Amplifies rounding no more than a trained model does: logits count."""
    return str(save_tiny(tmp_path_factory.mktemp("calm"), "qwen2_moe", num_experts=10, top_k=3, scale=CALM))


@pytest.mark.parametrize(("heads", "dtype"), [((4, 2, 24), torch.float32), ((32, 4, 128), torch.bfloat16)], ids=str)
def test_attention_in_refilled_buffers(heads, dtype):
    prompt_cases.check_prompt_batch(heads, dtype, "cuda")


def run(comm: Comm, config: dict):
    result = drive(comm, config, SCRIPT)
    result.logits = {key: logits.cpu() for key, logits in result.logits.items()}
    return result


def settings(model: str, **more) -> dict:
    sizes = {"max_model_len": 128, "num_blocks": 96, "max_batch_tokens": 64, "max_requests": 8}
    return {"model": model, "device": "cuda", "dtype": "float32", **sizes, **more}


@pytest.fixture(scope="module")
def alone(model, calm):
    """Runs of both models on one rank, launched from the host."""
    comm = Comm(0, 1, torch.device("cuda", 0))
    return {folder: run(comm, settings(folder, graphs=False)) for folder in (model, calm)}


def require_same(got, want, logits: bool) -> None:
    assert got.tokens == want.tokens
    for key, expected in want.logits.items() if logits else ():
        error = (got.logits[key] - expected).abs().max() / expected.abs().max()
        assert error < BOUND, f"request {key[0]}, position {key[1]}: {error}"


def test_one_rank(calm, alone):
    for folder, want in alone.items():
        result = run(Comm(0, 1, torch.device("cuda", 0)), settings(folder))
        require_same(result, want, folder == calm)
        assert result.report["prompt_graph_replays"] >= 5 and all_blocks_free([result])


@pytest.mark.parametrize("exchange,overlap", [("p2p", "on"), ("p2p", "off"), ("p2p", "auto"), ("alltoall", "on")])
def test_two_ranks(gpu_pair, calm, alone, exchange, overlap):
    for folder, want in alone.items():
        results = gpu_pair.run(run, settings(folder, ranks=2, exchange=exchange, overlap=overlap), timeout_s=200)
        require_same(merge(results), want, folder == calm)
        assert all_blocks_free(results)
        replays = [result.report["prompt_graph_replays"] for result in results]
        assert min(replays) >= 5 if exchange == "p2p" else max(replays) == 0


def test_a_timeline_that_comes_later_sees_replays(model):
    """Graphs that were captured without one are captured anew."""
    engine = Engine(EngineConfig.from_dict(settings(model)), Comm(0, 1, torch.device("cuda", 0)))
    params = {"temperature": 0.0, "max_tokens": 4}
    for number in range(4):
        if number == 3:
            engine.runner.decoder.timeline = timeline = Timeline(engine.comm)
        prompt = list(range(9 + 50 * number, 49 + 50 * number))
        engine.step([{"op": "add", "id": number, "prompt": prompt, "params": params}])
        while not engine.idle:
            engine.step([])
    replays = engine.runner.prompts.replays + engine.runner.graphs.replays
    seen = Counter((span.step, span.layer, span.stage) for span in timeline.read())
    assert replays >= 8 and set(seen.values()) == {1}
    assert sum(stage == "experts" for _, _, stage in seen) == 4 * len(engine.model.moe_layers)
