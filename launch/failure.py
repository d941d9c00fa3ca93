"""What a failed run says: which rank, where, why.

A failing rank leaves ``error.rank{N}.json`` in the run's folder, an object with ``rank, step, layer, stage, kind,
message, traceback, time`` (see ``epmoe/engine/worker.py``).
"""

from __future__ import annotations

import json
import signal
from pathlib import Path


class RankFailure(Exception):
    """A rank ended before its time.  ``details`` are lines for people: a traceback, or the rank's last output."""

    def __init__(self, rank: int, reason: str, details: str = "", user_error: bool = False) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank, self.reason, self.details, self.user_error = rank, reason, details, user_error

    def block(self) -> str:
        """The last words of the run: details first, the rank and the cause in the last line."""
        details = f"{self.details.rstrip()}\n" if self.details else ""
        return f"{details}epmoe: rank {self.rank} failed: {self.reason}"


def read_error_files(run_dir: Path) -> list[RankFailure]:
    """The reports of failed ranks, earliest first: errors of peers follow the one that caused them."""
    reports = []
    for path in run_dir.glob("error.rank*.json"):
        try:
            reports.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:  # cut off: its writer was killed; another report or the exit code tells more
            continue
    return [_from_report(report) for report in sorted(reports, key=lambda report: report["time"])]


def _from_report(report: dict) -> RankFailure:
    layer = f", layer {report['layer']}" if report["layer"] >= 0 else ""
    where = f"step {report['step']}{layer}, {report['stage']}"
    if report["kind"] == "UserError":
        return RankFailure(report["rank"], report["message"], user_error=True)
    what = f"{report['kind']}: {report['message']}" if report["message"] else report["kind"]
    return RankFailure(report["rank"], f"{where}: {what}", report["traceback"])


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"ended with exit code {code} and left no report"
    name = signal.Signals(-code).name
    hint = " (by hand, or by the kernel when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
