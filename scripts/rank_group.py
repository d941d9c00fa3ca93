"""Rank processes for benchmarks: on CPU, on a GPU each, or sharing GPUs."""

from __future__ import annotations

import os
import tempfile
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


def on_ranks(world: int, device: str, function: Callable, *args) -> None:
    """``function(comm, *args)`` on every rank, in fresh processes; raises if one fails."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        torch.multiprocessing.spawn(_serve, (world, device, rendezvous, function, args), nprocs=world)


def _serve(rank: int, world: int, kind: str, rendezvous: str, function: Callable, args: tuple) -> None:
    function(join(rank, world, kind, rendezvous), *args)


def join(rank: int, world: int, kind: str, rendezvous: str, timeout_s: float = 120) -> Comm:
    """This process as a rank."""
    device, shared = torch.device(kind), False
    torch.set_num_threads(1)
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        shared = world > torch.cuda.device_count()
    return open_comm(rank, world, device, rendezvous, timeout_s, shared)


def leave(comm: Comm) -> None:
    close_comm(comm)
