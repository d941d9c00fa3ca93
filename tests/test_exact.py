"""Exact routes: brute force on small instances, the known optima of real traces, and the right route by itself."""

import itertools

import numpy as np
import pytest
from placement_cases import best_by_brute_force, random_trace, require_whole

from placement.errors import UserError
from placement.exact import exact_route, solve_assignment, solve_chain, solve_exact
from placement.rlt import solve_rlt
from placement.solution import make_problem
from placement.states import all_states, count_states, layer_caps
from placement.topology import uniform
from placement.trace import load_trace

SHAPES = [  # experts, GPUs or topology, cap
    (4, 2, None),
    (4, 2, 1.05),
    (5, 2, 1.1),
    (4, uniform(2, speed=[2, 1]), 1.05),
    (4, uniform(3, slots=[2, 1, 1]), 1.2),
    (3, 3, 1.05),
    (3, 1, 1.05),
    (3, uniform(3, speed=[1, 2, 3]), 1.01),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("experts", "topology", "cap"), SHAPES)
def test_equals_brute_force(seed, experts, topology, cap):
    trace = random_trace(seed, 50, 3 if experts < 5 else 2, experts, 2)
    problem = make_problem(trace, topology, cap=cap)
    solution = solve_exact(problem)
    require_whole(problem, solution)
    assert solution.status == "optimal"
    assert (solution.bound, solution.gap) == (solution.objective, 0)
    assert solution.objective == pytest.approx(best_by_brute_force(problem, layer_caps(problem)), rel=1e-9)


@pytest.mark.parametrize("objective", ["compute_tail", "fan_out"])
@pytest.mark.parametrize("seed", range(3))
def test_layers_on_their_own_equal_brute_force(seed, objective):
    problem = make_problem(random_trace(seed, 40, 2, 5, 3), 2, objective=objective, cap=1.2)
    assert exact_route(problem) == "layers"
    solution = solve_exact(problem)
    require_whole(problem, solution)
    assert solution.objective == pytest.approx(best_by_brute_force(problem, layer_caps(problem)), rel=1e-9)


@pytest.mark.parametrize("cap", [None, 1.05])
def test_joint_program_equals_the_chain(cap):
    problem = make_problem(random_trace(4, 80, 3, 6, 2), 2, cap=cap, seconds=20.0)
    chain, program = solve_chain(problem), solve_rlt(problem)
    require_whole(problem, program)
    assert program.status == "optimal"
    assert program.objective == pytest.approx(chain.objective, rel=1e-9)


def test_joint_program_out_of_time_is_feasible_with_a_bound():
    problem = make_problem(random_trace(5, 300, 8, 8, 2), 4, cap=1.05, seconds=0.3)
    solution = solve_rlt(problem)
    require_whole(problem, solution)
    assert solution.status == "feasible"
    assert solution.bound > solution.objective
    assert solution.gap > 0
    best = solve_chain(problem).objective
    assert solution.objective <= best + 1e-12 <= solution.bound + 2e-12


def test_states_are_all_placements_and_classes_their_relabellings():
    slots_W, speed_W = np.array([2, 1, 2]), np.array([1.0, 1, 1])
    states = all_states(slots_W, speed_W)
    want = sorted(set(itertools.permutations([0, 0, 1, 2, 2])))
    assert states.rank_NE.tolist() == [list(s) for s in want]
    assert count_states(slots_W) == len(want) == 2 * len(states.canonical_C)  # ranks 0 and 2 are alike
    for state, index in zip(states.rank_NE, states.class_N):
        representative = states.rank_NE[states.canonical_C[index]]
        assert {0: 2, 1: 1, 2: 0}[state[0]] == representative[0] or (state == representative).all()
    assert len(all_states(slots_W, np.array([1.0, 1, 2])).canonical_C) == len(want)


def test_routes_are_found_from_the_problem():
    trace = random_trace(0, 60, 3, 8, 2)
    assert exact_route(make_problem(trace, 8)) == "assignment"
    assert exact_route(make_problem(trace, 4, cap=1.05)) == "chain"
    assert exact_route(make_problem(random_trace(0, 60, 2, 24, 2), 4, cap=1.05)) == "rlt"
    assert exact_route(make_problem(trace, 4, redundant=1)) is None
    assert exact_route(make_problem(trace, 4, objective="step_seconds")) is None
    with pytest.raises(UserError, match="no exact method fits 3 layers x 40 experts on 4 GPUs"):
        solve_exact(make_problem(random_trace(0, 60, 3, 40, 2), 4))


def test_known_optima_of_real_traces(shared_dir):
    files = sorted((shared_dir / "traces").glob("small8x2_*.npz"))
    traces = [load_trace(file) for file in files]
    assert len(traces) == 4
    for gpus, cap, want, seconds in ((4, 1.05, 0.3603, 5), (4, None, 0.5031, 5), (8, None, 0.2892, 1)):
        solution = solve_exact(make_problem(traces, gpus, cap=cap))
        assert solution.status == "optimal"
        assert solution.objective == pytest.approx(want, abs=5e-5)
        assert solution.seconds < seconds


def test_no_tokens_and_one_layer():
    for trace in (random_trace(0, 0, 3, 4, 2), random_trace(0, 20, 1, 4, 2)):
        for gpus in (1, 2, 4):
            solution = solve_exact(make_problem(trace, gpus, cap=1.05))
            assert (solution.status, solution.objective) == ("optimal", 1.0)
    assert solve_assignment(make_problem(random_trace(0, 0, 2, 4, 2), 4)).objective == 1.0
