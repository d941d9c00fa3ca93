"""One door to every recording: finds the format, streams it as traces of this project.

========== ==============================================================  ==========================================
format     files                                                           what they hold
========== ==============================================================  ==========================================
epmoe      ``.npz`` (and ``NAME.000.npz`` shards)                          tokens, this project's ``epmoe-trace/1``
sglang     ``.pt``, or a folder of them                                    tokens (per_token) or loads (stat, per_pass)
vllm       ``.json``/``.jsonl`` responses, ``.npy``/``.npz`` arrays        tokens
jsonl      ``.jsonl`` with ``topk_experts`` or ``topk_ids``                tokens
exflow     ``.npy`` ``[tokens, layers]``                                   tokens, top-1
load       ``.json``/``.csv``/``.npy`` ``[layers, experts]``               loads
========== ==============================================================  ==========================================

Loads come back as a ``Profile`` without transitions: balance can be solved from it, affinity cannot.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from placement.errors import BROKEN_ARRAY, UserError
from placement.profile import Profile, profile_trace
from placement.readers_json import read_vllm, stream_jsonl
from placement.readers_sglang import read_sglang
from placement.recording import ReadOptions, make_load, make_trace, read_text
from placement.textfiles import parse_json
from placement.trace import Trace, join, shard_files, stream_trace

FORMATS = ("epmoe", "sglang", "vllm", "jsonl", "exflow", "load")


def sniff(path: str | Path) -> str:
    """The format of a recording, from its name and first bytes; ``UserError`` where that leaves a doubt."""
    path = Path(path)
    if path.is_dir():
        return "sglang"
    if not path.exists():
        shard_files(path)  # raises with the remedy where there are no shards either
        return "epmoe"
    if path.suffix == ".pt":
        return "sglang"
    if path.suffix == ".npz":
        return _sniff_npz(path)
    if path.suffix == ".npy":
        return _sniff_npy(path)
    if path.suffix == ".csv":
        return "load"
    if path.suffix in (".json", ".jsonl"):
        return _sniff_json(path)
    raise UserError(f"{path}: no reader for this name; give --from one of {', '.join(FORMATS)}")


def stream(path: str | Path, options: ReadOptions | None = None, kind: str | None = None) -> Iterator[Trace]:
    """The recording's traces, one piece in memory at a time; ``UserError`` for a recording of loads only."""
    path, options = Path(path), options or ReadOptions()
    kind = kind or sniff(path)
    if kind == "epmoe":
        yield from stream_trace(path)
    elif kind == "jsonl":
        yield from stream_jsonl(path, options)
    else:
        found = _read(path, options, kind)
        if not isinstance(found, Trace):
            raise UserError(f"{path} holds loads only, no tokens; record per token, or ask only for balance")
        yield found


def read_trace(path: str | Path, options: ReadOptions | None = None, kind: str | None = None) -> Trace:
    """The whole recording as one trace."""
    pieces = list(stream(path, options, kind))
    return pieces[0] if len(pieces) == 1 else join(pieces, str(path))


def read_profile(path: str | Path, options: ReadOptions | None = None, kind: str | None = None) -> Profile:
    """Loads of any recording; tokens are counted, a load table is taken as it is."""
    path, options = Path(path), options or ReadOptions()
    kind = kind or sniff(path)
    if kind in ("sglang", "load"):
        found = _read(path, options, kind)
        return profile_trace(found) if isinstance(found, Trace) else found
    return profile_trace(read_trace(path, options, kind))


def holds_tokens(path: str | Path, kind: str | None = None) -> bool:
    """False where the format can only hold loads (an ``.pt`` file is opened to see)."""
    kind = kind or sniff(path)
    if kind != "sglang":
        return kind != "load"
    return isinstance(_read(Path(path), ReadOptions(num_experts=1 << 20, top_k=1), kind), Trace)


def _read(path: Path, options: ReadOptions, kind: str) -> Trace | Profile:
    if kind == "sglang":
        return read_sglang(path, options)
    if kind == "vllm":
        return read_vllm(path, options)
    if kind == "exflow":
        return read_exflow(path, options)
    if kind == "load":
        return read_load_table(path, options)
    raise UserError(f"format {kind!r} is unknown; choose one of {', '.join(FORMATS)}")


def read_exflow(path: Path, options: ReadOptions) -> Trace:
    """ExFlow's ``.npy`` int ``[tokens, layers]``: the one expert of each token and layer."""
    ids_TL = _load_array(path)
    if ids_TL.ndim != 2:
        raise UserError(f"{path} has shape {ids_TL.shape}, an ExFlow trace is [tokens, layers]")
    return make_trace(ids_TL[..., None], None, options, str(path))


def read_load_table(path: Path, options: ReadOptions) -> Profile:
    """``[layers, experts]`` or ``[steps, layers, experts]`` counts: ``.npy``, ``.csv`` without a header, or JSON.

    A JSON object may hold the table under ``logical_count``, ``load`` or ``expert_load``.
    """
    if path.suffix == ".npy":
        table = _load_array(path)
    elif path.suffix == ".csv":
        lines = read_text(path).splitlines()
        if not any(lines):
            raise UserError(f"{path} is empty; give one line of numbers per layer, separated by commas")
        try:
            table = np.loadtxt(lines, delimiter=",", ndmin=2)
        except ValueError as error:
            raise UserError(f"{path}: {error}; give one line of numbers per layer, separated by commas") from None
    else:
        table = _json_table(path)
    if table.ndim == 3:
        table = table.sum(0)
    return make_load(table, options, str(path))


def _json_table(path: Path) -> np.ndarray:
    raw = parse_json(read_text(path), str(path), "is the file whole?")
    if isinstance(raw, dict):
        name = next((n for n in ("logical_count", "load", "expert_load") if n in raw), None)
        if name is None:
            raise UserError(f"{path} has the keys {sorted(raw)[:6]}; a load table is under logical_count or load")
        raw = raw[name]
    try:
        return np.asarray(raw, np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{path}: the table is not numbers [layers, experts]; give every layer all experts") from None


def _load_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except BROKEN_ARRAY as error:
        raise UserError(f"cannot read {path}: {error}; expected a whole .npy without pickles") from None
    if not isinstance(array, np.ndarray):
        raise UserError(f"{path} is an .npz archive, expected a .npy; leave out --from to have the format found")
    return array


def _sniff_npz(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except BROKEN_ARRAY as error:
        raise UserError(f"cannot read {path}: {error}; the file is cut or no .npz") from None
    return "vllm" if "routed_experts.npy" in names and "format.npy" not in names else "epmoe"


def _sniff_npy(path: Path) -> str:
    try:
        dims = np.load(path, allow_pickle=False, mmap_mode="r").ndim
    except BROKEN_ARRAY as error:
        raise UserError(f"cannot read {path}: {error}; expected a whole .npy without pickles") from None
    if dims == 3:
        return "vllm"
    raise UserError(f"{path} has {dims} dimensions: loads and ExFlow traces look alike; give --from load or exflow")


def _sniff_json(path: Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            head = file.read(1 << 16)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; give a text file") from None
    if '"topk_experts"' in head or '"topk_ids"' in head:
        return "jsonl"
    if "routed_experts" in head or '"choices"' in head:
        return "vllm"
    if head.lstrip().startswith("[[") or any(f'"{n}"' in head for n in ("logical_count", "load", "expert_load")):
        return "load"
    raise UserError(f"{path} looks like no known recording; give --from one of {', '.join(FORMATS)}")
