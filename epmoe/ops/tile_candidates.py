"""Tiles worth measuring: what ``epmoe tune`` and scripts/bench_moe.py choose from."""

from __future__ import annotations

from epmoe.ops.block_schedule import block_rows
from epmoe.ops.grouped_gemm import TileConfig
from epmoe.ops.tiles import FORMS, TAIL

# Rows of a block, and one GEMM's tiles; both GEMMs of a layer share the blocks.  What the heuristic knows, and more.
CANDIDATES = (
    *((form.rows, form.tiles) for form in FORMS if not form.tail),
    (16, TileConfig(128, 64, 4, 4, 3, swap=True)),
    (16, TileConfig(128, 64, 4, 5, 2, swap=True, flatten=True)),
    (32, TileConfig(128, 64, 4, 4, 2, swap=True, flatten=True)),
    (64, TileConfig(128, 64, 4, 3, 2)),
    (64, TileConfig(128, 128, 4, 3, 1, swap=True, flatten=True)),
    (128, TileConfig(128, 64, 4, 3, 2, flatten=True)),
    (128, TileConfig(256, 64, 8, 3, 1, flatten=True, group=16)),
    (128, TileConfig(256, 64, 8, 4, 1, group=16)),
    (128, TileConfig(256, 64, 8, 3, 1, swap=True, flatten=True)),
)
# (cols, depth, warps) of a vector kernel.
VECTORS = ((2, 1024, 4), (8, 512, 4), (4, 1024, 4), (8, 1024, 8), (2, 2048, 4), (2, 1024, 2), (4, 2048, 8))
# Of the 8-bit kernels, whose tiles have 128 weight rows and a depth of 128.
CANDIDATES_FP8 = (
    (16, TileConfig(128, 128, 4, 4, 2, swap=True)),
    (16, TileConfig(128, 128, 4, 4, 3, swap=True)),
    (16, TileConfig(128, 128, 4, 3, 4, swap=True)),
    (32, TileConfig(128, 128, 4, 4, 2, swap=True)),
    (32, TileConfig(128, 128, 4, 3, 3, swap=True)),
    (64, TileConfig(128, 128, 4, 3, 2)),
    (64, TileConfig(128, 128, 4, 4, 2)),
    (64, TileConfig(128, 128, 4, 3, 3)),
    (128, TileConfig(128, 128, 8, 4, 1)),
)


def candidates(pairs: int, slots: int) -> list[tuple[int, int, TileConfig]]:
    """(rows, tail, tiles) of one GEMM for ``pairs`` pairs over ``slots`` slots: blocks near the mean of a slot."""
    near = _near(CANDIDATES, block_rows(pairs, slots))
    return near + [(rows, TAIL, tiles) for rows, _, tiles in near if tiles.specialised]


def candidates_fp8(pairs: int, slots: int) -> list[tuple[int, int, TileConfig]]:
    return _near(CANDIDATES_FP8, block_rows(pairs, slots))


def _near(all_of_them: tuple, now: int) -> list[tuple[int, int, TileConfig]]:
    return [(rows, 0, config) for rows, config in all_of_them if now // 2 <= rows <= max(now * 2, 32)]
