"""Proven optima where the structure of a problem allows it, and the choice of the route.

- ``assignment``: one expert per GPU. Locality couples consecutive layers only through the relative labelling of GPUs,
  so each pair of layers is an independent assignment problem.
- ``chain``: few placements per layer. Locality is a longest path through layers x placements (dynamic program).
- ``layers``: few placements per layer, an objective that does not couple layers (compute tail, fan-out).
- ``rlt``: the joint integer program, for a handful of layers (``rlt.py``).
"""

from __future__ import annotations

import time

import numpy as np
from scipy.optimize import linear_sum_assignment

from placement.errors import UserError
from placement.plan import plan_from_ranks
from placement.rlt import MAX_PRODUCTS, count_products, solve_rlt
from placement.solution import Problem, Solution, finish
from placement.states import MAX_STATES, States, all_states, count_states, layer_caps

_FLOPS_PER_SECOND = 2e9  # careful guess for two small cores; decides the route, so it must not depend on the machine
_CELLS = 1 << 22
LAYERWISE = ("compute_tail", "compute_tail_worst_layer", "compute_tail_equal", "fan_out")


def exact_route(problem: Problem) -> str | None:
    """The exact route that fits the problem and its time budget, or ``None``. Depends on the problem alone."""
    slots_W, name, uniform_speed = problem.slots_W, problem.objective.name, np.ptp(problem.topology.speed_W) == 0
    if problem.spare_slots or problem.objective.terms or problem.old_plan is not None:
        return None
    listable = count_states(slots_W) <= MAX_STATES
    if name in LAYERWISE and listable and (name != "fan_out" or problem.train is not None):
        return "layers"
    if name != "locality" or problem.profile.transitions_LEE is None:
        return None
    if slots_W.max() == 1 and (problem.cap is None or uniform_speed):  # then every placement has the same tail
        return "assignment"
    if listable and _chain_flops(problem) <= _FLOPS_PER_SECOND * problem.seconds:
        return "chain"
    return "rlt" if count_products(problem) <= MAX_PRODUCTS else None


def solve_exact(problem: Problem) -> Solution:
    """Solve by the route that fits; ``UserError`` if none does."""
    route = exact_route(problem)
    if route is None:
        raise UserError(
            f"no exact method fits {problem.shape.num_layers} layers x {problem.shape.num_experts} experts on"
            f" {problem.ranks} GPUs with objective {problem.objective.name} in {problem.seconds:g} s; use a search"
        )
    routes = {"assignment": solve_assignment, "chain": solve_chain, "layers": solve_layers, "rlt": solve_rlt}
    return routes[route](problem)


def solve_assignment(problem: Problem) -> Solution:
    """One expert per GPU: GPU of the next layer's expert = GPU of the expert it is assigned to."""
    started = time.perf_counter()
    rank_LE = [np.arange(problem.ranks)]
    for counts_EE in problem.profile.require_transitions():
        here, following = linear_sum_assignment(counts_EE, maximize=True)
        rank_E = np.empty(problem.ranks, np.int64)
        rank_E[following] = rank_LE[-1][here]
        rank_LE.append(rank_E)
    plan = plan_from_ranks(problem.shape, problem.ranks, np.stack(rank_LE))
    return finish(problem, plan, "exact-assignment", started, proven=True)


def solve_chain(problem: Problem) -> Solution:
    """Dynamic program over the placements of each layer; a load cap removes placements.

    Exchanging like ranks in all layers changes nothing, so values are kept for one representative of each class:
    ``value[s'] = max over labelled s of value[class of s] + score(s, s')``.
    """
    started = time.perf_counter()
    states, allowed_LN = _allowed_states(problem)
    value_C = np.where(allowed_LN[0, states.canonical_C], 0.0, -np.inf)
    back = []
    for layer, counts_EE in enumerate(problem.profile.require_transitions()):
        best_C, from_C = _best_predecessors(states, value_C[states.class_N], counts_EE, problem.ranks)
        value_C = np.where(allowed_LN[layer + 1, states.canonical_C], best_C, -np.inf)
        back.append(from_C)
    rank_LE = _trace_back(states, back, int(value_C.argmax()), problem.ranks)
    plan = plan_from_ranks(problem.shape, problem.ranks, rank_LE)
    return finish(problem, plan, "exact-chain", started, proven=True)


