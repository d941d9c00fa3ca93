"""The engine of one rank: propose -> agree -> build -> forward -> sample -> commit, in lockstep with the other ranks.

A step opens with one all-gather of small headers; rank 0 announces there how many bytes of messages follow.  If any
rank has tokens to run, every rank runs the model, with zero tokens if need be.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgpack
import torch

from epmoe.checkpoint import Loader, load_weights
from epmoe.comm import Comm
from epmoe.config import EngineConfig, check_engine
from epmoe.engine.agreement import HEADER_MOVES, Header, Kind, agreed_kind
from epmoe.engine.graphs import is_decode
from epmoe.engine.home import RankLoad, assign_home
from epmoe.engine.kv_cache import BlockPool, new_cache, size_cache
from epmoe.engine.probe import ProbeScores
from epmoe.engine.request import Request, SamplingParams
from epmoe.engine.runner import Launched, Runner
from epmoe.engine.scheduler import Chunk, Scheduler, longest
from epmoe.engine.staging import HostCopy
from epmoe.model.decoder import Decoder
from epmoe.model_config import ModelConfig
from epmoe.moe.by_size import costs_from
from epmoe.moe.calibrate import measure_stages
from epmoe.moe.exchange import Exchange, ExchangeShape, Traffic
from epmoe.moe.open_exchange import open_exchange
from epmoe.moe.peer_order import expected_rows
from epmoe.moe.timeline import Timeline
from epmoe.ops.tuned import Tuned
from epmoe.trace import ExpertLoads, RoutingRecorder, observe_all
from placement.errors import UserError
from placement.homes import Affinity, score_prompt
from placement.plan import Plan, linear_plan


class Output(NamedTuple):
    """New tokens of one request; ``finish_reason`` with its last ones."""

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
    """

    def __init__(self, engine: EngineConfig, comm: Comm, load: Loader = load_weights) -> None:
        self.engine, self.comm = engine, comm
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
        self.affinity = read_affinity(engine, self.model, comm.world)
        probing = engine.probe_tokens and comm.world > 1
        self.probes = ProbeScores(self.plan, self.affinity, comm.device) if probing else None
        observers = (self.loads, self.recorder, self.probes)
        observe = observe_all([each for each in observers if each is not None])
        cache = new_cache(self.model, engine, num_blocks, comm.device)
        self.stage_times = None
        if engine.overlap == "auto" and comm.world > 1:
            self.stage_times = measure_stages(decoder, cache, engine.max_batch_tokens, engine.max_model_len)
        self.rehearsed = Traffic.none(comm.world) + exchange.traffic(), dict(getattr(exchange, "steps", {}))
        if engine.timeline:
            decoder.timeline = Timeline(comm)
        self.runner = Runner(decoder, cache, engine, observe)
        self.idle = True
        self.stopping = False
        self.steps = self.forwards = self.reruns = self.moved = 0
        self.model_seconds = self.step_seconds = self.wait_seconds = 0.0
        self._in_flight: tuple[list[Chunk], Launched] | None = None
        self._undecided: dict[int, dict] = {}  # messages of requests under probe, on every rank, by request id
        self._decided: list[tuple[int, int]] = []  # (request id, home) to be announced by this rank

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
        self._settle(headers)
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

    def report(self) -> dict:
        """Counters since the start (see ``launch`` for how they are shown)."""
        return {
            "load_LE": self.loads.load_LE.tolist(),
            "active_L": self.loads.active_L.tolist(),
            "steps": self.steps,
            "forwards": self.forwards,
            "reruns": self.reruns,  # of steps whose exchange had too little room
            "graph_replays": self.runner.graphs.replays if self.runner.graphs is not None else 0,
            "seconds_in_steps": self.step_seconds,  # of steps that ran the model
            "model_seconds": self.model_seconds,
            "wait_seconds": self.wait_seconds,  # for the device, with nothing else to do
            "preemptions": self.scheduler.preemptions,
            "moved_after_probe": self.moved,  # requests handed to a better home
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
            homes=tuple(self._decided[:HEADER_MOVES]),
        )
        self._decided = self._decided[HEADER_MOVES:]
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
        return [Output(r.id, [token], r.finish_reason, extra.get(r.id)) for r, token in kept]

    def _apply(self, messages: list[dict], headers: list[Header]) -> list[Output]:
        """Every rank applies the same messages; a home is a pure function of them and the headers, so all agree."""
        loads = [RankLoad(header.queued_tokens, header.free_blocks) for header in headers] if messages else []
        outputs = []
        for message in messages:
            if message["op"] == "add":
                self._add(message, loads)
            elif message["op"] == "abort":
                if self._undecided.pop(message["id"], None) is not None:
                    self.probes.forget(message["id"])
                if (request := self.scheduler.abort(message["id"])) is not None:
                    outputs.append(Output(request.id, [], request.finish_reason))
            elif message["op"] == "stop":
                self.stopping = True
            else:
                raise AssertionError(f"unknown message {message['op']!r}")
        return outputs

    def _add(self, message: dict, loads: list[RankLoad]) -> None:
        prompt = message["prompt"]
        tokens = longest(len(prompt), message["params"]["max_tokens"], self.engine)
        known = self.affinity is not None and len(self.affinity.token_rank_VW) > 0
        affinity_W = score_prompt(prompt, self.affinity.token_rank_VW) if known else None
        home = assign_home(tokens, loads, self.engine.block_size, affinity_W)
        queued, free = loads[home].queued_tokens + tokens, loads[home].free_blocks - self.pool.blocks_for(tokens)
        loads[home] = RankLoad(queued, free)
        probe = self.engine.probe_tokens if self.probes is not None else 0
        if 0 < probe < len(prompt):
            self._undecided[message["id"]] = message
        if home == self.comm.rank:
            self._adopt(message, probe if probe < len(prompt) else 0)

    def _adopt(self, message: dict, probe: int = 0) -> None:
        """Become the home of a request."""
        params = SamplingParams.from_dict(message["params"])
        seed = params.seed if params.seed is not None else self.engine.seed * 0x9E3779B1 + message["id"]
        request = Request(message["id"], message["prompt"], params, seed, message.get("sample", 0), self.comm.rank)
        request.probe = probe
        self.scheduler.add(request)

    def _settle(self, headers: list[Header]) -> None:
        """Move requests to the homes that were announced, then decide for the probes that this rank has finished."""
        for number, home in (pair for header in headers for pair in header.homes):
            message = self._undecided.pop(number, None)
            if message is None:  # aborted meanwhile
                continue
            here = next((r for r in [*self.scheduler.running, *self.scheduler.waiting] if r.id == number), None)
            if here is not None and home == self.comm.rank:
                here.probe = 0
            elif here is not None:
                self.scheduler.withdraw(number)
                self.moved += 1
                if self.recorder is not None:
                    self.recorder.forget(number)
            elif home == self.comm.rank:
                self._adopt(message)
        if self.probes is None:
            return
        announced = {number for number, _ in self._decided}
        loads = [RankLoad(header.queued_tokens, header.free_blocks) for header in headers]
        for request in self.scheduler.running:
            if request.probe and request.computed == request.probe and request.id not in announced:
                self._decided.append((request.id, self._home_after_probe(request, loads)))

    def _home_after_probe(self, request: Request, loads: list[RankLoad]) -> int:
        """Its best rank by the routing of its probe, among those with room; the request does not weigh on its rank."""
        tokens = longest(len(request.prompt), request.params.max_tokens, self.engine)
        own = loads[self.comm.rank]
        loads = list(loads)
        loads[self.comm.rank] = RankLoad(own.queued_tokens - tokens, own.free_blocks + len(request.blocks))
        return assign_home(tokens, loads, self.engine.block_size, self.probes.take(request.id).numpy())


