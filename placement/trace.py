"""Routing traces (``epmoe-trace/1``): per token and MoE layer, the experts its router chose.

An ``.npz`` without pickles::

    format, model      str
    num_experts        int32             E
    moe_layers         int32 [L]         index in the model of each MoE layer
    expert_ids         uint8 [T, L, K]   (uint16 where E > 256) distinct logical experts, in no particular order
    seq_lens           int32 [sequences] sums to T
    token_ids          uint32 [T]        optional; then tokenizer_sha256 (str) may say whose
    expert_weights     float16 [T, L, K] optional; router weights before any renormalisation
    homes              int32 [sequences] optional; the home rank each sequence had when it was recorded

Large traces are shards ``NAME.000.npz``, ``NAME.001.npz``, ...: :func:`stream_trace` yields one at a time.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from placement.errors import BROKEN_ARRAY, UserError
from placement.plan import MoEShape
from placement.textfiles import whole_file

FORMAT = "epmoe-trace/1"


@dataclass(frozen=True)
class Trace:
    """One domain of traffic. Arrays as in the module's docstring; ``expert_ids_TLK`` is checked at construction."""

    shape: MoEShape
    expert_ids_TLK: np.ndarray
    seq_lens: np.ndarray
    token_ids_T: np.ndarray | None = None
    expert_weights_TLK: np.ndarray | None = None
    homes: np.ndarray | None = None
    tokenizer_sha256: str = ""
    source: str = "trace"

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def num_tokens(self) -> int:
        return len(self.expert_ids_TLK)

    def load_LE(self) -> np.ndarray:
        """int64 ``[L, E]``: (token, choice) pairs per expert; sums to ``T * K`` in every layer."""
        T, L, K = self.expert_ids_TLK.shape
        E = self.shape.num_experts
        flat_TLK = self.expert_ids_TLK.astype(np.int32) + (np.arange(L, dtype=np.int32) * E)[:, None]
        return np.bincount(flat_TLK.ravel(), minlength=L * E).reshape(L, E)

    def sequence_starts(self) -> np.ndarray:
        """int64 ``[sequences + 1]``: first token of each sequence, and T."""
        return np.concatenate([[0], np.cumsum(self.seq_lens, dtype=np.int64)])

    def take_sequences(self, which: np.ndarray) -> Trace:
        """The trace of the given sequences, in that order."""
        starts = self.sequence_starts()
        spans = [np.arange(starts[i], starts[i + 1]) for i in which]
        rows = np.concatenate(spans) if len(spans) else np.empty(0, np.int64)
        return replace(
            self,
            expert_ids_TLK=self.expert_ids_TLK[rows],
            seq_lens=self.seq_lens[which],
            token_ids_T=None if self.token_ids_T is None else self.token_ids_T[rows],
            expert_weights_TLK=None if self.expert_weights_TLK is None else self.expert_weights_TLK[rows],
            homes=None if self.homes is None else self.homes[which],
        )

    def split(self, holdout: float) -> tuple[Trace, Trace]:
        """(train, held-out): the first ``1 - holdout`` of the sequences and the rest. Never splits a sequence."""
        count = len(self.seq_lens)
        first = count - int(round(count * holdout))
        if not 0 < holdout < 1 or not 0 < first < count:
            raise UserError(
                f"holdout {holdout} of {count} sequences in {self.source} leaves one side empty;"
                " use a share between 0 and 1 and a trace with more sequences"
            )
        return self.take_sequences(np.arange(first)), self.take_sequences(np.arange(first, count))

    def save(self, path: str | Path) -> None:
        """Write one compressed ``.npz``."""
        arrays = {
            "format": np.array(FORMAT),
            "model": np.array(self.shape.name),
            "num_experts": np.int32(self.shape.num_experts),
            "moe_layers": np.array(self.shape.moe_layers, np.int32),
            "expert_ids": self.expert_ids_TLK.astype(id_dtype(self.shape.num_experts), copy=False),
            "seq_lens": self.seq_lens.astype(np.int32, copy=False),
        }
        if self.token_ids_T is not None:
            arrays["token_ids"] = self.token_ids_T.astype(np.uint32, copy=False)
        if self.tokenizer_sha256:
            arrays["tokenizer_sha256"] = np.array(self.tokenizer_sha256)
        if self.expert_weights_TLK is not None:
            arrays["expert_weights"] = self.expert_weights_TLK.astype(np.float16, copy=False)
        if self.homes is not None:
            arrays["homes"] = self.homes.astype(np.int32, copy=False)
        with whole_file(path) as file:  # savez would append .npz to a path without it
            np.savez_compressed(file, **arrays)


def id_dtype(num_experts: int) -> type:
    return np.uint8 if num_experts <= 256 else np.uint16


def load_trace(path: str | Path) -> Trace:
    """Read a trace whole; ``NAME.npz`` also finds ``NAME.000.npz``, ... and joins them."""
    shards = list(stream_trace(path))
    if len(shards) == 1:
        return shards[0]
    return join(shards, str(path))


def stream_trace(path: str | Path) -> Iterator[Trace]:
    """Yield the trace shard by shard (one shard in memory at a time)."""
    for file in shard_files(path):
        yield _load_file(file)


