"""What a rank knows of itself and of its peers' ends."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch
from tiny_checkpoints import save_tiny

from epmoe.comm import Comm, PeerMemory
from epmoe.config import EngineConfig
from epmoe.engine.engine import Engine
from epmoe.engine.runner import Launched


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
        assert memory.gone() is None
        child.communicate()
        assert memory.gone() == 1
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
