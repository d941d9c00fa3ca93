"""Runs the engine on the ranks of a pool, without sockets, and gathers what each rank says."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from epmoe.comm import Comm
from epmoe.config import EngineConfig
from epmoe.engine.engine import Engine


@dataclass
class Script:
    """Requests ``(id, prompt, params)`` by the step at which they arrive, and aborts likewise."""

    requests: list[tuple[int, list[int], dict]]
    arrive: dict[int, int] = field(default_factory=dict)  # id -> step, default 0
    abort: dict[int, int] = field(default_factory=dict)  # id -> step
    want_logits: bool = False


@dataclass
class Result:
    """What one rank saw: tokens and finish reason by request, logits by (request, position), its counters."""

    tokens: dict[int, list[int]]
    reasons: dict[int, str]
    logits: dict[tuple[int, int], torch.Tensor]
    report: dict
    homes: set[int]
    tokens_by_step: list[int]


def drive(comm: Comm, config: dict, script: Script, **options) -> Result:
    """Run a script to its end on this rank; every rank calls it with the same arguments (``options`` of Engine)."""
    engine = Engine(EngineConfig.from_dict(config), comm, **options)
    result = Result({}, {}, {}, {}, set(), [])
    _watch(engine, result, script.want_logits)
    due = sorted(script.requests, key=lambda r: (script.arrive.get(r[0], 0), r[0]))
    aborts = sorted(script.abort.items(), key=lambda item: item[1])
    while not engine.finished:
        messages = []
        if comm.rank == 0:
            while due and script.arrive.get(due[0][0], 0) <= engine.steps:
                number, prompt, params = due.pop(0)
                messages.append({"op": "add", "id": number, "prompt": prompt, "params": params})
            while aborts and aborts[0][1] <= engine.steps:
                messages.append({"op": "abort", "id": aborts.pop(0)[0]})
            if not due and not aborts and not engine.stopping:
                messages.append({"op": "stop"})
        for output in engine.step(messages):
            result.tokens.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish_reason:
                assert output.request_id not in result.reasons, f"request {output.request_id} ended twice"
                result.reasons[output.request_id] = output.finish_reason
    result.report = engine.report()
    result.homes = set(result.reasons)
    engine.close()
    return result


def merge(results: list[Result]) -> Result:
    """One result of all ranks; a request must have lived on one rank only."""
    merged = Result({}, {}, {}, {}, set(), [])
    for result in results:
        assert not merged.tokens.keys() & result.tokens.keys(), "a request's tokens came from two ranks"
        merged.tokens |= result.tokens
        merged.reasons |= result.reasons
        merged.logits |= result.logits
    return merged


def all_blocks_free(results: list[Result]) -> bool:
    return all(r.report["free_blocks"] == r.report["num_blocks"] for r in results)


def _watch(engine: Engine, result: Result, want_logits: bool) -> None:
    """Record each step's token count, and the logits it draws from, by wrapping the runner's parts."""
    runner = engine.runner
    launch, forward = runner.launch, runner.forward

    def watched_forward(chunks, kind):
        ran = forward(chunks, kind)
        if want_logits:
            drawing = [chunk for chunk in chunks if chunk.samples]
            for row, chunk in zip(ran.logits_NV.float().clone(), drawing):
                result.logits[chunk.request.id, chunk.position] = row
        return ran

    def watched_launch(chunks, kind):
        result.tokens_by_step.append(sum(chunk.count for chunk in chunks))
        return launch(chunks, kind)

    runner.forward, runner.launch = watched_forward, watched_launch
