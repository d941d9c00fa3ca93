"""Which kernel variant and which tiles: a function of (pairs, slots, D, F, dtype), measured on one H200.

Variants: *vector* for one row; *stream*: weights stream past tiles of 16 or 32 pairs, as the left operand; *blocked*:
tiles of 64 or 128 pairs x 128 or 256 weight rows, on Hopper also with warps that only load; *plain* pointers for shapes
that TMA does not take and for float32.  Stream or blocked: what tile_cost.py expects to be fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

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
BLOCKED_128 = TileConfig(cols=256, depth=64, warps=8, stages=3, flatten=True)
SPECIALISED = TileConfig(cols=256, depth=64, warps=12, stages=4, specialised=True)
TAIL = 32

# Block rows, tail, tiles; then of gate_up and of down: TFLOP/s, us of a tile besides, TB/s.
FORMS = (
    Form(16, 0, STREAM, Speed(172, 0.0, 4.36), Speed(192, 0.6, 4.49)),
    Form(16, 0, STREAM_TWO, Speed(238, 0.0, 4.41), Speed(244, 0.7, 4.49)),
    Form(32, 0, STREAM, Speed(329, 0.2, 4.47), Speed(355, 0.4, 4.49)),
    Form(32, 0, NARROW_THREE, Speed(339, 0.0, 4.39), Speed(322, 0.4, 4.4)),
    Form(64, 0, NARROW, Speed(465, 0.0, 4.46), Speed(577, 0.5, 4.31)),
    Form(64, 0, NARROW_THREE, Speed(453, 0.0, 4.55), Speed(526, 0.5, 4.33)),
    Form(64, 0, BLOCKED_64, Speed(605, 0.0, 4.33), Speed(662, 1.4, 4.23)),
    Form(128, 0, BLOCKED_128, Speed(783, 3.3, 4.14), Speed(769, 1.7, 4.16)),
    Form(128, 0, SPECIALISED, Speed(671, 0.0, 4.92), Speed(774, 1.5, 4.41)),
    Form(128, TAIL, SPECIALISED, Speed(726, 0.0, 4.84), Speed(820, 2.7, 4.45)),
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

    The second one has as many programs as ``hidden`` has columns for them, and an SM holds two of 8 warps or five of 4:
    larger tiles where these make one round with enough loads in flight, nearly two programs an SM or more than three;
    small ones elsewhere.
    """
    per_sm = ceil(hidden / 8) / sms
    if per_sm > 5:
        down = (4, 1024, 4) if features <= 2048 else (2, 2048, 4)
    elif per_sm > 3.2:
        down = (8, 512, 4)
    else:
        down = (8, 1024, 8) if 1.65 < per_sm <= 2 else (2, 1024, 2)
    return (2, 1024, 2), down
