"""What each program of an attention kernel does: tiles of query rows against runs of their sequence's keys.

A row is (query, query head) of one key head's group of G; rows of one sequence are in that order.  A tile is ``rows``
consecutive rows of a sequence.  Where tiles are few, as in decode, the keys that a tile sees are cut into *parts* so
that every SM reads; a tile's parts are consecutive items, and a second launch adds them in order.

Example: G = 8, tiles of 16 rows, runs of 512 keys.  A sequence of 1300 cached tokens whose last one is queried is one
tile of 8 rows and three items: keys 0..511, 512..1023, 1024..1299.

Cutting is done on the host from lengths alone.  A decode graph has a fixed number of items whatever the lengths: the
runs get longer as the sequences do (`run_length`), and items left over name no sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from epmoe.ops.launch import sm_count

FIELDS = 9
SEQUENCE, TOKEN, ROW, ROWS, CONTEXT, START, STOP, PART, PARTS = range(FIELDS)
"""Of an item: its sequence (-1: nothing to do) and that one's first token in the step; its tile's first row and rows;
cached tokens before the sequence's first query; its keys START..STOP; which part of how many of its tile it is."""

SHORTEST_RUN = 64
PROGRAMS_PER_SM = 2
MOST_SMS = 160  # of any GPU
PARTS_AT_ONCE = 1024  # bounds the memory for parts
PRODUCT_ROWS, PRODUCT_KEYS = 128, 256  # tile of `ops.latent_products`
MOST_WEIGHTS = 1 << 28  # softmax weights that it may keep at once; for more keys latent tiles go one by one


@dataclass(frozen=True)
class Tiling:
    """Rows and keys of a tile, the longest run of keys (None: all), warps, pipeline stages, a limit of registers.

    ``exact``: runs are cut at multiples of ``run`` and every tile is masked alike, so that a row's bits depend on
    nothing but its own keys.  ``products``: by `ops.latent_products`.
    """

    rows: int
    keys: int
    run: int | None = None
    warps: int = 4
    stages: int = 3
    exact: bool = False
    registers: int | None = None
    products: bool = False


@dataclass(frozen=True)
class Heads:
    """Key heads, query heads of each; deterministic mode; whether keys are latent rows (`ops.latent`)."""

    kv_heads: int
    group: int
    fixed: bool = False
    latent: bool = False

    @property
    def decode(self) -> Tiling:
        """Tiles of sequences with one query."""
        if self.fixed:
            return FIXED_LATENT if self.latent else FIXED
        if self.latent:
            return Tiling(16, 32) if self.group <= 16 else Tiling(64, 64, warps=8, stages=2)
        return Tiling(min(64, max(16, 1 << (self.group - 1).bit_length())), 64)

    def decode_of(self, sequences: int, longest: int) -> Tiling:
        """As ``decode``, by two products where there are many heads and the memory that their weights need."""
        items = item_limit(sequences, 1, MOST_SMS, products=True)
        few = items * PRODUCT_ROWS * longest <= MOST_WEIGHTS
        many_heads = self.latent and not self.fixed and 64 < self.group <= PRODUCT_ROWS
        return PRODUCTS if many_heads and few else self.decode

    @property
    def chunk(self) -> Tiling:
        """Tiles of prompt chunks."""
        if self.fixed:
            return self.decode
        return Tiling(64, 64, warps=8, stages=2) if self.latent else Tiling(128, 64, warps=8, stages=2, registers=128)


PRODUCTS = Tiling(PRODUCT_ROWS, PRODUCT_KEYS, warps=8, stages=4, products=True)
FIXED = Tiling(64, 64, 512, exact=True)
FIXED_LATENT = Tiling(64, 64, 512, warps=8, stages=2, exact=True)


