"""Baselines: whole plans for every shape, EPLB's published example, and balance at least as good as LPT's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import random_trace, require_whole

from placement.balance import solve_balance
from placement.cost import compute_tail_L
from placement.eplb import eplb_node, replicate, separate_copies, solve_eplb
from placement.errors import UserError
from placement.greedy import (
    lpt,
    lpt_swap,
    solve_linear,
    solve_lpt,
    solve_lpt_swap,
    solve_random,
    solve_round_robin,
    swap_pairs,
)
from placement.plan import MoEShape, linear_plan, round_robin_plan
from placement.profile import Profile
from placement.solution import make_problem
from placement.topology import two_level, uniform
from placement.trace import load_trace
from placement.two_stage import solve_two_stage

SOLVERS = (
    solve_linear,
    solve_round_robin,
    solve_random,
    solve_lpt,
    solve_lpt_swap,
    solve_eplb,
    solve_balance,
    solve_two_stage,
)


def load_problem(load_LE, topology, **options):
    load_LE = np.atleast_2d(np.asarray(load_LE, float))
    shape = MoEShape(tuple(range(len(load_LE))), load_LE.shape[1], 1)
    return make_problem(Profile(shape, load_LE[0].sum(), load_LE), topology, objective="compute_tail_equal", **options)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_plan_is_whole(data):
    experts = data.draw(st.integers(1, 12), "experts")
    ranks = data.draw(st.integers(1, 5), "ranks")
    slots = data.draw(st.lists(st.integers(1, experts), min_size=ranks, max_size=ranks), "slots per rank")
    if sum(slots) < experts:
        slots = [-(-experts // ranks)] * ranks
    speed = data.draw(st.lists(st.sampled_from([1.0, 1.0, 0.5, 2.0]), min_size=ranks, max_size=ranks), "speeds")
    tokens = data.draw(st.integers(0, 30), "tokens")
    trace = random_trace(data.draw(st.integers(0, 99)), tokens, 2, experts, min(2, experts))
    solver = data.draw(st.sampled_from(SOLVERS))
    problem = make_problem(trace, uniform(ranks, speed=speed, slots=slots), seconds=0.1)
    require_whole(problem, solver(problem))


def test_without_spare_slots_linear_and_round_robin_are_what_engines_do():
    trace = random_trace(1, 30, 2, 10, 2)
    problem = make_problem(trace, 4)
    assert solve_linear(problem).plan.slots == linear_plan(trace.shape, 4).slots
    assert solve_round_robin(problem).plan.slots == round_robin_plan(trace.shape, 4).slots
    assert solve_random(problem).plan.slots == solve_random(problem).plan.slots
    other = make_problem(trace, 4, seed=1)
    assert solve_random(problem).plan.slots != solve_random(other).plan.slots


def test_eplb_published_example():
    weight = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    problem = load_problem(weight, two_level(2, 4), slots=16)
    found = solve_eplb(problem, groups=4, policy="hierarchical").plan.slot_expert_LS
    assert found[0].tolist() == [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]
    assert found[1].tolist() == [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]


def test_eplb_of_the_flashlb_example_is_its_known_232():
    problem = load_problem([600, 560, 120, 120, 20, 10, 10, 10], 8, slots=16)
    solution = solve_eplb(problem)
    assert solution.objective * 1450 / 8 == pytest.approx(232)


@pytest.mark.parametrize("seed", range(4))
def test_balance_reaches_the_optimum_of_the_flashlb_example(seed):
    problem = load_problem([600, 560, 120, 120, 20, 10, 10, 10], 8, slots=16, seed=seed, seconds=2.0)
    assert solve_balance(problem).objective * 1450 / 8 == pytest.approx(590 / 3)  # 196.67


@pytest.mark.parametrize("seed", range(3))
def test_balance_is_at_least_as_even_as_eplb_and_pair_swaps(seed):
    rng = np.random.default_rng(seed)
    load_LE = rng.pareto(1.2, (2, 14)) * 100
    for topology, options in ((4, {"redundant": 1}), (uniform(3, speed=[2, 1, 1], slots=[8, 6, 5]), {}), (7, {})):
        problem = load_problem(load_LE, topology, seconds=0.5, **options)
        found = solve_balance(problem).objective
        assert found <= solve_eplb(problem).objective + 1e-12
        assert found <= solve_lpt_swap(problem).objective + 1e-12


def test_eplb_never_leaves_two_copies_on_a_gpu():
    """EPLB issue 22: 256 + 32 slots on 32 GPUs. Some layer of these does double up before the repair."""
    rng = np.random.default_rng(0)
    doubled = 0
    for _ in range(30):
        load_E = rng.pareto(1.0, 16) + 0.01
        slots_W, speed_W = np.full(8, 3), np.ones(8)
        held = eplb_node(load_E, slots_W, speed_W)
        assert all(len(set(experts)) == 3 for experts in held)
        expert_S = replicate(load_E, 24, 8)
        assert np.bincount(expert_S).max() <= 8
        doubled += any(len(set(expert_S[i::8])) < 3 for i in range(8))
    assert doubled
    assert separate_copies([[0, 0], [1, 2]], np.array([5.0, 1, 1]), np.ones(2)) == [[0, 1], [0, 2]]
    assert separate_copies([[0, 0], [0, 1]], np.array([5.0, 1]), np.ones(2)) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("seed", range(10))
def test_swaps_never_worsen_lpt_and_end_where_no_exchange_helps(seed):
    rng = np.random.default_rng(seed)
    load_LE, slots_W, speed_W = rng.pareto(2, (3, 12)), np.array([5, 4, 3]), rng.uniform(0.5, 2, 3)

    def tail_L(rank_LE):
        return compute_tail_L(np.stack([np.bincount(r, w, 3) for r, w in zip(rank_LE, load_LE)]), speed_W)

    first_LE, then_LE = lpt(load_LE, slots_W, speed_W), lpt_swap(load_LE, slots_W, speed_W)
    assert (tail_L(then_LE) <= tail_L(first_LE) + 1e-12).all()
    assert all(np.bincount(r, minlength=3).tolist() == [5, 4, 3] for r in then_LE)
    for layer in range(3):
        for a in range(12):
            for b in range(12):
                other = then_LE.copy()
                other[layer, [a, b]] = other[layer, [b, a]]
                assert tail_L(other)[layer] >= tail_L(then_LE)[layer] - 1e-9


def test_swaps_keep_copies_apart():
    expert_S = np.array([0, 1, 0, 2, 3, 0])
    rank_S = np.array([0, 0, 1, 1, 2, 2])
    found = swap_pairs(np.array([5.0, 5, 5, 1, 1, 5]), rank_S, expert_S, np.ones(3))
    held = {rank: expert_S[found == rank].tolist() for rank in range(3)}
    assert all(len(set(experts)) == 2 for experts in held.values())


def test_balance_on_a_real_trace(shared_dir):
    train, _ = load_trace(shared_dir / "traces" / "dsv2lite_law.npz").split(0.5)
    problem = make_problem(train, 8, objective="compute_tail")
    assert solve_lpt(problem).objective == pytest.approx(1.023, abs=0.003)
    assert solve_lpt_swap(problem).objective < 1.002
    two_stage = solve_two_stage(make_problem(train, 8))
    assert two_stage.objective == pytest.approx(0.148, abs=0.003)


def test_hot_experts_go_to_fast_gpus():
    problem = load_problem([8, 4, 4, 2, 1, 1], uniform(2, speed=[4, 1]))
    solution = solve_lpt_swap(problem)
    assert 0 in solution.plan.slots[0][0]
    assert solution.objective < solve_linear(load_problem([1, 1, 2, 4, 4, 8], uniform(2, speed=[4, 1]))).objective


@pytest.mark.parametrize(
    ("topology", "options", "says"),
    [
        (4, {"slots": 11}, "11 slots on 4 GPUs cannot hold 12 experts; give at least 12"),
        (2, {"slots": 26}, "an expert cannot have more replicas than the 2 GPUs"),
        (16, {}, "leave GPU 12 of 16 empty"),
        (2, {"redundant": -1}, "redundant is -1"),
        (2, {"redundant": 1, "slots": 14}, "not both"),
        (uniform(2, slots=[6, 7]), {"redundant": 1}, "leave out slots and redundant"),
        (2, {"cap": 0.9}, "cap is 0.9"),
        (2, {"seconds": 0}, "time budget is 0"),
        (2, {"objective": "speed"}, "objective 'speed' is unknown"),
    ],
)
def test_impossible_requests_are_one_clear_line(topology, options, says):
    with pytest.raises(UserError, match=says) as error:
        make_problem(random_trace(0, 20, 2, 12, 2), topology, **options)
    assert "\n" not in str(error.value)


def test_hierarchical_eplb_says_what_does_not_divide():
    with pytest.raises(UserError, match="divisible by groups"):
        solve_eplb(load_problem(np.ones(12), two_level(2, 2)), groups=5, policy="hierarchical")
    with pytest.raises(UserError, match="use the global policy"):
        solve_eplb(load_problem(np.ones(13), two_level(2, 2)), policy="hierarchical")
    with pytest.raises(UserError, match="policy 'flat' is unknown"):
        solve_eplb(load_problem(np.ones(12), 2), policy="flat")
