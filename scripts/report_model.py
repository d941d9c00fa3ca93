"""A whole model on several ranks under several placements: the fourth part of multi_gpu_report.py.

Weights are random; routing is that of recorded tokens (see ``report_replay``).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from model_bench_lib import random_load
from report_engine import Served, gathered, open_engine, serve
from report_replay import model_folder, replay

from epmoe.comm import Comm
from epmoe.engine import intake
from epmoe.engine.engine import Engine
from epmoe.engine.runner import Runner
from epmoe.model_config import ModelConfig
from epmoe.moe.timeline import Timeline, hidden_of
from placement.cost import round_robin_homes
from placement.homes import assign_homes, fit_affinity, score_routing
from placement.plan import Plan, linear_plan
from placement.topology import Topology, uniform
from placement.trace import Trace

LINK = 390e9  # bytes a second from a GPU to all others, where it was not measured
STEPS = 3  # of prefill on every rank, the last one nearly full
STAGES = ("attention", "router", "dispatch", "send", "arrive", "experts", "combine", "sum")
SLACK = 1.01  # of the fullest home's tokens: a batch ends when its fullest rank has
PROBE = 32  # tokens whose routing chooses a request's home


@dataclass(frozen=True)
class Work:
    """What every placement is measured on; the same on all ranks.

    Args:
        train, held: recorded tokens that plans and affinities were made from, and others that are run.
        plans: by name.
        files: of the measured links (equal ones where there is none of so many ranks), of the costs of exchanges, and
            of tuned tiles; what is not there is left out.
        rehearse: small layers, for CPU ranks.
        exchange: see ``EngineConfig.exchange``.
        prefill_tokens: most of a rank and step.
        requests: most of a rank; those of the steps under way too, or their successors are not full.
        brief: no tokens are drawn, no stages timed, affinity homes are those of the joint plan only, runs are fewer.
    """

    train: Trace
    held: Trace
    plans: dict[str, Plan]
    files: tuple[str, str, str]
    rehearse: bool
    exchange: str
    prefill_tokens: int
    requests: int
    brief: bool = False

    @property
    def rounds(self) -> int:
        """How often the held-out requests are run, so that prefill has a few full steps."""
        steps = 1 if self.rehearse else STEPS
        ranks = self.plans["linear"].ranks
        return max(1, self.prefill_tokens * ranks * steps // self.held.num_tokens)

    def links(self) -> Topology:
        ranks = self.plans["linear"].ranks
        path = Path(self.files[0])
        found = Topology.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None
        return found if found is not None and found.ranks == ranks else uniform(ranks, bandwidth=LINK / (ranks - 1))


def measure_model(comm: Comm, save: Callable, seconds: float, work: Work, say: Callable | None = None) -> dict:
    """Every plan with both home rules, lanes off and on."""
    ends, usual = time.monotonic() + 0.9 * seconds, intake.assign_home
    try:
        return _measure_plans(comm, (save, say or said), ends, work)
    finally:
        intake.assign_home = usual


def _measure_plans(comm: Comm, tell: tuple[Callable, Callable], ends: float, work: Work) -> dict:
    (save, say), rows = tell, []
    folder = model_folder(work.train, work.rehearse)

    def late() -> bool:
        return max(gathered(comm, time.monotonic() > ends))

    for name, plan in work.plans.items():
        if late():
            rows.append({"plan": name, "failed": "no time was left"})
            continue
        engine = opened(comm, work, folder, plan)
        for rule in rules_of(name, work):
            homes, decode = homes_of(plan, work, rule), None
            for overlap in ("off", "on"):
                row = {"plan": name, "homes": rule, "overlap": overlap}
                if late():
                    rows.append(row | {"failed": "no time was left"})
                    continue
                engine.engine = replace(engine.engine, overlap=overlap)
                row |= measure_prefill(comm, work, engine, homes)
                if not work.brief:
                    decode = decode or measure_decode(comm, work, engine, homes)
                rows.append(row | (decode or {}))
                say(comm, rows[-1])
                save(record_of(work, rows))
        del engine
        gc.collect()
    return record_of(work, rows)


def rules_of(name: str, work: Work) -> tuple[str, ...]:
    """How homes are chosen for a plan."""
    affine = name == "joint" if work.brief else name != "linear"
    return ("round-robin", "affinity") if affine else ("round-robin",)


def record_of(work: Work, rows: list[dict]) -> dict:
    shape = [*work.train.expert_ids_TLK.shape[1:], work.train.shape.num_experts]
    sizes = {"tokens_a_step": work.prefill_tokens, "held_out_tokens": work.held.num_tokens, "rounds": work.rounds}
    return {"trace": work.train.source, "shape": shape, **sizes, "rows": rows, "predicted": []}


def said(comm: Comm, row: dict) -> None:
    if comm.rank == 0:
        brief = {k: v for k, v in row.items() if k not in ("stage_us", "runs_s")}
        print("  ", {k: round(v, 3) if isinstance(v, float) else v for k, v in brief.items()}, flush=True)


def homes_of(plan: Plan, work: Work, rule: str) -> np.ndarray:
    """Home rank of every held-out request."""
    held = work.held
    if rule == "round-robin":
        return round_robin_homes(len(held.seq_lens), plan.ranks)
    affinity = fit_affinity(plan, work.train, PROBE)
    starts = held.sequence_starts()
    heads = [held.expert_ids_TLK[start : min(start + PROBE, end)] for start, end in zip(starts, starts[1:])]
    score_RW = np.stack([score_routing(head, affinity.expert_rank_LEW) for head in heads])
    return assign_homes(score_RW, held.seq_lens, SLACK)


def opened(comm: Comm, work: Work, folder: str, plan: Plan) -> Engine:
    """An engine of the plan that replays the held-out tokens, warm."""
    longest, size = int(work.held.seq_lens.max()) + 2, 64
    requests = min(work.requests, work.prefill_tokens)
    settings = {
        "model": folder, "dtype": "float32" if comm.device.type == "cpu" else "bfloat16", "combine": "reduce",
        "exchange": work.exchange, "plan": plan.to_json(), "max_model_len": longest, "block_size": size,
        "num_blocks": requests * -(-longest // size) + 8, "overlap": "off",
        "max_batch_tokens": work.prefill_tokens, "max_requests": requests,
    }  # fmt: skip
    for name, file in zip(("exchange_costs", "tuned"), map(Path, work.files[1:])):
        if file.is_file():
            settings[name] = file.read_text(encoding="utf-8")
    engine = open_engine(comm, settings, random_load)
    engine.pool.reuse_prefixes = False  # the same sequences come again and again
    replay(engine, work.held)
    return engine


def measure_prefill(comm: Comm, work: Work, engine: Engine, homes: np.ndarray) -> dict:
    """Tokens a second of whole prompts in full steps; and by a timeline where a step's time goes."""
    row = {} if work.brief else timed_stages(comm, work, engine, homes)
    before, runs = engine.report(), []
    for _ in range(2 if work.rehearse else 5 if work.brief else 6):
        replays = graph_replays(engine)
        served = prefilled(work, engine, homes)
        seconds = max(gathered(comm, sum(served.step_seconds)))  # without taking the requests in
        runs.append((seconds, step_ms(served), (graph_replays(engine) - replays) / len(served.step_seconds)))
    settled = sorted(runs[2:] or runs[1:])  # graphs are captured in the first two
    seconds, step, in_graphs = settled[(len(settled) - 1) // 2]
    tokens = work.held.num_tokens * work.rounds
    remote = remote_rows(comm, before, engine.report()) / (len(runs) * tokens * work.held.shape.num_layers)
    return row | {
        "prefill_tokens_per_s": tokens / seconds, "prefill_ms": step, "in_graphs": in_graphs,
        "remote_rows": remote, "runs_s": [each for each, *_ in runs],
    }  # fmt: skip


def prefilled(work: Work, engine: Engine, homes: np.ndarray) -> Served:
    with_homes(homes, work.rounds)
    return serve(engine, requests_of(work.held, work.rounds, decode=0))


def graph_replays(engine: Engine) -> int:
    return engine.runner.prompts.replays if engine.runner.prompts is not None else 0


def measure_decode(comm: Comm, work: Work, engine: Engine, homes: np.ndarray) -> dict:
    """All requests draw tokens, in replayed graphs on a GPU: always one lane."""
    for length in (8, 4) if work.rehearse else (12, 64):  # the first captures graphs
        with_homes(homes, 1)
        served = serve(engine, requests_of(work.held, 1, decode=length))
    drawn = np.sum(gathered(comm, served.step_tokens), 0)
    after = int((drawn >= 0.5 * drawn.max()).argmax()) + 1  # the step in which most are past their prompts
    seconds = float(np.median(served.step_seconds[after:]))
    return {"decode_tokens_per_s": float(np.median(drawn[after:])) / seconds, "decode_ms": 1e3 * seconds}


def timed_stages(comm: Comm, work: Work, engine: Engine, homes: np.ndarray) -> dict:
    """Of a run in which stages are timed: the share of communication beside compute (the worst rank's), and
    microseconds of communication and of every stage a layer and step (the mean rank's)."""
    usual, decoder = engine.runner, engine.runner.decoder
    engine.runner = Runner(decoder, usual.cache, engine.engine, usual.observe)  # whose graphs are captured with events
    for _ in range(2):  # captures, then is measured
        decoder.timeline = timeline = Timeline(comm)
        prefilled(work, engine, homes)
        spans = timeline.read()
    decoder.timeline = comm.on_work = None
    engine.runner = usual
    passes = len({(span.step, span.layer) for span in spans if span.stage == "experts"})
    stage_us = dict.fromkeys(STAGES, 0.0)
    for span in spans:
        if span.stage in stage_us:
            stage_us[span.stage] += (span.end - span.begin) / passes
    hidden = hidden_of(spans)[-1]
    own = [hidden.share, hidden.communication / passes, float(passes), *stage_us.values()]
    share, moved, passes, *stages = np.array(gathered(comm, own)).T
    stage_us = {name: float(times.mean()) for name, times in zip(STAGES, stages)}
    return {
        "hidden": float(share.min()), "communication_us": float(moved.mean()), "passes": float(passes.mean()),
        "stage_us": stage_us,
    }  # fmt: skip


def step_ms(served: Served) -> float:
    """Median milliseconds of this rank's steps, without those at the end that have little or nothing to do."""
    seconds = np.array(served.step_seconds)
    return 1e3 * float(np.median(seconds[seconds >= 0.5 * seconds.max()]))


def requests_of(trace: Trace, rounds: int, decode: int) -> list[dict]:
    """Every sequence ``rounds`` times; its last tokens are left to be drawn (one at least)."""
    starts, found = trace.sequence_starts(), []
    for _ in range(rounds):
        for start, end in zip(starts, starts[1:]):
            cut = max(start + 1, end - decode)
            params = {"temperature": 0.0, "max_tokens": max(1, int(end - cut)), "ignore_eos": True}
            found.append({"id": len(found), "prompt": list(range(start, cut)), "params": params})
    return found


def with_homes(homes: np.ndarray, rounds: int) -> None:
    """The engine's next requests get these homes, in order, on every rank alike."""
    queue = iter(np.tile(homes, rounds + 1).tolist())
    intake.assign_home = lambda *_: next(queue)


def remote_rows(comm: Comm, before: dict, after: dict) -> float:
    """Rows that went to other ranks between two reports of the engines."""
    sent_W = np.array(after["sent_rows"]) - np.array(before["sent_rows"])
    return float(sum(gathered(comm, float(sent_W.sum() - sent_W[comm.rank]))))


def first_layers(work: Work, count: int) -> Work:
    """The same with the first layers only and the linear plan: compiles what the whole needs."""
    traces = []
    for trace in (work.train, work.held):
        shape = replace(trace.shape, moe_layers=trace.shape.moe_layers[:count])
        few = trace.take_sequences(range(min(16, len(trace.seq_lens))))
        traces.append(Trace(shape, few.expert_ids_TLK[:, :count], few.seq_lens, source=few.source))
    shape = ModelConfig.from_folder(model_folder(traces[0], work.rehearse)).moe_shape
    traces = [replace(trace, shape=shape) for trace in traces]
    plans = {"linear": linear_plan(traces[0].shape, work.plans["linear"].ranks)}
    return replace(work, train=traces[0], held=traces[1], plans=plans)
