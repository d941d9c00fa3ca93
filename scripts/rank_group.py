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


def on_ranks(world: int, device: str, function: Callable, *args, limit_s: float = 3600) -> None:
    """``function(comm, *args)`` on every rank, in fresh processes.

    Raises if one fails, and after ``limit_s`` seconds: then all are killed, so that a hang costs no more than that.
    """
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    ends = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        ranks = torch.multiprocessing.spawn(_serve, (world, device, rendezvous, function, args), world, join=False)
        try:
            while not ranks.join(max(0.1, ends - time.monotonic())):
                if time.monotonic() > ends:
                    raise TimeoutError(f"{function.__name__} did not end within {limit_s:.0f} s")
        finally:
            for process in ranks.processes:
                process.kill()


def _serve(rank: int, world: int, kind: str, rendezvous: str, function: Callable, args: tuple) -> None:
    comm = join(rank, world, kind, rendezvous)
    function(comm, *args)
    close_comm(comm)


def join(rank: int, world: int, kind: str, rendezvous: str, timeout_s: float = 120) -> Comm:
    """This process as a rank."""
    device, shared = torch.device(kind), False
    torch.set_num_threads(1)
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        shared = world > torch.cuda.device_count()
    return open_comm(rank, world, device, rendezvous, timeout_s, shared)
