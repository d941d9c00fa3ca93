"""Small random traces and plans for the placement tests, each from a seed."""

import itertools

import numpy as np
import pytest

from placement.cost import evaluate
from placement.plan import MoEShape, Plan, make_plan, plan_from_ranks
from placement.solution import objective_value
from placement.trace import Trace


def random_trace(seed: int, tokens: int = 60, layers: int = 3, experts: int = 6, top_k: int = 2) -> Trace:
    """Skewed routing with some affinity between layers; sequences of 1 to 7 tokens."""
    rng = np.random.default_rng(seed)
    taste = rng.gumbel(size=(tokens, 1, experts)) + rng.normal(size=(1, layers, experts))
    score = taste + 0.7 * rng.gumbel(size=(tokens, layers, experts))
    ids = np.argsort(-score, axis=-1)[..., :top_k].astype(np.uint8)
    lens = []
    while sum(lens) < tokens:
        lens.append(min(int(rng.integers(1, 8)), tokens - sum(lens)))
    shape = MoEShape(tuple(range(layers)), experts, top_k, "random")
    return Trace(shape, ids.reshape(tokens, layers, top_k), np.array(lens, np.int32), source=f"random trace {seed}")


def random_plan(seed: int, shape: MoEShape, ranks: int, extra: int = 0) -> Plan:
    """Every expert somewhere, every rank with something, then up to ``extra`` more copies per layer."""
    rng = np.random.default_rng(seed)
    slots = []
    for _ in shape.moe_layers:
        held = [set() for _ in range(ranks)]
        for i, expert in enumerate(rng.permutation(shape.num_experts)):
            held[i % ranks if i < ranks else rng.integers(ranks)].add(int(expert))
        for _ in range(extra):
            held[rng.integers(ranks)].add(int(rng.integers(shape.num_experts)))
        for rank_held in held:
            if not rank_held:
                rank_held.add(int(rng.integers(shape.num_experts)))
        slots.append([rng.permutation(sorted(h)) for h in held])
    return make_plan(shape, ranks, slots)


def require_whole(problem, solution) -> None:
    """Every slot is filled, no expert is missing or twice on a rank, and the objective is the cost function's."""
    for held_by_rank in solution.plan.slots:
        assert [len(held) for held in held_by_rank] == problem.slots_W.tolist()
        assert all(len(set(held)) == len(held) for held in held_by_rank)
        assert set().union(*held_by_rank) == set(range(problem.shape.num_experts))
    costs = evaluate(solution.plan, problem.train, problem.topology)
    assert solution.objective == pytest.approx(getattr(costs, problem.objective.name), rel=1e-9)
    assert solution.status in ("optimal", "feasible")
    assert solution.plan.made_by == solution.method


def best_by_brute_force(problem, caps_L: np.ndarray) -> float:
    """The best objective over every plan without replicas that keeps the caps, by trying all of them."""
    E, W, L = problem.shape.num_experts, problem.ranks, problem.shape.num_layers
    states = [
        s
        for s in itertools.product(range(W), repeat=E)
        if np.bincount(s, minlength=W).tolist() == problem.slots_W.tolist()
    ]
    fair_L = problem.profile.load_LE.sum(1) / problem.topology.speed_W.sum()
    allowed = []
    for layer in range(L):
        load_E = problem.profile.load_LE[layer]
        slowest = [(np.bincount(s, load_E, W) / problem.topology.speed_W).max() for s in states]
        allowed.append([s for s, t in zip(states, slowest) if t <= caps_L[layer] * fair_L[layer] * (1 + 1e-9)])
    plans = (plan_from_ranks(problem.shape, W, np.array(rows)) for rows in itertools.product(*allowed))
    values = [objective_value(problem, plan) for plan in plans]
    return max(values) if problem.objective.maximise else min(values)