class Scratch:
    """Memory for the parts of a launch of up to X items, shared by all layers and by launches after one another.

    Of a part it holds the first ``rows`` rows, as many as any tile uses.
    """

    def __init__(self, items: int, rows: int, device: torch.device) -> None:
        self.items, self.rows, self.device = items, rows, device
        self._buffers: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def buffers(self, kv_heads: int, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts float32 ``[X, KVH, rows, d]`` and the log2 of their softmax sums ``[X, KVH, rows]``."""
        key = (kv_heads, value_dim)
        if key not in self._buffers:
            shape = (self.items, kv_heads, self.rows)
            part = torch.empty((*shape, value_dim), dtype=torch.float32, device=self.device)
            self._buffers[key] = part, torch.empty(shape, dtype=torch.float32, device=self.device)
        return self._buffers[key]


@dataclass(frozen=True)
class Work:
    """One launch: items and each tile's first one (-1: none) on the device.

    Args:
        split: tiles may have several parts.
        longest: no tile sees more keys (for ``products``).
    """

    tiling: Tiling
    item_XF: torch.Tensor
    first_Y: torch.Tensor
    split: bool
    scratch: Scratch
    longest: int = 0


def run_length(keys: int, tiles: int, items: int, multiple: int) -> int:
    """Runs so long that ``tiles`` tiles that see ``keys`` keys together make at most ``items`` > ``tiles`` items."""
    length = max(SHORTEST_RUN, -(-keys // (items - tiles)))
    return -(-length // multiple) * multiple


def item_limit(tiles: int, kv_heads: int, num_sms: int, products: bool = False) -> int:
    """Items of a step of ``tiles`` tiles whose keys are split: enough for every SM to have several programs; with
    ``products``, of which an item has two, one."""
    return tiles + (-(-num_sms // 2) if products else -(-PROGRAMS_PER_SM * num_sms // kv_heads))


def cut(lens_N3: np.ndarray, group: int, tiling: Tiling, items: int | None) -> np.ndarray:
    """Items int32 ``[X, FIELDS]`` of sequences ``(first token, queries, cached tokens)``, numbered from 0.

    Args:
        items: at most so many, by longer runs where ``tiling`` sets none; None: runs are not cut.
    """
    token_N, queries_N, kv_N = lens_N3.T
    tiles_N = -(-queries_N * group // tiling.rows)
    seq_X = np.repeat(np.arange(len(lens_N3)), tiles_N)
    row_X = (np.arange(len(seq_X)) - np.repeat(np.cumsum(tiles_N) - tiles_N, tiles_N)) * tiling.rows
    rows_X = np.minimum(tiling.rows, queries_N[seq_X] * group - row_X)
    context_N = kv_N - queries_N
    stop_X = np.where(kv_N[seq_X] > 0, context_N[seq_X] + (row_X + rows_X - 1) // group + 1, 0)
    run = tiling.run
    if run is None and items is not None and len(seq_X):
        run = run_length(int(stop_X.sum()), len(seq_X), items, tiling.keys)
    if run is None:
        order = np.argsort(-stop_X, kind="stable")  # long tiles first
        seq_X, row_X, rows_X, stop_X = (x[order] for x in (seq_X, row_X, rows_X, stop_X))
        run = max(int(stop_X.max(initial=0)), 1)
    parts_X = np.maximum(-(-stop_X // run), 1)
    run_X = np.full_like(stop_X, run)
    if tiling.run is None:  # parts of one tile as even as whole tiles of keys allow
        run_X = np.maximum(-(-stop_X // (parts_X * tiling.keys)), 1) * tiling.keys
        parts_X = np.maximum(-(-stop_X // run_X), 1)
    tile = np.repeat(np.arange(len(seq_X)), parts_X)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(parts_X) - parts_X, parts_X)
    start = part * run_X[tile]
    seq = seq_X[tile]
    columns = (
        seq, token_N[seq], row_X[tile], rows_X[tile], context_N[seq],
        start, np.minimum(start + run_X[tile], stop_X[tile]), part, parts_X[tile],
    )  # fmt: skip
    item_XF = np.empty((len(seq), FIELDS), np.int32)
    for field, column in enumerate(columns):
        item_XF[:, field] = column
    return item_XF


def eager_work(query_lens: list[int], kv_lens: list[int], heads: Heads, device: torch.device) -> list[Work]:
    """Launches of a step of any mix: decodes, their keys split for all SMs, and prompt chunks in large tiles."""
    if not query_lens:
        return []
    queries_N, kv_N = np.asarray(query_lens), np.asarray(kv_lens)
    lens_N3 = np.stack((np.cumsum(queries_N) - queries_N, queries_N, kv_N), 1)
    if heads.fixed:
        return _launches(heads.decode, cut(lens_N3, heads.group, heads.decode, None), device)
    works = []
    single_N = queries_N == 1
    decode = heads.decode_of(int(single_N.sum()), int(kv_N.max()))
    for tiling, chosen_N in ((decode, single_N), (heads.chunk, ~single_N)):
        if chosen_N.any():
            tiles = int(chosen_N.sum()) * -(-heads.group // tiling.rows)
            limit = item_limit(tiles, heads.kv_heads, sm_count(device), tiling.products) if tiling is decode else None
            item_XF = cut(lens_N3[chosen_N], heads.group, tiling, limit)
            item_XF[:, SEQUENCE] = np.flatnonzero(chosen_N)[item_XF[:, SEQUENCE]]
            works += _launches(tiling, item_XF, device)
    return works


def _launches(tiling: Tiling, item_XF: np.ndarray, device: torch.device) -> list[Work]:
    """One launch, or where tiles are split several of at most ``PARTS_AT_ONCE`` items, whole tiles each."""
    split = bool((item_XF[:, PARTS] > 1).any())
    first_Y = np.flatnonzero(item_XF[:, PART] == 0)
    pieces = [item_XF]
    if split:
        most_parts = int(item_XF[:, PARTS].max())
        runs = np.searchsorted(first_Y, np.arange(0, len(item_XF), max(PARTS_AT_ONCE - most_parts, 1)))
        pieces = np.split(item_XF, first_Y[np.unique(runs[(runs > 0) & (runs < len(first_Y))])])
    most, longest = max(len(piece) for piece in pieces), int(item_XF[:, STOP].max(initial=0))
    scratch = Scratch(most if split else 0, int(item_XF[:, ROWS].max()), device)
    works = []
    for piece in pieces:
        first_Y = np.flatnonzero(piece[:, PART] == 0).astype(np.int32)
        item_XF, first_Y = (torch.from_numpy(x).to(device, non_blocking=True) for x in (piece, first_Y))
        works.append(Work(tiling, item_XF, first_Y, split, scratch, longest))
    return works
