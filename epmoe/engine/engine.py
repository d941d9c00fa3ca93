"""The engine of one rank: propose -> agree -> build -> forward -> sample -> commit, in lockstep with the other ranks.

A step opens with one all-gather of small headers; rank 0 announces there how many bytes of messages follow.  If any
rank has tokens to run, every rank runs the model, with zero tokens if need be.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgpack
import torch

from epmoe.checkpoint import Loader, load_weights
from epmoe.comm import Comm
from epmoe.config import EngineConfig, check_engine
from epmoe.engine.agreement import Header, Kind, agreed_kind, prompts_in_graphs
from epmoe.engine.decode_graphs import is_decode
from epmoe.engine.home import rank_loads
from epmoe.engine.intake import Intake
from epmoe.engine.kv_cache import BlockPool, new_cache, size_cache
from epmoe.engine.opening import exchange_shape, free_memory, read_affinity, read_plan
from epmoe.engine.probe import ProbeScores
from epmoe.engine.runner import Launched, Runner
from epmoe.engine.scheduler import Chunk, Scheduler
from epmoe.engine.staging import HostCopy
from epmoe.model.decoder import Decoder
from epmoe.model_config import ModelConfig
from epmoe.moe.by_size import costs_from
from epmoe.moe.calibrate import measure_stages
from epmoe.moe.exchange import Exchange, Traffic
from epmoe.moe.open_exchange import open_exchange
from epmoe.moe.peer_order import expected_rows
from epmoe.moe.timeline import Timeline
from epmoe.ops.blas import sum_in_float32
from epmoe.ops.draw import UNDRAWN
from epmoe.ops.tuned import Tuned
from epmoe.trace import ExpertLoads, RoutingRecorder, observe_all


class Output(NamedTuple):
    """New tokens of one request; ``finish_reason`` with its last ones, or with none: "abort", or "error" where the
    logits of the next token were not finite."""

    request_id: int
    tokens: list[int]
    finish_reason: str | None
    extra: dict | None = None


class Engine:
    """One rank's scheduler, cache and model.

    Messages (given to rank 0's :meth:`step`, applied on all ranks at the end of that step): ``{"op": "add", "id",
    "prompt", "params", "sample"}``, ``{"op": "abort", "id"}``, ``{"op": "stop"}``.

    Args:
        load: makes this rank's weights; by default it reads them from the model's folder.
        progress: called with (graphs captured, graphs to capture) at start-up.
    """

    def __init__(
        self,
        engine: EngineConfig,
        comm: Comm,
        load: Loader = load_weights,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.engine, self.comm = engine, comm
        sum_in_float32()
        self.model = ModelConfig.from_folder(engine.model)
        check_engine(engine, self.model)
        self.plan = read_plan(engine, self.model, comm.world)
        local = [held[comm.rank] for held in self.plan.slots]
        dtype = getattr(torch, engine.dtype)
        weights, self.load_report = load(Path(engine.model), self.model, local, dtype, comm.device)
        costs = None if engine.exchange_costs is None else costs_from(engine.exchange_costs, "exchange_costs")
        exchange = open_exchange(comm, exchange_shape(engine, self.model, self.plan), engine.exchange, costs)
        exchange.expect_traffic(expected_rows(self.plan))
        tuned = None if engine.tuned is None else Tuned.from_json(engine.tuned)
        decoder = Decoder(self.model, weights, self.plan, exchange, engine.deterministic, tuned)
        num_blocks = size_cache(self.model, engine, dtype, free_memory(comm.device))
        self.pool = BlockPool(num_blocks, engine.block_size, reuse_prefixes=not engine.record_tokens)
        self.scheduler = Scheduler(engine, self.pool, self.model.eos_token_ids)
        self.loads = ExpertLoads(len(self.model.moe_layers), self.model.num_experts, comm.device)
        self.recorder = self._open_recorder()
        affinity = read_affinity(engine, self.model, comm.world)
        probing = engine.probe_tokens and comm.world > 1
        self.probes = ProbeScores(self.plan, affinity, comm.device) if probing else None
        self.intake = Intake(engine, comm.rank, self.scheduler, affinity, self.probes, self.recorder)
        observers = (self.loads, self.recorder, self.probes)
        observe = observe_all([each for each in observers if each is not None])
        cache = new_cache(self.model, engine, num_blocks, comm.device)
        self.stage_times = None
        if engine.overlap == "auto" and comm.world > 1:
            lengths = engine.max_batch_tokens, engine.max_model_len
            self.stage_times = measure_stages(decoder, cache, *lengths, engine.graphs and prompts_in_graphs(engine))
        if engine.timeline:
            decoder.timeline = Timeline(comm)
        self.runner = Runner(decoder, cache, engine, observe)
        if engine.capture_at_start and self.runner.graphs is not None and not engine.timeline:
            self.runner.graphs.capture_all(progress)
        self.rehearsed = Traffic.none(comm.world) + exchange.traffic(), dict(getattr(exchange, "steps", {}))
        self.idle = True
        self.stopping = False
        self.steps = self.forwards = self.reruns = 0
        self.model_seconds = self.step_seconds = self.wait_seconds = 0.0
        self._in_flight: tuple[list[Chunk], Launched] | None = None

    def step(self, messages: list[dict]) -> list[Output]:
        """One step, on every rank together; returns what this rank's requests gained.

        Args:
            messages: on rank 0 what is new since the last step; on other ranks empty.
        """
        started = time.perf_counter()
        self.comm.at.step, self.comm.at.stage = self.steps, "agree"
        chunks = self.scheduler.schedule()
        headers, messages = self._agree(chunks, messages)
        kind = agreed_kind(headers, self.engine, self.runner.graphs is not None, self.stage_times)
        launched = self._launch(chunks, kind) if kind is not None else None
        outputs = self._commit(*self._in_flight) if self._in_flight is not None else []
        self._in_flight = None
        if launched is not None:
            if self.engine.async_steps and not self.runner.decoder.exchange.may_overflow:
                self._in_flight = (chunks, launched)
            else:
                outputs += self._commit(chunks, launched)
        self.intake.settle(headers)
        outputs += self._apply(messages, headers)
        self.steps += 1
        self.idle = not messages and not any(header.unfinished for header in headers)
        if launched is not None:
            self.step_seconds += time.perf_counter() - started
        return outputs

    @property
    def finished(self) -> bool:
        """True on all ranks at once: told to stop, and every request has ended."""
        return self.stopping and self.idle

    def close(self) -> None:
        """End it, ahead of its communicator: NCCL frees none while graphs live that captured its collectives, but waits
        for ever."""
        self.runner.close()

    def report(self) -> dict:
        """Counters since the start (see ``launch`` for how they are shown)."""
        graphs, prompts = self.runner.graphs, self.runner.prompts
        return {
            "load_LE": self.loads.load_LE.tolist(),
            "active_L": self.loads.active_L.tolist(),
            "steps": self.steps,
            "forwards": self.forwards,
            "reruns": self.reruns,  # of steps whose exchange had too little room
            "graph_replays": graphs.replays if graphs is not None else 0,
            "graphs_at_start": graphs.at_start if graphs is not None else None,
            "graphs_captured_late": graphs.late if graphs is not None else 0,  # a step waited for them
            "prompt_graph_replays": prompts.replays if prompts is not None else 0,
            "prompt_graphs": prompts.late if prompts is not None else 0,
            "seconds_in_steps": self.step_seconds,  # of steps that ran the model
            "model_seconds": self.model_seconds,
            "wait_seconds": self.wait_seconds,  # for the device, with nothing else to do
            "preemptions": self.scheduler.preemptions,
            "moved_after_probe": self.intake.moved,  # requests handed to a better home
            "free_blocks": self.pool.num_free,
            "num_blocks": self.pool.num_blocks,
            **exchange_report(self.runner.decoder.exchange, *self.rehearsed),
        }

    # -- parts of a step ----------------------------------------------------------------------------------------

    def _open_recorder(self) -> RoutingRecorder | None:
        limit = self.engine.record_tokens
        if not limit:
            return None
        return RoutingRecorder(self.model.moe_shape, self.engine.max_batch_tokens, limit, self.comm.device)

    def _agree(self, chunks: list[Chunk], messages: list[dict]) -> tuple[list[Header], list[dict]]:
        payload = msgpack.packb(messages) if messages else b""
        mine = Header(
            step=self.steps,
            tokens=sum(chunk.count for chunk in chunks),
            decodes=int(all(map(is_decode, chunks))),
            unfinished=int(self.scheduler.has_work or self._in_flight is not None),
            queued_tokens=self.scheduler.queued_tokens(),
            free_blocks=self.pool.num_free,
            payload_bytes=len(payload),
            homes=self.intake.announce(),
        )
        headers = [Header.unpack(fields) for fields in self.comm.all_gather_headers(mine.pack())]
        assert all(header.step == self.steps for header in headers), f"ranks are at different steps: {headers}"
        size = headers[0].payload_bytes
        return headers, msgpack.unpackb(self.comm.broadcast_bytes(payload, size)) if size else []

    def _launch(self, chunks: list[Chunk], kind: Kind) -> Launched:
        started = time.perf_counter()
        if self.probes is not None:
            self.probes.expect(chunks)
        launched = self._run(chunks, kind)
        if self.recorder is not None:
            self.recorder.keep(chunks)
        self.forwards += 1
        self.model_seconds += time.perf_counter() - started
        return launched

    def _run(self, chunks: list[Chunk], kind: Kind) -> Launched:
        """Start a step; where its exchange dropped rows, which all ranks see alike, once more with exact sizes.

        That is safe before the step is committed: keys and values are written again, noise is keyed by position, and
        what was counted and drawn is taken back.
        """
        exchange = self.runner.decoder.exchange
        exchange.begin_step(kind.tokens)
        if not exchange.may_overflow:
            return self.runner.launch(chunks, kind)
        counters = [each for each in (self.loads, self.probes) if each is not None]
        saved, last_token = [each.saved() for each in counters], self.runner.last_token.clone()
        launched = self.runner.launch(chunks, kind)
        self.comm.at.stage = "overflow"
        if not HostCopy(exchange.overflowed()).numpy().any():
            return launched
        self.reruns += 1
        for each, state in zip(counters, saved):
            each.restore(state)
        self.runner.last_token.copy_(last_token)
        exchange.begin_step(kind.tokens, exact=True)
        return self.runner.launch(chunks, replace(kind, padded=0))

    def _commit(self, chunks: list[Chunk], launched: Launched) -> list[Output]:
        started = time.perf_counter()
        self.comm.at.stage = "commit"  # where a host waits for a device that waits for other ranks
        tokens, extra = launched.tokens(), launched.extra()
        self.runner.decoder.exchange.raise_if_failed()
        self.wait_seconds += time.perf_counter() - started
        kept = self.scheduler.commit(chunks, tokens)
        return [
            Output(r.id, [token], r.finish_reason, extra.get(r.id))
            if token != UNDRAWN
            else Output(r.id, [], r.finish_reason)
            for r, token in kept
        ]

    def _apply(self, messages: list[dict], headers: list[Header]) -> list[Output]:
        """Every rank applies the same messages; a home is a pure function of them and the headers, so all agree."""
        loads = rank_loads(headers) if messages else []
        outputs = []
        for message in messages:
            if message["op"] == "add":
                self.intake.add(message, loads)
            elif message["op"] == "abort":
                self.intake.forget(message["id"])
                if (request := self.scheduler.abort(message["id"])) is not None:
                    outputs.append(Output(request.id, [], request.finish_reason))
            elif message["op"] == "stop":
                self.stopping = True
            else:
                raise AssertionError(f"unknown message {message['op']!r}")
        return outputs


def exchange_report(exchange: Exchange, before: Traffic, steps_before: dict[str, int]) -> dict:
    """What travelled, and which exchanges a choice by size took, since ``before``."""
    traffic = exchange.traffic() - before
    steps = getattr(exchange, "steps", {})
    return {
        "sent_rows": traffic.rows_W.tolist(),
        "exchange": exchange.name,
        "exchange_steps": {name: count - steps_before[name] for name, count in steps.items()},
        "exchange_bytes": exchange.buffer_bytes,
        "exchange_notes": getattr(exchange, "notes", []),
        "traffic": traffic.report(),
    }
