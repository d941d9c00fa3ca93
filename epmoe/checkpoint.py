"""Loads one rank's weights: every tensor of the checkpoint is claimed exactly once, only this rank's bytes are read.

All ranks account for the whole checkpoint from its headers, so all fail alike; then each reads its own experts and the
shared parts straight into their final place (``epmoe.layout``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from epmoe.families import FAMILIES
from epmoe.layout import empty_weights
from epmoe.model.weights import ModelWeights
from epmoe.model_config import ModelConfig
from epmoe.ops.fp8 import SCALE_SUFFIX, scale_shape
from epmoe.reading import Readers, read_pieces
from epmoe.shards import DTYPES, FP8, Entry, Headers, read_headers
from placement.errors import UserError

LISTED = 4  # findings named per kind of problem


@dataclass(frozen=True)
class LoadReport:
    """What one rank read.  ``bytes_read`` counts headers and data; ``bytes_total`` is the size of the checkpoint."""

    bytes_read: int
    bytes_total: int
    tensors: int
    experts: int
    files: int
    seconds: float


Loader = Callable[
    [Path, ModelConfig, Sequence[Sequence[int]], torch.dtype, torch.device], tuple[ModelWeights, LoadReport]
]


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    local_experts: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    keep_fp8: bool | None = None,
) -> tuple[ModelWeights, LoadReport]:
    """Read the weights of one rank.

    Args:
        folder: a Hugging Face checkpoint: ``model.safetensors``, or shards with their index.
        config: its config.
        local_experts: ``[MoE layer][local slot]`` -> expert.
        dtype: of all weights but the correction biases, which stay float32.
        progress: called with (bytes read, bytes to read).
        keep_fp8: leave experts that are stored as 8-bit floats so (default: on a GPU); all else is dequantised.

    Raises:
        UserError: one line with all that is wrong with the checkpoint (see ``account``), or the expert whose weights
            are all zero.
    """
    began, device = time.perf_counter(), torch.device(device)
    keep_fp8 = device.type == "cuda" if keep_fp8 is None else keep_fp8
    with Readers(device) if device.type == "cuda" else nullcontext() as readers:
        headers = account(Path(folder), config)
        stored_fp8 = {name for name, entry in headers.entries.items() if keep_fp8 and entry.dtype == FP8}
        weights, pieces = empty_weights(config, local_experts, dtype, device, stored_fp8.__contains__)
        read = read_pieces(pieces, headers.entries, progress, readers)
    _refuse_zeros(weights, config, local_experts)
    return weights, LoadReport(
        bytes_read=headers.bytes_read + read,
        bytes_total=headers.bytes_total,
        tensors=len({piece.name for piece in pieces}),
        experts=sum(len(held) for held in local_experts),
        files=len({headers.entries[piece.name].file for piece in pieces}),
        seconds=time.perf_counter() - began,
    )


def account(folder: Path, config: ModelConfig) -> Headers:
    """Match a checkpoint's headers with what the config asks for; UserError listing all that does not fit."""
    headers = read_headers(folder)
    everything = [range(config.num_experts)] * len(config.moe_layers)
    _, pieces = empty_weights(config, everything, torch.float32, "meta")
    expected = {piece.name: piece.shape for piece in pieces}
    found, ignored = headers.entries, _ignored_names(config)
    expected |= _scales(found, expected) if config.block_fp8 else {}
    problems = dict(headers.problems)
    if "unreadable files" not in problems:
        problems["missing"] = [name for name in expected if name not in found]
    problems["unknown"] = [name for name in found if name not in expected and not ignored.fullmatch(name)]
    problems |= _unfit({name: found[name] for name in expected if name in found}, expected, config.block_fp8)
    listed = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
    if listed:
        raise UserError(
            f"{folder} does not hold the {config.family} model of its config.json; {'; '.join(listed)};"
            " download it again, or correct config.json"
        )
    return headers


def _scales(found: dict[str, Entry], expected: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the scales that must lie beside the 8-bit matrices."""
    stored = [name for name in expected if name in found and found[name].dtype == FP8 and len(expected[name]) == 2]
    return {name + SCALE_SUFFIX: scale_shape(*expected[name]) for name in stored}


def _unfit(found: dict[str, Entry], expected: dict[str, tuple[int, ...]], block_fp8: bool) -> dict[str, list[str]]:
    """Tensors of another shape, of a type that is not implemented, or of the rarer of two half-precision types."""
    misshapen = [
        f"{name} ({list(entry.shape)}, config.json asks for {list(expected[name])})"
        for name, entry in found.items()
        if entry.shape != expected[name]
    ]
    strange = [
        f"{name} ({entry.dtype})"
        for name, entry in found.items()
        if entry.dtype not in DTYPES and not (block_fp8 and entry.dtype == FP8 and len(entry.shape) == 2)
    ]
    weights = {name: entry for name, entry in found.items() if not name.endswith(SCALE_SUFFIX)}
    halves = {kind: [n for n, entry in weights.items() if entry.dtype == kind] for kind in ("BF16", "F16")}
    rarer, other = sorted(halves, key=lambda kind: len(halves[kind]))
    mixed = [f"{name} ({rarer} among {other})" for name in halves[rarer]]
    return {"misshapen": misshapen, f"of a type other than {', '.join(DTYPES)}": strange, "of mixed types": mixed}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _ignored_names(config: ModelConfig) -> re.Pattern[str]:
    names = FAMILIES[config.family].names
    tied = (re.escape(names.head),) if config.tie_word_embeddings else ()
    return re.compile("|".join((*names.ignored, *tied)))


def _refuse_zeros(weights: ModelWeights, config: ModelConfig, local_experts: Sequence[Sequence[int]]) -> None:
    """An expert of zeros was never written (or never read): its tokens would silently lose a term."""
    for layer, held in zip(config.moe_layers, local_experts):
        experts = weights.layers[layer].mlp.experts
        for name, matrix_LRC in (("gate and up", experts.gate_up), ("down", experts.down)):
            matrix_LRC = matrix_LRC.view(torch.uint8) if matrix_LRC.itemsize == 1 else matrix_LRC
            suspects = (~matrix_LRC[:, 0].any(-1)).nonzero().flatten().tolist()  # by the first row, which is cheap
            for slot in suspects:
                if not matrix_LRC[slot].any():
                    raise UserError(
                        f"layer {layer}, expert {held[slot]}: its {name} weights are all zero; an expert must have been"
                        " trained and saved: download the checkpoint again"
                    )
