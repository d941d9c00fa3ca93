"""The order in which a rank visits its peers."""

import numpy as np
import pytest

from epmoe.moe.peer_order import matched_order, rotated_order, round_rows


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
