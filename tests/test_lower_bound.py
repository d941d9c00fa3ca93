"""Bounds: never beyond the optimum, and the strength they are known to have on a real trace."""

import numpy as np
import pytest
from placement_cases import best_by_brute_force, random_plan, random_trace

from placement import cost
from placement.greedy import solve_lpt_swap
from placement.lower_bound import bound, compute_tail_bound_L, fan_out_bound, locality_bound
from placement.plan import linear_plan
from placement.solution import make_problem
from placement.states import layer_caps
from placement.topology import uniform
from placement.trace import load_trace

SHAPES = [
    (4, 2, None),
    (4, 2, 1.05),
    (6, 2, 1.1),
    (6, 3, 1.3),
    (5, 2, 1.2),
    (4, uniform(2, speed=[2, 1]), 1.05),
    (5, uniform(3, slots=[3, 1, 1]), 1.5),
    (3, 3, None),
    (3, 1, 1.05),
]


@pytest.mark.parametrize(
    "objective", ["locality", "fan_out", "dispatch_rows", "compute_tail", "compute_tail_worst_layer"]
)
@pytest.mark.parametrize(("experts", "topology", "cap"), SHAPES)
def test_no_plan_is_better_than_the_bound(experts, topology, cap, objective):
    trace = random_trace(experts, 30, 2 if objective == "locality" else 1, experts, 2 + experts % 2)
    problem = make_problem(trace, topology, cap=cap, objective=objective)
    best = best_by_brute_force(problem, layer_caps(problem))
    found = bound(problem, 0.3)
    if objective == "locality":
        assert best <= found + 1e-9 <= 1 + 2e-9
    else:
        assert found <= best + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_no_replicated_plan_is_better_than_the_bound(seed):
    trace = random_trace(seed, 40, 3, 6, 3)
    plan = random_plan(seed, trace.shape, 3, extra=4)
    slots = [max(len(layer[rank]) for layer in plan.slots) for rank in range(3)]
    topology = uniform(3, slots=slots)
    problem = make_problem(trace, topology)
    found = cost.evaluate(plan, trace, topology)
    assert found.locality <= locality_bound(problem, 0.3) + 1e-9
    assert found.fan_out >= fan_out_bound(problem, 0.3) - 1e-9
    assert found.compute_tail >= compute_tail_bound_L(problem).mean() - 1e-9


def test_one_expert_per_gpu_is_tight():
    """There the matching program is the assignment problem itself."""
    trace = random_trace(1, 300, 3, 6, 2)
    problem = make_problem(trace, 6)
    best = best_by_brute_force(make_problem(random_trace(1, 300, 2, 4, 2), 4), np.full(2, np.inf))
    assert locality_bound(make_problem(random_trace(1, 300, 2, 4, 2), 4), 5.0) == pytest.approx(best, rel=0.01)
    assert locality_bound(problem, 0.01) >= locality_bound(problem, 5.0) - 1e-12


def test_strength_on_a_real_trace(shared_dir):
    train, _ = load_trace(shared_dir / "traces" / "dsv2lite_law.npz").split(0.5)
    capped = make_problem(train, 8, cap=1.05)
    assert locality_bound(capped, 2.0, spectral=False) <= 0.381
    assert locality_bound(make_problem(train, 8), 2.0, spectral=False) == pytest.approx(0.423, abs=0.002)
    fan_out = fan_out_bound(capped, 1.0)
    assert 2.1 < fan_out < cost.evaluate(solve_lpt_swap(capped).plan, train).fan_out


@pytest.mark.soak
def test_the_spectral_split_strengthens_the_bound(shared_dir):
    train, _ = load_trace(shared_dir / "traces" / "dsv2lite_law.npz").split(0.5)
    assert locality_bound(make_problem(train, 8, cap=1.05), 4.0) <= 0.352


def test_edges():
    empty = make_problem(random_trace(0, 0), 2)
    assert locality_bound(empty) == 1
    assert fan_out_bound(empty) == 0
    assert bound(make_problem(random_trace(0), 2, objective="step_seconds")) is None
    alone = make_problem(random_trace(0), 1)
    assert locality_bound(alone, 1.0) == pytest.approx(1, abs=1e-6)
    assert fan_out_bound(alone, 1.0) == pytest.approx(1, abs=1e-6)
    top1 = random_trace(0, top_k=1)
    assert fan_out_bound(make_problem(top1, 2), 1.0) == 1 == cost.evaluate(linear_plan(top1.shape, 2), top1).fan_out
