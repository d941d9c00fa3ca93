"""A failure is loud, fast and names itself: what a killed, raising or stopped run does and leaves behind."""

import json
import os
import random
import shutil
import signal
import time

import pytest
from cli import GONE_S, Run
from tiny_checkpoints import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "mixtral", tokenizer=True)


@pytest.fixture
def start(tmp_path):
    """Start a run; whatever it leaves is ended after the test."""
    runs = []

    def begin(model, *argv, torchrun=0):
        ranks = [] if torchrun else ["--ranks", "2"]
        long = ["--max-tokens", "480", "--ignore-eos", "--prompt", "the token", "--prompt", "the expert"]
        runs.append(Run(tmp_path / f"run{len(runs)}", "generate", "--model", str(model), *ranks, *long, *argv,
                        torchrun=torchrun))  # fmt: skip
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def last_line(run) -> str:
    return run.err.rstrip().split("\n")[-1]


def test_killed_while_generating(start, model):
    run = start(model)
    run.wait_generating()
    assert run.ports, "gloo listens somewhere; without a port this test would not see one left open"
    run.ranks()[1].kill()
    assert run.end(GONE_S) == 1
    assert last_line(run) == (
        "epmoe: rank 1 failed: was killed by SIGKILL (by hand, or by the kernel when memory runs out)"
    )
    assert run.leftovers() == []


def test_killed_while_starting(start, model):
    run = start(model)
    run.wait_for(lambda: len(run.ranks()) == 2, "two ranks")
    run.remember()
    run.ranks()[1].kill()
    assert run.end() == 1
    assert last_line(run).startswith("epmoe: rank 1 failed: was killed by SIGKILL")
    assert run.leftovers() == []


def test_raises_while_generating(start, model):
    """An interrupt raises in the middle of a step of that rank; its peers' collectives fail after it."""
    run = start(model, "--ranks", "3")
    run.wait_generating()
    run.ranks()[2].send_signal(signal.SIGINT)
    assert run.end(GONE_S) == 1
    assert last_line(run).startswith("epmoe: rank 2 failed: step ")
    assert "KeyboardInterrupt" in last_line(run)
    assert "Traceback" in run.err
    assert run.leftovers() == []


def test_ranks_end_with_the_front(start, model):
    run = start(model)
    run.wait_generating()
    run.process.kill()
    assert run.wait_gone() == []


def test_first_sigterm_drains(start, model, tmp_path):
    out = tmp_path / "out.json"
    run = start(model, "--json", str(out), "--max-tokens", "300")
    run.wait_generating()
    time.sleep(0.5)
    run.process.terminate()
    assert run.end(60) == 128 + signal.SIGTERM
    assert "2 running requests finish" in run.err
    assert [len(result["token_ids"]) for result in json.loads(out.read_text())] == [300, 300]
    assert run.leftovers() == []


def test_second_interrupt_ends_at_once(start, model):
    run = start(model)
    run.wait_generating()
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "stopping" in run.err, "drain")
    run.process.send_signal(signal.SIGINT)
    assert run.end(GONE_S) == 128 + signal.SIGINT
    assert last_line(run) == "epmoe: stopped by SIGINT"
    assert run.leftovers() == []


def test_truncated_checkpoint(start, model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    run = start(broken)
    assert run.end() == 2
    assert last_line(run).startswith("epmoe: error: ")
    assert "model.safetensors" in last_line(run)
    assert "Traceback" not in run.err
    assert run.leftovers() == []


def test_killed_under_torchrun(start, model):
    run = start(model, torchrun=2)
    run.wait_generating()
    run.torchrun_ranks()[1].kill()
    assert run.end(GONE_S) != 0
    assert "SIGKILL" in run.err
    assert run.wait_gone() == []


@pytest.mark.parametrize("victim", ["torchrun", "front"])
def test_what_torchrun_and_its_front_leave_when_they_are_killed(start, model, victim):
    run = start(model, torchrun=2)
    run.wait_generating()
    front = next(each for each in run.family if "launch.torchrun" in each.cmdline())
    (run.process if victim == "torchrun" else front).kill()
    assert run.end(GONE_S) != 0
    assert run.wait_gone() == []


@pytest.mark.soak
@pytest.mark.parametrize("torchrun", [0, 2])
@pytest.mark.parametrize("seed", range(50))
def test_killed_at_any_time(start, model, seed, torchrun):
    draw = random.Random(seed)
    victim, delay = draw.randrange(2), draw.uniform(0, 8)
    run = start(model, torchrun=torchrun)
    ranks = run.torchrun_ranks if torchrun else run.ranks
    run.wait_for(lambda: len(ranks()) == 2, "two ranks")
    time.sleep(delay)
    run.remember()
    ranks()[victim].kill()
    assert run.end(GONE_S) != 0
    assert "SIGKILL" in run.err
    if not torchrun:
        assert last_line(run).startswith(f"epmoe: rank {victim} failed: was killed by SIGKILL")
    assert run.wait_gone() == []


def test_a_stalled_rank_ends_the_run(start, model):
    """A stopped process answers nobody: its peers notice, and say where they wait."""
    run = start(model, "--stall-seconds", "3")
    run.wait_generating()
    run.ranks()[1].send_signal(signal.SIGSTOP)
    assert run.end(GONE_S + 3) == 1
    assert last_line(run).startswith("epmoe: rank 0 failed: step ")
    assert "Stalled: no progress for 3 s" in last_line(run)
    assert run.leftovers() == []


def test_a_rank_that_cannot_write_its_report_prints_it(tmp_path, capsys):
    from epmoe.config import RankInfo
    from epmoe.engine.worker import write_error

    write_error(RankInfo(3, 4, 3, "", "", "", str(tmp_path / "gone")), None, ValueError("broken"))
    err = capsys.readouterr().err
    assert "rank 3: step 0, start: ValueError: broken" in err and "No such file" in err


def test_a_rank_without_a_folder_prints_its_report(tmp_path, capsys, monkeypatch):
    """One of another machine that no torchrun started: nobody would look for a file there."""
    from epmoe.config import RankInfo
    from epmoe.engine.worker import write_error

    monkeypatch.chdir(tmp_path)
    write_error(RankInfo(3, 4, 0, "", "", "", ""), None, ValueError("broken"))
    assert "rank 3: step 0, start: ValueError: broken" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_torchrun_reads_the_error_of_a_rank(tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from epmoe.config import RankInfo
    from epmoe.engine.worker import write_error

    file = tmp_path / "error.json"
    write_error(RankInfo(3, 4, 3, "", "", "", str(tmp_path), error_file=str(file)), None, ValueError("broken"))
    failure = ProcessFailure(local_rank=3, pid=1, exitcode=1, error_file=str(file))
    assert failure.message["message"] == "rank 3: step 0, start: ValueError: broken"
    assert failure.timestamp_isoformat() != "<N/A>"
