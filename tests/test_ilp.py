"""MoETuner's programs: optimal on small instances, honest out of time, and every variant gives whole plans."""

import itertools

import numpy as np
import pulp
import pytest
from placement_cases import random_trace, require_whole

from placement import ilp
from placement.errors import UserError
from placement.greedy import solve_lpt_swap
from placement.ilp import MoETunerOptions, cluster_experts, place_clusters, solve_moetuner
from placement.profile import Profile
from placement.solution import make_problem
from placement.topology import two_level, uniform
from placement.two_stage import chain_labels, cluster_traffic

EXACT = MoETunerOptions(gap=0.0)


def second_stage_cost(problem, cluster_LE, place_LC, objective):
    """ILP 2's objective from its definition, one pair of clusters at a time."""
    total, best_link = 0.0, problem.topology.bandwidth_WW[~np.eye(problem.ranks, dtype=bool)].max()
    for layer, traffic_CC in enumerate(cluster_traffic(problem, cluster_LE)):
        link = np.zeros((problem.ranks, problem.ranks))
        for c, d in itertools.product(range(problem.ranks), repeat=2):
            g, h = place_LC[layer][c], place_LC[layer + 1][d]
            if g != h:
                link[g, h] += traffic_CC[c, d] * best_link / problem.topology.bandwidth_WW[g, h]
        total += link.max() if objective == "max" else link.sum()
    return total


@pytest.mark.parametrize("seed", range(3))
def test_first_program_is_the_most_even_split(seed):
    problem = make_problem(random_trace(seed, 200, 2, 6, 2), 3, seconds=20.0)
    cluster_LE, stages = cluster_experts(problem, EXACT, 20.0)
    for load_E, cluster_E, stage in zip(problem.profile.load_LE, cluster_LE, stages):
        share_E = load_E / load_E.sum()

        def deviation(split, share_E=share_E):
            return np.abs(np.bincount(split, share_E, 3) - 1 / 3).sum()

        splits = [s for s in itertools.product(range(3), repeat=6) if np.bincount(s, minlength=3).tolist() == [2, 2, 2]]
        best = min(deviation(s) for s in splits)
        assert stage.status == "optimal"
        assert deviation(cluster_E) == pytest.approx(best, abs=1e-7)
        assert stage.objective == pytest.approx(best, abs=1e-7)


@pytest.mark.parametrize("objective", ["max", "sum"])
@pytest.mark.parametrize("topology", [uniform(3), two_level(3, 1), two_level(2, 2, intra=(8.0, 0), inter=(1.0, 0))])
def test_second_program_is_the_best_placing_of_clusters(topology, objective):
    W = topology.ranks
    problem = make_problem(random_trace(7, 100, 3 if W == 3 else 2, 2 * W, 2), topology, seconds=20.0)
    cluster_LE, _ = cluster_experts(problem, EXACT, 5.0)
    options = MoETunerOptions(objective, gap=0.0)
    place_LC, stages = place_clusters(problem, cluster_LE, options, 20.0)
    orders = list(itertools.permutations(range(W)))
    best = min(
        second_stage_cost(problem, cluster_LE, rows, objective)
        for rows in itertools.product(orders, repeat=problem.shape.num_layers)
    )
    assert second_stage_cost(problem, cluster_LE, place_LC, objective) == pytest.approx(best, abs=1e-6)
    assert all(stage.status == "optimal" for stage in stages)


def test_equal_links_and_the_sum_need_no_program():
    problem = make_problem(random_trace(3, 100, 3, 6, 2), 3, seconds=20.0)
    cluster_LE, _ = cluster_experts(problem, EXACT, 5.0)
    place_LC, stages = place_clusters(problem, cluster_LE, MoETunerOptions("sum"), 20.0)
    assert stages == []
    np.testing.assert_array_equal(place_LC, chain_labels(problem, cluster_LE))


def test_knowing_slow_links_pays_where_they_are():
    topology = two_level(2, 2, intra=(100.0, 0.0), inter=(1.0, 0.0))
    trace = random_trace(2, 300, 3, 8, 2)
    aware, blind = (make_problem(trace, t, seconds=10.0) for t in (topology, uniform(4)))
    cluster_LE, _ = cluster_experts(aware, EXACT, 5.0)
    options = MoETunerOptions("sum", gap=0.0)
    placed = [place_clusters(p, cluster_LE, options, 10.0)[0] for p in (aware, blind)]
    costs = [second_stage_cost(aware, cluster_LE, place_LC, "sum") for place_LC in placed]
    assert costs[0] < 0.99 * costs[1]


