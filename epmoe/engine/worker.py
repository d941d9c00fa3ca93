"""The step loop of one rank: propose -> agree -> build -> forward -> sample -> commit.

All ranks run this loop in lockstep.  A step opens with one all-gather of small headers; rank 0 announces there how many
bytes of requests follow.  If any rank has tokens to run, every rank runs the model, with zero tokens if need be.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import msgpack
import numpy as np
import torch
import zmq

from epmoe.checkpoint import load_weights
from epmoe.comm import Comm, close_comm, open_comm
from epmoe.config import EngineConfig, ModelConfig, RankInfo, check_engine
from epmoe.engine.home import RankLoad, assign_home
from epmoe.engine.kv_cache import BlockPool, new_cache, size_cache
from epmoe.engine.request import Request, SamplingParams
from epmoe.engine.runner import Launched, Runner
from epmoe.engine.scheduler import Chunk, Scheduler
from epmoe.model.decoder import Decoder
from epmoe.moe.exchange import AllToAll
from epmoe.trace import ExpertLoads
from placement.plan import Plan, linear_plan

HEADER_FIELDS = 32
IDLE_POLL_MS = 200
CACHE_SHARE = 0.5  # of the memory that is free once weights are loaded


@dataclass(frozen=True)
class Header:
    """What a rank tells the others at the start of a step; travels as int64[32]."""

    step: int
    tokens: int
    unfinished: int
    queued_tokens: int
    free_blocks: int
    payload_bytes: int

    def pack(self) -> np.ndarray:
        fields = np.zeros(HEADER_FIELDS, np.int64)
        values = (self.step, self.tokens, self.unfinished, self.queued_tokens, self.free_blocks, self.payload_bytes)
        fields[: len(values)] = values
        return fields

    @staticmethod
    def unpack(fields: np.ndarray) -> Header:
        return Header(*(int(value) for value in fields[:6]))


class Worker:
    """One rank: its scheduler, its model, and its sockets."""

    def __init__(self, info: RankInfo, engine: EngineConfig, comm: Comm) -> None:
        self.info, self.engine, self.comm = info, engine, comm
        self.model = ModelConfig.from_folder(engine.model)
        check_engine(engine, self.model)
        self.plan = self._plan()
        local = [held[comm.rank] for held in self.plan.slots]
        weights, self.load_report = load_weights(
            Path(engine.model), self.model, local, getattr(torch, engine.dtype), comm.device
        )
        exchange = AllToAll(comm, self.plan.max_slots, engine.combine)
        decoder = Decoder(self.model, weights, self.plan, exchange, engine.deterministic)
        num_blocks = size_cache(self.model, engine, weights.embed.dtype, int(free_memory(comm.device) * CACHE_SHARE))
        self.pool = BlockPool(num_blocks, engine.block_size)
        self.scheduler = Scheduler(engine, self.pool, self.model.eos_token_ids)
        self.loads = ExpertLoads(len(self.model.moe_layers), self.model.num_experts, comm.device)
        cache = new_cache(self.model, engine, num_blocks, comm.device)
        self.runner = Runner(decoder, cache, engine, self.loads)
        self.draining = False
        self.steps = self.forwards = 0
        self.model_seconds = 0.0
        self._open_sockets()

    # -- loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until rank 0 is told to stop and every request has ended."""
        started = time.perf_counter()
        previous: tuple[list[Chunk], Launched] | None = None
        idle = True
        while True:
            self.comm.at.step, self.comm.at.stage = self.steps, "agree"
            chunks = self.scheduler.schedule()
            headers, messages = self._agree(chunks, previous is not None, idle)
            launched = self._launch(chunks) if any(header.tokens for header in headers) else None
            if previous is not None:
                self._commit(*previous)
                previous = None
            if launched is not None:
                if self.engine.async_steps:
                    previous = (chunks, launched)
                else:
                    self._commit(chunks, launched)
            self._apply(messages, headers)
            self.steps += 1
            idle = not any(header.unfinished or header.payload_bytes for header in headers)
            if self.draining and idle:
                break
        self._send_stats(time.perf_counter() - started)

    def _agree(self, chunks: list[Chunk], in_flight: bool, idle: bool) -> tuple[list[Header], list[dict]]:
        """Exchange headers, and the messages that rank 0 has for everyone (they take effect at the step's end)."""
        payload = self._collect(idle) if self.comm.rank == 0 else b""
        mine = Header(
            step=self.steps,
            tokens=sum(chunk.count for chunk in chunks),
            unfinished=int(self.scheduler.has_work or in_flight),
            queued_tokens=self.scheduler.queued_tokens(),
            free_blocks=self.pool.num_free,
            payload_bytes=len(payload),
        )
        headers = [Header.unpack(fields) for fields in self.comm.all_gather_headers(mine.pack())]
        assert all(header.step == self.steps for header in headers), f"ranks are at different steps: {headers}"
        size = headers[0].payload_bytes
        return headers, msgpack.unpackb(self.comm.broadcast_bytes(payload, size)) if size else []

    def _launch(self, chunks: list[Chunk]) -> Launched:
        started = time.perf_counter()
        launched = self.runner.launch(chunks)
        self.forwards += 1
        self.model_seconds += time.perf_counter() - started
        return launched

    def _commit(self, chunks: list[Chunk], launched: Launched) -> None:
        kept = self.scheduler.commit(chunks, launched.tokens())
        if kept:
            extra = launched.extra(chunks)
            items = [[r.id, [token], r.finish_reason, extra.get(r.id)] for r, token in kept]
            self._send({"op": "tokens", "rank": self.comm.rank, "items": items})

    # -- requests -----------------------------------------------------------------------------------------------

    def _collect(self, idle: bool) -> bytes:
        """Rank 0: everything the front has sent, as one payload; waits a little for it when there is nothing to do."""
        messages = []
        wait = IDLE_POLL_MS if idle else 0
        while self.requests.poll(wait):
            messages.append(msgpack.unpackb(self.requests.recv()))
            wait = 0
        return msgpack.packb(messages) if messages else b""

    def _apply(self, messages: list[dict], headers: list[Header]) -> None:
        """Every rank applies the same messages; a home is a pure function of them and the headers, so all agree."""
        loads = [RankLoad(header.queued_tokens, header.free_blocks) for header in headers]
        for message in messages:
            if message["op"] == "add":
                self._add(message, loads)
            elif message["op"] == "abort":
                if (request := self.scheduler.abort(message["id"])) is not None:
                    item = [request.id, [], request.finish_reason, None]
                    self._send({"op": "tokens", "rank": self.comm.rank, "items": [item]})
            elif message["op"] == "stop":
                self.draining = True
            else:
                raise AssertionError(f"unknown message {message['op']!r}")

    def _add(self, message: dict, loads: list[RankLoad]) -> None:
        params = SamplingParams.from_dict(message["params"])
        tokens = len(message["prompt"]) + params.max_tokens
        home = assign_home(tokens, loads, self.engine.block_size)
        loads[home] = RankLoad(
            loads[home].queued_tokens + tokens, loads[home].free_blocks - self.pool.blocks_for(tokens)
        )
        if home == self.comm.rank:
            seed = params.seed if params.seed is not None else self.engine.seed * 0x9E3779B1 + message["id"]
            request = Request(message["id"], message["prompt"], params, seed, message.get("sample", 0), home)
            self.scheduler.add(request)

    # -- sockets ------------------------------------------------------------------------------------------------

    def _open_sockets(self) -> None:
        context = zmq.Context.instance()
        self.outputs = context.socket(zmq.PUSH)
        self.outputs.setsockopt(zmq.LINGER, 5000)
        self.outputs.connect(self.info.outputs_addr)
        if self.comm.rank == 0:
            self.requests = context.socket(zmq.PULL)
            self.requests.setsockopt(zmq.LINGER, 0)
            self.requests.connect(self.info.requests_addr)
        report = {"num_blocks": self.pool.num_blocks, "block_size": self.pool.block_size}
        report |= {"bytes_read": self.load_report.bytes_read, "load_seconds": self.load_report.seconds}
        self._send({"op": "ready", "rank": self.comm.rank, "report": report})

    def _send(self, message: dict) -> None:
        self.outputs.send(msgpack.packb(message))

    def _send_stats(self, seconds: float) -> None:
        report = {
            "load_LE": self.loads.load_LE.tolist(),
            "steps": self.steps,
            "forwards": self.forwards,
            "seconds": seconds,
            "model_seconds": self.model_seconds,
            "preemptions": self.scheduler.preemptions,
            "free_blocks": self.pool.num_free,
            "sent_rows": self.runner.decoder.exchange.sent_rows.tolist(),
        }
        self._send({"op": "stats", "rank": self.comm.rank, "report": report})

    def _plan(self) -> Plan:
        shape = self.model.moe_shape
        if self.engine.plan is None:
            return linear_plan(shape, self.comm.world)
        plan = Plan.from_json(self.engine.plan, "the plan")
        shape.require_same(plan.shape, "the model", "the plan")
        assert plan.ranks == self.comm.world, f"plan for {plan.ranks} ranks on {self.comm.world}"
        return plan


