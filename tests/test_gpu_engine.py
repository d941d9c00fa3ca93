"""The engine on a GPU keeps the promises that it keeps on CPU (``pytest -m gpu``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from drive import Script, all_blocks_free, drive, merge
from tiny_checkpoints import FAMILIES, save_tiny
from tokenizers import Tokenizer

from epmoe.checkpoint import load_weights
from epmoe.comm import Comm
from epmoe.config import EngineConfig
from epmoe.engine import runner
from epmoe.engine.engine import Engine
from epmoe.model_config import ModelConfig
from placement.plan import plan_from_ranks
from placement.trace import load_trace
from scripts.rank_group import on_ranks

pytestmark = pytest.mark.gpu

DEMO = Path(__file__).resolve().parents[1] / "epmoe" / "demo_model"
PROMPTS = [list(range(5, 5 + n)) for n in (1, 2, 15, 16, 17, 40, 90)]
NEW = 24
ALL = tuple(range(len(PROMPTS)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: str(save_tiny(folder / family, family, num_experts=10, top_k=3)) for family in FAMILIES}


def requests(which=ALL):
    return [(i, PROMPTS[i], {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True}) for i in which]


def run(model: str, device: str, script: Script, load=load_weights, **settings):
    comm = Comm(0, 1, torch.device(device))
    config = {"model": model, "device": device, "max_model_len": 256, "num_blocks": 128, **settings}
    return drive(comm, config, script, load=load)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_equal_the_cpu_run(checkpoints, family):
    cpu = run(checkpoints[family], "cpu", Script(requests(), want_logits=True))
    gpu = run(checkpoints[family], "cuda", Script(requests(), want_logits=True))
    assert all_blocks_free([gpu])
    assert gpu.tokens == cpu.tokens
    for key, logits in cpu.logits.items():
        torch.testing.assert_close(gpu.logits[key].cpu(), logits, rtol=0, atol=1e-4 * float(logits.abs().max()))


def test_embedded_model_agrees_with_the_cpu_run():
    """Real text."""
    token_ids = load_trace(DEMO / "trace_english.npz").token_ids_T
    check_against_cpu(
        str(DEMO), [token_ids[start : start + n].tolist() for start, n in ((0, 5), (900, 40), (3000, 130))]
    )


TEXTS = (
    "The",
    "Die Datei wird gelesen, und",
    "def main(argv):\n    return len(argv)\n\n\ndef read(path):\n    with open(path) as f:",
)


def test_real_checkpoint_agrees_with_the_cpu_run(shared_dir):
    folder = shared_dir / "models" / "small32x4"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    check_against_cpu(str(folder), [tokenizer.encode(text).ids for text in TEXTS])


def check_against_cpu(model: str, prompts: list[list[int]]) -> None:
    """Greedy tokens in float32, eager and with graphs; first logits in bfloat16."""
    params = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
    script = Script([(i, prompt, params) for i, prompt in enumerate(prompts)], want_logits=True)
    want = run(model, "cpu", script).tokens
    assert run(model, "cuda", script).tokens == want
    assert run(model, "cuda", script, graphs=False).tokens == want
    cpu, gpu = (run(model, device, script, dtype="bfloat16") for device in ("cpu", "cuda"))
    for i, prompt in enumerate(prompts):
        ours, theirs = gpu.logits[i, len(prompt)].cpu(), cpu.logits[i, len(prompt)]
        assert float((ours - theirs).abs().max()) <= 3e-2 * float(theirs.abs().max())


SAMPLED = (
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_k": 20, "seed": 6},
    {"temperature": 1.2, "top_p": 0.8, "min_p": 0.02, "seed": 7},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 8},
    {"temperature": 0.0, "presence_penalty": 0.5},
    {"temperature": 1.0, "top_k": 3, "logprobs": 4, "seed": 9},
)


@pytest.mark.parametrize("graphs", [False, True])
def test_samples_are_those_of_the_cpu(checkpoints, graphs):
    """All kinds of sampling in one batch, one step ahead of the host."""
    asked = [(i, PROMPTS[i], {"max_tokens": NEW, "ignore_eos": True, **params}) for i, params in enumerate(SAMPLED)]
    cpu = run(checkpoints["qwen3_moe"], "cpu", Script(asked))
    assert run(checkpoints["qwen3_moe"], "cuda", Script(asked), graphs=graphs).tokens == cpu.tokens


def test_host_runs_ahead_and_behind_alike(checkpoints):
    settled = run(checkpoints["qwen3_moe"], "cuda", Script(requests()), async_steps=False)
    assert run(checkpoints["qwen3_moe"], "cuda", Script(requests()), async_steps=True).tokens == settled.tokens


def test_a_decode_step_waits_for_nothing_but_its_tokens(checkpoints, monkeypatch):
    """One copy to the host a step, and no call that waits for the device besides."""
    copies = []

    class Counted(runner.HostCopy):
        def __init__(self, tensor: torch.Tensor) -> None:
            copies.append(tuple(tensor.shape))
            super().__init__(tensor)

    monkeypatch.setattr(runner, "HostCopy", Counted)
    sizes = {"max_model_len": 256, "num_blocks": 128, "max_requests": 8, "capture_at_start": True}
    engine = Engine(
        EngineConfig(model=checkpoints["qwen3_moe"], device="cuda", **sizes), Comm(0, 1, torch.device("cuda"))
    )
    kinds = [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 0.7, "top_p": 0.9}]
    engine.step(
        [
            {"op": "add", "id": i, "prompt": prompt, "params": {"max_tokens": NEW, "ignore_eos": True, **kinds[i % 3]}}
            for i, prompt in enumerate(PROMPTS)
        ]
    )
    for _ in range(4):
        engine.step([])
    copies.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [engine.step([]) for _ in range(8)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(each) for each in outputs] == [len(PROMPTS)] * 8
    assert copies == [(len(PROMPTS),)] * 8


@pytest.mark.parametrize("graphs", [False, True])
def test_a_request_without_finite_logits_ends_alone(checkpoints, graphs):
    """Its prompt has a token whose embedding is NaN, or it draws one; log-probabilities and penalties beside it."""
    model, kinds = checkpoints["qwen3_moe"], [{}, {"logprobs": 2}, {"presence_penalty": 0.5}, {"temperature": 1.0}]
    asked = [
        (i, PROMPTS[i], {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "seed": i, **kinds[i % 4]})
        for i in ALL
    ]
    want = run(model, "cuda", Script(asked), graphs=graphs).tokens
    bad = next(token for token in want[0] if token not in PROMPTS[0])

    def damaged(*where):
        weights, report = load_weights(*where)
        weights.embed[bad] = float("nan")
        return weights, report

    found = run(model, "cuda", Script(asked), load=damaged, graphs=graphs)
    assert all_blocks_free([found])
    for i, tokens in want.items():
        ends = 0 if bad in PROMPTS[i] else tokens.index(bad) + 1 if bad in tokens[:-1] else NEW
        assert found.tokens[i] == tokens[:ends], i
        assert found.reasons[i] == ("length" if ends == NEW else "error"), i
    assert "error" in found.reasons.values() and "length" in found.reasons.values()


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_draw_the_tokens_of_eager_steps(checkpoints, family):
    """Requests that come and go, so that sizes change and are padded; several captures and replays of each."""
    script = Script(requests(), arrive={4: 6, 5: 8, 6: 15}, abort={1: 20}, want_logits=True)
    eager = run(checkpoints[family], "cuda", script, graphs=False)
    graphs = run(checkpoints[family], "cuda", script)
    assert eager.report["graph_replays"] == 0 and graphs.report["graph_replays"] > NEW / 2
    assert graphs.tokens == eager.tokens and all_blocks_free([graphs])
    assert graphs.report["load_LE"] == eager.report["load_LE"], "padding was routed or counted"
    for key, logits in eager.logits.items():
        torch.testing.assert_close(graphs.logits[key], logits, rtol=0, atol=1e-4 * float(logits.abs().max()))


def test_no_step_waits_for_a_capture_made_at_start(checkpoints):
    """All sizes, before the first request; nothing that they ran on counts."""
    script = Script(requests(), arrive={4: 6, 5: 8, 6: 15}, abort={1: 20}, want_logits=True)
    late = run(checkpoints["qwen3_moe"], "cuda", script)
    early = run(checkpoints["qwen3_moe"], "cuda", script, capture_at_start=True, max_requests=20)
    assert late.report["graphs_captured_late"] > 0 == late.report["graphs_at_start"]["graphs"]
    assert early.report["graphs_captured_late"] == 0 < early.report["graphs_at_start"]["graphs"]
    assert early.tokens == late.tokens and all_blocks_free([early])
    assert early.report["load_LE"] == late.report["load_LE"] and early.report["active_L"] == late.report["active_L"]
    for key, logits in late.logits.items():
        torch.testing.assert_close(early.logits[key], logits, rtol=0, atol=1e-4 * float(logits.abs().max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_mode_is_bitwise(checkpoints, family, dtype):
    """Alone, in a full batch, in chunks of 7, after preemption, without graphs: the same bits."""
    settings = {"dtype": dtype, "deterministic": True}
    batch = run(checkpoints[family], "cuda", Script(requests(), want_logits=True), **settings)
    others = [run(checkpoints[family], "cuda", Script(requests([i]), want_logits=True), **settings) for i in (2, 5, 6)]
    chunked = {"max_batch_tokens": 7, "max_requests": 7}
    others.append(run(checkpoints[family], "cuda", Script(requests(), want_logits=True), **settings, **chunked))
    tight = {"num_blocks": 16, "max_requests": 7}
    others.append(run(checkpoints[family], "cuda", Script(requests(), want_logits=True), **settings, **tight))
    others.append(run(checkpoints[family], "cuda", Script(requests(), want_logits=True), **settings, graphs=False))
    for other in others:
        for key, logits in other.logits.items():
            assert torch.equal(logits, batch.logits[key]), f"request {key[0]}, position {key[1]}"


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_gpu_draw_the_same_tokens(checkpoints, rank_pool, world):
    """Over gloo with CUDA tensors; bitwise in deterministic mode."""
    model = checkpoints["qwen3_moe"]
    alone = run(model, "cuda", Script(requests(), want_logits=True), deterministic=True)
    shape = ModelConfig.from_folder(model).moe_shape
    rng = np.random.default_rng(world)
    plan = plan_from_ranks(shape, world, np.stack([rng.permutation(np.arange(10) % world) for _ in shape.moe_layers]))
    config = {"model": model, "device": "cuda", "max_model_len": 256, "num_blocks": 128, "deterministic": True}
    script = Script(requests(), want_logits=True)
    results = rank_pool(world).run(drive_on_gpu, {**config, "ranks": world, "plan": plan.to_json()}, script)
    merged = merge(results)
    assert merged.tokens == alone.tokens
    assert all(torch.equal(logits, alone.logits[key].cpu()) for key, logits in merged.logits.items())


def drive_on_gpu(comm: Comm, config: dict, script: Script):
    """``drive`` with this rank's tensors on the GPU that all ranks share."""
    result = drive(Comm(comm.rank, comm.world, torch.device("cuda", 0), comm.data, comm.control), config, script)
    result.logits = {key: logits.cpu() for key, logits in result.logits.items()}
    return result


