"""Prompts in, results out: the files of ``epmoe generate``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from placement.errors import UserError
from placement.textfiles import require_distinct, write_whole

KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True)
class Prompt:
    """A text or token ids; ``where`` names its place in errors."""

    text: str | None
    token_ids: tuple[int, ...] | None
    where: str


def read_prompts(path: str) -> list[Prompt]:
    """Prompts of a file: one a line, or JSONL with ``prompt`` or ``prompt_token_ids``; blank lines are left out.

    A file is JSONL if its name says so, or if its first line is an object with one of the two keys.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # without the byte order mark of some editors
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read prompt file {path}: {reason}; give UTF-8 text, one prompt a line") from None
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"prompt file {path} holds no prompt; give one a line")
    if path.endswith((".jsonl", ".json")) or _is_object(lines[0][1]):
        return [_from_json(where, line) for where, line in lines]
    return [Prompt(line.rstrip("\r"), None, where) for where, line in lines]


def _is_object(line: str) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and any(key in value for key in KEYS)


def _from_json(where: str, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); a line is an object with prompt or prompt_token_ids") from None
    if not isinstance(value, dict) or sum(key in value for key in KEYS) != 1:
        raise UserError(f"{where}: give an object with either prompt or prompt_token_ids")
    if "prompt" in value:
        if not isinstance(value["prompt"], str):
            raise UserError(f"{where}: prompt is {type(value['prompt']).__name__}; give a string")
        return Prompt(value["prompt"], None, where)
    ids = value["prompt_token_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise UserError(f"{where}: prompt_token_ids must be a list of whole numbers of at least 0")
    return Prompt(None, tuple(ids), where)


def as_prompts(prompts: object) -> list[Prompt]:
    """One or several prompts as Python callers write them: a string, token ids, or an object with either key."""
    many = isinstance(prompts, (list, tuple)) and not (prompts and all(isinstance(i, Integral) for i in prompts))
    return [_as_prompt(prompt, f"prompt {number}") for number, prompt in enumerate(prompts if many else [prompts])]


def _as_prompt(value: object, where: str) -> Prompt:
    if isinstance(value, dict):
        given = [key for key in KEYS if value.get(key) is not None]
        if len(given) != 1 or set(value) - set(KEYS):
            raise UserError(f"{where} has the keys {sorted(value)}; give either prompt or prompt_token_ids")
        value = value[given[0]]
        if isinstance(value, str) != (given[0] == "prompt"):
            raise UserError(f"{where}: {given[0]} is {type(value).__name__}; prompt is text, prompt_token_ids a list")
    if isinstance(value, str):
        return Prompt(value, None, where)
    if isinstance(value, (list, tuple)) and all(isinstance(i, Integral) and not isinstance(i, bool) for i in value):
        return Prompt(None, tuple(int(i) for i in value), where)
    raise UserError(f"{where} is {type(value).__name__}; give a string, a list of token ids, or an object with either")


def write_results(path: str, results: list[dict]) -> str | None:
    """Write the file; what went wrong if it could not be written (the texts must then go elsewhere)."""
    try:
        write_whole(path, json.dumps(results, ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        return f"cannot write results to {path}: {error.strerror}; the texts were printed instead, give a writable path"
    return None


def cannot_write(path: str | Path, error: OSError) -> str:
    """For a file whose contents are lost."""
    return f"cannot write {path}: {error.strerror or error}; give a path with room and run again"


def require_writable(*paths: str | None) -> None:
    """Raise ``UserError`` before the work is done rather than after it. ``None`` is an output nobody asked for."""
    given = [path for path in paths if path is not None]
    for path in given:
        _require_writable(path)
    require_distinct(map(Path, given))


def _require_writable(path: str) -> None:
    folder = Path(path).resolve().parent
    if not path or not folder.is_dir() or Path(path).is_dir():
        raise UserError(
            f"cannot write results to {path or repr(path)}: no such folder, or a folder itself; give a path for a file"
        )
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise UserError(f"cannot write results to {path}: no permission; give a path that can be written")
