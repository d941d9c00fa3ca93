"""Copies: counted gains are real, every slot is used, load alone reaches known optima."""

import numpy as np
import pytest
from test_joint import random_trace, require_sound

from placement import cost
from placement.balance import balance_layer
from placement.greedy import lpt_swap
from placement.joint import solve_joint
from placement.plan import linear_plan
from placement.replicate import Copies, LayerTokens, add, fill, improve_copies, reserve
from placement.solution import make_problem

W, E, K = 4, 12, 3


def a_layer(seed: int = 0, cap: float = np.inf, spare: int = 1) -> LayerTokens:
    rng = np.random.default_rng(seed)
    ids_TK = np.argsort(-(rng.gumbel(size=(240, E)) + rng.normal(size=E)), axis=1)[:, :K]
    home_T = rng.integers(0, W, 240)
    load_HE = np.bincount((home_T[:, None] * E + ids_TK).ravel(), minlength=W * E).reshape(W, E).astype(float)
    remote_HW = (1 - np.eye(W)).astype(np.float32)
    return LayerTokens(ids_TK, home_T, remote_HW, load_HE, np.full(W, cap), np.full(W, E // W + spare))


def single(tokens: LayerTokens) -> Copies:
    rank_E = np.arange(E) % W
    held_EW = np.zeros((E, W), bool)
    held_EW[np.arange(E), rank_E] = True
    return Copies(tokens, held_EW, np.tile(rank_E, (W, 1)))


def brute_cost(tokens: LayerTokens, serve_HE: np.ndarray) -> float:
    total = 0
    for home, ids_K in zip(tokens.home_T, tokens.ids_TK):
        total += len({int(serve_HE[home, e]) for e in ids_K} - {int(home)})
    return total


def test_cost_is_remote_ranks_and_the_gain_of_a_copy_is_exact():
    tokens = a_layer()
    copies = single(tokens)
    assert copies.cost() == brute_cost(tokens, copies.serve_HE)
    leave_HE, join_HEW = copies.tables()
    for home, expert, rank in [(0, 1, 0), (2, 5, 2), (3, 0, 1), (1, 7, 1)]:
        moved = copies.copy()
        moved.held_EW[expert, rank] = True
        moved.serve_HE[home, expert] = rank
        gain = leave_HE[home, expert] - join_HEW[home, expert, rank]
        assert copies.cost() - moved.cost() == pytest.approx(gain)
        assert moved.cost() == brute_cost(tokens, moved.serve_HE)


def test_a_copy_at_home_always_gains():
    leave_HE, join_HEW = single(a_layer(1)).tables()
    for home in range(W):
        assert (join_HEW[home, :, home] == 0).all() and (leave_HE[home] >= 0).all()


@pytest.mark.parametrize("spare", [0, 1, 5])
def test_every_slot_is_used_and_cost_never_rises(spare):
    tokens = a_layer(2, cap=np.inf, spare=spare)
    before = single(tokens)
    expert_S, rank_S, slot_HE = improve_copies(tokens, np.arange(E), np.arange(E) % W, before.serve_HE, 10)
    assert (np.bincount(rank_S, minlength=W) == tokens.slots_W).all()
    assert len(set(zip(expert_S.tolist(), rank_S.tolist()))) == len(expert_S)
    assert (expert_S[slot_HE] == np.arange(E)).all()
    after = brute_cost(tokens, rank_S[slot_HE])
    assert after <= before.cost() and (spare == 0 or after < before.cost())


def test_caps_limit_what_a_copy_serves():
    tokens = a_layer(3)
    cap = single(tokens).load_W().max() * 1.001
    capped = LayerTokens(
        tokens.ids_TK, tokens.home_T, tokens.weight_HW, tokens.load_HE, np.full(W, cap), tokens.slots_W
    )
    copies = single(capped)
    fill(copies)
    reserve(copies)
    assert copies.load_W().max() <= cap * 1.02 + 1e-9
    leave_HE, join_HEW = copies.tables()
    expert, rank = np.argwhere(~copies.held_EW)[0]
    add(copies, int(expert), int(rank), leave_HE - join_HEW[..., rank])
    assert copies.load_W().max() <= cap * 1.02 + 1e-9


def test_replicas_lower_rows_and_the_plan_says_who_serves():
    trace = random_trace(600, 2, 16, 3)
    homes = np.arange(len(trace.seq_lens)) % 4
    found = []
    for redundant in (0, 1):
        options = {"objective": "dispatch_rows", "cap": 1.2, "seconds": 1.0, "threads": 1, "homes": homes}
        problem = make_problem(trace, 4, redundant=redundant, **options)
        solution = solve_joint(problem)
        require_sound(solution.plan, problem)
        found.append(cost.evaluate(solution.plan, trace, homes=homes).dispatch_rows)
    assert found[1] < found[0] < cost.evaluate(linear_plan(trace.shape, 4), trace, homes=homes).dispatch_rows


def slowest(held: list[list[int]], load_E: np.ndarray, speed_W: np.ndarray) -> float:
    copies_E = np.bincount(np.concatenate([np.asarray(h, int) for h in held]), minlength=len(load_E))
    assert copies_E.min() >= 1 and all(len(set(h)) == len(h) for h in held)
    return max(sum(load_E[e] / copies_E[e] for e in h) / s for h, s in zip(held, speed_W))


def test_flashlb_example_reaches_its_optimum():
    load_E = np.array([600, 560, 120, 120, 20, 10, 10, 10.0])
    held = balance_layer(load_E, np.full(8, 2), np.ones(8))
    assert [len(h) for h in held] == [2] * 8
    assert slowest(held, load_E, np.ones(8)) == pytest.approx(560 / 3 + 10)


@pytest.mark.parametrize("seed", range(8))
def test_load_alone_is_no_worse_than_lpt_with_swaps(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 6))
    experts = int(rng.integers(ranks, 14))
    load_E, speed_W = rng.pareto(1.5, experts) + 0.1, rng.uniform(0.5, 2, ranks)
    slots_W = np.full(ranks, -(-experts // ranks))
    total = int(slots_W.sum())
    rank_E = lpt_swap(load_E[None], slots_W, speed_W)[0]
    lpt_slowest = (np.bincount(rank_E, load_E, ranks) / speed_W).max()
    held = balance_layer(load_E, slots_W, speed_W, steps=5)
    assert sum(map(len, held)) == total and [len(h) for h in held] == slots_W.tolist()
    if total == experts:
        assert slowest(held, load_E, speed_W) <= lpt_slowest * (1 + 1e-9)
