"""Routing in JSON: vLLM's ``routed_experts`` responses, and JSON lines with ``topk_experts`` or ``topk_ids``.

vLLM (``--enable-return-routed-experts``), a response, a list of responses or one per line; each of ``choices`` (or
the response itself) carries ``routed_experts`` and, in some versions, ``prompt_routed_experts``: nested lists, a base64
``.npy`` string, or ``{"data": base64, "shape": [...], "dtype": ...}``, always ``[tokens, MoE layers, k]``.

JSON lines, two kinds seen in the wild::

    {"layer": 3, "batch_id": 17, "origin_rows": [0, 1], "topk_experts": [[5, 2], [9, 0]], "topk_weights": ...}
    {"type": "meta", "num_experts": 64}, then
    {"type": "route", "req_id": "a", "token_idx": 0, "layer": 3, "topk_ids": [5, 2], "topk_weights": ...}
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from placement.errors import BROKEN_ARRAY, UserError
from placement.recording import ReadOptions, make_trace, read_text
from placement.trace import Trace

_TOKENS_PER_TRACE = 65536  # a long file is handed on in pieces of about this many tokens


# -- vLLM -----------------------------------------------------------------------------------------------------------


def read_vllm(path: Path, options: ReadOptions) -> Trace:
    """Responses in ``.json``/``.jsonl``, or arrays: ``.npy`` ``[T, L, K]`` (one sequence), ``.npz`` by field."""
    source = str(path)
    if path.suffix in (".npy", ".npz"):
        parts = _vllm_arrays(path)
    else:
        parts = [_sequence(choice, where) for choice, where in _choices(_documents(path), source)]
    parts = [part for part in parts if part is not None and len(part)]
    if not parts:
        raise UserError(f"{source} holds no routed_experts; start vLLM with --enable-return-routed-experts")
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise UserError(f"{source}: responses differ in [layers, k]: {sorted(shapes)}; give responses of one model")
    lens = None if len(parts) == 1 and options.sequence_length else [len(part) for part in parts]
    return make_trace(np.concatenate(parts), lens, options, source)


def _vllm_arrays(path: Path) -> list[np.ndarray]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return [loaded]
        names = [n for n in ("prompt_routed_experts", "routed_experts") if n in loaded.files]
        parts = [loaded[n] for n in names]
    except BROKEN_ARRAY as error:
        raise UserError(f"cannot read {path}: {error}; expected a whole .npy or .npz without pickles") from None
    return [np.concatenate(parts)] if parts else []


def _documents(path: Path) -> list:
    text = read_text(path)
    try:
        whole = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return [record for _, record in _lines(text, str(path))]
    return whole if isinstance(whole, list) else [whole]


def _choices(documents: list, source: str) -> Iterator[tuple[dict, str]]:
    for number, document in enumerate(documents):
        if not isinstance(document, dict):
            raise UserError(f"{source}: response {number} is {type(document).__name__}, expected an object")
        choices = document.get("choices") or [document]
        for index, choice in enumerate(choices):
            prompt = choice.get("prompt_routed_experts", document.get("prompt_routed_experts"))
            yield {**choice, "prompt_routed_experts": prompt}, f"{source}: response {number}, choice {index}"


def _sequence(choice: dict, where: str) -> np.ndarray | None:
    """The prompt's rows and the generated ones, ``[T, L, K]``; ``None`` where the response carries neither."""
    fields = [choice.get("prompt_routed_experts"), choice.get("routed_experts")]
    parts = [_decode(value, where) for value in fields if value is not None]
    return np.concatenate(parts) if parts else None


def _decode(value: object, where: str) -> np.ndarray:
    try:
        if isinstance(value, str):
            ids = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
        elif isinstance(value, dict):
            raw = base64.b64decode(value["data"], validate=True)
            ids = np.frombuffer(raw, np.dtype(value["dtype"])).reshape(value["shape"])
        else:
            ids = np.asarray(value)
    except (*BROKEN_ARRAY, TypeError) as error:
        raise UserError(f"{where}: routed_experts cannot be decoded ({error}); is the response whole?") from None
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{where}: routed_experts is {ids.dtype} {ids.shape}, expected integers [tokens, layers, k]")
    return ids


# -- JSON lines -----------------------------------------------------------------------------------------------------


