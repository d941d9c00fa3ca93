"""How attention's work is cut: every row meets every key that it may see exactly once, within the promised sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epmoe.ops import attention_work
from epmoe.ops.attention_work import FIELDS, FIXED, Heads, Tiling, cut, eager_work, item_limit
from epmoe.ops.decode_batch import DecodeShape, decode_batch

CPU = torch.device("cpu")


def seen_keys(item_XF: np.ndarray, lens: list[tuple[int, int]], group: int) -> list[np.ndarray]:
    """How often each row of each sequence meets each key."""
    met = [np.zeros((queries * group, kv), int) for queries, kv in lens]
    for seq, _, first_row, rows, context, start, stop, _, _ in item_XF[item_XF[:, 0] >= 0]:
        for row in range(first_row, first_row + rows):
            met[seq][row, start : min(stop, context + row // group + 1)] += 1
    return met


def require_causal(item_XF: np.ndarray, lens: list[tuple[int, int]], group: int) -> None:
    for met, (queries, kv) in zip(seen_keys(item_XF, lens, group), lens):
        position = kv - queries + np.arange(queries * group) // group
        assert (met == (np.arange(kv) <= position[:, None])).all()


def table(lens: list[tuple[int, int]]) -> np.ndarray:
    queries, kv = np.array(lens).reshape(-1, 2).T
    return np.stack((np.cumsum(queries) - queries, queries, kv), 1)


LENS = [(1, 1), (1, 700), (3, 65), (70, 70), (5, 600), (1, 64)]


@pytest.mark.parametrize("items", [None, 9, 25, 60])
@pytest.mark.parametrize("tiling", [Tiling(16, 64), Tiling(128, 32), FIXED], ids=str)
@pytest.mark.parametrize("group", [1, 5, 20])
def test_each_row_meets_its_keys_once(group, tiling, items):
    tiles = sum(-(-queries * group // tiling.rows) for queries, _ in LENS)
    items = items and items + tiles
    item_XF = cut(table(LENS), group, tiling, items)
    require_causal(item_XF, LENS, group)
    assert tiling.exact or items is None or len(item_XF) <= items
    assert (item_XF[:, 5] % tiling.keys == 0).all(), "runs start at whole tiles of keys"
    parts = item_XF[:, -1]
    firsts = np.flatnonzero(item_XF[:, -2] == 0)
    assert len(firsts) == tiles and (np.diff([*firsts, len(item_XF)]) == parts[firsts]).all()


def test_exact_runs_do_not_depend_on_the_company():
    alone = cut(table([(40, 1500)]), 8, FIXED, None)
    among = cut(table([(1, 9), (40, 1500), (7, 7)]), 8, FIXED, None)
    assert (alone[:, 2:] == among[among[:, 0] == 1][:, 2:]).all()


def test_a_step_is_cut_into_decodes_and_chunks_and_bounded_launches(monkeypatch):
    queries, kv_lens = zip(*LENS)
    works = eager_work(list(queries), list(kv_lens), Heads(2, 8), CPU)
    require_causal(np.concatenate([work.item_XF for work in works]), LENS, 8)
    monkeypatch.setattr(attention_work, "PARTS_AT_ONCE", 6)
    works = eager_work(list(queries), list(kv_lens), Heads(2, 8, fixed=True), CPU)
    require_causal(np.concatenate([work.item_XF for work in works]), LENS, 8)
    assert len(works) > 2 and all(len(work.item_XF) <= 6 and work.item_XF[0, -2] == 0 for work in works)
    assert len({work.scratch for work in works}) == 1


@pytest.mark.parametrize("fixed", [False, True])
def test_a_decode_batch_has_the_same_number_of_items_for_every_filling(fixed):
    shape = DecodeShape(5, 1300, 16, 2, 8, fixed)
    batch = decode_batch(shape, CPU)
    for kv_lens in ([1300] * 5, [1], [], [7, 1300, 64], [65, 1, 640, 2, 3]):
        batch.fill(kv_lens, [list(range(-(-kv // 16))) for kv in kv_lens])
        (work,) = batch.work(2, 8, fixed)
        items = work.item_XF.numpy()
        assert items.shape == (15 if fixed else item_limit(5, 2, 3), FIELDS)
        padded = [(1, kv) for kv in kv_lens] + [(1, 0)] * (5 - len(kv_lens))
        used = items[items[:, 0] >= 0]
        require_causal(used[used[:, 6] > 0], padded, 8)
        assert (items[work.first_Y.numpy(), 0] == np.arange(5)).all()


def test_a_decode_batch_follows_blocks_that_grow_move_and_change():
    """Its two host tables keep what did not change since the fill before the last."""
    rng = np.random.default_rng(0)
    batch = decode_batch(DecodeShape(5, 400, 16, 4, 8), CPU)
    blocks = [rng.integers(0, 1000, 3).tolist() for _ in range(5)]
    for step in range(40):
        if step % 3 == 0:
            blocks[step % 5].append(int(rng.integers(1000)))
        if step % 4 == 0:
            rng.shuffle(blocks)
        if step % 7 == 0:
            blocks[step % 5] = rng.integers(0, 1000, 2).tolist()
        chosen = blocks[: 1 + step % 5]
        batch.fill([16 * len(row) - step % 16 for row in chosen], chosen)
        for n, row in enumerate(chosen):
            assert batch.block_table_NP[n, : len(row)].tolist() == row, step
            assert int(batch.slot_T[n]) == row[-1] * 16 + 15 - step % 16
