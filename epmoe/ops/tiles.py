"""Which kernel variant and which tiles: a function of (pairs, slots, D, F, dtype) now, measured on H200.

Variants: *vector* for one row; *swap* tiles of 16 to 64 pairs where weights stream past few pairs; *wide* tiles of
128 pairs where tensor cores are the limit; *plain* pointers for shapes that TMA does not take and for float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epmoe.ops.grouped_gemm import TileConfig, takes_descriptors, takes_specialised
from epmoe.ops.moe_index import block_rows

PINNED_ROWS = 64


@dataclass(frozen=True)
class Choice:
    """Tiles of both GEMMs for blocks of ``rows`` pairs; ``vector`` = (cols, depth, warps) of both vector kernels."""

    rows: int
    gate_up: TileConfig
    down: TileConfig
    vector: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None


PLAIN = TileConfig(cols=128, depth=32, warps=4, stages=2)
PINNED = TileConfig(cols=128, depth=64, warps=4, stages=3, per_sm=2)
VECTOR = ((2, 1024, 4), (8, 512, 4))
SPECIALISED = TileConfig(cols=256, depth=64, warps=8, stages=4, specialised=True)

# By mean pairs per slot, up to: block rows, gate_up, down.  Measured with scripts/bench_moe.py on one H200.
STREAM = TileConfig(128, 128, 4, 4, swap=True, flatten=True)
WIDE = TileConfig(256, 64, 8, 4, group=16)
WIDE_FLAT = TileConfig(256, 64, 8, 3, flatten=True)
WIDE_TAIL = TileConfig(256, 64, 8, 4, tail=64)
BY_MEAN = (
    (12, 16, STREAM, TileConfig(128, 128, 4, 3, 2, swap=True, flatten=True)),
    (24, 32, STREAM, STREAM),
    (200, 128, WIDE_TAIL, SPECIALISED),
    (600, 128, SPECIALISED, SPECIALISED),
    (1200, 128, WIDE, SPECIALISED),
    (1 << 62, 128, WIDE, WIDE_FLAT),
)


def choose(rows_RD: torch.Tensor, pairs: int, weights, act: str = "silu", deterministic: bool = False) -> Choice:
    """Tiles for ``pairs`` (row, choice) pairs over the slots of ``weights`` (an upper bound will do)."""
    slots = weights.down.shape[0]
    plain = rows_RD.dtype == torch.float32 or not takes_descriptors(weights, rows_RD.device)
    if deterministic:
        # One tile whatever the batch: a row's bits are then the same in any company.
        config = PLAIN if plain else PINNED
        return Choice(PINNED_ROWS, config, config)
    vector = VECTOR if rows_RD.shape[0] == 1 else None
    if plain:
        return Choice(min(block_rows(pairs, slots), 64), PLAIN, PLAIN, vector)
    _, rows, gate_up, down = next(row for row in BY_MEAN if pairs <= row[0] * slots)
    if not takes_specialised(weights, rows_RD.device, act):
        gate_up, down = (WIDE_FLAT if config.specialised else config for config in (gate_up, down))
    return Choice(rows, gate_up, down, vector)
