"""A whole model on several ranks under several placements: the fourth part of multi_gpu_report.py.

Weights are random; routing is that of recorded tokens.  A token's id is its row in the recording: the router computes
what it always does, then its choice is replaced by the recorded one, and the token drawn after row t is row t + 1.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from model_bench_lib import QWEN3_30B, random_load
from report_engine import Served, gathered, open_engine, serve

from epmoe.comm import Comm
from epmoe.config import ModelConfig
from epmoe.engine import engine as engine_module
from epmoe.engine.engine import Engine
from epmoe.model.decoder import Decoder
from epmoe.moe.layer import MoELayer, Routing
from epmoe.moe.timeline import Timeline, hidden_of
from placement.cost import Calibration, evaluate, round_robin_homes
from placement.homes import assign_homes, fit_affinity, score_routing
from placement.plan import Plan
from placement.simulate import simulate
from placement.topology import Topology
from placement.trace import Trace

PROBE = 32  # tokens whose routing chooses a request's home
REHEARSAL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256,
             "moe_intermediate_size": 64, "intermediate_size": 64}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What every placement is measured on; the same on all ranks.

    Args:
        train, held: recorded tokens that plans and affinities were made from, and others that are run.
        plans: by name.
        rehearse: small layers, for CPU ranks.
        exchange: see ``EngineConfig.exchange``.
    """

    train: Trace
    held: Trace
    plans: dict[str, Plan]
    topology: Topology | None
    rehearse: bool
    exchange: str
    prefill_tokens: int
    decode_requests: int


@dataclass(frozen=True)
class ReplayLayer(MoELayer):
    """Routes as recorded: ``expert_VK`` int32, this layer's choices by recorded row.

    ``rows``: the lanes' tokens (recorded rows) in the present step, one list for all layers; ``row_T``: one lane's.
    """

    expert_VK: torch.Tensor | None = None
    rows: list[torch.Tensor] = field(default_factory=list)
    row_T: torch.Tensor | None = None

    def stages(self, x_TD: torch.Tensor, valid_T: torch.Tensor | None, lane: int, *rest):
        return MoELayer.stages(replace(self, row_T=self.rows[lane]), x_TD, valid_T, lane, *rest)

    def route(self, x_TD: torch.Tensor, valid_T: torch.Tensor | None = None) -> Routing:
        computed = super().route(x_TD, valid_T)
        expert_TK = self.expert_VK[self.row_T]
        slot_TK = self.serve_slot_E[expert_TK.long()]
        if valid_T is not None:
            slot_TK = slot_TK.where(valid_T[:, None], -1)
        return Routing(computed.weight_TK, expert_TK, slot_TK)


class ReplayDecoder(Decoder):
    """Takes routing and the next token from a recording; everything else is computed."""

    @torch.inference_mode()
    def forward(self, lanes, cache, observe=None) -> torch.Tensor:
        next(iter(self.moe.values())).rows[:] = [batch.token_T for batch in lanes]
        logits = super().forward(lanes, cache, observe)
        after = [batch.token_T if batch.sample_rows is None else batch.token_T[batch.sample_rows] for batch in lanes]
        return logits.scatter_(1, (torch.cat(after) + 1)[:, None] % logits.shape[1], 1e4)


def model_folder(trace: Trace, rehearse: bool) -> str:
    """config.json of Qwen3-30B-A3B's attention and experts, with the recording's layers, experts and choices."""
    L, E, K = trace.shape.num_layers, trace.shape.num_experts, trace.shape.top_k
    values = QWEN3_30B | {"num_hidden_layers": L, "num_experts": E, "num_experts_per_tok": K}
    if rehearse:
        values |= REHEARSAL | {"vocab_size": trace.num_tokens}
    folder = Path(tempfile.mkdtemp(prefix="replayed-"))
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def measure_model(comm: Comm, save: Callable, seconds: float, work: Work) -> dict:
    """Every plan with both home rules, lanes off and on; then what the simulation says, calibrated on linear."""
    ends, usual = time.monotonic() + 0.9 * seconds, engine_module.assign_home
    try:
        return _measure_plans(comm, save, ends, work)
    finally:
        engine_module.assign_home = usual


