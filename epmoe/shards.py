"""Safetensors files: headers without data, and exact reads of rows straight into tensors.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length (little endian), a JSON header of
``name -> {dtype, shape, data_offsets}`` with offsets relative to its end, then the data without holes.  It is read here
rather than by ``safe_open`` so that a single cut or damaged tensor can be named, and so that a rank reads, and counts,
exactly the bytes it needs, without a second copy in memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

MAX_HEADER = 100_000_000  # bytes; the format's own limit
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
FP8 = "F8_E4M3"  # only with scales beside it, in checkpoints that say so
STORED = DTYPES | {FP8: torch.float8_e4m3fn}
# What a damaged file can raise while its JSON is taken apart.
MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Entry:
    """One stored tensor; ``start`` is the byte of its first element in ``file``, ``end`` the one after its last."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Headers:
    """Every tensor of a checkpoint and what is wrong with its files; ``problems`` maps a kind to its findings."""

    entries: dict[str, Entry]
    problems: dict[str, list[str]]
    bytes_read: int
    bytes_total: int


def read_headers(folder: Path) -> Headers:
    """Headers of all shards named by the index, or of the single file.  Never raises for what it finds in them."""
    entries: dict[str, Entry] = {}
    problems: dict[str, list[str]] = {}
    bytes_read = bytes_total = 0
    index, files = _files(folder, problems)
    for name in files:
        path = folder / name
        try:
            found, size = _read_header(path)
        except MALFORMED as error:
            reason = f"its header lacks {error}" if isinstance(error, KeyError) else error
            reason = getattr(error, "strerror", None) or reason
            problems.setdefault("unreadable files", []).append(f"{name} ({reason})")
            continue
        length = path.stat().st_size
        bytes_read += size
        bytes_total += length
        for tensor, entry in found.items():
            if tensor in entries:
                problems.setdefault("stored twice", []).append(f"{tensor} (in {entries[tensor].file.name} and {name})")
            elif index and index.get(tensor, name) != name:
                problems.setdefault("not where the index says", []).append(f"{tensor} (in {name})")
            entries[tensor] = entry
            if entry.end > length:
                problems.setdefault("truncated", []).append(f"{tensor} (ends at byte {entry.end} of {name})")
    return Headers(entries, problems, bytes_read, bytes_total)


def read_rows(file: int, entry: Entry, row: int, into: Tensor) -> int:
    """Fill ``into`` (contiguous, on the CPU, of the stored dtype) from ``row`` of a stored tensor seen as 2-D.

    ``file`` is an open descriptor.  Returns the bytes read; EOFError where the file ends early.
    """
    start = entry.start + row * entry.shape[-1] * into.itemsize
    return read_bytes(file, start, into.view(-1).view(torch.uint8))


def read_bytes(file: int, start: int, into: Tensor) -> int:
    """Fill ``into`` (uint8, on the CPU) from byte ``start`` of an open file; EOFError where it ends early."""
    view = memoryview(into.numpy())
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], start + done)
        if got == 0:
            raise EOFError(f"the file ends at byte {start + done}")
        done += got
    return done


def read_tensor(entry: Entry) -> Tensor:
    """A whole stored tensor; for small ones."""
    into = torch.empty(entry.shape, dtype=STORED[entry.dtype])
    file = os.open(entry.file, os.O_RDONLY)
    try:
        read_rows(file, entry, 0, into)
    finally:
        os.close(file)
    return into


def _files(folder: Path, problems: dict[str, list[str]]) -> tuple[dict[str, str], Sequence[str]]:
    """(index: tensor -> file, the files in order); the index is empty for a single file."""
    path = folder / INDEX
    if not path.is_file():
        if not (folder / SINGLE).is_file():
            problems["unreadable files"] = [f"neither {INDEX} nor {SINGLE} is there (convert other formats to it)"]
            return {}, []
        return {}, [SINGLE]
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(index.values()))
        if outside := [name for name in files if not isinstance(name, str) or Path(name).name != name]:
            raise ValueError(f"it names {outside[0]!r}, which is no file of this folder")
        return index, files
    except MALFORMED as error:
        problems["unreadable files"] = [f"{INDEX} ({type(error).__name__}: {error})"]
        return {}, []


def _read_header(path: Path) -> tuple[dict[str, Entry], int]:
    """(entries, bytes read); ValueError where the header is not one."""
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError("shorter than a header")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER, path.stat().st_size - 8):
            raise ValueError(f"its header claims {length} bytes")
        raw = json.loads(file.read(length))
    raw.pop("__metadata__", None)
    base = 8 + length
    entries = {}
    for name, item in raw.items():
        begin, end = item["data_offsets"]
        shape = tuple(int(n) for n in item["shape"])
        dtype = STORED.get(item["dtype"])
        if dtype and end - begin != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has {end - begin} bytes, its shape {list(shape)} needs {prod(shape)} elements")
        entries[name] = Entry(path, item["dtype"], shape, base + begin, base + end)
    _check_holes(entries, base)
    return entries, base


def _check_holes(entries: dict[str, Entry], base: int) -> None:
    at = base
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].start):
        if entry.start != at:
            raise ValueError(f"{name} starts at byte {entry.start}, the tensor before it ends at {at}")
        at = entry.end
