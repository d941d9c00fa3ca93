"""Steps as CUDA graphs: what those of decodes (`decode_graphs`) and those with prompts (`prompt_graphs`) share.

A graph reads its inputs from buffers that stay in place and are refilled before each replay; everything between the
refill and what the step leaves runs without the host.  A size runs once eagerly on those buffers (kernels are compiled,
libraries set up), the second time it is captured, and every step from there on is a replay: same kernels, same tokens.
A kind of graph says how a size's inputs are made (`_open`), filled, and what runs on them (`_step`).
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from epmoe.config import EngineConfig
from epmoe.engine.staging import Staging, buffer_bytes, views
from epmoe.model.decoder import Decoder, RoutingObserver
from epmoe.moe.timeline import Marks

Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Parts:
    """What a rank's steps are made of. ``last_token``: int64 ``[max_requests + 1]``, the newest draw of each device
    row, and a spare row for padding."""

    decoder: Decoder
    cache: torch.Tensor
    engine: EngineConfig
    observe: RoutingObserver | None
    last_token: torch.Tensor
    staging: Staging


@dataclass
class Captured(Generic[Inputs]):
    """A graph's inputs, most of them views of one uint8 ``buffer``, and, once there is one, the graph and what it
    leaves."""

    inputs: Inputs
    buffer: torch.Tensor
    warm: bool = False
    graph: torch.cuda.CUDAGraph | None = None
    outputs: Any = None
    marks: Marks | None = None  # of its stages, where a timeline is kept


class StepGraphs(ABC, Generic[Inputs]):
    """The graphs of one rank, by size."""

    def __init__(self, parts: Parts) -> None:
        self.decoder, self.cache, self.engine, self.observe = parts.decoder, parts.cache, parts.engine, parts.observe
        self.last_token, self.staging = parts.last_token, parts.staging
        self.replays = 0
        self.late = 0  # captures that a step waited for
        self._captured: dict[Hashable, Captured[Inputs]] = {}
        self._pool: tuple[int, int] | None = None

    @abstractmethod
    def _step(self, at: Captured[Inputs]) -> Any:
        """What is captured: the model on the inputs in their buffers."""

    def _keep(
        self, size: Hashable, arrays: Sequence[np.ndarray], inputs: Callable[[list[torch.Tensor]], Inputs]
    ) -> Captured[Inputs]:
        """A new size, with zeros in its buffer: ``inputs`` takes its views, of the shapes and types of ``arrays``."""
        buffer = torch.zeros(buffer_bytes(arrays), dtype=torch.uint8, device=self.cache.device)
        self._captured[size] = at = Captured(inputs(views(buffer, arrays)), buffer)
        return at

    def _run(self, at: Captured[Inputs]) -> Any:
        """One step on the inputs as they are: eager, captured or replayed. What `_step` returned; a replay overwrites
        it."""
        if not at.warm:
            at.warm = True
            return self._step(at)
        timeline = self.decoder.timeline
        if at.graph is None or (timeline is not None and at.marks is None):
            self.late += 1
            self._capture(at)
        if timeline is not None:
            timeline.before(at.marks)
        self.decoder.exchange.comm.at.stage = "graph"
        at.graph.replay()
        if timeline is not None:
            timeline.ran(at.marks)
        self.replays += 1
        return at.outputs

    def _capture(self, at: Captured[Inputs]) -> None:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        timeline = self.decoder.timeline
        captured = nullcontext() if timeline is None else timeline.captured()
        gc.disable()  # freeing another graph meanwhile would spoil this one
        try:
            with captured as at.marks, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                at.outputs = self._step(at)
        finally:
            gc.enable()
        at.graph = graph

    def close(self) -> None:
        """Free the graphs; none may be running."""
        for at in self._captured.values():
            if at.graph is not None:
                at.graph.reset()
        self._captured.clear()
