"""The progress bar, and lines that must not tear it; all on standard error."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar


class Progress:
    """A bar of finished requests with tokens/s; where standard error is no terminal, a line for each phase."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, rate="")
        self._tokens, self._started = 0, time.monotonic()

    def phase(self, name: str, total: int | None = None) -> None:
        self._tokens, self._started = 0, time.monotonic()
        self._bar.reset(self._task, description=name, total=total, rate="")
        if self._bar.disable:
            self.say(name if total is None else f"{name}, {total} requests")

    def reached(self, phase: str, done: int, total: int) -> None:
        """How far a phase of starting has come."""
        self._bar.update(self._task, description=phase, completed=done, total=total)

    def add_tokens(self, count: int) -> None:
        self._tokens += count
        rate = self._tokens / max(1e-9, time.monotonic() - self._started)
        self._bar.update(self._task, rate=f"{rate:.0f} tokens/s")

    def advance(self) -> None:
        self._bar.advance(self._task)

    def say(self, line: str) -> None:
        """Show a line above the bar; any thread may."""
        self._bar.console.print(line, markup=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
