"""The engine on the ranks of a benchmark, without sockets: requests in, tokens and times out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import distributed

from epmoe.checkpoint import Loader, load_weights
from epmoe.comm import Comm
from epmoe.config import EngineConfig
from epmoe.engine.engine import Engine


@dataclass
class Served:
    """``tokens`` by request id over all ranks; ``reports`` of all ranks' engines; seconds of this rank."""

    tokens: dict[int, list[int]]
    reports: list[dict]
    seconds: float = 0.0
    step_tokens: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


def open_engine(comm: Comm, settings: dict, load: Loader = load_weights) -> Engine:
    return Engine(EngineConfig.from_dict({"ranks": comm.world, "device": comm.device.type, **settings}), comm, load)


def serve(engine: Engine, requests: list[dict], on_step: Callable[[], None] = lambda: None) -> Served:
    """Run requests (``{"id", "prompt", "params"}``) to their end; every rank calls it with the same ones."""
    comm, tokens, times = engine.comm, {}, []
    messages = [{"op": "add", **request} for request in requests] if comm.rank == 0 else []
    settle(comm)
    began = time.perf_counter()
    outputs = engine.step(messages)
    while True:
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.tokens)
        if engine.idle:
            break
        at = time.perf_counter()
        outputs = engine.step([])
        on_step()
        times.append((sum(len(output.tokens) for output in outputs), time.perf_counter() - at))
    settle(comm)
    seconds = time.perf_counter() - began
    merged: dict[int, list[int]] = {}
    for each in gathered(comm, tokens):
        merged |= each
    return Served(merged, gathered(comm, engine.report()), seconds, *map(list, zip(*times)))


def gathered(comm: Comm, value: object) -> list:
    """Every rank's value, on all ranks."""
    if comm.world == 1:
        return [value]
    values = [None] * comm.world
    distributed.all_gather_object(values, value, group=comm.control)
    return values


def settle(comm: Comm) -> None:
    """All ranks and their devices are here."""
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
    gathered(comm, None)