def _measure_plans(comm: Comm, save: Callable, ends: float, work: Work) -> dict:
    folder = model_folder(work.train, work.rehearse)
    rows: list[dict] = []
    for name, plan in work.plans.items():
        if max(gathered(comm, time.monotonic() > ends)):
            rows.append({"plan": name, "left_out": "no time"})
            continue
        try:
            engine = opened(comm, work, folder, plan)
        except Exception:
            rows.append({"plan": name, "homes": "", "overlap": "", "failed": traceback.format_exc(limit=-4)})
            say(comm, rows[-1])
            continue
        for homes_rule, overlap in product(("round-robin", "affinity"), ("off", "on")):
            if name == "linear" and homes_rule == "affinity" or max(gathered(comm, time.monotonic() > ends)):
                continue
            row = {"plan": name, "homes": homes_rule, "overlap": overlap}
            try:
                row |= measure_plan(comm, work, engine, homes_of(plan, work, homes_rule), overlap)
            except Exception:
                row["failed"] = traceback.format_exc(limit=-4)
            rows.append(row)
            save(record_of(work, rows))
            say(comm, row)
        del engine
        gc.collect()
    found = record_of(work, rows)
    save(found)
    return found | {"predicted": predictions(work, rows)}


def record_of(work: Work, rows: list[dict]) -> dict:
    shape = [*work.train.expert_ids_TLK.shape[1:], work.train.shape.num_experts]
    return {"trace": work.train.source, "shape": shape, "rows": rows, "predicted": []}


def say(comm: Comm, row: dict) -> None:
    if comm.rank:
        return
    if "failed" in row:
        print(row["failed"], flush=True)
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if k != "failed"}, flush=True)


def homes_of(plan: Plan, work: Work, rule: str) -> np.ndarray:
    """Home rank of every held-out request."""
    held = work.held
    if rule == "round-robin":
        return round_robin_homes(len(held.seq_lens), plan.ranks)
    affinity = fit_affinity(plan, work.train, PROBE)
    starts = held.sequence_starts()
    heads = [held.expert_ids_TLK[start : min(start + PROBE, end)] for start, end in zip(starts, starts[1:])]
    score_RW = np.stack([score_routing(head, affinity.expert_rank_LEW) for head in heads])
    return assign_homes(score_RW, held.seq_lens)


