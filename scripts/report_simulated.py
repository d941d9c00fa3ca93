"""What ``epmoe-placement simulate`` says of the model of multi_gpu_report.py, calibrated on its linear plan."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context

import numpy as np
from report_model import Work, homes_of
from report_replay import model_folder

from epmoe.model_config import ModelConfig
from placement.cost import Calibration, evaluate
from placement.plan import Plan
from placement.simulate import simulate
from placement.trace import join


def nominal(config: ModelConfig, step_tokens: float, rehearse: bool) -> Calibration:
    """Costs as the shapes say them, for plans that are made before anything was measured."""
    row_bytes = config.hidden_size * (4 if rehearse else 2)
    return Calibration(
        dispatch_row_bytes=row_bytes + 8 * config.top_k, combine_row_bytes=row_bytes,
        pair_seconds=6 * config.hidden_size * config.moe_intermediate_size / (5e10 if rehearse else 5e14),
        layer_seconds=0.0, step_tokens=float(step_tokens),
    )  # fmt: skip


def calibrated(work: Work, row: dict) -> Calibration:
    """From what was measured with the linear plan: seconds of a pair from its experts' time, the hidden share from its
    timeline (both as the shapes say where stages were not timed), and the rest of a layer so that its tokens a second
    are met."""
    config = ModelConfig.from_folder(model_folder(work.train, work.rehearse))
    plan = work.plans["linear"]
    pairs = work.rounds * work.held.num_tokens * config.top_k * work.held.shape.num_layers / plan.ranks
    calibration = nominal(config, work.prefill_tokens * plan.ranks, work.rehearse)
    if "stage_us" in row:
        experts_s = row["stage_us"]["experts"] * row["passes"] / 1e6
        hidden = row["hidden"] if row["overlap"] == "on" else 0.0
        calibration = replace(calibration, pair_seconds=experts_s / pairs, overlap=hidden)
    bare = simulated(work, plan, homes_of(plan, work, "round-robin"), calibration)
    missing = bare["tokens"] / row["prefill_tokens_per_s"] - bare["seconds"]
    return replace(calibration, layer_seconds=max(0.0, missing / bare["steps"] / work.held.shape.num_layers))


def simulated(work: Work, plan: Plan, homes: np.ndarray, calibration: Calibration) -> dict:
    """Of as many rounds of the held-out requests as fill two steps."""
    rounds = -(-2 * work.prefill_tokens * plan.ranks // work.held.num_tokens)
    trace = join([work.held] * rounds, work.held.source)
    homes = np.tile(homes, rounds)
    return simulate(plan, trace, work.links(), homes=homes, combine="reduce", calibration=calibration).summary()


def predictions(work: Work, rows: list[dict]) -> list[dict]:
    """What ``placement.simulate`` says of every plan, calibrated once on linear without and once with two lanes."""
    bases = [row for row in rows if row["plan"] == "linear" and "failed" not in row]
    pairs = list(product(work.plans, ("round-robin", "affinity")))
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
        calibrations = list(pool.map(partial(calibrated, work), bases))
        asked = [(base, each, *pair) for base, each in zip(bases, calibrations) for pair in pairs]
        return list(pool.map(partial(_predicted, work), asked))


def _predicted(work: Work, asked: tuple[dict, Calibration, str, str]) -> dict:
    base, calibration, name, rule = asked
    plan = work.plans[name]
    homes = homes_of(plan, work, rule)
    costs = evaluate(plan, work.held, homes=homes, combine="reduce")
    run = simulated(work, plan, homes, calibration)
    return {
        "plan": name, "homes": rule, "overlap": base["overlap"],
        "prefill_tokens_per_s": run["tokens_per_second"], "prefill_ms": 1e3 * run["step_seconds_p50"],
        "compute_tail": costs.compute_tail, "remote_rows": costs.dispatch_rows, "calibration": vars(calibration),
    }  # fmt: skip
