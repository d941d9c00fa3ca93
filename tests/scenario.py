"""Runs a script of requests on W ranks and gathers tokens and logits; plans at random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from drive import Script, all_blocks_free, drive, merge

from epmoe.model_config import ModelConfig
from placement.plan import Plan, make_plan


@dataclass(frozen=True)
class Run:
    """What a script came to: tokens and finish reasons by request, logits float32 ``[V]`` by (request, position)."""

    tokens: dict[int, list[int]]
    reasons: dict[int, str]
    logits: dict[tuple[int, int], torch.Tensor]
    preemptions: int
    moved: int  # requests that a probe sent to another rank
    computed: int  # tokens that went through the model, on all ranks
    homes_W: list[int]  # requests that ended on each rank


def run_script(pool, config: dict, script: Script, threads: int = 1, timeout_s: float = 300) -> Run:
    """On every rank of ``pool``; all blocks must be free at the end and every request ended."""
    results = pool.run(_drive, {**config, "ranks": pool.world}, script, threads, timeout_s=timeout_s)
    for result in results:
        keys, rows = result.logits
        result.logits = dict(zip(keys, torch.from_numpy(rows)))
    assert all_blocks_free(results), [result.report for result in results]
    merged = merge(results)
    assert merged.reasons.keys() == {number for number, _, _ in script.requests}
    return Run(
        tokens=merged.tokens,
        reasons=merged.reasons,
        logits=merged.logits,
        preemptions=sum(result.report["preemptions"] for result in results),
        moved=sum(result.report["moved_after_probe"] for result in results),
        computed=sum(sum(result.tokens_by_step) for result in results),
        homes_W=[len(result.homes) for result in results],
    )


def _drive(comm, config: dict, script: Script, threads: int):
    torch.set_num_threads(threads)
    try:
        result = drive(comm, config, script)
    finally:
        torch.set_num_threads(1)
    rows = [row.numpy() for row in result.logits.values()]
    result.logits = (list(result.logits), np.stack(rows) if rows else np.empty((0, 0), np.float32))  # pickled as bytes
    return result


def random_plan(folder: Path, ranks: int, seed: int, copies: float = 0.0) -> str:
    """Text of a plan: experts on random ranks in random slots, each rank at least one; each expert gets a second copy
    (on another rank) with probability ``copies``."""
    rng = np.random.default_rng(seed)
    shape = ModelConfig.from_folder(folder).moe_shape
    layers = []
    for _ in range(shape.num_layers):
        held = [[] for _ in range(ranks)]
        for n, expert in enumerate(rng.permutation(shape.num_experts)):
            held[n if n < ranks else rng.integers(ranks)].append(expert)
        for expert in range(shape.num_experts):
            free = [rank for rank in range(ranks) if expert not in held[rank]]
            if free and rng.random() < copies:
                held[rng.choice(free)].append(expert)
        layers.append(held)
    plan: Plan = make_plan(shape, ranks, layers, made_by="random")
    return plan.to_json()
