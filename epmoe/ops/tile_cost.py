"""What each form of tiles takes for a layer: the time of its full waves over the SMs, against that of its weights.

A form is a block size and the tiles of a grouped product.  For each of the two products it has three constants, fitted
by scripts/fit_tiles.py to 86 cases of eleven shapes on one H200 (docs/results/h200_tiles.json)::

    blocks = slots * E[blocks of a slot],  a slot's pairs being Poisson with the mean of all
    tiles  = blocks * ceil(weight rows / cols)
    work   = waves(tiles) * (flops of a tile / (tflops / programs) + tile_us)
    memory = bytes of the active slots' weights / tbs
    us     = 10 + (work^4 + memory^4)^(1/4)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, erfc, exp, inf, sqrt
from typing import NamedTuple

from epmoe.ops.block_schedule import block_rows
from epmoe.ops.grouped_gemm import TileConfig

START_US = 10.0
SMS = 132  # of the GPU that was measured
SHARP = 4  # exponent that joins the two limits
SPREAD = 1.2  # standard deviations: waves are averaged over as many tiles less, the mean, and as many more


class Speed(NamedTuple):
    """How fast one product runs in one form."""

    tflops: float
    """Of full tiles, with every SM busy."""
    tile_us: float
    """Of a tile, besides."""
    tbs: float
    """At which weights stream."""


@dataclass(frozen=True)
class Form:
    """Tiles over blocks of ``rows`` pairs, the last block of a slot with up to ``tail`` more; how fast they are."""

    rows: int
    tail: int
    tiles: TileConfig
    gate_up: Speed
    down: Speed


@dataclass(frozen=True)
class Layer:
    """Sizes of one rank's experts, how many pairs they get, and the SMs there are."""

    slots: int
    hidden: int
    features: int
    pairs: int
    sms: int

    @property
    def mean(self) -> float:
        return self.pairs / self.slots


def expected_blocks(mean: float, rows: int, tail: int = 0) -> tuple[float, float]:
    """Mean and variance of the number of blocks of a slot that has ``mean`` pairs on average."""
    total = squares = 1 - exp(-mean)
    last = mean + 5 * sqrt(mean) + 1
    for number in range(1, ceil((last - tail) / rows)):
        at = number * rows + tail
        chance = 0.5 * erfc((at + 0.5 - mean) / sqrt(2 * mean))  # of more than ``at`` pairs, hence another block
        total += chance
        squares += (2 * number + 1) * chance
    return total, max(squares - total * total, 0.0)


def _waves(tiles: float, sms: int, per_sm: int) -> float:
    """Rounds of a persistent grid; in the last one an SM may have some of its programs' tiles only."""
    full, rest = divmod(tiles, sms * per_sm)
    return full + min(ceil(rest / sms), per_sm) / per_sm


def product_us(layer: Layer, form: Form, speed: Speed, weight_rows: int, width: int) -> float:
    """Microseconds of the product with ``weight_rows`` rows of ``width`` columns in each slot."""
    blocks, variance = expected_blocks(layer.mean, form.rows, form.tail)
    blocks, spread = layer.slots * blocks, SPREAD * sqrt(layer.slots * variance)
    columns, per_sm = ceil(weight_rows / form.tiles.cols), form.tiles.per_sm
    around = (max(blocks - spread, 1.0), blocks, blocks + spread)
    waves = sum(_waves(count * columns, layer.sms, per_sm) for count in around) / 3
    flops = 2.0 * (form.rows + form.tail / 2) * form.tiles.cols * width
    work = waves * (flops * SMS * per_sm / (speed.tflops * 1e6) + speed.tile_us)
    active = layer.slots * (1 - exp(-layer.mean))
    memory = active * weight_rows * width * 2.0 / (speed.tbs * 1e6)
    return START_US + (work**SHARP + memory**SHARP) ** (1 / SHARP)


def worth(form: Form, layer: Layer) -> bool:
    """Whether the form is near: blocks around the mean of a slot, and tails where that is at most six.

    Tails were measured from a half to eight blocks a slot: at four they still win (up to 9 %), at eight they lose.
    """
    near = block_rows(layer.pairs, layer.slots)
    return near // 2 <= form.rows <= max(2 * near, 32) and not (form.tail and layer.mean > 6 * form.rows)


def fastest(layer: Layer, forms: Iterable[Form]) -> tuple[tuple[int, int], TileConfig, TileConfig]:
    """((rows, tail), tiles of gate_up, tiles of down) that take least together; both products share the blocks."""
    best: dict[tuple[int, int], list] = {}
    sizes = (2 * layer.features, layer.hidden), (layer.hidden, layer.features)
    for form in forms:
        if not worth(form, layer):
            continue
        mine = best.setdefault((form.rows, form.tail), [(inf, form.tiles)] * 2)
        for part, speed in enumerate((form.gate_up, form.down)):
            us = product_us(layer, form, speed, *sizes[part])
            if us < mine[part][0]:
                mine[part] = us, form.tiles
    blocks, (gate_up, down) = min(best.items(), key=lambda item: sum(us for us, _ in item[1]))
    return blocks, gate_up[1], down[1]