def stream_jsonl(path: Path, options: ReadOptions) -> Iterator[Trace]:
    """Traces of about 65,536 tokens each, in the order of the file."""
    source = str(path)
    groups = _groups(path, source)
    first = next(groups, None)
    if first is None:
        raise UserError(f"{source} holds no routing record; expected lines with layer and topk_experts or topk_ids")
    meta, layers = first[3], tuple(sorted(first[1]))
    if options.num_experts is None and options.like is None and "num_experts" in meta:
        options = replace(options, num_experts=int(meta["num_experts"]))
    blocks, lens = [], []
    for key, rows_by_layer, line, _ in (first, *groups):
        block = _stack_layers(rows_by_layer, layers, f"{source}: {key} (up to line {line})")
        if blocks and block.shape[1:] != blocks[0].shape[1:]:
            raise UserError(f"{source}: {key} has {block.shape[2]} choices a token, earlier ones {blocks[0].shape[2]}")
        blocks.append(block)
        lens.append(len(block))
        if sum(lens) >= _TOKENS_PER_TRACE:
            yield make_trace(np.concatenate(blocks), lens, options, source, moe_layers=layers)
            blocks, lens = [], []
    if blocks:
        yield make_trace(np.concatenate(blocks), lens, options, source, moe_layers=layers)


def _lines(text: object, source: str) -> Iterator[tuple[int, dict]]:
    lines = text.splitlines() if isinstance(text, str) else text
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{source}: line {number} is not JSON ({error}); is the file whole?") from None
        if not isinstance(record, dict):
            raise UserError(f"{source}: line {number} is {type(record).__name__}, expected an object")
        yield number, record


def _groups(path: Path, source: str) -> Iterator[tuple[str, dict[int, dict[int, list]], int, dict]]:
    """(name, layer -> token -> ids, last line, meta) of each batch or request.

    Batches are closed when the next one starts; requests may interleave and are held to the end of the file.
    """
    meta: dict = {}
    requests: dict[str, dict] = {}
    batch, rows, number = None, {}, 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, record in _lines(file, source):
                if record.get("type") == "meta":
                    meta = record
                elif "topk_ids" in record:
                    _add_route(requests.setdefault(str(record.get("req_id", "")), {}), record, number, source)
                elif "topk_experts" in record:
                    key = record.get("batch_id", record.get("step", 0))
                    if batch is not None and key != batch:
                        yield f"batch {batch}", rows, number - 1, meta
                        rows = {}
                    batch = key
                    _add_batch(rows, record, number, source)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if batch is not None:
        yield f"batch {batch}", rows, number, meta
    for name, by_layer in requests.items():
        yield f"request {name}", by_layer, number, meta


def _add_route(by_layer: dict[int, dict[int, list]], record: dict, line: int, source: str) -> None:
    try:
        layer, token = int(record["layer"]), int(record["token_idx"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{source}: line {line} needs integer layer and token_idx beside topk_ids") from None
    rows = by_layer.setdefault(layer, {})
    if token in rows:
        raise UserError(f"{source}: line {line} repeats token {token} of layer {layer}; keep one record of each")
    rows[token] = record["topk_ids"]


def _add_batch(by_layer: dict[int, dict[int, list]], record: dict, line: int, source: str) -> None:
    chosen, origin = record["topk_experts"], record.get("origin_rows")
    if "layer" not in record or not isinstance(chosen, list) or not chosen:
        raise UserError(f"{source}: line {line} needs layer and a list topk_experts that is not empty")
    if not isinstance(chosen[0], list):
        chosen = [chosen]
    if not all(isinstance(x, int) for x in (record["layer"], *(origin if isinstance(origin, list) else ()))):
        raise UserError(f"{source}: line {line}: layer and origin_rows must be integers")
    rows = by_layer.setdefault(record["layer"], {})
    if isinstance(origin, int) and origin != len(chosen):
        raise UserError(f"{source}: line {line} has {len(chosen)} rows, origin_rows says {origin}; the line is cut")
    if isinstance(origin, list) and len(origin) != len(chosen):
        raise UserError(f"{source}: line {line} has {len(chosen)} rows for {len(origin)} origin_rows; the line is cut")
    tokens = origin if isinstance(origin, list) else range(len(rows), len(rows) + len(chosen))
    for token, ids in zip(tokens, chosen):
        if token in rows:
            raise UserError(f"{source}: line {line} repeats row {token} of layer {record['layer']}; keep one of each")
        rows[token] = ids


def _stack_layers(by_layer: dict[int, dict[int, list]], layers: tuple[int, ...], where: str) -> np.ndarray:
    """int64 ``[T, L, K]`` with tokens in order; ``UserError`` where layers disagree about the tokens."""
    if tuple(sorted(by_layer)) != layers:
        raise UserError(f"{where} has layers {sorted(by_layer)[:6]}, the first {list(layers)[:6]}; record them all")
    tokens = sorted(by_layer[layers[0]])
    for layer in layers[1:]:
        if sorted(by_layer[layer]) != tokens:
            raise UserError(
                f"{where}: layer {layer} has {len(by_layer[layer])} tokens, layer {layers[0]} has {len(tokens)};"
                " the layers must record the same tokens"
            )
    try:
        ids = np.array([[by_layer[layer][token] for layer in layers] for token in tokens])
    except ValueError:
        raise UserError(f"{where}: rows differ in the number of experts; every token needs the same k") from None
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{where}: expert ids are {ids.dtype} {ids.shape}, expected integers [tokens, layers, k]")
    return ids