@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize("exchange", ["alltoall", "padded", "p2p"])
def test_two_gpus_draw_the_tokens_of_one(checkpoints, exchange, at_start, tmp_path):
    """Steps are graphs where the exchange can be captured: both ranks replay the same sizes, or none does."""
    if torch.cuda.device_count() < 2:
        pytest.skip("left out: one GPU")
    model, script = checkpoints["qwen3_moe"], Script(requests(), arrive={4: 6, 5: 8, 6: 15})
    alone = run(model, "cuda", Script(requests()))
    config = {
        "model": model,
        "device": "cuda",
        "max_model_len": 256,
        "num_blocks": 128,
        "ranks": 2,
        "exchange": exchange,
        "capture_at_start": at_start,
        "max_requests": 16,
    }
    on_ranks(2, "cuda", drive_to_file, config, script, str(tmp_path), limit_s=120)
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert merge(results).tokens == alone.tokens and all_blocks_free(results)
    replays = [result.report["graph_replays"] for result in results]
    assert replays[0] == replays[1] and (replays[0] > NEW / 2) == (exchange != "alltoall"), replays


def drive_to_file(comm: Comm, config: dict, script: Script, folder: str) -> None:
    torch.save(drive(comm, config, script), Path(folder) / f"{comm.rank}.pt")