def exchange_shape(engine: EngineConfig, model: ModelConfig, plan: Plan) -> ExchangeShape:
    """What the exchange sizes its buffers from; the same on every rank."""
    return ExchangeShape(
        slots_per_rank=plan.max_slots,
        max_tokens=engine.max_batch_tokens,
        hidden=model.hidden_size,
        top_k=model.top_k,
        dtype=getattr(torch, engine.dtype),
        combine=engine.combine,
        capacity_factor=engine.capacity_factor,
        wire=engine.wire,
        graph_tokens=engine.max_requests if engine.graphs else 0,
    )


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


def read_affinity(engine: EngineConfig, model: ModelConfig, world: int) -> Affinity | None:
    """The plan's affinity file, checked against the model and the number of ranks."""
    if engine.affinity is None:
        return None
    affinity = Affinity.load(engine.affinity)
    want = (len(model.moe_layers), model.num_experts, world)
    if affinity.expert_rank_LEW.shape != want:
        found = affinity.expert_rank_LEW.shape
        raise UserError(f"{engine.affinity}: expert_rank has shape {found}, this model on {world} ranks needs {want}")
    return affinity


def read_plan(engine: EngineConfig, model: ModelConfig, world: int) -> Plan:
    """The engine's plan, checked against the model; the linear one if none is given."""
    if engine.plan is None:
        return linear_plan(model.moe_shape, world)
    plan = Plan.from_json(engine.plan, "the plan")
    model.moe_shape.require_same(plan.shape, "the model", "the plan")
    assert plan.ranks == world, f"plan for {plan.ranks} ranks on {world}"
    return plan


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the GPU, or on the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
