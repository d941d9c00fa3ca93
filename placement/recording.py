"""What every reader of foreign recordings shares: the facts a file does not state, and the way to a ``Trace``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from placement.errors import UserError
from placement.plan import MoEShape
from placement.profile import Profile
from placement.trace import Trace, first_repeat, id_dtype

MOST_LOAD = 1e18


def _silent(message: str) -> None:
    """The default ``note``: readers say what they dropped or assumed; who does not listen loses nothing else."""


@dataclass(frozen=True)
class ReadOptions:
    """Facts that a foreign file leaves out.

    ``like`` is the model's shape where it is known and overrides the rest; ``sequence_length`` cuts a recording that
    does not mark its sequences; ``note`` receives one line for everything dropped or assumed.
    """

    like: MoEShape | None = None
    num_experts: int | None = None
    top_k: int | None = None
    model: str = ""
    sequence_length: int | None = None
    note: Callable[[str], None] = _silent


def make_trace(ids_TLK: np.ndarray, seq_lens: list[int] | None, options: ReadOptions, source: str, **extra) -> Trace:
    """A checked trace from raw ids ``[T, L, K]``; ``extra``: ``moe_layers`` and optional fields of ``Trace``.

    Rows are checked before the ids are narrowed to a byte, so that -1 or 300 is named and not wrapped.
    """
    ids_TLK = np.asarray(ids_TLK)
    if ids_TLK.ndim != 3 or not np.issubdtype(ids_TLK.dtype, np.integer):
        raise UserError(f"{source}: ids are {ids_TLK.dtype} {ids_TLK.shape}, expected integers [tokens, layers, k]")
    shape = shape_for(ids_TLK.shape[1], ids_TLK.shape[2], options, source, extra.pop("moe_layers", None))
    check_ids(ids_TLK, shape.num_experts, source)
    lens = cut_sequences(len(ids_TLK), options.sequence_length) if seq_lens is None else seq_lens
    return Trace(
        shape=shape,
        expert_ids_TLK=ids_TLK.astype(id_dtype(shape.num_experts)),
        seq_lens=np.asarray(lens, np.int32),
        source=source,
        **extra,
    )


def check_ids(ids_TLK: np.ndarray, num_experts: int, source: str) -> None:
    """``UserError`` naming the first (token, layer) out of range, or all-zero, or with a repeated id."""
    if ids_TLK.size and not ids_TLK.any():
        raise UserError(f"{source}: every id is 0; the capture did not run (a fused kernel may bypass its hook)")
    bad = (ids_TLK < 0) | (ids_TLK >= num_experts)
    if bad.any():
        token, layer, choice = np.argwhere(bad)[0]
        raise UserError(
            f"{source}: token {token}, layer {layer} chose expert {ids_TLK[token, layer, choice]},"
            f" not in 0..{num_experts - 1}; -1 is padding, larger ids may be physical slots or fused shared experts"
        )
    if (repeat := first_repeat(ids_TLK)) is not None:
        raise UserError(
            f"{source}: token {repeat[0]}, layer {repeat[1]} chose one expert twice: {ids_TLK[repeat].tolist()};"
            " such rows come from an empty capture or from physical slots"
        )


def shape_for(
    layers: int, top_k: int, options: ReadOptions, source: str, moe_layers: tuple[int, ...] | None = None
) -> MoEShape:
    """The model's shape from ``options``, checked against what the file shows."""
    if options.like is not None:
        like = options.like
        if (layers, top_k) != (like.num_layers, like.top_k):
            raise UserError(
                f"{source} has {layers} MoE layers and {top_k} choices, the model given has {like.num_layers} and"
                f" {like.top_k}; give the model it was recorded from"
            )
        return like
    if options.num_experts is None:
        raise UserError(f"{source} does not say how many experts a layer has; give --num-experts or --like FILE")
    return MoEShape(moe_layers or tuple(range(layers)), options.num_experts, top_k, options.model)


def make_load(
    load_LE: np.ndarray, options: ReadOptions, source: str, moe_layers: tuple[int, ...] | None = None
) -> Profile:
    """A profile that knows loads only; the number of choices per token must come from ``options``."""
    load_LE = np.asarray(load_LE)
    if load_LE.ndim != 2 or not load_LE.size or not np.issubdtype(load_LE.dtype, np.number):
        raise UserError(f"{source}: loads are {load_LE.dtype} {load_LE.shape}, expected numbers [layers, experts]")
    bad = ~np.isfinite(load_LE) | (load_LE < 0)
    if bad.any():
        layer, expert = np.argwhere(bad)[0]
        raise UserError(f"{source}: layer {layer}, expert {expert} has load {load_LE[layer, expert]}; give counts")
    if load_LE.max() > MOST_LOAD:
        raise UserError(f"{source}: a load of {load_LE.max():g} is no count of tokens (at most {MOST_LOAD:g})")
    if not load_LE.any():
        raise UserError(f"{source}: every load is 0; record while requests are served")
    if options.like is None and options.top_k is None:
        raise UserError(f"{source}: loads do not say how many experts a token chooses; give --top-k or --like FILE")
    layers = moe_layers or tuple(range(len(load_LE)))
    shape = options.like or MoEShape(layers, load_LE.shape[1], options.top_k, options.model)
    tokens = float(load_LE.sum(-1, dtype=np.float64).max()) / shape.top_k
    return Profile(shape, tokens, load_LE.astype(np.float64))


def cut_sequences(tokens: int, length: int | None) -> list[int]:
    """Lengths of consecutive pieces of ``length`` tokens (the last may be shorter); one piece if ``length`` is None."""
    if not tokens:
        return []
    if length is None:
        return [tokens]
    if length < 1:
        raise UserError(f"sequence length {length} must be at least 1")
    return [length] * (tokens // length) + ([tokens % length] if tokens % length else [])


def read_text(path: Path) -> str:
    if path.is_char_device():  # /dev/zero has no end
        raise UserError(f"cannot read {path}: it is a device; give a text file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; give a text file") from None
