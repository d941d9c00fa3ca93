"""What a rank knows of itself and of its peers' ends."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_checkpoints import save_tiny

from epmoe.comm import Comm, NoPeerMemory, PeerMemory, agree_on_memory, gpu_identity, open_buffers, rows_backend
from epmoe.config import EngineConfig, RankInfo
from epmoe.engine.engine import Engine
from epmoe.engine.runner import Launched
from epmoe.engine.worker import own_device


def test_a_peer_that_ended_is_seen_through_any_descriptor():
    """Also beyond the 1024 that select() takes."""
    high = 1500
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= high:
        pytest.skip("this process may open too few files")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    low = os.pidfd_open(child.pid)
    try:
        os.dup2(low, high)
        memory = PeerMemory(None, [], None, [None, high])
        assert memory.gone() == []
        child.communicate()
        assert memory.gone() == [1]
    finally:
        os.close(low)
        os.close(high)


def test_a_rank_that_waits_for_its_device_says_so(tmp_path, monkeypatch):
    """The watchdog and error reports name the stage."""
    config = EngineConfig(str(save_tiny(tmp_path, "mixtral")), max_model_len=64)
    engine = Engine(config, Comm(0, 1, torch.device("cpu")))
    seen, tokens = [], Launched.tokens

    def watched(self) -> list[int]:
        seen.append(str(engine.comm.at))
        return tokens(self)

    monkeypatch.setattr(Launched, "tokens", watched)
    params = {"temperature": 0.0, "max_tokens": 2}
    engine.step([{"op": "add", "id": 0, "prompt": [5, 6, 7], "params": params}, {"op": "stop"}])
    while not engine.finished:
        engine.step([])
    assert seen == ["step 2, commit", "step 3, commit"]


def backend_of(comm: Comm, gpus: list[str]) -> str:
    """As `open_comm` decides, on ranks that have these GPUs."""
    return rows_backend(comm.all_gather_headers(np.frombuffer(gpus[comm.rank].ljust(16).encode(), np.int64)))


@pytest.mark.parametrize(
    "gpus,backend", [("abc", "nccl"), ("aba", "gloo"), ("aaa", "gloo"), ("abb", "gloo")], ids=lambda value: value
)
def test_all_ranks_agree_whether_any_share_a_gpu(rank_pool, gpus, backend):
    """Whatever a rank sees: of three, two may share one GPU of a node while the third has a node of its own."""
    assert rank_pool(3).run(backend_of, list(gpus)) == [backend] * 3


def test_ranks_without_a_gpu_are_on_gloo(rank_pool):
    identity = gpu_identity(torch.device("cpu"))
    assert rows_backend(np.stack([identity])) == rows_backend(np.stack([identity, identity + 7])) == "gloo"
    assert rank_pool(2).run(carried_by) == ["gloo", "gloo"]


def carried_by(comm: Comm) -> str:
    return torch.distributed.get_backend(comm.data)


@pytest.mark.parametrize("seen,index", [(1, 0), (2, 1), (4, 3)])
def test_a_rank_takes_one_of_the_gpus_that_it_sees(monkeypatch, seen, index):
    """A launcher may show a rank only its own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    info = RankInfo(3, 4, 3, "", "", "", "")
    assert own_device(info, EngineConfig("model", device="cuda")) == torch.device("cuda", index)


def test_a_gpu_has_one_identity_in_all_processes(monkeypatch):
    uuids = ["4f6c", "4f6c", "4f6d"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    one, same, other = (gpu_identity(torch.device("cuda", n)) for n in range(3))
    assert one.tolist() == same.tolist() != other.tolist()


def opened(comm: Comm, unable: int) -> str:
    """What rank says when rank ``unable`` has no peer memory."""
    try:
        agree_on_memory(comm, "out of memory" if comm.rank == unable else "")
    except NoPeerMemory as error:
        return str(error)
    return "opened"


def test_one_rank_without_peer_memory_is_enough_for_all_to_fall_back(rank_pool):
    said = rank_pool(3).run(opened, 1)
    assert "out of memory" in said[1]
    assert said[0] == said[2] and "rank 1 cannot" in said[0]
    assert rank_pool(3).run(opened, -1) == ["opened"] * 3


def on_cpu(comm: Comm) -> str:
    try:
        open_buffers(comm, 64)
    except NoPeerMemory as error:
        return str(error)
    return "opened"


def test_cpu_ranks_have_no_peer_memory(rank_pool):
    assert all("device cpu" in said for said in rank_pool(2).run(on_cpu))
