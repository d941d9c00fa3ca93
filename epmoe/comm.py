"""The only place that touches torch.distributed.

Two groups: ``data`` carries token rows (NCCL on GPUs, gloo on CPU), ``control`` the per-step agreement between hosts
(always gloo).  ``Comm.at`` names where in a step this rank is; the watchdog and every error message read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

Work = dist.Work
# torch renamed it in 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Position:
    """Where a rank is: step, MoE layer (-1 outside the layers) and stage. Written by one thread, read by any."""

    step: int = 0
    layer: int = -1
    stage: str = "start"

    def __str__(self) -> str:
        layer = f", layer {self.layer}" if self.layer >= 0 else ""
        return f"step {self.step}{layer}, {self.stage}"


@dataclass
class Comm:
    """One rank's process groups. With ``world == 1`` none is needed, and every exchange is local."""

    rank: int
    world: int
    device: torch.device
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    at: Position = field(default_factory=Position)
    on_nccl: bool = False  # rows travel on NCCL
    on_work: Callable[[Work], None] | None = None  # sees the exchanges of rows that the host waits for

    def all_to_all(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> Pending:
        """Start an exchange of rows: ``send[w]`` rows of ``rows`` go to rank w, ``receive[w]`` come from it, in rank
        order. Any dtype (bytes on the wire); zero rows are legal."""
        if self.data is None:
            return Pending(rows, None)
        wire = rows.contiguous().view(torch.uint8)
        out = wire.new_empty((sum(receive), *wire.shape[1:]))
        work = dist.all_to_all_single(out, wire, receive, send, group=self.data, async_op=True)
        return self._pending(out.view(rows.dtype), work, wire)

    def all_to_all_blocks(self, out: torch.Tensor, blocks: torch.Tensor) -> Pending:
        """Start an exchange of equal blocks: ``blocks[w]`` goes to rank w, ``out[w]`` comes from it. Both are dense
        and may be used in a captured graph on NCCL."""
        if self.data is None:
            out.copy_(blocks)
            return Pending(out, None)
        flat_out, flat = out.view(-1).view(torch.uint8), blocks.view(-1).view(torch.uint8)
        work = dist.all_to_all_single(flat_out, flat, group=self.data, async_op=True)
        return self._pending(out, work, blocks)

    def _pending(self, rows: torch.Tensor, work: dist.Work, sent: torch.Tensor) -> Pending:
        """On NCCL the current stream goes on behind the exchange; on gloo the host waits for it, later."""
        if self.on_nccl:
            work.wait()
            return Pending(rows, None)
        if self.on_work is not None:
            self.on_work(work)
        return Pending(rows, work, sent)

    def all_gather_headers(self, header: np.ndarray) -> np.ndarray:
        """Every rank's int64 header, ``[W, fields]``, over the control group."""
        if self.world == 1:
            return header[None]
        out = torch.empty((self.world, len(header)), dtype=torch.int64)
        _all_gather(out, torch.from_numpy(header)[None], group=self.control)
        return out.numpy()

    def broadcast_bytes(self, payload: bytes | None, size: int) -> bytes:
        """Rank 0's bytes, known to be ``size`` long, on every rank."""
        if self.world == 1:
            return payload
        data = torch.empty(size, dtype=torch.uint8)
        if self.rank == 0:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(data, group_src=0, group=self.control)
        return data.numpy().tobytes()


@dataclass(frozen=True)
class Pending:
    """A running exchange; it keeps its send buffer alive until it is waited for."""

    rows: torch.Tensor
    work: dist.Work | None
    sent: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.rows


class NoPeerMemory(RuntimeError):
    """Ranks cannot reach each other's memory; the message says why.  Raised on all ranks alike."""


@dataclass(frozen=True)
class PeerMemory:
    """A buffer of the same size on every rank, each mapped into every rank.

    ``peers``: uint8 tensors, one a rank; ``local`` is this rank's.  ``table_W``: int64, their addresses, for kernels.
    ``processes``: a descriptor of each rank's process that becomes readable when it ends, or None.
    """

    local: torch.Tensor
    peers: list[torch.Tensor]
    table_W: torch.Tensor
    processes: list[int | None]
    handle: object = None

    def gone(self) -> list[int]:
        """The ranks whose processes have ended."""
        held = {process: rank for rank, process in enumerate(self.processes) if process is not None}
        watcher = select.poll()  # not select(), whose descriptors end at 1023
        for process in held:
            watcher.register(process, select.POLLIN)
        return sorted(held[process] for process, _ in watcher.poll(0))


def open_buffers(comm: Comm, size: int) -> PeerMemory:
    """Zeroed symmetric memory of ``size`` bytes, a collective of all ranks; raises `NoPeerMemory`.

    Ranks that share a GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 in their environment.
    """
    handle, local, why = None, None, ""
    if comm.device.type != "cuda":
        why = f"device {comm.device.type} has no peer memory"
    else:
        try:
            from torch.distributed import _symmetric_memory as symmetric  # private to torch, and it moves

            local = symmetric.empty(size, dtype=torch.uint8, device=comm.device).zero_()
            torch.cuda.synchronize(comm.device)
        except (ImportError, AttributeError, RuntimeError) as error:
            why = _first_line(error)
    agree_on_memory(comm, why)
    try:
        # Its handles travel over the host group: the first use of NCCL's would make a communicator.
        handle = symmetric.rendezvous(local, comm.control)
        peers = [local if w == comm.rank else handle.get_buffer(w, (size,), torch.uint8) for w in range(comm.world)]
    except (AttributeError, RuntimeError, TypeError) as error:
        why = _first_line(error)
    pids_W = agree_on_memory(comm, why)
    table = torch.tensor([peer.data_ptr() for peer in peers], dtype=torch.int64, device=comm.device)
    return PeerMemory(local, peers, table, [_open_process(pid) for pid in pids_W], handle)


def _open_process(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system, or a container that hides its neighbours
        return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def agree_on_memory(comm: Comm, why: str) -> list[int]:
    """Raise on all ranks if one has a reason; else the ranks' process ids.  Behind it every rank's buffer is ready."""
    host = zlib.crc32(socket.gethostname().encode())
    headers = comm.all_gather_headers(np.array([bool(why), host, os.getpid()], np.int64))
    if not why and (headers[:, 1] != host).any():
        why = "the ranks are on several hosts"
    elif not why and headers[:, 0].any():
        why = f"rank {headers[:, 0].argmax()} cannot"
    if why:
        raise NoPeerMemory(f"no memory shared between the ranks' GPUs: {why}")
    return headers[:, 2].tolist()


def open_comm(rank: int, world: int, device: torch.device, init_method: str, timeout_s: float) -> Comm:
    """Join the group at ``init_method`` (``file://...``, ``tcp://...`` or ``env://``).

    Rows travel on NCCL if every rank has a GPU of its own, whatever each of them sees; else gloo carries them.
    """
    if world == 1:
        return Comm(rank, world, device)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method, timeout=timeout, world_size=world, rank=rank)
    control = dist.new_group(backend="gloo", timeout=timeout)
    comm = Comm(rank, world, device, dist.group.WORLD, control)
    if rows_backend(comm.all_gather_headers(gpu_identity(device))) == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # torch warns where it is not the argument's
        comm.data, comm.on_nccl = dist.new_group(backend="nccl", timeout=timeout, pg_options=options), True
    return comm


def gpu_identity(device: torch.device) -> np.ndarray:
    """int64 ``[2]``: a digest of the GPU's UUID, the same in every process and unlike any other GPU's; zeros on CPU."""
    if device.type != "cuda":
        return np.zeros(2, np.int64)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    digest = hashlib.blake2b(uuid.encode(), digest_size=16).digest()
    return np.frombuffer(digest, np.int64).copy()


def rows_backend(identity_W2: np.ndarray) -> str:
    """What carries rows between ranks on these devices (`gpu_identity` of each): NCCL refuses ranks that share a GPU.

    All ranks of all hosts decide from the same table, so they agree.
    """
    own_gpus = identity_W2.any(1).all() and len(np.unique(identity_W2, axis=0)) == len(identity_W2)
    return "nccl" if own_gpus else "gloo"


def close_comm(comm: Comm) -> None:
    if comm.world > 1:
        with contextlib.suppress(RuntimeError):  # a peer that left first is no error at the end
            dist.destroy_process_group()
