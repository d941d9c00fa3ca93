"""Pools of gloo rank processes that tests share: each is spawned once per session and runs functions on all ranks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch


class RankPool:
    """W processes in one group: of gloo, or on GPUs of NCCL where each has its own."""

    def __init__(self, world: int, threads: int = 1, device: str = "cpu") -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads of many ranks would spin the cores full
        self.world = world
        self.broken = False  # after a failure some ranks may still wait in a collective
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world, rendezvous, threads, device), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable, *args, timeout_s: float = 120) -> list:
        """``function(comm, *args)`` on every rank; the results in rank order. A failure on any rank is raised here."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(5 if errors else timeout_s):
                self.broken = True
                raise TimeoutError(f"rank {rank} of {self.world} gave no answer to {function.__name__}; {errors}")
            ok, value = pipe.recv()
            (results if ok else errors).append(value if ok else f"rank {rank}: {value}")
        if errors:
            self.broken = True
            raise AssertionError("\n".join(errors))
        return results

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes):
            process.kill()  # it holds nothing worth a polite end, which takes seconds
            process.join()
            pipe.close()
        self._folder.cleanup()


def _serve(pipe, rank: int, world: int, rendezvous: str, threads: int, kind: str) -> None:
    from epmoe.comm import open_comm

    torch.set_num_threads(threads)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    comm = open_comm(rank, world, device, rendezvous, 120)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(comm, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