def opened(comm: Comm, work: Work, folder: str, plan: Plan) -> Engine:
    """An engine of the plan that replays the held-out tokens, warm."""
    longest = int(work.held.seq_lens.max()) + 2
    blocks = (work.decode_requests + work.prefill_tokens // longest + 8) * -(-longest // 16)
    settings = {
        "model": folder, "dtype": "float32" if comm.device.type == "cpu" else "bfloat16", "combine": "reduce",
        "exchange": work.exchange, "plan": plan.to_json(), "max_model_len": longest, "num_blocks": blocks,
        "max_batch_tokens": work.prefill_tokens, "max_requests": min(work.decode_requests, work.prefill_tokens),
    }  # fmt: skip
    engine = open_engine(comm, settings, random_load)
    engine.pool.reuse_prefixes = False  # the same sequences come again and again
    replay(engine, work.held)
    with_homes(homes_of(plan, work, "round-robin"), 1)
    serve(engine, requests_of(work.held, 1, decode=8))  # compiles, captures
    return engine


def measure_plan(comm: Comm, work: Work, engine: Engine, homes: np.ndarray, overlap: str) -> dict:
    held = work.held
    engine.engine = replace(engine.engine, overlap=overlap)
    rounds = max(1, round(work.prefill_tokens * comm.world * (1 if work.rehearse else 3) / held.num_tokens))
    row = {"exchange": engine.runner.decoder.exchange.name, "tokens_a_step": work.prefill_tokens}
    if overlap == "on":
        with_homes(homes, 1)
        row["hidden"] = hidden_share(comm, engine, held)  # also compiles what two lanes need
    prefill = requests_of(held, rounds, decode=0)
    with_homes(homes, rounds)
    served = serve(engine, prefill)
    tokens = sum(len(request["prompt"]) for request in prefill)
    row |= {"prefill_tokens_per_s": tokens / served.seconds, "prefill_ms": step_ms(served)}
    with_homes(homes, 1)
    served = serve(engine, requests_of(held, 1, decode=4 if work.rehearse else 64))
    return row | decode_rate(comm, served) | traffic_of(served)


def decode_rate(comm: Comm, served: Served) -> dict:
    """Over the steps from the one in which most tokens were drawn for the first time to the end."""
    drawn = np.sum(gathered(comm, served.step_tokens), 0)
    first = int((drawn >= 0.5 * drawn.max()).argmax())
    seconds = np.array(served.step_seconds)[first:]
    rate = float(drawn[first:].sum() / max(seconds.sum(), 1e-9))
    return {"decode_tokens_per_s": rate, "decode_ms": 1e3 * float(np.median(seconds))}


def step_ms(served: Served) -> float:
    """Median milliseconds of the steps of this rank."""
    return 1e3 * float(np.median(served.step_seconds))


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
    engine_module.assign_home = lambda *_: next(queue)


def replay(engine: Engine, trace: Trace) -> None:
    """Make an engine's decoder replay a recording."""
    decoder = engine.runner.decoder
    decoder.__class__ = ReplayDecoder
    expert_LVK = torch.from_numpy(trace.expert_ids_TLK.astype(np.int32)).transpose(0, 1).contiguous()
    expert_LVK = torch.cat([expert_LVK, expert_LVK[:, :1]], 1).to(engine.comm.device)  # the row behind the last
    rows: list[torch.Tensor] = []
    for row, (index, layer) in enumerate(decoder.moe.items()):
        values = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
        decoder.moe[index] = ReplayLayer(**values, expert_VK=expert_LVK[row], rows=rows)


def traffic_of(served: Served) -> dict:
    """Remote rows per token and layer, and the fullest rank's share of expert work, as counted by the engines."""
    rows = np.array([report["sent_rows"] for report in served.reports], float)
    tokens = sum(report["traffic"]["tokens"] for report in served.reports)
    return {"remote_rows": float((rows.sum() - np.trace(rows)) / max(tokens, 1))}


def hidden_share(comm: Comm, engine: Engine, trace: Trace) -> float:
    """Share of communication beside compute in prefill, by the timeline; the slowest rank's."""
    timeline = engine.runner.decoder.timeline = Timeline(comm)
    try:
        serve(engine, requests_of(trace, 1, decode=0))
    finally:
        engine.runner.decoder.timeline = None
    return min(gathered(comm, hidden_of(timeline.read())[-1].share))


def predictions(work: Work, rows: list[dict]) -> list[dict]:
    """Prefill tokens/s by ``placement.simulate``, its layer time set so that linear, lanes off, is met."""
    base = next((r for r in rows if r["plan"] == "linear" and r.get("overlap") == "off" and "failed" not in r), None)
    if base is None:
        return []
    config = ModelConfig.from_folder(model_folder(work.train, work.rehearse))
    row_bytes = config.hidden_size * (4 if work.rehearse else 2)
    ranks = work.plans["linear"].ranks
    calibration = Calibration(
        dispatch_row_bytes=row_bytes + 8 * config.top_k, combine_row_bytes=row_bytes,
        pair_seconds=6 * config.hidden_size * config.moe_intermediate_size / (5e10 if work.rehearse else 5e14),
        layer_seconds=0.0, step_tokens=float(work.prefill_tokens * ranks),
    )  # fmt: skip

    def run(plan: Plan, homes: np.ndarray):
        simulated = simulate(plan, work.held, work.topology, homes=homes, combine="reduce", calibration=calibration)
        return simulated.summary()

    bare = run(work.plans["linear"], homes_of(work.plans["linear"], work, "round-robin"))
    missing = work.held.num_tokens / base["prefill_tokens_per_s"] - bare["seconds"]
    layers = bare["steps"] * work.held.shape.num_layers
    calibration = replace(calibration, layer_seconds=max(0.0, missing / layers))
    found = []
    for name, plan in work.plans.items():
        for rule in ("round-robin", "affinity"):
            homes = homes_of(plan, work, rule)
            costs = evaluate(plan, work.held, homes=homes, combine="reduce")
            found.append({
                "plan": name, "homes": rule, "prefill_tokens_per_s": run(plan, homes)["tokens_per_second"],
                "compute_tail": costs.compute_tail, "remote_rows": costs.dispatch_rows,
            })  # fmt: skip
    return found
