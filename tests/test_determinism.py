"""Batching and placement never change a token; in deterministic mode they never change a bit of a logit.

The yardstick is each request alone on one rank.  Everything else (ranks, placements, replicas, batch, chunks, prefix
hits, preemption) must give the same logits at the same positions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drive import Script
from scenario import Run, random_plan, run_script
from tiny_checkpoints import save_tiny

BLOCK = 4
MAX_LEN = 96
SHARED_PREFIX = list(range(1, 25))  # six blocks
MODES = [(torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 1), (torch.bfloat16, 2)]
# (ranks, seed, share of experts with a second copy): two of the five placements have replicas
PLACEMENTS = [(2, 1, 0.0), (2, 2, 0.5), (4, 3, 0.0), (4, 4, 0.5), (4, 5, 0.0)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    sizes = {"qwen2_moe": {"num_experts": 10, "top_k": 3}}
    return {
        family: save_tiny(tmp_path_factory.mktemp(family), family, seed=3, **sizes.get(family, {}))
        for family in ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe")
    }


def script(max_tokens: int = 8) -> Script:
    """Seven requests: one token, a context past a tile of 64 keys, and three with a prefix in common."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 320, length).tolist() for length in (1, 7, 16, 64)]
    prompts += [SHARED_PREFIX + rng.integers(1, 320, length).tolist() for length in (1, 5, 17)]
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return Script([(number, prompt, params) for number, prompt in enumerate(prompts)], want_logits=True)


def run(pool, folder: Path, script: Script, threads: int = 1, **settings) -> Run:
    config = {"model": str(folder), "max_model_len": MAX_LEN, "block_size": BLOCK, "dtype": "float32", **settings}
    return run_script(pool, config, script, threads)


def alone(pool, folder: Path, script: Script, threads: int = 1, **settings) -> Run:
    """Each request by itself, on a cache that has seen nothing."""
    runs = [run(pool, folder, replace(script, requests=[r]), threads, **settings) for r in script.requests]
    tokens, logits = {}, {}
    for some in runs:
        tokens |= some.tokens
        logits |= some.logits
    return replace(runs[0], tokens=tokens, logits=logits)


def difference(a: Run, b: Run) -> float:
    """Largest difference of two runs' logits over the largest logit; the same positions must have been drawn."""
    assert a.logits.keys() == b.logits.keys()
    rows_a, rows_b = (torch.stack([some.logits[key] for key in sorted(a.logits)]) for some in (a, b))
    return ((rows_a - rows_b).abs().max() / rows_b.abs().max()).item()


def ways(rank_pool, folder: Path, script: Script, threads: int, *, brief: bool = False, **settings):
    """(name, run) of the script in every way that must not matter; if ``brief``, in the most telling ones."""
    one = rank_pool(1)

    def go(pool, script=script, **more):
        return run(pool, folder, script, threads, **{**settings, **more})

    crowded = {"num_blocks": MAX_LEN // BLOCK, "max_batch_tokens": 7, "max_requests": 3}
    yield "full batch", go(one)
    yield "2 ranks, all at once", go(rank_pool(2), plan=random_plan(folder, 2, 6, 0.5), **crowded)
    if brief:
        return
    yield "host one step ahead", go(one, async_steps=not settings.get("async_steps", True))
    for tokens, requests in ((1, 1), (7, 3), (64, 64)):
        yield f"chunks of {tokens}", go(one, max_batch_tokens=tokens, max_requests=requests)
    late = replace(script, arrive={number: 10 * number for number, _, _ in script.requests})
    hit = go(one, late)
    fresh = sum(len(prompt) + params["max_tokens"] - 1 for _, prompt, params in script.requests)
    assert hit.computed == fresh - 2 * len(SHARED_PREFIX), "the prefix was not found in the cache twice"
    yield "prefix hit", hit
    preempted = go(one, num_blocks=MAX_LEN // BLOCK)
    assert preempted.preemptions > 0
    yield "preemption", preempted
    for world, seed, copies in PLACEMENTS:
        yield f"{world} ranks, plan {seed}", go(rank_pool(world), plan=random_plan(folder, world, seed, copies))
    plans = {seed: random_plan(folder, 2, seed, 0.5) for seed in (6, 10)}
    probed = {seed: go(rank_pool(2), plan=plan, probe_tokens=4) for seed, plan in plans.items()}
    assert sum(some.moved for some in probed.values()), "no request changed its home"
    for seed, some in probed.items():
        yield f"homes chosen after a probe of 4 tokens, plan {seed}", some


def require_bitwise(rank_pool, folder: Path, dtype: torch.dtype, threads: int, *, brief: bool = False) -> None:
    settings = {"deterministic": True, "dtype": str(dtype).removeprefix("torch.")}
    yardstick = alone(rank_pool(1), folder, script(), threads, **settings)
    for name, some in ways(rank_pool, folder, script(), threads, brief=brief, **settings):
        assert difference(some, yardstick) == 0, name
        assert some.tokens == yardstick.tokens, name


# Shared experts with a gate, biases, a dense layer: the family with most parts.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_deterministic_mode_is_bitwise(rank_pool, checkpoints, dtype):
    require_bitwise(rank_pool, checkpoints["qwen2_moe"], dtype, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_deterministic_mode_is_bitwise_with_two_threads(rank_pool, checkpoints, dtype):
    require_bitwise(rank_pool, checkpoints["qwen2_moe"], dtype, 2, brief=True)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe"])
@pytest.mark.parametrize("dtype, threads", MODES, ids=lambda value: str(value).removeprefix("torch."))
def test_deterministic_mode_is_bitwise_in_every_way(rank_pool, checkpoints, family, dtype, threads):
    require_bitwise(rank_pool, checkpoints[family], dtype, threads)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_deterministic_mode_is_bitwise_in_every_family(rank_pool, checkpoints, family):
    require_bitwise(rank_pool, checkpoints[family], torch.float32, 1, brief=True)


@pytest.mark.parametrize("brief", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["some ways", "every way"])
@pytest.mark.parametrize("combine", ["exact", "reduce"])
def test_ordinary_mode_agrees_to_rounding(rank_pool, shared_dir, combine, brief):
    folder = shared_dir / "models" / "small32x4"
    yardstick = alone(rank_pool(1), folder, script(), combine=combine)
    for name, some in ways(rank_pool, folder, script(), 1, brief=brief, combine=combine):
        assert some.tokens == yardstick.tokens, name
        error = difference(some, yardstick)
        assert error <= 1e-6, f"{name}: largest difference {error:.1e} of the largest logit"


@pytest.mark.parametrize("combine", ["exact", "reduce"])
def test_ordinary_mode_draws_the_same_tokens(rank_pool, checkpoints, combine):
    """These random models amplify rounding (transformers' float32 is up to 4e-5 from its float64): tokens only."""
    folder = checkpoints["qwen3_moe"]
    yardstick = alone(rank_pool(1), folder, script(), combine=combine)
    for name, some in ways(rank_pool, folder, script(), 1, combine=combine):
        assert some.tokens == yardstick.tokens, name
