"""A rank process: the engine between its sockets, and what is left behind when it fails."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path

import msgpack
import torch
import zmq

from epmoe.checkpoint import load_weights
from epmoe.comm import Comm, close_comm, open_comm
from epmoe.config import EngineConfig, RankInfo
from epmoe.engine.engine import Engine
from epmoe.engine.watchdog import watch
from placement.errors import UserError

IDLE_POLL_MS = 200
PROGRESS_S = 0.2  # between two messages about the same phase of starting
TRACE_MESSAGE_BYTES = 8 << 20
TIMELINE_MESSAGE_SPANS = 20_000


def run(info: RankInfo, config: EngineConfig, timeout_s: float = 600.0) -> None:
    """Serve until the front says stop and every request has ended.

    On failure the error is written where the watcher finds it and the process ends at once: a rank that unwound
    politely would keep its peers waiting in a collective.
    """
    comm = engine = None
    try:
        if config.threads:
            torch.set_num_threads(config.threads)
        comm = open_comm(info.rank, info.world, own_device(info, config), info.init_method, timeout_s)
        outputs = Outputs(info)
        load = partial(load_weights, progress=outputs.progress("loading weights, MB", 1e-6))
        engine = Engine(config, comm, load, outputs.progress("capturing graphs"))
        exchange = engine.runner.decoder.exchange
        watch(comm.at, config.stall_seconds, lambda error: write_error(info, comm, error), exchange.watch_peers)
        serve(engine, info, outputs)
        engine.close()
        close_comm(comm)
    except BaseException as error:
        write_error(info, comm, cause_of(error, engine))
        os._exit(1)


def cause_of(error: BaseException, engine: Engine | None) -> BaseException:
    """A collective broke because a peer is gone: the exchange may know where the device waited for whom."""
    try:
        if engine is not None and isinstance(error, RuntimeError):
            engine.runner.decoder.exchange.raise_if_failed(patience_s=4.0)
    except RuntimeError as failure:
        return failure
    return error


def own_device(info: RankInfo, config: EngineConfig) -> torch.device:
    """This rank's device: one of the GPUs that it sees, in turn by local rank; a launcher may show each rank only its
    own."""
    if config.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise UserError("device is cuda, and torch sees no GPU on this machine; use cpu, or a CUDA build of torch")
    device = torch.device("cuda", info.local_rank % count)
    torch.cuda.set_device(device)
    return device


class Outputs:
    """This rank's way to the front."""

    def __init__(self, info: RankInfo) -> None:
        self.rank, self.context = info.rank, zmq.Context()
        self._socket = self.context.socket(zmq.PUSH)
        self._socket.connect(info.outputs_addr)

    def send(self, op: str, **fields) -> None:
        self._socket.send(msgpack.packb({"op": op, "rank": self.rank, **fields}))

    def progress(self, phase: str, unit: float = 1.0) -> Callable[[int, int], None]:
        """Tells the front how far a phase of starting has come, in ``unit``; rank 0 speaks for all."""
        said = 0.0

        def reached(done: int, total: int) -> None:
            nonlocal said
            now = time.monotonic()
            if self.rank == 0 and (now - said >= PROGRESS_S or done == total):
                said = now
                self.send("progress", phase=phase, done=round(done * unit), total=round(total * unit))

        return reached


def serve(engine: Engine, info: RankInfo, outputs: Outputs) -> None:
    """The loop between the sockets: rank 0 pulls requests, every rank pushes its tokens."""
    send, requests = outputs.send, None
    if info.rank == 0:
        requests = outputs.context.socket(zmq.PULL)
        requests.connect(info.requests_addr)
    gc.collect()
    gc.freeze()  # what is alive now stays: a collection that went through it would hold up a step
    report = engine.load_report
    send("ready", report={**report.__dict__, "num_blocks": engine.pool.num_blocks, "combine": engine.engine.combine})
    started = time.perf_counter()
    while not engine.finished:
        gained = engine.step(receive(requests, engine.idle) if requests is not None else [])
        if gained:
            send("tokens", items=gained)
    for message in recorded_messages(engine):
        send("trace", **message)
    for message in timeline_messages(engine):
        send("timeline", **message)
    send("stats", report={**engine.report(), "seconds": time.perf_counter() - started})
    outputs.context.destroy(linger=5000)


def recorded_messages(engine: Engine) -> Iterator[dict]:
    """What was recorded, in messages of bounded size: ``{"full", "sequences": [[id, token ids, expert ids]]}``.

    Token ids are bytes of uint32 ``[T]``, expert ids of uint8 or uint16 ``[T, L, K]`` (see ``placement.trace``).
    """
    if engine.recorder is None:
        return
    sequences, size = [], 0
    for number, token_T, ids_TLK in engine.recorder.sequences():
        sequences.append([number, token_T.tobytes(), ids_TLK.tobytes()])
        size += token_T.nbytes + ids_TLK.nbytes
        if size >= TRACE_MESSAGE_BYTES:
            yield {"full": engine.recorder.full, "sequences": sequences}
            sequences, size = [], 0
    yield {"full": engine.recorder.full, "sequences": sequences}


def timeline_messages(engine: Engine) -> Iterator[dict]:
    """What was timed, in messages of bounded size: ``{"full", "spans": [fields of a Span]}``."""
    timeline = engine.runner.decoder.timeline
    if timeline is None:
        return
    spans = timeline.read()
    for first in range(0, len(spans), TIMELINE_MESSAGE_SPANS):
        part = spans[first : first + TIMELINE_MESSAGE_SPANS]
        yield {"full": timeline.full, "spans": [astuple(span) for span in part]}


def receive(requests: zmq.Socket, idle: bool) -> list[dict]:
    """All that the front has sent; waits a little when there is nothing else to do."""
    messages = []
    wait = IDLE_POLL_MS if idle else 0
    while requests.poll(wait):
        messages.append(msgpack.unpackb(requests.recv()))
        wait = 0
    return messages


def write_error(info: RankInfo, comm: Comm | None, error: BaseException) -> None:
    """``error.rank{N}.json`` in the run folder: who, where in the step, what; printed where there is no such folder."""
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
    message = f"rank {info.rank}: step {record['step']}, {record['stage']}: {record['kind']}: {error}"
    if unwritten := _save(record, info):  # then the front, or the launcher, shows the last lines of this rank
        print(f"{record['traceback']}{message}\n({unwritten})", file=sys.stderr, flush=True)
    if info.error_file:  # in the form of torch.distributed.elastic's error handler
        extra = {"py_callstack": record["traceback"], "timestamp": str(int(record["time"]))}
        report = {"message": {"message": message, "extraInfo": extra}}
        Path(info.error_file).write_text(json.dumps(report), encoding="utf-8")


def _save(record: dict, info: RankInfo) -> str:
    """Write the file; why it is not there, or nothing."""
    if not info.run_dir:
        return "on another machine than rank 0"
    path = Path(info.run_dir) / f"error.rank{info.rank}.json"
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.rename(path)
    except OSError as error:  # a full disk, say
        return f"not in {path}: {error.strerror}"
    return ""