def test_uneven_clusters_share_memory_over_the_layers():
    problem = make_problem(random_trace(5, 300, 4, 8, 2), 2, seconds=20.0)
    options = MoETunerOptions(equal_counts=False, gap=0.0)
    cluster_LE, stages = cluster_experts(problem, options, 5.0)
    even = cluster_experts(problem, EXACT, 5.0)[1]
    assert all(a.objective <= b.objective + 1e-9 for a, b in zip(stages, even))
    plan = solve_moetuner(problem, options).plan
    size_LW = np.array([[len(held) for held in layer] for layer in plan.slots])
    assert size_LW.sum() == 4 * 8
    sizes = [sorted(np.bincount(c, minlength=2).tolist()) for c in cluster_LE]
    best = min(abs(sum(s[side] for s, side in zip(sizes, sides)) - 16) for sides in itertools.product((0, 1), repeat=4))
    assert abs(size_LW[:, 0].sum() - 16) == best


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {"redundant": 1}),
        (two_level(2, 2), {}),
        (uniform(3, speed=[2, 1, 1], slots=[4, 2, 3]), {}),
        (uniform(2, slots=[3, 5]), {}),
        (6, {}),
    ],
)
@pytest.mark.parametrize("objective", ["max", "sum"])
def test_every_plan_is_whole(topology, options, objective):
    problem = make_problem(random_trace(1, 60, 3, 7, 2), topology, seconds=2.0, **options)
    solution = solve_moetuner(problem, MoETunerOptions(objective))
    require_whole(problem, solution)
    assert solution.status == "feasible"  # two stages prove nothing of the whole


def test_no_tokens_and_loads_alone():
    empty = make_problem(random_trace(0, 0, 2, 4, 2), 2, seconds=2.0)
    require_whole(empty, solve_moetuner(empty))
    trace = random_trace(0, 50, 2, 6, 2)
    table = Profile(trace.shape, 50.0, trace.load_LE().astype(float))
    loads = make_problem(table, 2, objective="compute_tail", seconds=2.0)
    found = solve_moetuner(loads, EXACT).objective
    assert found <= solve_lpt_swap(loads).objective + 1e-7


def hard_partition() -> pulp.LpProblem:
    """A market split: easy to satisfy roughly, hopeless to prove."""
    rng = np.random.default_rng(0)
    model = pulp.LpProblem("hard", pulp.LpMinimize)
    x = [model.add_variable(f"x_{i}", cat="Binary") for i in range(60)]
    off = [model.add_variable(f"o_{r}", 0) for r in range(6)]
    model += pulp.lpSum(off)
    for r in range(6):
        weight = rng.integers(1, 100, 60)
        sum_x = pulp.lpDot(weight.tolist(), x)
        model += off[r] >= sum_x - int(weight.sum() // 2)
        model += off[r] >= int(weight.sum() // 2) - sum_x
    return model


def test_a_time_limit_is_feasible_never_optimal():
    """PuLP calls this state Optimal; the stage must not."""
    problem = make_problem(random_trace(0), 2)
    model = hard_partition()
    stage = ilp._solve(model, problem, 0.0, 0.5)
    assert pulp.LpStatus[model.status] == "Optimal"  # the trap
    assert stage.status == "feasible"
    assert stage.bound < stage.objective


def test_no_solution_in_time_is_none(monkeypatch):
    """PuLP calls this state Optimal too, with values that solve nothing."""
    problem = make_problem(random_trace(0, 200, 2, 12, 2), 3, seconds=1.0)
    model = hard_partition()
    assert ilp._solve(model, problem, 0.0, 0.0).status == "none"
    monkeypatch.setattr(ilp, "_solve", lambda *args, **kwargs: ilp.Stage("none", float("inf"), 0.0))
    require_whole(problem, solve_moetuner(problem))


def test_gap_that_is_allowed_is_not_called_optimal():
    problem = make_problem(random_trace(0), 2)
    stage = ilp._solve(hard_partition(), problem, 10.0, 20.0)
    assert stage.status == "feasible"
    assert stage.objective - stage.bound > 0


def test_nothing_is_printed(capfd):
    problem = make_problem(random_trace(0), 2, seconds=1.0)
    ilp._silence_banner.cache_clear()
    solve_moetuner(problem)
    assert capfd.readouterr().out == ""


def test_unknown_objective():
    with pytest.raises(UserError, match="choose max or sum"):
        solve_moetuner(make_problem(random_trace(0), 2), MoETunerOptions("mean"))
