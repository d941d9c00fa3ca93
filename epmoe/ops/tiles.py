"""Which kernel variant and which tiles: a function of (pairs, slots, D, F, dtype), measured on one H200.

Variants: *vector* for one row; *stream*: weights stream past tiles of 16 or 32 pairs, as the left operand; *blocked*:
tiles of 64 or 128 pairs x 256 weight rows, on Hopper with warps that only load; *plain* pointers for shapes that TMA
does not take and for float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epmoe.ops.block_schedule import block_rows
from epmoe.ops.grouped_gemm import TileConfig, takes_descriptors
from epmoe.ops.launch import sm_count
from epmoe.ops.specialised_gemm import takes_specialised

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
BLOCKED_64 = TileConfig(cols=256, depth=64, warps=8, stages=4, flatten=True)
BLOCKED_128 = TileConfig(cols=256, depth=64, warps=8, stages=3, flatten=True)
SPECIALISED = TileConfig(cols=256, depth=64, warps=12, stages=4, specialised=True)

# By mean pairs per slot, up to: block rows, gate_up, down.  From scripts/bench_moe.py on one H200 (docs/results).
FEW = ((12, 16, STREAM, STREAM_TWO), (24, 32, STREAM, STREAM))
NOT_SPECIALISED = (*FEW, (160, 64, BLOCKED_64, NARROW), (float("inf"), 128, BLOCKED_128, BLOCKED_128))
BY_MEAN = (
    *FEW,
    (88, 64, BLOCKED_64, NARROW),
    (160, 128, SPECIALISED, SPECIALISED),
    (float("inf"), 128, BLOCKED_128, BLOCKED_128),
)
TAIL = 32


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
        # Steps of 512 where the last of 1024 would be half empty.
        short = features >= 8192 or (features > 1024 and features % 1024)
        vector = (2, 1024, 2), (8, 512, 4) if short else (4, 1024, 4)
    if plain:
        if rows_RD.dtype != torch.float32 and pairs <= 24 * slots:
            return Choice(16, POINTERS, POINTERS, vector)
        return Choice(min(block_rows(pairs, slots), 64), PLAIN, PLAIN, vector)
    few_tiles = slots * hidden < 128 * sm_count(rows_RD.device)
    specialised = takes_specialised(rows_RD.device, hidden) and not few_tiles
    by_mean = BY_MEAN if specialised else NOT_SPECIALISED
    _, rows, gate_up, down = next(row for row in by_mean if pairs <= row[0] * slots)
    if rows == 64 and pairs <= rows * slots and few_tiles:
        # Fewer tiles of the second product than SMs: smaller blocks make more of them.
        rows, gate_up, down = 32, STREAM, STREAM
    tail = TAIL if gate_up.specialised else 0
    return Choice(rows, gate_up, down, vector, tail)
