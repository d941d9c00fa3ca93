"""Which kernel variant and which tiles: a function of (pairs, slots, D, F, dtype), measured on one H200.

Variants: *vector* for one row; *stream*: weights stream past tiles of 16 or 32 pairs, as the left operand; *blocked*:
tiles of 64 or 128 pairs x 128 or 256 weight rows, on Hopper also with warps that only load; *plain* pointers for shapes
that TMA does not take and for float32.  Stream or blocked: what tile_cost.py expects to be fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from epmoe.ops.block_schedule import block_rows
from epmoe.ops.grouped_gemm import TileConfig, takes_descriptors
from epmoe.ops.launch import sm_count
from epmoe.ops.specialised_gemm import takes_specialised
from epmoe.ops.tile_cost import Form, Layer, Speed, fastest

PINNED_ROWS = 64


@dataclass(frozen=True)
class Choice:
    """Tiles of both GEMMs for blocks of ``rows`` pairs; ``vector`` = (cols, depth, warps) of both vector kernels.

    ``tail``: pairs that the last block of a slot may hold besides (specialised tiles only).
    """

    rows: int
    gate_up: TileConfig
    down: TileConfig
    vector: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None
    tail: int = 0


PLAIN = TileConfig(cols=128, depth=32, warps=4, stages=2)
POINTERS = TileConfig(cols=128, depth=64, warps=4, stages=4, per_sm=3, swap=True)
PINNED = TileConfig(cols=128, depth=64, warps=4, stages=3, per_sm=2)
STREAM = TileConfig(cols=128, depth=128, warps=4, stages=4, swap=True, flatten=True)
STREAM_TWO = TileConfig(cols=128, depth=128, warps=4, stages=3, per_sm=2, swap=True, flatten=True)
NARROW = TileConfig(cols=128, depth=64, warps=4, stages=4, per_sm=2, swap=True, flatten=True)
NARROW_THREE = TileConfig(cols=128, depth=64, warps=4, stages=3, per_sm=3, swap=True)
BLOCKED_64 = TileConfig(cols=256, depth=64, warps=8, stages=4, flatten=True)
PAIRED = TileConfig(cols=128, depth=64, warps=4, stages=3, per_sm=2, flatten=True)
BLOCKED_128 = TileConfig(cols=256, depth=64, warps=8, stages=3, flatten=True)
SPECIALISED = TileConfig(cols=256, depth=64, warps=12, stages=4, specialised=True)
TAIL = 32

# Block rows, tail, tiles; then of gate_up and of down: TFLOP/s, us of a tile besides, TB/s.
FORMS = (
    Form(16, 0, STREAM, Speed(169, 0.0, 4.32), Speed(180, 0.4, 4.49)),
    Form(16, 0, STREAM_TWO, Speed(228, 0.0, 4.44), Speed(208, 0.0, 4.53)),
    Form(32, 0, STREAM, Speed(335, 0.4, 4.47), Speed(368, 0.8, 4.5)),
    Form(32, 0, NARROW_THREE, Speed(360, 2.2, 4.36), Speed(315, 0.0, 4.38)),
    Form(64, 0, NARROW, Speed(479, 0.0, 4.41), Speed(563, 0.0, 4.32)),
    Form(64, 0, NARROW_THREE, Speed(445, 0.0, 4.46), Speed(509, 0.0, 4.34)),
    Form(64, 0, BLOCKED_64, Speed(630, 0.2, 4.22), Speed(634, 0.7, 4.23)),
    Form(128, 0, PAIRED, Speed(627, 1.0, 4.3), Speed(653, 0.0, 4.34)),
    Form(128, 0, BLOCKED_128, Speed(686, 0.7, 4.15), Speed(712, 0.8, 4.13)),
    Form(128, 0, SPECIALISED, Speed(680, 0.0, 4.49), Speed(715, 0.0, 4.19)),
    Form(128, TAIL, SPECIALISED, Speed(794, 0.0, 4.15), Speed(812, 0.0, 3.98)),
)


def choose(rows_RD: torch.Tensor, pairs: int, weights, deterministic: bool = False) -> Choice:
    """Tiles for ``pairs`` (row, choice) pairs over the slots of ``weights`` (an upper bound will do)."""
    slots, hidden, features = weights.down.shape
    plain = rows_RD.dtype == torch.float32 or not takes_descriptors(weights, rows_RD.device)
    if deterministic:
        # One tile whatever the batch: a row's bits are then the same in any company.
        config = PLAIN if plain else PINNED
        return Choice(PINNED_ROWS, config, config)
    vector = None
    if rows_RD.shape[0] == 1:
        vector = vector_tiles(hidden, features, sm_count(rows_RD.device))
    if plain:
        if rows_RD.dtype != torch.float32 and pairs <= 24 * slots:
            return Choice(16, POINTERS, POINTERS, vector)
        return Choice(min(block_rows(pairs, slots), 64), PLAIN, PLAIN, vector)
    specialised = takes_specialised(rows_RD.device, hidden)
    (rows, tail), gate_up, down = _fastest(Layer(slots, hidden, features, pairs, sm_count(rows_RD.device)), specialised)
    return Choice(rows, gate_up, down, vector, tail)


@lru_cache(maxsize=4096)
def _fastest(layer: Layer, specialised: bool) -> tuple[tuple[int, int], TileConfig, TileConfig]:
    return fastest(layer, (form for form in FORMS if specialised or not form.tiles.specialised))


def vector_tiles(hidden: int, features: int, sms: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(cols, depth, warps) of both vector kernels.

    The second one has as many programs as ``hidden`` has columns for them, and an SM holds 8 of 2 warps or 4 of 4: the
    tiles that make one full round of it are taken, or small ones where there are several rounds.
    """
    if hidden <= 2 * 8 * sms:
        down = (2, 1024, 2)
    elif hidden <= 8 * 4 * sms:
        down = (8, 512, 4)
    else:
        down = (4, 1024, 4) if features <= 2048 else (2, 2048, 4)
    return (2, 1024, 2), down
