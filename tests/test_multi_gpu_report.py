"""The report of several GPUs runs through on CPU ranks, and writes files that others read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from placement.topology import Topology

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "multi_gpu_report.py"
sys.path.insert(0, str(SCRIPT.parent))

from report_parts import GRACE, Part, run_parts  # noqa: E402
from report_text import markdown  # noqa: E402


def report(folder: Path, *options: str) -> dict:
    files = ("--json", "r.json", "--markdown", "r.md", "--topology", "t.json")
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--ranks", "2", "--rehearse", *files, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "r.json").read_text())


def test_links_and_exchanges_on_cpu_ranks(tmp_path):
    found = report(tmp_path, "--parts", "1", "3", "--tokens", "3", "--exchange", "oneshot", "padded")
    parts = {name: part["found"] for name, part in found["parts"].items()}
    topology = Topology.from_json((tmp_path / "t.json").read_text())
    assert topology.ranks == 2 and topology.bandwidth_WW[0, 1] > 0 and topology.latency_WW[1, 0] > 0
    assert "no memory shared" in parts["links"]["peer_memory"]
    names = {each["case"]["exchange"] for each in parts["exchanges"]["results"]}
    assert names == {"oneshot", "padded"}
    text = (tmp_path / "r.md").read_text()
    assert "2 CPU ranks over gloo" in text and "| padded |" in text


def test_a_part_that_cannot_be_made_leaves_the_others(tmp_path):
    found = report(tmp_path, "--parts", "model", "links", "--trace", "nowhere.npz")["parts"]
    assert found["links"]["found"]["all_reduce"] == "right" and "nowhere.npz" in found["model"]["failed"]


def test_parts_that_die_or_hang_leave_the_others():
    kept, began = {}, time.monotonic()
    parts = [
        Part("good", 1, good),
        Part("dies", 1, dies),
        Part("stuck", 0.05, stuck),
        Part("last", 8, good),
    ]
    run_parts((2, "cpu"), parts, began + 300, kept.update)  # of which a busy machine needs much to start ranks
    assert kept["good"]["found"] == kept["last"]["found"] == {"ranks": 2} and "failed" not in kept["last"]
    assert kept["dies"]["found"] == {"so far": 1} and "exit code 3" in kept["dies"]["failed"]
    assert kept["stuck"]["found"] == {"so far": 2} and "within its time" in kept["stuck"]["failed"]
    assert time.monotonic() - began < 300 + GRACE


def test_parts_without_time_say_so():
    kept = {}
    run_parts((2, "cpu"), [Part("late", 1, good)], time.monotonic(), kept.update)
    assert kept["late"]["failed"] == "no time was left" and kept["late"]["found"] is None


def test_tables_show_what_is_known_and_why_the_rest_is_not():
    row = {"prefill_tokens_per_s": 100.0, "prefill_ms": 5.0, "in_graphs": 1.0, "remote_rows": 0.9}
    timed = {"hidden": 0.9, "stage_us": {"experts": 12.0, "send": 0.0}, "decode_tokens_per_s": 7.0, "decode_ms": 2.0}
    linear, joint = {"plan": "linear", "homes": "round-robin"}, {"plan": "joint", "homes": "affinity"}
    rows = [
        linear | {"overlap": "off"} | row | timed,
        joint | {"overlap": "on"} | row | {"prefill_tokens_per_s": 125.0},
        {"plan": "eplb", "failed": "no time was left"},
    ]
    said = [joint | {"overlap": "on", "prefill_tokens_per_s": 110.0, "prefill_ms": 4.5}]
    model = {"trace": "some", "shape": [2, 6, 64], "rows": rows, "predicted": said}
    parts = {
        "put": {"seconds": 3, "found": {"command": "bench", "lines": ["588 rows"]}, "failed": "it did not end"},
        "model": {"seconds": 9, "found": model},
        "links": {"seconds": 0, "found": None, "failed": "no time was left"},
    }
    text = markdown({"where": "2 ranks SHARING 1 x GPU", "date": "", "torch": "", "command": "", "parts": parts})
    assert "take turns" in text and "588 rows" in text and "Cut short: it did not end" in text
    assert "| joint | affinity | on | 125 | +25.0 % | +10.0 % | 5.0 | 4.5 | - | 100 % | - | - | - | 0.900 |" in text
    assert "eplb, , lanes : no time was left" in text and "| linear | round-robin | off | 12 |" in text


def good(comm, save, seconds):
    assert seconds > 1
    return {"ranks": len(comm.all_gather_headers(np.zeros(1, np.int64)))}


def dies(comm, save, seconds):
    save({"so far": 1})
    if comm.rank == 1:
        time.sleep(1)
        os._exit(3)
    time.sleep(300)


def stuck(comm, save, seconds):
    save({"so far": 2})
    time.sleep(0 if comm.rank else 300)


@pytest.mark.soak
def test_all_parts_on_cpu_ranks(tmp_path):
    trace = SCRIPT.parents[1] / "epmoe" / "demo_model" / "trace_c.npz"
    options = ("--solve-seconds", "2", "--tokens", "1", "16", "--trace", str(trace))
    parts = report(tmp_path, "--limit-seconds", "400", *options)["parts"]
    assert list(parts) == ["links", "promises", "exchanges", "model"]
    assert not any("failed" in part for part in parts.values())
    assert all(each["holds"] is not False for each in parts["promises"]["found"])
    assert parts["model"]["found"]["rows"] and not any("failed" in row for row in parts["model"]["found"]["rows"])
