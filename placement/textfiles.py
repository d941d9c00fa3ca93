"""JSON that says one thing per key, and files that are whole or not there."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from placement.errors import UserError


def parse_json(text: str, source: str, expected: str) -> object:
    """``json.loads``, but a key that an object has twice is a ``UserError``, as is text that is no JSON.

    Args:
        source: names the file in errors.
        expected: ends the message of what is no JSON: what the file should be.
    """

    def pairs(found: list[tuple[str, object]]) -> dict:
        made = dict(found)
        if len(made) < len(found):
            names = [name for name, _ in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{source}: the key {twice!r} is given twice in one object; remove one of them")
        return made

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise UserError(f"{source} is not JSON ({error}); {expected}") from None
    except RecursionError:
        raise UserError(f"{source} is JSON nested too deeply; {expected}") from None


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file so that ``path`` holds the old content or all of the new one; ``OSError`` where it cannot."""
    with whole_file(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of ``path`` when the block ends without an error.

    Links are followed; a device or a pipe is written to as it is.
    """
    if Path(path).exists() and not stat.S_ISREG(Path(path).stat().st_mode):
        with open(path, "wb") as file:
            yield file
        return
    target = Path(path).resolve()
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
    handle, name = tempfile.mkstemp(prefix=".epmoe-", dir=target.parent)
    try:
        with open(handle, "wb") as file:
            yield file
        os.chmod(name, mode)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def require_distinct(outputs: Iterable[Path]) -> None:
    """``UserError`` if two outputs of one run would replace each other."""
    seen = set()
    for path in outputs:
        target = os.path.realpath(path)
        if target in seen and (os.path.isfile(target) or not os.path.exists(target)):  # a device takes any number
            raise UserError(f"two outputs go to {path}; give each a file of its own")
        seen.add(target)


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask
