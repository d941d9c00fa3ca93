"""Random arrivals, lengths, sampling, aborts, preemptions: every request ends, no block is lost, ranks do not show."""

from __future__ import annotations

import numpy as np
import pytest
from drive import Script
from scenario import Run, run_script
from tiny_checkpoints import save_tiny

# Room for two requests of full length, so that growing outputs preempt one another.
CONFIG = {
    "max_model_len": 48,
    "block_size": 4,
    "num_blocks": 24,
    "max_requests": 6,
    "max_batch_tokens": 24,
    "deterministic": True,
    "seed": 11,
}


def random_script(count: int, seed: int) -> Script:
    """Bursts and lulls; prompts often begin alike; one in ten is aborted, before it runs, while it runs or after."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(1, 320, 40).tolist() for _ in range(4)]
    requests, arrive, abort = [], {}, {}
    step = 0
    for number in range(count):
        length = int(rng.integers(1, 40))
        shared = prefixes[rng.integers(4)][: rng.integers(0, length)] if rng.random() < 0.5 else []
        prompt = shared + rng.integers(1, 320, length - len(shared)).tolist()
        params = {"max_tokens": int(rng.integers(1, 12)), "temperature": float(rng.choice([0.0, 0.8]))}
        if rng.random() < 0.2:
            params |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "top_k": 20}
        if rng.random() < 0.3:
            params |= {"stop_token_ids": rng.integers(0, 320, 40).tolist()}
        requests.append((number, prompt, params))
        step += int(rng.choice([0, 0, 1, 2, 12]))
        arrive[number] = step
        if rng.random() < 0.1:
            abort[number] = step + int(rng.choice([0, 1, 3, 10, 60]))
    return Script(requests, arrive, abort)


def check_outcome(script: Script, run: Run) -> None:
    """run_script has checked that all blocks are free and every request ended once; here, that it ended rightly."""
    for number, prompt, params in script.requests:
        tokens, reason = run.tokens[number], run.reasons[number]
        most = min(params["max_tokens"], CONFIG["max_model_len"] - len(prompt))
        stops = params.get("stop_token_ids", [])
        assert len(tokens) <= most and not any(token in stops for token in tokens[:-1])
        if reason == "abort":
            assert number in script.abort
        else:
            stopped = bool(tokens) and tokens[-1] in stops
            assert reason == ("stop" if stopped else "length")
            assert stopped or len(tokens) == most


def check_same(script: Script, a: Run, b: Run) -> None:
    """The same tokens; where an abort came sooner on one side, what it has is the beginning of the other's."""
    for number, _, _ in script.requests:
        shorter, longer = sorted((a.tokens[number], b.tokens[number]), key=len)
        assert longer[: len(shorter)] == shorter, number
        assert len(shorter) == len(longer) or number in script.abort, number


def soak(rank_pool, folder, count: int, timeout_s: float) -> None:
    script = random_script(count, seed=count)
    runs = []
    for world, async_steps in ((1, True), (3, True), (1, False)):
        config = {"model": str(folder), "async_steps": async_steps, **CONFIG}
        run = run_script(rank_pool(world), config, script, timeout_s=timeout_s)
        check_outcome(script, run)
        runs.append(run)
    assert runs[0].preemptions > count // 100 and min(runs[1].homes_W) > count // 6
    assert sum(reason == "abort" for reason in runs[0].reasons.values()) > count // 50
    check_same(script, runs[0], runs[1])
    check_same(script, runs[0], runs[2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"num_hidden_layers": 2, "mlp_only_layers": []}
    return save_tiny(tmp_path_factory.mktemp("soak"), "qwen3_moe", seed=4, **sizes)


def test_a_hundred_random_requests(rank_pool, folder):
    soak(rank_pool, folder, 100, 300)


@pytest.mark.soak
def test_ten_thousand_random_requests(rank_pool, folder):
    soak(rank_pool, folder, 10_000, 7200)
