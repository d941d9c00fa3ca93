"""The order in which a rank visits its peers."""

from itertools import combinations

import numpy as np
import pytest
from tiny_checkpoints import save_tiny

from epmoe.comm import Comm
from epmoe.config import EngineConfig
from epmoe.engine.engine import Engine
from epmoe.moe.alltoall import AllToAll
from epmoe.moe.oneshot import OneShot
from epmoe.moe.peer_order import expected_rows, matched_order, rotated_order, round_rows
from placement.plan import MoEShape, make_plan


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 16])
def test_every_round_is_a_permutation_and_every_peer_comes_once(world):
    random = np.random.default_rng(world)
    for rows in (np.zeros((world, world)), random.integers(0, 50, (world, world)), random.random((world, world)) ** 9):
        for order in (matched_order(rows), rotated_order(world)):
            assert (np.sort(order, 0) == np.arange(world)[:, None]).all()
            assert (np.sort(order, 1) == np.arange(world)).all()
            assert (order[:, -1] == np.arange(world)).all()


def test_heavy_pairs_travel_in_one_round():
    """A ring of heavy pairs that rotations cut through: 0 -> 2 -> 1 -> 3 -> 0."""
    rows = np.ones((4, 4))
    for sender, receiver in ((0, 2), (2, 1), (1, 3), (3, 0)):
        rows[sender, receiver] = 100
    order = matched_order(rows)
    assert order[:, 0].tolist() == [2, 3, 1, 0]
    assert round_rows(rows, order).sum() == 102 < round_rows(rows, rotated_order(4)).sum()


def test_skewed_traffic_takes_no_longer_than_in_rotation():
    random = np.random.default_rng(0)
    shorter = 0
    for _ in range(20):
        rows = random.pareto(1.0, (8, 1)) * random.pareto(1.0, (1, 8)) + random.random((8, 8))
        mine, rotation = round_rows(rows, matched_order(rows)).sum(), round_rows(rows, rotated_order(8)).sum()
        assert mine <= rotation
        shorter += mine < 0.98 * rotation
    assert shorter >= 10


def test_expected_rows_are_the_mean_over_all_choices():
    slots = [[[0, 1, 2], [3, 0], [4, 5]], [[0], [1, 2, 3, 4], [5, 4]]]
    plan = make_plan(MoEShape((0, 1), 6, 2), 3, slots)
    rows = np.zeros((3, 3))
    pairs = list(combinations(range(6), 2))
    for home in range(3):
        for layer in range(2):
            serve_E = plan.serve_rank_WLE[home, layer]
            for chosen in pairs:
                for rank in set(serve_E[list(chosen)].tolist()):
                    rows[home, rank] += 1 / (2 * len(pairs))
    assert expected_rows(plan) == pytest.approx(rows)
    assert len(set(rows.ravel().round(9).tolist())) > 3


def told(comm: Comm, config: dict) -> list[tuple[str, np.ndarray]]:
    heard, before = [], AllToAll.expect_traffic
    AllToAll.expect_traffic = lambda exchange, rows_WW: heard.append((exchange.name, rows_WW))
    try:
        Engine(EngineConfig.from_dict(config), comm)
    finally:
        AllToAll.expect_traffic = before
    return heard


def test_every_exchange_of_an_engine_hears_what_the_plan_expects(tmp_path, rank_pool):
    model = str(save_tiny(tmp_path, "mixtral", num_experts=5))
    config = {"model": model, "ranks": 2, "max_model_len": 64, "exchange": "auto"}
    (one, other) = rank_pool(2).run(told, config)
    assert [name for name, _ in one] == [OneShot.name, AllToAll.name]
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(one, other))
