"""SGLang's expert distribution recorder: ``stat``, ``stat_approx``, ``per_pass`` and ``per_token`` dumps.

Layouts (``python/sglang/srt/eplb/expert_distribution.py``); L counts all layers of the model, dense rows stay empty::

    stat       {rank, logical_count int32 [steps, L, E], average_utilization_rate_over_window}
    per_pass   {records: [{forward_pass_id, rank, gatherer_key, global_physical_count [L, P]}],
                last_physical_to_logical_map [L, P]}
    per_token  the same with input_ids, positions, extend_seq_lens and topk_ids_of_layer int32 [L, T, 8]; -1 is padding,
               the ids are *physical* slots

A step buffer is circular: unused steps are zero. The map is the last one; if the server rebalanced while recording,
earlier ids are mapped wrongly and nothing in the file tells, so record with rebalancing off.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path

import numpy as np

from placement.errors import UserError
from placement.formats_pt import load_pt
from placement.profile import Profile
from placement.recording import ReadOptions, make_load, make_trace
from placement.trace import Trace


def read_sglang(path: Path, options: ReadOptions) -> Trace | Profile:
    """One ``.pt`` file, or a folder with one ``per_token`` file per rank."""
    files = sorted(path.glob("*.pt")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path} holds no .pt file; give the recorder's folder or one of its files")
    dumps = [_open(file) for file in files]
    if "logical_count" in dumps[0]:
        if len(dumps) > 1:
            raise UserError(f"{path} holds {len(dumps)} stat files; each sums all ranks already: give one of them")
        return _read_stat(dumps[0], options, str(files[0]))
    if any("records" not in dump for dump in dumps):
        raise UserError(f"{path} mixes stat and per-token files; give a folder with one kind")
    dumps = _drop_copies(dumps, options)
    return _read_records(dumps, options, str(path))


def _open(file: Path) -> dict:
    raw = load_pt(file)
    tokens = {"records", "last_physical_to_logical_map"}
    known = isinstance(raw, dict) and ("logical_count" in raw or tokens <= raw.keys())
    if not known:
        keys = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
        raise UserError(f"{file} is not an SGLang recorder file (found {keys}); expected logical_count or records")
    return raw


def _read_stat(dump: dict, options: ReadOptions, source: str) -> Profile:
    count_SLE = np.asarray(dump["logical_count"])
    if count_SLE.ndim == 2:
        count_SLE = count_SLE[None]
    if count_SLE.ndim != 3:
        raise UserError(f"{source}: logical_count has shape {count_SLE.shape}, expected [steps, layers, experts]")
    used_S = count_SLE.any((1, 2))
    if not used_S.any():
        raise UserError(f"{source}: every count is 0; start the recorder before sending requests")
    if dropped := int((~used_S).sum()):
        options.note(f"{source}: {dropped} empty steps of the circular buffer dropped, {int(used_S.sum())} kept")
    return _moe_rows(count_SLE[used_S].sum(0, dtype=np.int64), options, source)


def _moe_rows(load_LE: np.ndarray, options: ReadOptions, source: str) -> Profile:
    layers = tuple(int(i) for i in np.flatnonzero(load_LE.any(-1)))
    if len(layers) < len(load_LE):
        options.note(f"{source}: {len(load_LE) - len(layers)} layers without counts left out as dense")
    return make_load(load_LE[list(layers)], options, source, layers)


def _drop_copies(dumps: list[dict], options: ReadOptions) -> list[dict]:
    """Ranks of a tensor-parallel attention group record the same tokens: keep one of them."""
    kept: list[dict] = []
    for dump in dumps:
        if any(_same_tokens(dump["records"], other["records"]) for other in kept):
            options.note("a rank repeats the tokens of another (tensor-parallel attention): counted once")
        else:
            kept.append(dump)
    return kept


def _same_tokens(a: list[dict], b: list[dict]) -> bool:
    return (
        len(a) == len(b) > 0
        and all("input_ids" in record for record in (*a, *b))
        and all(x["input_ids"] == y["input_ids"] and x["positions"] == y["positions"] for x, y in zip(a, b))
        and any(x["input_ids"] for x in a)
    )


def _read_records(dumps: list[dict], options: ReadOptions, source: str) -> Trace | Profile:
    maps = [np.asarray(dump["last_physical_to_logical_map"]) for dump in dumps]
    if any(m.shape != maps[0].shape or (m != maps[0]).any() for m in maps):
        raise UserError(f"{source}: the ranks end with different physical maps; record with rebalancing off")
    records = [record for dump in dumps for record in dump["records"]]
    if not records:
        raise UserError(f"{source} has no records; send requests between start and dump")
    if all("topk_ids_of_layer" in record for record in records):
        return _read_tokens([dump["records"] for dump in dumps], maps[0], options, source)
    return _read_passes(records, maps[0], options, source)


def _read_passes(records: list[dict], slot_expert_LP: np.ndarray, options: ReadOptions, source: str) -> Profile:
    total_LP = np.zeros(slot_expert_LP.shape, np.int64)
    for number, record in enumerate(records):
        count_LP = np.asarray(record.get("global_physical_count", ()))
        if count_LP.shape != total_LP.shape:
            raise UserError(f"{source}: record {number} counts {count_LP.shape}, the map has {total_LP.shape} slots")
        total_LP += count_LP
    load_LE = np.zeros((len(total_LP), int(slot_expert_LP.max()) + 1), np.int64)
    np.add.at(load_LE, (np.arange(len(total_LP))[:, None], slot_expert_LP), total_LP)
    return _moe_rows(load_LE, options, source)


def _read_tokens(by_rank: list[list[dict]], slot_expert_LP: np.ndarray, options: ReadOptions, source: str) -> Trace:
    ids, tokens, lens = [], [], []
    layers = _recorded_layers(by_rank, source)
    for records in by_rank:
        rows, owner, token_ids = [], [], []
        sequences = _Sequences()
        for number, record in enumerate(records):
            where = f"{source}: pass {record.get('forward_pass_id', number)}, rank {record.get('rank', '?')}"
            ids_TLK, real_T = _logical_ids(record, layers, slot_expert_LP, where)
            rows.append(ids_TLK[real_T])
            owner.append(sequences.place(record, len(real_T), where)[real_T])
            token_ids.append(np.asarray(record["input_ids"], np.int64)[real_T])
        order = np.argsort(np.concatenate(owner), kind="stable")  # sequence by sequence, each in time order
        ids.append(_stack(rows, source)[order])
        tokens.append(np.concatenate(token_ids)[order])
        counts = np.bincount(np.concatenate(owner))
        lens += counts[counts > 0].tolist()
    if options.num_experts is None and options.like is None:
        options = replace(options, num_experts=int(slot_expert_LP.max()) + 1)
    token_ids_T = np.concatenate(tokens).astype(np.uint32)
    return make_trace(np.concatenate(ids), lens, options, source, moe_layers=layers, token_ids_T=token_ids_T)


def _recorded_layers(by_rank: list[list[dict]], source: str) -> tuple[int, ...]:
    """Model indices of the layers with any recorded choice."""
    seen = None
    for record in (record for records in by_rank for record in records):
        has_L = (np.asarray(record["topk_ids_of_layer"]) >= 0).any((1, 2))
        seen = has_L if seen is None else seen | has_L
    layers = tuple(int(i) for i in np.flatnonzero(seen))
    if not layers:
        raise UserError(f"{source}: no layer recorded a choice; the model may bypass the recorder's hook")
    return layers


def _logical_ids(
    record: dict, layers: tuple[int, ...], slot_expert_LP: np.ndarray, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """(logical ids int64 [T, L, K], real bool [T]); tokens that chose nothing in every layer are padding."""
    slot_LTK = np.asarray(record["topk_ids_of_layer"])[list(layers)].astype(np.int64)
    if slot_LTK.shape[1] != len(record["input_ids"]):
        raise UserError(f"{where}: {slot_LTK.shape[1]} rows for {len(record['input_ids'])} input ids; the file is cut")
    chosen_LT = (slot_LTK >= 0).sum(-1)
    real_T = chosen_LT.any(0)
    top_k = int(chosen_LT.max(initial=1))
    short = (chosen_LT != top_k) & real_T
    if short.any():
        layer, token = np.argwhere(short)[0]
        raise UserError(
            f"{where}: token {token}, layer {layers[layer]} has {chosen_LT[layer, token]} choices, others {top_k};"
            " the pass was not recorded whole"
        )
    slot_LTK = slot_LTK[..., :top_k]
    if slot_LTK.max(initial=0) >= slot_expert_LP.shape[1]:
        raise UserError(
            f"{where}: slot {slot_LTK.max()} is outside the map of {slot_expert_LP.shape[1]} slots;"
            " record with shared-expert fusion off"
        )
    L, T, K = slot_LTK.shape
    mapped = np.take_along_axis(slot_expert_LP[list(layers)], np.maximum(slot_LTK, 0).reshape(L, T * K), axis=1)
    return np.moveaxis(mapped.reshape(L, T, K), 0, 1), real_T


def _stack(rows: list[np.ndarray], source: str) -> np.ndarray:
    widths = sorted({block.shape[2] for block in rows if len(block)})
    if len(widths) > 1:
        raise UserError(f"{source}: passes differ in choices per token {widths}; give files of one model")
    return np.concatenate([block for block in rows if len(block)] or rows[:1])


class _Sequences:
    """Which sequence each recorded token belongs to, over the passes of one rank.

    The recorder keeps no request ids. A prefill chunk names its length and positions; a decoded token continues the
    oldest sequence that waits for its position. Two requests of equal length may be exchanged by this; loads and
    transitions are per token and do not change.
    """

    def __init__(self) -> None:
        self._count = 0
        self._waiting: dict[int, deque[int]] = defaultdict(deque)  # next position -> sequences, oldest first

    def place(self, record: dict, tokens: int, where: str) -> np.ndarray:
        """int64 ``[tokens]``: sequence number of each token of the pass."""
        positions = list(record["positions"])
        if len(positions) != tokens:
            raise UserError(f"{where}: {len(positions)} positions for {tokens} tokens; the file is cut")
        chunks = [int(n) for n in record.get("extend_seq_lens") or ()] or [1] * tokens
        if sum(chunks) > tokens:
            raise UserError(f"{where}: extend_seq_lens sum to {sum(chunks)} of {tokens} tokens; the file is cut")
        chunks += [1] * (tokens - sum(chunks))  # padding of the batch
        owner, start, moved = np.empty(tokens, np.int64), 0, []
        for length in chunks:
            first = int(positions[start])
            waiting = self._waiting.get(first) if first else None
            if waiting:
                sequence = waiting.popleft()
            else:
                sequence, self._count = self._count, self._count + 1
            owner[start : start + length] = sequence
            moved.append((first + length, sequence))
            start += length
        for position, sequence in moved:  # after the pass, so that no sequence is continued twice in it
            self._waiting[position].append(sequence)
        return owner
