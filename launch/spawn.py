"""Rank processes on this machine: start them, watch them, end them; the first failure is the one shown.

Each rank is ``python -m launch.rank RUN_DIR RANK``.  What it needs to know lies as files in the run's private folder.
Its standard input is a pipe that nobody writes to: when this process ends, however it ends, the rank reads end of file
and ends too.  Its output comes back through a pipe, line by line, so that it never tears the progress bar and never
comes after the error that ends a run.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from epmoe.config import EngineConfig, RankInfo
from launch.env import child_environment
from launch.failure import RankFailure, describe_exit, read_error_files

ENGINE_FILE = "engine.json"
TERM_SECONDS = 1.0  # from SIGTERM to SIGKILL
LAST_LINES = 20


def write_inputs(run_dir: Path, engine: EngineConfig, infos: list[RankInfo]) -> None:
    """The files that ranks read at start."""
    (run_dir / ENGINE_FILE).write_text(engine.to_json(), encoding="utf-8")
    for info in infos:
        (run_dir / f"rank{info.rank}.json").write_text(json.dumps(asdict(info)), encoding="utf-8")


class Ranks:
    """The rank processes of one run.  ``say(line)`` shows a line that a rank printed."""

    def __init__(self, run_dir: Path, count: int, threads: int, say: Callable[[str], None]) -> None:
        self.run_dir = run_dir
        self._say = say
        self._last: list[deque[str]] = [deque(maxlen=LAST_LINES) for _ in range(count)]
        self._processes: list[subprocess.Popen] = []
        self._readers: list[threading.Thread] = []
        environment = child_environment(threads)
        try:
            for rank in range(count):
                self._start(rank, environment)
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.rank", str(self.run_dir), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which drains and then ends the ranks
        )
        reader = threading.Thread(target=self._read, args=(rank, process), daemon=True)
        self._processes.append(process)
        self._readers.append(reader)
        reader.start()

    def _read(self, rank: int, process: subprocess.Popen) -> None:
        for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._last[rank].append(line)
            self._say(f"[rank {rank}] {line}")

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def check(self, ending: bool = False) -> None:
        """Raise ``RankFailure`` if a rank failed, or ended at all unless ``ending``; all others are ended first."""
        fine = (None, 0) if ending else (None,)
        if all(process.poll() in fine for process in self._processes):
            return
        # A peer's error follows the death that caused it: seen now, the cause is already there to be seen as well.
        codes = [process.poll() for process in self._processes]
        self.kill()
        raise self._cause(codes)

    def _cause(self, codes: list[int | None]) -> RankFailure:
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                return RankFailure(rank, describe_exit(code), self._tail(rank))
        reports = read_error_files(self.run_dir)
        if reports:
            return reports[0]
        rank = next(rank for rank, code in enumerate(codes) if code is not None)
        return RankFailure(rank, describe_exit(codes[rank]), self._tail(rank))

    def _tail(self, rank: int) -> str:
        return "\n".join(self._last[rank])

    def finish(self, seconds: float) -> None:
        """Wait for all ranks to end by themselves; a rank that does not is a failure."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self._processes):
            self.check(ending=True)
            if time.monotonic() > deadline:
                late = next(rank for rank, process in enumerate(self._processes) if process.poll() is None)
                self.kill()
                raise RankFailure(late, f"did not end within {seconds:g} s after its last request", self._tail(late))
            time.sleep(0.01)
        self.check(ending=True)
        self._join_readers()

    def kill(self) -> None:
        """End every rank: SIGTERM, then SIGKILL; returns when all are gone."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + TERM_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                process.wait()
        self._join_readers()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _join_readers(self) -> None:
        for reader, process in zip(self._readers, self._processes):
            reader.join(0.5)
            process.stdin.close()
