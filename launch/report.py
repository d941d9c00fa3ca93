"""What a run says at its end: speed, bytes read, and what the placement did to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from epmoe.config import EngineConfig
from launch.completion import Completion
from launch.recording import Recorded
from placement.cost import compute_tail_L, evaluate
from placement.plan import Plan, linear_plan
from placement.trace import Trace

COMBINE = {
    "exact": "exact (rows added at home in choice order: placement does not change a token)",
    "reduce": "reduce (one sum per token and rank travels: equal to exact up to rounding)",
}


@dataclass(frozen=True)
class RunReport:
    """Everything the summary is made from.  ``ready`` and ``stats`` are the ranks' reports, by rank."""

    engine: EngineConfig
    placement: str  # as the user asked for it
    plan: Plan
    trace: Trace | None
    completions: list[Completion]
    seconds: float
    ready: dict[int, dict]
    stats: dict[int, dict]
    recorded: Recorded | None = None


def summary(run: RunReport) -> str:
    """Lines for people."""
    engine = run.engine
    new = sum(len(c.token_ids) for c in run.completions)
    prompts = [c.prompt_token_ids for c in run.completions if c.index == 0]
    load_WLE = np.array([run.stats[rank]["load_LE"] for rank in range(engine.ranks)])
    load_LW = served_LW(load_WLE, run.plan)
    mode = "deterministic" if engine.deterministic else "not deterministic"
    lines = [
        f"{len(prompts)} prompts ({sum(map(len, prompts))} tokens), {new} new tokens in {run.seconds:.2f} s:"
        f" {new / max(run.seconds, 1e-9):.1f} tokens/s",
        f"{engine.ranks} ranks, {engine.device}, {engine.dtype}, {mode}, {engine.threads} threads a rank;"
        f" combine {COMBINE[engine.combine]}",
        f"placement {run.placement}, made by {run.plan.made_by or 'hand'}",
        *_rank_table(run, load_LW),
        _tails(load_WLE, load_LW, run.plan),
        *_remote_rows(run, load_WLE),
        *_traffic(run),
    ]
    return "\n".join(lines)


def served_LW(load_WLE: np.ndarray, plan: Plan) -> np.ndarray:
    """int64 ``[L, W]``: expert rows (token, choice) that each rank serves, from each home's load per expert."""
    served = np.zeros((plan.shape.num_layers, plan.ranks), np.int64)
    layer_LE = np.broadcast_to(np.arange(plan.shape.num_layers)[:, None], load_WLE.shape[1:])
    for home, load_LE in enumerate(load_WLE):
        np.add.at(served, (layer_LE, plan.serve_rank_WLE[home]), load_LE)
    return served


def _rank_table(run: RunReport, load_LW: np.ndarray) -> list[str]:
    rows_W = load_LW.sum(0)
    share_W = rows_W / max(1, rows_W.sum())
    head = f"{'rank':>4}  {'MB read':>9}  {'expert rows':>12}  {'share':>6}"
    return [head] + [
        f"{rank:>4}  {run.ready[rank]['bytes_read'] / 1e6:>9.1f}  {rows_W[rank]:>12}  {share_W[rank]:>6.1%}"
        for rank in range(run.engine.ranks)
    ]


def _tails(load_WLE: np.ndarray, load_LW: np.ndarray, plan: Plan) -> str:
    before_L = compute_tail_L(served_LW(load_WLE, linear_plan(plan.shape, plan.ranks)))
    after_L = compute_tail_L(load_LW)
    return (
        f"compute_tail of this run (fullest rank over the mean; 1 is even): {before_L.mean():.3f} linear ->"
        f" {after_L.mean():.3f} this placement; worst layer {before_L.max():.3f} -> {after_L.max():.3f}"
    )


def _traffic(run: RunReport) -> list[str]:
    """What the exchange moved between ranks: rows, bytes, the heaviest link, fan-out, padding."""
    ranks = range(run.engine.ranks)
    if len(ranks) == 1:
        return []
    moved = [run.stats[rank]["traffic"] for rank in ranks]
    there, back, rows = (np.array([each[key] for each in moved]) for key in ("dispatch_bytes", "combine_bytes", "rows"))
    link_WW = there + back
    np.fill_diagonal(link_WW, 0)
    heaviest = np.unravel_index(link_WW.argmax(), link_WW.shape)
    remote = ~np.eye(len(ranks), dtype=bool)
    padding = sum(each["padding"] * sum(each["dispatch_bytes"]) for each in moved) / max(1, there.sum())
    tokens = max(1, sum(each["tokens"] for each in moved))
    return [
        f"exchange {run.stats[0]['exchange']}: {rows[remote].sum()} rows left their rank,"
        f" {there[remote].sum() / 1e6:.1f} MB there, {back[remote].sum() / 1e6:.1f} MB back; heaviest link"
        f" {heaviest[0]} -> {heaviest[1]}, {link_WW.max() / 1e6:.1f} MB",
        f"fan-out {rows.sum() / tokens:.2f} ranks a token; {padding:.1%} of the bytes sent there are no hidden rows",
        *_choice(run.stats[0]),
    ]


def _choice(stats: dict) -> list[str]:
    """What a choice by size took, which buffers it holds, and what it could not take."""
    lines = [f"p2p is not used: {note}" for note in stats["exchange_notes"]]
    if steps := {name: count for name, count in stats["exchange_steps"].items() if count}:
        taken = ", ".join(f"{name} for {count} steps" for name, count in steps.items())
        lines.append(f"auto took {taken}; {stats['exchange_bytes'] / 1e6:.1f} MB of exchange buffers a rank")
    return lines


def _remote_rows(run: RunReport, load_WLE: np.ndarray) -> list[str]:
    """Rows that left their home rank: measured, and on the trace, where one was given, before and after."""
    shape = run.plan.shape
    cells = load_WLE.sum() / shape.top_k  # tokens x layers
    sent = sum(
        count for rank, report in run.stats.items() for to, count in enumerate(report["sent_rows"]) if to != rank
    )
    lines = [f"remote rows per token and layer of this run: {sent / max(1, cells):.3f}"]
    on = []
    if run.recorded is not None:
        on.append(("on this run's recorded routing", run.recorded.trace, run.recorded.trace.homes))
    if run.trace is not None:
        on.append((f"on the {run.trace.num_tokens} tokens of the given traces", run.trace, None))
    for what, trace, homes in on:
        plans = (linear_plan(shape, run.plan.ranks), run.plan)
        before, after = (evaluate(plan, trace, homes=homes) for plan in plans)
        lines.append(
            f"{what}: compute_tail {before.compute_tail:.3f} linear -> {after.compute_tail:.3f} this placement;"
            f" remote rows {before.dispatch_rows:.3f} -> {after.dispatch_rows:.3f}"
        )
    return lines
