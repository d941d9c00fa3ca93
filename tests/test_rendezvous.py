"""How ranks that torchrun, or nobody, started find each other: variables, addresses and ports that lead nowhere."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cli import one_line

from launch import torchrun
from launch.__main__ import main

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    "changes", [{"RANK": "1"}, {"WORLD_SIZE": "0"}, {"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_RANK": "-1"}]
)
def test_variables_of_torchrun_that_contradict_each_other(monkeypatch, capsys, changes):
    for name, value in {**TORCHRUN, "MASTER_PORT": "29500", **changes}.items():
        monkeypatch.setenv(name, value)
    assert main(["generate", "--model", "demo", "--prompt", "x"]) == 2
    assert " ".join(next(iter(changes.items()))) in one_line(capsys)


def test_a_rendezvous_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = subprocess.run(
            [sys.executable, "-m", "launch", "generate", "--model", "demo", "--prompt", "x"],
            env={**os.environ, **TORCHRUN, "MASTER_PORT": str(taken.getsockname()[1]), "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[1],
        )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "address already in use" in done.stderr.splitlines()[-1] and "--master-port" in done.stderr
    assert list(tmp_path.iterdir()) == []


def by_hand(port, rank, world, *argv):
    """A rank of a job of several machines that no torchrun started."""
    named = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "launch", "generate", *argv],
        env={**os.environ, **TORCHRUN, **named, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("rank, words", [(0, "cannot listen"), (1, "nobody answers at no-such-host.invalid:29500")])
def test_a_master_address_that_does_not_exist(monkeypatch, capsys, rank, words):
    changes = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"}
    for name, value in {**TORCHRUN, **changes}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "MEET_S", 0.1)
    assert main(["generate", "--model", "demo", "--prompt", "x"]) == 2
    line = one_line(capsys)
    assert words in line and "no-such-host.invalid" in line and "MASTER_ADDR" in line


def test_a_rank_whose_first_rank_makes_a_mistake(tmp_path):
    """It ends with it; ranks of other machines may well come first."""
    port = free_port()
    second = by_hand(port, 1, 2, "--model", "demo", "--prompt", "x")
    first = by_hand(port, 0, 2, "--model", str(tmp_path), "--prompt", "x")
    assert first.wait(60) == 2 and second.wait(30) == 1
    assert "config.json" in first.stderr.read().splitlines()[-1]
    assert second.stderr.read().splitlines()[-1].startswith("epmoe: rank 0 failed: ended before the run began")
