"""The report of several GPUs runs through on CPU ranks, and writes files that others read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from placement.topology import Topology

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "multi_gpu_report.py"


def report(folder: Path, *options: str) -> dict:
    files = ("--json", "r.json", "--markdown", "r.md", "--topology", "t.json")
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--ranks", "2", "--rehearse", *files, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "r.json").read_text())


def test_links_and_exchanges_on_cpu_ranks(tmp_path):
    found = report(tmp_path, "--parts", "1", "3", "--together", "--tokens", "3", "--exchange", "oneshot", "padded")
    parts = {name: part["found"] for name, part in found["parts"].items()}
    topology = Topology.from_json((tmp_path / "t.json").read_text())
    assert topology.ranks == 2 and topology.bandwidth_WW[0, 1] > 0 and topology.latency_WW[1, 0] > 0
    assert "no memory shared" in parts["links"]["peer_memory"]
    names = {each["case"]["exchange"] for each in parts["exchanges"]["results"]}
    assert names == {"oneshot", "padded"}
    text = (tmp_path / "r.md").read_text()
    assert "2 CPU ranks over gloo" in text and "| padded |" in text


def test_a_part_that_fails_leaves_the_others(tmp_path):
    found = report(tmp_path, "--parts", "4", "1", "--together", "--trace", "nowhere.npz")["parts"]
    assert found["links"]["found"]["all_reduce"] == "right" and "nowhere.npz" in found["model"]["found"]["failed"]


@pytest.mark.soak
def test_all_parts_on_cpu_ranks(tmp_path):
    parts = report(tmp_path, "--seconds", "400", "--solve-seconds", "2", "--tokens", "1", "16")["parts"]
    assert all(each["holds"] is not False for each in parts["promises"]["found"])
    assert parts["model"]["found"]["rows"] and not any("failed" in row for row in parts["model"]["found"]["rows"])
