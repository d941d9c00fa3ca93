"""Whether ranks reach each other at all, and how fast every link is: the first part of multi_gpu_report.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from exchange_bench_lib import barrier, link_limit, slowest, timed
from torch import distributed

from epmoe.comm import Comm, NoPeerMemory, PeerMemory, open_buffers
from placement.topology import Topology

BLOCK = {"cpu": 4 << 20, "cuda": 128 << 20}
SMALL = 4096
REPEAT = 6
ROUNDS, SMALL_ONES = {"cpu": 3, "cuda": 7}, {"cpu": 4, "cuda": 32}  # 8 ranks have 56 pairs


def links(comm: Comm, save: Callable, seconds: float, topology_file: str) -> dict:
    """Smoke tests, then bandwidth and latency of every pair, one at a time, and of all at once; rank 0 writes the
    topology file, in which a link has no more than its share with all busy."""
    found: dict = {"backend": "nccl" if comm.on_nccl else "gloo"}
    ones = torch.ones(1 << 10, device=comm.device)
    distributed.all_reduce(ones, group=comm.data)
    assert (ones == comm.world).all(), "all_reduce is wrong"
    found["all_reduce"] = "right"
    memory, found["peer_memory"] = _peer_memory(comm)
    found["measured_by"] = "copy to peer memory" if memory else "all_to_all_single with one block"
    bandwidth, latency = np.zeros((comm.world, comm.world)), np.zeros((comm.world, comm.world))
    for source in range(comm.world):
        for target in range(comm.world):
            if source != target:
                large = _pair_us(comm, memory, (source, target), BLOCK[comm.device.type])
                small = _pair_us(comm, memory, (source, target), SMALL, SMALL_ONES[comm.device.type])
                latency[source, target] = small * 1e-6
                bandwidth[source, target] = BLOCK[comm.device.type] / max(large - small, 1e-3) * 1e6
    found |= {"gb_per_s": (bandwidth / 1e9).round(2).tolist(), "latency_us": (latency * 1e6).round(2).tolist()}
    found["all_pairs_gb_per_s"] = link_limit(comm, 8 if comm.device.type == "cpu" else 256)
    if memory:
        found["all_pairs_copy_gb_per_s"] = _all_pairs(comm, memory)
    if comm.rank == 0:
        ranks = comm.world
        at_once = found.get("all_pairs_copy_gb_per_s", found["all_pairs_gb_per_s"]) * 1e9 / max(ranks - 1, 1)
        shared = np.minimum(bandwidth, at_once)  # an exchange uses all links of a rank together
        topology = Topology(ranks, np.ones(ranks), shared, latency, np.zeros(ranks, np.int64))
        Path(topology_file).write_text(topology.to_json() + "\n", encoding="utf-8")
        print({key: value for key, value in found.items() if key != "latency_us"}, flush=True)
    return found


def _peer_memory(comm: Comm) -> tuple[PeerMemory | None, str]:
    try:
        memory = open_buffers(comm, BLOCK["cuda"] * 2)
    except NoPeerMemory as error:
        return None, str(error)
    memory.peers[(comm.rank + 1) % comm.world][:SMALL].fill_(comm.rank + 1)
    barrier(comm)
    right = (memory.local[:SMALL] == (comm.rank - 1) % comm.world + 1).all()
    barrier(comm)
    assert right, "what a peer wrote did not arrive"
    return memory, "works"


def _pair_us(comm: Comm, memory: PeerMemory | None, pair: tuple[int, int], size: int, repeat: int = 1) -> float:
    """Microseconds of one message of ``repeat`` in a row, while all other links are idle."""
    send = _copy(comm, memory, *pair, size) if memory else _message(comm, *pair, size)

    def in_a_row() -> None:
        for _ in range(repeat):
            send()

    in_a_row()
    times = [timed(comm, (in_a_row,)) for _ in range(ROUNDS[comm.device.type])]
    return float(np.min(slowest(comm, np.array(times)))) / repeat


def _copy(comm: Comm, memory: PeerMemory, source: int, target: int, size: int) -> Callable[[], object]:
    if comm.rank != source:
        return lambda: None
    half = BLOCK["cuda"]
    into, block = memory.peers[target][half : half + size], memory.local[:size]
    return lambda: into.copy_(block)


def _message(comm: Comm, source: int, target: int, size: int) -> Callable[[], object]:
    give, take = [0] * comm.world, [0] * comm.world
    if comm.rank == source:
        give[target] = size
    if comm.rank == target:
        take[source] = size
    block = torch.zeros(sum(give), dtype=torch.uint8, device=comm.device)
    into = torch.zeros(sum(take), dtype=torch.uint8, device=comm.device)
    return lambda: distributed.all_to_all_single(into, block, take, give, group=comm.data)


def _all_pairs(comm: Comm, memory: PeerMemory) -> float:
    """GB/s that a rank sends when all ranks copy to all others at once."""
    half = BLOCK["cuda"]
    size = half // comm.world
    peers = [(comm.rank + n) % comm.world for n in range(1, comm.world)]
    streams = [torch.cuda.Stream() for _ in peers]

    def all_at_once() -> None:
        for peer, stream in zip(peers, streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                start = half + comm.rank * size
                for _ in range(REPEAT):
                    memory.peers[peer][start : start + size].copy_(memory.local[:size])
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    all_at_once()
    us = float(np.median(slowest(comm, np.array([timed(comm, (all_at_once,)) for _ in range(5)]))))
    return REPEAT * len(peers) * size / us / 1e3
