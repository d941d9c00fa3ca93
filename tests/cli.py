"""Runs the command line as a user does, in processes of its own, and looks at what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

GONE_S = 10.0  # the promise: a failed run is gone by then
START_S = 120.0  # patience for imports on a busy machine


class Run:
    """One run of ``epmoe`` (or of torchrun) in the background; everything it writes goes under ``folder``."""

    def __init__(self, folder: Path, *argv: str, torchrun: int = 0) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        head = [sys.executable, "-m", "launch"]
        if torchrun:
            head = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={torchrun}", "--standalone"]
            head += ["-m", "launch"]
        self.shm_before = set(os.listdir("/dev/shm"))
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            self.process = subprocess.Popen(
                [*head, *argv],
                cwd=Path(__file__).resolve().parents[1],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"},
            )
        self.family: list[psutil.Process] = [psutil.Process(self.process.pid)]
        self.ports: set[int] = set()

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def ranks(self) -> dict[int, psutil.Process]:
        """Rank processes by rank, of a run without torchrun."""
        found = {}
        for child in self._descendants():
            line = child.cmdline()
            if "launch.rank" in line:
                found[int(line[-1])] = child
        return found

    def torchrun_ranks(self) -> dict[int, psutil.Process]:
        """Rank processes by rank, of a run under torchrun."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            rank = None if _dead(child) else child.environ().get("RANK")
            if rank is not None:
                found[int(rank)] = child
        return found

    def wait_for(self, condition, what: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}: {self.err}"
            assert time.monotonic() < deadline, f"no {what} after {START_S:g} s: {self.err}"
            time.sleep(0.02)

    def wait_generating(self) -> None:
        """Until tokens are being made; remembers every process and open port of the run."""
        self.wait_for(lambda: "generating" in self.err, "generation")
        time.sleep(0.3)
        self.remember()

    def remember(self) -> None:
        self.family = [psutil.Process(self.process.pid), *self._descendants()]
        for process in self.family:
            self.ports |= {c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}

    def end(self, seconds: float = START_S) -> int:
        """The exit code."""
        return self.process.wait(seconds)

    def leftovers(self) -> list[str]:
        """Processes, listening ports, shared memory and files that should be gone."""
        alive = [f"process {p.pid} {' '.join(p.cmdline())}" for p in self.family if p.is_running() and not _dead(p)]
        listening = {c.laddr.port for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        ports = [f"port {port}" for port in self.ports & listening]
        memory = [f"shared memory {name}" for name in set(os.listdir("/dev/shm")) - self.shm_before]
        files = [f"file {path}" for path in (self.folder / "tmp").glob("epmoe-*")]
        return alive + ports + memory + files

    def wait_gone(self) -> list[str]:
        """What is left once the run has had its time."""
        deadline = time.monotonic() + GONE_S
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def close(self) -> None:
        """End whatever a failed test left running."""
        for process in [*self._descendants(), *self.family]:
            if process.is_running() and not _dead(process):
                process.kill()
        self.process.wait()

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def one_line(capsys) -> str:
    """What the command said of the user's mistake: a line, and nothing else."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("epmoe: error: "), err
    return err