def shard_files(path: str | Path) -> list[Path]:
    """``[path]`` if it exists, else its shards in order; ``UserError`` if there is neither, or a shard is missing."""
    path = Path(path)
    if path.is_file():
        return [path]
    stem = path.name.removesuffix(".npz")
    numbered = {}
    if path.parent.is_dir():
        for file in path.parent.iterdir():
            if match := re.fullmatch(re.escape(stem) + r"\.(\d{3,})\.npz", file.name):
                numbered[int(match[1])] = file
    if not numbered:
        raise UserError(f"no trace at {path}; give an {FORMAT} .npz file or the name its .000.npz shards share")
    if sorted(numbered) != list(range(len(numbered))):
        missing = min(set(range(max(numbered))) - numbered.keys())
        raise UserError(f"trace {path} lacks shard {missing:03d} of {max(numbered) + 1}; copy every shard")
    return [numbered[i] for i in sorted(numbered)]


def join(traces: list[Trace], source: str) -> Trace:
    """Concatenate traces of one model; optional arrays are kept where all have them."""
    first = traces[0]
    for other in traces[1:]:
        first.shape.require_same(other.shape, first.source, other.source)

    def cat(name: str) -> np.ndarray | None:
        parts = [getattr(t, name) for t in traces]
        return None if any(p is None for p in parts) else np.concatenate(parts)

    return replace(
        first,
        expert_ids_TLK=cat("expert_ids_TLK"),
        seq_lens=cat("seq_lens"),
        token_ids_T=cat("token_ids_T"),
        expert_weights_TLK=cat("expert_weights_TLK"),
        homes=cat("homes"),
        source=source,
    )


def _load_file(path: Path) -> Trace:
    if path.is_file() and not zipfile.is_zipfile(path):
        raise UserError(f"cannot read trace {path}: it is no whole .npz archive; expected an {FORMAT} file")
    try:
        with np.load(path, allow_pickle=False) as archive:
            raw = {name: archive[name] for name in archive.files}
    except BROKEN_ARRAY as error:
        raise UserError(f"cannot read trace {path}: {error}; expected an {FORMAT} .npz, whole") from None
    if str(raw.get("format", "")) != FORMAT:
        found = str(raw.get("format"))
        raise UserError(f"{path}: format is {found!r}, expected {FORMAT!r}; use epmoe-placement convert")
    required = {"model", "num_experts", "moe_layers", "expert_ids", "seq_lens"}
    if missing := sorted(required - raw.keys()):
        raise UserError(f"{path} lacks {missing}; an {FORMAT} file has {sorted(required)}")
    ids = raw["expert_ids"]
    if ids.ndim != 3:
        raise UserError(f"{path}: expert_ids has shape {ids.shape}, expected [tokens, layers, choices]")
    moe_layers = tuple(int(i) for i in np.atleast_1d(raw["moe_layers"]))
    return Trace(
        shape=MoEShape(moe_layers, int(raw["num_experts"]), ids.shape[2], str(raw["model"])),
        expert_ids_TLK=ids,
        seq_lens=raw["seq_lens"],
        token_ids_T=raw.get("token_ids"),
        expert_weights_TLK=raw.get("expert_weights"),
        homes=raw.get("homes"),
        tokenizer_sha256=str(raw.get("tokenizer_sha256", "")),
        source=str(path),
    )


def _validate(trace: Trace) -> None:
    ids, source = trace.expert_ids_TLK, trace.source
    want = (trace.shape.num_layers, trace.shape.top_k)
    if ids.ndim != 3 or ids.shape[1:] != want:
        raise UserError(f"{source}: expert_ids has shape {ids.shape}, expected [tokens, layers, choices] = [*, {want}]")
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{source}: expert_ids is {ids.dtype}, expected integers")
    if ids.size and not (ids.min() >= 0 and ids.max() < trace.shape.num_experts):
        bad = np.argwhere((ids < 0) | (ids >= trace.shape.num_experts))[0]
        value = ids[tuple(bad)]
        raise UserError(
            f"{source}: token {bad[0]}, layer {bad[1]} chose expert {value}, not in 0..{trace.shape.num_experts - 1}"
        )
    if (repeat := first_repeat(ids)) is not None:
        token, layer = repeat
        raise UserError(f"{source}: token {token}, layer {layer} chose one expert twice: {ids[repeat].tolist()}")
    if trace.seq_lens.ndim != 1 or (trace.seq_lens.size and trace.seq_lens.min() < 1):
        raise UserError(f"{source}: seq_lens must be a list of lengths of at least 1")
    if int(trace.seq_lens.sum()) != len(ids):
        total = int(trace.seq_lens.sum())
        raise UserError(f"{source}: seq_lens sum to {total}, expert_ids has {len(ids)} tokens; is the file whole?")
    if trace.token_ids_T is not None and trace.token_ids_T.shape != (len(ids),):
        raise UserError(f"{source}: token_ids has shape {trace.token_ids_T.shape}, expected [{len(ids)}]")
    if trace.expert_weights_TLK is not None and trace.expert_weights_TLK.shape != ids.shape:
        raise UserError(f"{source}: expert_weights has shape {trace.expert_weights_TLK.shape}, expected {ids.shape}")
    if trace.homes is not None and (trace.homes.shape != trace.seq_lens.shape or (trace.homes < 0).any()):
        raise UserError(f"{source}: homes has shape {trace.homes.shape}, expected a rank for each of the sequences")


def first_repeat(ids_TLK: np.ndarray) -> tuple[int, int] | None:
    """(token, layer) of the first row that names one expert twice, or ``None``."""
    step = max(1, (1 << 22) // max(1, ids_TLK[0].size if len(ids_TLK) else 1))  # bounds the sorted copy's memory
    for start in range(0, len(ids_TLK), step):
        ordered = np.sort(ids_TLK[start : start + step], axis=-1)
        same = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if same.any():
            token, layer = np.argwhere(same)[0]
            return start + int(token), int(layer)
    return None
