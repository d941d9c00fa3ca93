"""Rank processes for benchmarks: on CPU, on a GPU each, or sharing GPUs."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from epmoe.comm import Comm, close_comm, open_comm


def label(device: str, world: int) -> str:
    """Where ranks run, for people; ranks that share a GPU are named so, as their times mean little."""
    if device == "cpu":
        return f"{world} CPU ranks over gloo, {torch.get_num_threads()} threads"
    count = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0)
    return f"{world} ranks SHARING {count} x {name}" if world > count else f"{world} x {name}, NCCL"


class RankGroup:
    """Fresh processes that each call ``function(comm, *args)``; `close` kills what is left of them."""

    def __init__(self, world: int, device: str, function: Callable, *args) -> None:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        values = (world, device, rendezvous, function, args)
        self._ranks = torch.multiprocessing.spawn(_serve, values, world, join=False)

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether all ranks have returned; raises if one has failed."""
        return self._ranks.join(max(0.05, within_s))

    def close(self) -> None:
        for process in self._ranks.processes:
            process.kill()
        for process in self._ranks.processes:
            process.join()
        self._folder.cleanup()


def on_ranks(world: int, device: str, function: Callable, *args, limit_s: float = 3600) -> None:
    """``function(comm, *args)`` on every rank, in fresh processes.

    Raises if one fails, and after ``limit_s`` seconds: then all are killed, so that a hang costs no more than that.
    """
    ends = time.monotonic() + limit_s
    ranks = RankGroup(world, device, function, *args)
    try:
        while not ranks.ended(ends - time.monotonic()):
            if time.monotonic() > ends:
                raise TimeoutError(f"{function.__name__} did not end within {limit_s:.0f} s")
    finally:
        ranks.close()


def _serve(rank: int, world: int, kind: str, rendezvous: str, function: Callable, args: tuple) -> None:
    comm = join(rank, world, kind, rendezvous)
    function(comm, *args)
    close_comm(comm)


def join(rank: int, world: int, kind: str, rendezvous: str, timeout_s: float = 120) -> Comm:
    """This process as a rank."""
    device = torch.device(kind)
    torch.set_num_threads(1)
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return open_comm(rank, world, device, rendezvous, timeout_s)
