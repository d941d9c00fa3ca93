"""The solvers' contract: figures come from the cost function, and a bound that a plan beats is a fault."""

import numpy as np
import pytest
from placement_cases import random_plan, random_trace

from placement import cost
from placement.errors import UserError
from placement.exact import solve_exact
from placement.greedy import solve_lpt_swap, solve_random
from placement.plan import linear_plan
from placement.profile import Profile, profile_trace
from placement.solution import OBJECTIVES, Objective, figures, finish, make_problem, objective_value
from placement.topology import uniform


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("extra", [0, 3])
def test_objectives_are_the_cost_functions_figures(name, extra):
    trace = random_trace(2)
    plan = random_plan(2, trace.shape, 3, extra)
    problem = make_problem(trace, uniform(3, slots=[6, 6, 6]), objective=name)
    costs = cost.evaluate(plan, trace).to_dict(arrays=False)
    equal = cost.compute_tail_L(cost.equal_split_LW(trace.load_LE(), plan)).mean()
    assert objective_value(problem, plan) == pytest.approx((costs | {"compute_tail_equal": equal})[name])


def test_weighted_objective():
    trace = random_trace(2)
    mixed = Objective("mixed", terms=(("fan_out", 1.0), ("locality", -2.0)))
    problem = make_problem(trace, 3, objective=mixed)
    plan = linear_plan(trace.shape, 3)
    found = figures(problem, plan)
    assert objective_value(problem, plan) == pytest.approx(found["fan_out"] - 2 * found["locality"])
    assert mixed.better(1.0, 2.0)
    assert OBJECTIVES["locality"].better(2.0, 1.0)


def test_a_load_table_is_enough_for_load_only():
    trace = random_trace(1)
    table = Profile(trace.shape, trace.num_tokens, trace.load_LE().astype(float))
    from_table = solve_lpt_swap(make_problem(table, 3, objective="compute_tail"))
    from_trace = solve_lpt_swap(make_problem(trace, 3, objective="compute_tail"))
    assert from_table.plan.slots == from_trace.plan.slots
    assert from_table.objective == pytest.approx(from_trace.objective)
    for objective in ("locality", "fan_out"):
        with pytest.raises(UserError, match="give a trace"):
            solve_lpt_swap(make_problem(table, 3, objective=objective))


def test_traces_of_one_model_are_joined():
    trace = random_trace(1)
    problem = make_problem(trace.split(0.5), 3)
    assert problem.train.num_tokens == trace.num_tokens
    np.testing.assert_array_equal(problem.profile.load_LE, profile_trace(trace).load_LE)
    with pytest.raises(UserError, match="num_experts"):
        make_problem([trace, random_trace(1, experts=7)], 3)


def test_status_gap_and_history():
    trace = random_trace(1)
    problem = make_problem(trace, 3)
    plan = linear_plan(trace.shape, 3)
    value = objective_value(problem, plan)
    open_ended = finish(problem, plan, "some", 0.0)
    assert (open_ended.status, open_ended.bound, open_ended.gap) == ("feasible", None, None)
    bounded = finish(problem, plan, "some", 0.0, bound=value * 1.5, history=[(0.1, value, None)])
    assert (bounded.status, bounded.gap) == ("feasible", pytest.approx(0.5))
    assert bounded.history == ((0.1, value, None),)
    assert finish(problem, plan, "some", 0.0, bound=value).status == "optimal"
    with pytest.raises(AssertionError, match="beyond its bound"):
        finish(problem, plan, "some", 0.0, bound=value * 0.9)
    assert set(bounded.to_dict()) >= {"status", "objective", "bound", "gap", "seconds", "history"}


def test_the_same_problem_gives_the_same_plan():
    for solver in (solve_random, solve_lpt_swap, solve_exact):
        first, second = (solver(make_problem(random_trace(3), 3, seed=7, cap=1.2)) for _ in range(2))
        assert first.plan.slots == second.plan.slots
