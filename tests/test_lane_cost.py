"""The makespan of a graph of stages against brute force, and the choice between one lane and two."""

from __future__ import annotations

import itertools
import random

import pytest

from epmoe.moe.lane_cost import LaneTimes, StageTimes, choose_lanes, split_time, unsplit_time
from epmoe.moe.makespan import COMPUTE, LAYER, LINK, Task, layer_tasks, makespan
from scripts.least_makespan import best_makespan, lower_bound


def brute_force(tasks: list[Task]) -> float:
    orders = itertools.permutations(range(len(tasks)))
    legal = (o for o in orders if all(o.index(k) < o.index(n) for n in o for k in tasks[n].after))
    return min(makespan(tasks, order) for order in legal)


def random_tasks(rng: random.Random) -> list[Task]:
    tasks = []
    for n in range(rng.randint(1, 7)):
        after = tuple(k for k in range(n) if rng.random() < 0.3)
        tasks.append(Task(str(n), rng.choice((COMPUTE, LINK)), rng.choice((0.5, 1, 2, 3, 5)), after))
    return tasks


@pytest.mark.parametrize("seed", range(60))
def test_best_makespan_is_the_best_of_all_orders(seed):
    tasks = random_tasks(random.Random(seed))
    best = brute_force(tasks)
    assert lower_bound(tasks) <= best + 1e-9
    assert best_makespan(tasks) == (pytest.approx(best), True)


def test_a_search_cut_short_gives_a_bound_and_says_so():
    lane = dict(zip(LAYER, (100, 10, 140, 20, 150, 180, 10)))
    tasks = layer_tasks([lane, lane], 8)
    value, certain = best_makespan(tasks, most=10)
    assert not certain and value == lower_bound(tasks)


def test_one_lane_is_a_chain_with_the_shared_experts_beside_the_dispatch():
    lane = {"attention": 5, "router": 1, "dispatch": 4, "shared": 3, "experts": 6, "combine": 4, "sum": 1}
    assert best_makespan(layer_tasks([lane], 3)) == (3 * (5 + 1 + 4 + 6 + 4 + 1), True)
    assert best_makespan(layer_tasks([{**lane, "shared": 5}], 3)) == (3 * (5 + 1 + 5 + 6 + 4 + 1), True)


def test_two_lanes_of_equal_stages_hide_all_but_the_ends():
    lane = {"attention": 4, "dispatch": 4, "experts": 4, "combine": 4}
    value, certain = best_makespan(layer_tasks([lane, lane], 4))
    assert certain and value == 2 * 4 * 8 + 4  # compute without a gap; the last lane's combine sticks out


SIZES = (1, 1024, 4096)


def times(dispatch: float, fixed: float = 0.0) -> StageTimes:
    """Compute of 1 us a token and stage and of ``fixed`` us besides, ``dispatch`` us a token each way."""
    compute = [fixed + T for T in SIZES]
    link = [dispatch * T for T in SIZES]
    return StageTimes.of(SIZES, {"attention": compute, "experts": compute, "dispatch": link, "combine": link})


def test_times_between_and_beyond_the_measured_sizes():
    table = StageTimes.of((2, 4, 8), {"attention": (10, 20, 30)})
    assert [table.at("attention", T) for T in (0, 1, 2, 3, 6, 8, 16)] == [0, 10, 10, 15, 25, 30, 50]
    assert table.at("shared", 4) == 0


def both(dispatch: float, fixed: float = 0.0) -> LaneTimes:
    return LaneTimes(times(dispatch, fixed), times(dispatch, fixed))


def test_two_lanes_where_they_hide_more_than_they_cost():
    assert choose_lanes((1024,) * 4, both(0.5)) == 2
    assert choose_lanes((1024,) * 4, both(0.0)) == 1  # nothing to hide
    assert choose_lanes((1024,) * 4, both(0.01)) == 1  # less than the margin
    assert choose_lanes((64,) * 4, both(0.5, fixed=1000)) == 1  # halves take as long as the whole
    assert choose_lanes((1, 1, 0, 1), both(5.0)) == choose_lanes((0, 0), both(5.0)) == 1  # nobody can split


def test_the_slowest_rank_decides():
    table = both(0.5, fixed=300)
    assert choose_lanes((16,) * 4, table) == 1
    assert choose_lanes((2048, 0, 0, 1), table) == choose_lanes((2048, 1, 0, 0), table) == 2


def test_two_lanes_that_compute_on_fewer_sms_must_hide_more():
    link = times(0.2)
    slower = {stage: [1.2 * us for us in row] if stage in ("attention", "experts") else row for stage, row in link.us}
    assert choose_lanes((1024,) * 4, both(0.2)) == 2
    assert choose_lanes((1024,) * 4, LaneTimes(link, StageTimes.of(SIZES, slower))) == 1


def test_half_lanes_of_no_overhead_take_the_makespan_of_the_schedule():
    table = times(1.0)
    assert unsplit_time((1000,) * 2, table) == pytest.approx(4 * 4 * 1000)
    assert split_time((1000,) * 2, table) == pytest.approx(4 * 4 * 500 + 500, rel=0.01)