def solve_layers(problem: Problem) -> Solution:
    """The best placement of every layer on its own, by listing them."""
    started = time.perf_counter()
    states, allowed_LN = _allowed_states(problem)
    canonical = states.canonical_C
    chosen = []
    for layer, load_E in enumerate(problem.profile.load_LE):
        if problem.objective.name == "fan_out":
            cost_C = _fan_out_C(problem, states, layer)
        else:
            cost_C = states.tail_N(load_E, problem.topology.speed_W)[canonical]
        chosen.append(states.rank_NE[canonical[np.where(allowed_LN[layer, canonical], cost_C, np.inf).argmin()]])
    plan = plan_from_ranks(problem.shape, problem.ranks, np.stack(chosen))
    return finish(problem, plan, "exact-layers", started, proven=True)


def _allowed_states(problem: Problem) -> tuple[States, np.ndarray]:
    """All states, and bool ``[L, N]``: which keep the layer's cap."""
    states = all_states(problem.slots_W, problem.topology.speed_W)
    caps_L = layer_caps(problem) * (1 + 1e-12)
    tails = [states.tail_N(load_E, problem.topology.speed_W) for load_E in problem.profile.load_LE]
    return states, np.stack(tails) <= caps_L[:, None]


def _best_predecessors(
    states: States, value_N: np.ndarray, counts_EE: np.ndarray, ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each representative of the next layer: the best value of reaching it, and from which labelled state."""
    reachable = np.flatnonzero(np.isfinite(value_N))
    here = states.one_hot(reachable, ranks).reshape(len(reachable), -1)
    count = len(states.canonical_C)
    best_C, from_C = np.empty(count), np.empty(count, np.int64)
    step = max(1, _CELLS // len(reachable))
    for start in range(0, count, step):
        chosen = states.canonical_C[start : start + step]
        pull = np.einsum("ef,nfw->new", counts_EE, states.one_hot(chosen, ranks)).reshape(len(chosen), -1)
        total_NC = here @ pull.T
        total_NC += value_N[reachable][:, None]
        winner = total_NC.argmax(0)
        best_C[start : start + step] = total_NC[winner, np.arange(len(chosen))]
        from_C[start : start + step] = reachable[winner]
    return best_C, from_C


def _trace_back(states: States, back: list[np.ndarray], last: int, ranks: int) -> np.ndarray:
    """int64 ``[L, E]``: the best path, from the last layer's representative backwards, in the last layer's labels."""
    rank_E = states.rank_NE[states.canonical_C[last]].astype(np.int64)
    path, index, relabel_W = [rank_E], last, np.arange(ranks)
    for from_C in reversed(back):
        state = from_C[index]
        labelled_E = states.rank_NE[state].astype(np.int64)
        path.append(relabel_W[labelled_E])
        index = states.class_N[state]
        representative_E = states.rank_NE[states.canonical_C[index]]
        following_W = np.empty(ranks, np.int64)  # the representative's labels -> the labels in use
        following_W[representative_E] = relabel_W[labelled_E]
        relabel_W = following_W
    return np.stack(path[::-1])


def _fan_out_C(problem: Problem, states: States, layer: int) -> np.ndarray:
    """float64 ``[C]``: distinct ranks summed over the training tokens, of each representative."""
    ids_TK = np.ascontiguousarray(np.sort(problem.train.expert_ids_TLK[:, layer], axis=1))
    as_bytes, count = np.unique(ids_TK.view(f"V{ids_TK.strides[0]}"), return_counts=True)
    sets = as_bytes.view(ids_TK.dtype).reshape(len(count), -1).astype(np.int64)
    canonical = states.canonical_C
    cost_C = np.empty(len(canonical))
    step = max(1, _CELLS // max(1, len(sets) * problem.ranks))
    for start in range(0, len(canonical), step):
        rank = states.rank_NE[canonical[start : start + step]][:, sets]
        distinct = sum((rank == w).any(-1) for w in range(problem.ranks))
        cost_C[start : start + step] = distinct @ count
    return cost_C


def _chain_flops(problem: Problem) -> float:
    """Multiplications of the dynamic program."""
    kinds, members = np.unique(np.stack([problem.slots_W, problem.topology.speed_W]), axis=1, return_counts=True)
    states = count_states(problem.slots_W)
    classes = states / np.prod([float(np.prod(np.arange(1, n + 1))) for n in members])
    return 2.0 * states * classes * problem.shape.num_experts * problem.ranks * problem.shape.num_layers