def free_memory(device: torch.device) -> int:
    """Bytes a cache could take: of the GPU, or of the host divided among its ranks by the caller's share."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8


def run(info: RankInfo, engine: EngineConfig, timeout_s: float = 600.0) -> None:
    """Entry of a rank process; on failure writes the error where the watcher finds it and ends the process at once.

    Ending at once matters: a rank that unwinds politely would keep its peers waiting in a collective.
    """
    device = torch.device("cuda", info.local_rank) if engine.device == "cuda" else torch.device("cpu")
    comm = None
    try:
        if engine.threads:
            torch.set_num_threads(engine.threads)
        comm = open_comm(info.rank, info.world, device, info.init_method, timeout_s)
        worker = Worker(info, engine, comm)
        worker.run()
        zmq.Context.instance().destroy(linger=5000)
        close_comm(comm)
    except BaseException as error:
        write_error(info, comm, error)
        os._exit(1)


def write_error(info: RankInfo, comm: Comm | None, error: BaseException) -> None:
    """``error.rank{N}.json`` in the run folder: who, where in the step, what."""
    at = comm.at if comm is not None else None
    record = {
        "rank": info.rank,
        "step": at.step if at else 0,
        "layer": at.layer if at else -1,
        "stage": at.stage if at else "start",
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }
    path = Path(info.run_dir) / f"error.rank{info.rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.rename(path)
