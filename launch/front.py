"""The front's end of the sockets: requests go to rank 0, tokens come back from the ranks.

Messages are msgpack maps.  To rank 0: ``{"op": "add", "id", "prompt", "params", "sample"}``, ``{"op": "abort", "id"}``,
``{"op": "stop"}`` (finish what is there, then end).  From a rank: while it starts ``{"op": "progress", "rank", "phase",
"done", "total"}`` (rank 0 only), then ``{"op": "ready", "rank", "report"}``,
``{"op": "tokens", "rank", "items": [[id, token ids, finish reason or null, extra or null]]}`` and, at the end,
``{"op": "trace", "rank", "full", "sequences"}`` if routing is recorded, then ``{"op": "stats", "rank", "report"}``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgpack
import zmq

from placement.errors import UserError

LONGEST_IPC_PATH = 100  # bytes; the kernel's limit is 107


@dataclass(frozen=True)
class Addresses:
    requests: str
    outputs: str


class Front:
    """Two bound sockets.  Within one machine they are files in the run's private folder, so no port is open."""

    def __init__(self, run_dir: Path, interface: str | None = None) -> None:
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._outputs = self._context.socket(zmq.PULL)
        self._unsent: deque[bytes] = deque()
        for socket in (self._requests, self._outputs):
            socket.set_hwm(0)
            socket.linger = 0
        names = ("requests", "outputs")
        if interface is None and len(str(run_dir)) + len("/requests") <= LONGEST_IPC_PATH:
            targets = [f"ipc://{run_dir}/{name}" for name in names]
        else:
            targets = [f"tcp://{interface or '127.0.0.1'}:*"] * 2
        try:
            self._requests.bind(targets[0])
            self._outputs.bind(targets[1])
        except zmq.ZMQError as error:
            self.close()
            rule = "rank 0 runs on the machine of --master-addr" if interface else "set TMPDIR to another folder"
            raise UserError(f"cannot listen on {targets[0]}: {error.strerror}; {rule}") from None
        self.addresses = Addresses(*(s.last_endpoint.decode().rstrip("\0") for s in (self._requests, self._outputs)))

    def send(self, message: dict) -> None:
        """Queue a message for rank 0; it leaves once rank 0 is connected."""
        self._unsent.append(msgpack.packb(message))
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._requests.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def receive(self, seconds: float) -> list[dict]:
        """All messages that are there, after waiting at most ``seconds`` for the first."""
        self._flush()
        messages = []
        if self._outputs.poll(int(seconds * 1000)):
            while True:
                try:
                    messages.append(msgpack.unpackb(self._outputs.recv(zmq.NOBLOCK), strict_map_key=False))
                except zmq.Again:
                    break
        return messages

    def close(self) -> None:
        self._context.destroy(linger=0)
