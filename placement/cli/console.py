"""What every command prints with: tables on stdout, notes and progress on stderr, JSON to a file."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from placement.errors import UserError
from placement.solution import Progress
from placement.textfiles import require_distinct, write_whole

_QUIET_SECONDS = 5.0  # between progress lines where stderr is no terminal


def note(message: str) -> None:
    print(f"note: {message}", file=sys.stderr)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
    """A table on stdout between two lines of text; it is never cut to the terminal's width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        words = all(isinstance(row[index], str) for row in rows) and index in (0, len(columns) - 1)
        table.add_column(column, justify="left" if words or index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    console = Console(highlight=False)
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    print(title)
    Console(highlight=False, width=max(needed, 20)).print(table)
    if caption:
        print(caption)


def cell(value: object) -> str:
    """Numbers at the precision that figures of this kind are compared at; ``-`` for what is not known."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.4f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def write_json(path: str, content: object) -> None:
    """``-`` is stdout."""
    text = json.dumps(content, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        write_text(path, text)


def write_text(path: str | Path, text: str) -> None:
    """The file holds the old content or all of the new one."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give another path") from None


def require_writable(*paths: str | None) -> None:
    """Refuse an output that cannot be written before hours are spent on what goes into it."""
    files = [Path(p) for p in paths if p is not None and p != "-"]
    for path in files:
        parent = path.parent
        try:
            path.exists()
        except OSError as error:  # a name that is too long, say
            raise UserError(f"cannot write {str(path):.60}: {error.strerror}; give another path") from None
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder; name a file")
        if not parent.is_dir():
            raise UserError(f"cannot write {path}: there is no folder {parent}; make it first")
        if not os.access(path if path.exists() else parent, os.W_OK):
            raise UserError(f"cannot write {path}: no permission; give another path")
    require_distinct(files)


@contextmanager
def progress_line(label: str, known: float | None = None) -> Iterator[Progress]:
    """Yields the callback of a solver: the best objective, the bound and the gap so far, on one line of stderr.

    ``known`` is a bound from elsewhere, for solvers that bring none.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    last = time.monotonic()

    def text(seconds: float, best: float, bound: float | None) -> str:
        line, bound = f"{label}: {seconds:6.1f} s  best {best:.5f}", known if bound is None else bound
        if bound is None:
            return line + "  no bound"
        return line + f"  bound {bound:.5f}  gap {abs(bound - best) / max(abs(best), 1e-12):.1%}"

    if console.is_terminal:
        with console.status(f"{label}: starting") as status:
            yield lambda *state: status.update(text(*state))
        return

    def show(*state) -> None:
        nonlocal last
        if time.monotonic() - last >= _QUIET_SECONDS:
            last = time.monotonic()
            print(text(*state), file=sys.stderr, flush=True)

    yield show
