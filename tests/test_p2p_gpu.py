"""The p2p exchange on a GPU (``pytest -m gpu``): virtual ranks, then processes that share one GPU or have one each."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from drive import Script, drive, merge
from p2p_cases import Case, VirtualExchange, inputs, lockstep_ranks, lockstep_round, reference
from p2p_ranks import (
    all_rounds,
    die_in_a_round,
    drive_engine,
    lose_a_rank_in_a_step,
    over_nccl_and_p2p,
    run_ranks,
    timed,
)
from safetensors.torch import load_file, save_file

from epmoe.comm import Comm
from epmoe.config import ModelConfig
from epmoe.ops.p2p_layout import COMBINE, DISPATCH
from epmoe.ops.p2p_ranks import PutOptions
from epmoe.ops.wire import from_wire, from_wire_ref, rounded, to_wire, to_wire_ref
from placement.plan import plan_from_ranks

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
DEMO = Path(__file__).resolve().parents[1] / "epmoe" / "demo_model"
SMALL = {2: Case(2, 48, 64, 8, 1024, 8, BF16, False), 4: Case(4, 33, 48, 4, 512, 3, BF16, True)}
SMALL[8] = Case(8, 24, 32, 8, 512, 2, BF16, False)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("world,tokens,hidden", [(1, 3, 64), (3, 17, 1024), (8, 33, 7168), (8, 130, 2048)])
def test_virtual_ranks_give_the_reference(world, tokens, hidden, reduce):
    case = Case(world, tokens, tokens + 3, 2 if world == 1 else 6, hidden, 4 if world > 1 else 2, BF16, reduce)
    exchange = VirtualExchange(case, "cuda", PutOptions())
    exchange.poison()
    for seed in range(4):
        data = inputs(case, seed, "cuda", only=0 if seed == 1 else None)
        assert torch.equal(exchange.round(*data), reference(case, *data)), f"round {seed}"
    assert exchange.failure() is None


@pytest.mark.parametrize("wire", ["model", "fp8"])
@pytest.mark.parametrize("reduce", [False, True])
def test_lockstep_ranks_give_the_reference(reduce, wire):
    case = Case(4, 40, 64, 4, 1024, 5, BF16, reduce)
    exchanges = lockstep_ranks(case, "cuda", wire)
    for seed, bound in enumerate((64, 40, 50)):
        for exchange in exchanges:
            exchange.copy_from = 50
            exchange.begin_step(bound)
        data = inputs(case, seed, "cuda")
        add = torch.randn_like(data[0])
        y = lockstep_round(exchanges, case, data, seed % 2, add)
        x = data[0] if wire == "model" else rounded(data[0])
        assert torch.equal(y, reference(case, x, *data[1:], add))
    assert all(exchange.failure() is None for exchange in exchanges)


@pytest.mark.parametrize("reduce", [False, True])
def test_large_steps_by_more_programs_give_the_reference(reduce):
    case = Case(4, 300, 320, 4, 1024, 5, BF16, reduce)
    exchanges = lockstep_ranks(case, "cuda")
    for seed, beside in enumerate((False, True, False)):
        for exchange in exchanges:
            exchange.shares_sms = beside
            exchange.begin_step(case.bound)
        data = inputs(case, seed, "cuda", only=2 if seed == 2 else None)
        assert torch.equal(lockstep_round(exchanges, case, data, seed % 2), reference(case, *data))
    assert all(exchange.failure() is None for exchange in exchanges)


def test_wire_kernels_equal_their_twins():
    x = torch.randn(37, 7168, device="cuda", dtype=BF16) * torch.logspace(-4, 4, 37, device="cuda", dtype=BF16)[:, None]
    x[3, :256] = 0
    used = 7168 + 4 * 56
    wire = to_wire(x)
    assert torch.equal(wire[:, :used], to_wire_ref(x)[:, :used])
    assert torch.equal(from_wire(wire, None, 7168, BF16), from_wire_ref(wire, None, 7168, BF16))


def test_a_wait_ends_at_its_time_limit_and_the_ones_behind_it_at_once():
    exchange = VirtualExchange(Case(3, 4, 4, 2, 64, 2, BF16, False), "cuda")
    exchange.set_step(9)
    torch.cuda.synchronize()
    first = timed(lambda: exchange.wait(DISPATCH))  # nobody sent
    again = timed(lambda: [exchange.wait(COMBINE) for _ in range(20)])
    assert str(exchange.failure()) == "step 9, layer 7, dispatch: rank 0 sent no signal in time"
    assert exchange.place.limit_s <= first < exchange.place.limit_s + 8 and again < 1, (first, again)


@pytest.mark.parametrize("world", SMALL)
def test_processes_sharing_a_gpu(world):
    assert run_ranks(world, all_rounds, SMALL[world], 20, 20) == [(0, 0)] * world


@pytest.mark.soak
@pytest.mark.parametrize("world", SMALL)
def test_a_thousand_rounds(world):
    """500 eager ones, and 250 replays of two with an eager one behind every third."""
    assert run_ranks(world, all_rounds, SMALL[world], 500, 250, timeout_s=180) == [(0, 0)] * world


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("reduce", [False, True])
def test_a_gpu_for_each_rank(reduce):
    case = Case(2, 48, 64, 8, 1024, 8, BF16, reduce)
    assert run_ranks(2, all_rounds, case, 100, 100, gpus=2) == [(0, 0)] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_that_see_only_their_own_gpu():
    """As some launchers start them: both have device 0."""
    assert run_ranks(2, over_nccl_and_p2p, SMALL[2], gpus=2, own=True) == [(True, [0, 1], 0)] * 2


@pytest.mark.parametrize("graphed", [False, True])
def test_a_killed_rank_ends_the_others(graphed):
    said = run_ranks(4, die_in_a_round, SMALL[4], graphed, timeout_s=60)
    assert said.pop(1) == -9
    for message in said:
        found = re.match(r"step 3, layer 5, (dispatch|combine): rank 1 is gone, .* \((.*) s, then (.*) s\)", message)
        assert found and float(found[2]) < 10, message
        assert float(found[3]) < 2, f"a kernel spins on: {message}"


def engine_config(model: str, **more) -> dict:
    return {"model": model, "device": "cuda", "max_model_len": 256, "num_blocks": 128, "deterministic": True, **more}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The first two layers of the embedded model: processes that share a GPU wait for their turn in each."""
    folder = tmp_path_factory.mktemp("p2p")
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}), encoding="utf-8")
    layer = re.compile(r"model\.layers\.(\d+)\.")
    tensors = load_file(DEMO / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not (at := layer.match(name)) or int(at[1]) < 2}
    save_file(kept, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def script():
    random = np.random.default_rng(0)
    sampling = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    prompts = [random.integers(0, 90, n).tolist() for n in (1, 15, 17, 60)]
    return Script([(n, prompt, sampling) for n, prompt in enumerate(prompts)], want_logits=True)


@pytest.fixture(scope="module")
def alone(model, script):
    return drive(Comm(0, 1, torch.device("cuda")), engine_config(model), script)


@pytest.mark.parametrize("world", [2, 4])
def test_the_engine_draws_the_same_tokens(model, script, alone, world):
    """Decode graphs and eager prompts over p2p, bitwise in deterministic mode."""
    random, shape = np.random.default_rng(world), ModelConfig.from_folder(model).moe_shape
    ranks_LE = np.stack([random.permutation(np.arange(shape.num_experts) % world) for _ in shape.moe_layers])
    plan = plan_from_ranks(shape, world, ranks_LE).to_json()
    config = engine_config(model, ranks=world, plan=plan, exchange="p2p", combine="exact")
    results = run_ranks(world, drive_engine, config, script, timeout_s=70)
    merged = merge(results)
    assert merged.tokens == alone.tokens
    assert all(np.array_equal(logits, alone.logits[key].float().cpu().numpy()) for key, logits in merged.logits.items())
    assert all(result.report["exchange"] == "p2p" and result.report["graph_replays"] > 10 for result in results)


@pytest.mark.parametrize("graphs,seen", [(True, True), (False, True), (True, False)])
def test_the_engine_that_loses_a_rank_says_where(model, graphs, seen):
    """Step, layer and stage of what the device waited for, also where the host's next collective broke first, and where
    ends of processes do not show."""
    sampling = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    script = Script([(n, [5, 6, 7 + n], sampling) for n in range(6)])
    config = engine_config(model, graphs=graphs, ranks=4, exchange="p2p", combine="exact")
    said = run_ranks(4, lose_a_rank_in_a_step, config, script, seen)
    assert said.pop(1) == -9
    end = "is gone" if seen else "was waited for"
    for message in said:
        found = re.match(rf"step 12, layer \d+, (dispatch|combine): rank 1 {end}.* \((.*) s\)", message)
        assert found and float(found[2]) < 10, message
