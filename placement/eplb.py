"""EPLB, the balancer of DeepSeek-V3 (github.com/deepseek-ai/EPLB), written from its description.

Global policy: give spare slots one by one to the expert with the most load per replica, then pack replicas on GPUs
in descending load, each on the least loaded GPU with a free slot.  Hierarchical policy: first pack groups of experts
on nodes, then do the same inside each node.  Ours: replicas of one expert end on distinct GPUs (the original allows
two copies on one GPU), and GPUs may have different numbers of slots and speeds.
"""

from __future__ import annotations

import time

import numpy as np

from placement.errors import UserError
from placement.plan import make_plan
from placement.solution import Problem, Solution, finish


def solve_eplb(problem: Problem, *, groups: int | None = None, policy: str = "global") -> Solution:
    """EPLB on the problem's loads.

    Args:
        groups: expert groups of the hierarchical policy (contiguous experts; default: one per node).
        policy: ``global`` or ``hierarchical``.
    """
    started = time.perf_counter()
    nodes = _nodes(problem, policy)
    groups = len(nodes) if groups is None else groups
    E = problem.shape.num_experts
    if policy == "hierarchical" and (E % groups or groups % len(nodes)):
        raise UserError(
            f"hierarchical EPLB needs experts ({E}) divisible by groups ({groups}), and groups by nodes ({len(nodes)});"
            " choose other groups or the global policy"
        )
    slots = []
    for load_E in problem.profile.load_LE:
        held = [[] for _ in range(problem.ranks)]
        for gpus, experts in zip(nodes, _node_experts(load_E, groups, len(nodes))):
            part = eplb_node(load_E[experts], problem.slots_W[gpus], problem.topology.speed_W[gpus])
            for gpu, local in zip(gpus, part):
                held[gpu] = experts[local].tolist()
        slots.append(held)
    method = "eplb" if policy == "global" else "eplb-hierarchical"
    return finish(problem, make_plan(problem.shape, problem.ranks, slots), method, started)


def eplb_node(load_E: np.ndarray, slots_W: np.ndarray, speed_W: np.ndarray) -> list[list[int]]:
    """Replicate and pack one layer on the GPUs of one node; ``[rank][slot]`` experts, each rank's distinct."""
    expert_S = replicate(load_E, int(slots_W.sum()), len(slots_W))
    copies_E = np.bincount(expert_S, minlength=len(load_E))
    pack_S, place_S = pack((load_E / copies_E)[expert_S], slots_W, speed_W)
    held = [[0] * n for n in slots_W]
    for expert, rank, place in zip(expert_S, pack_S, place_S):
        held[rank][place] = int(expert)
    return separate_copies(held, load_E, speed_W)


def replicate(load_E: np.ndarray, num_slots: int, max_copies: int) -> np.ndarray:
    """int64 ``[num_slots]``: each expert once, then copies of the expert with the most load per copy so far."""
    copies_E = np.ones(len(load_E))
    extra = []
    for _ in range(num_slots - len(load_E)):
        expert = int(np.where(copies_E < max_copies, load_E / copies_E, -1.0).argmax())
        copies_E[expert] += 1
        extra.append(expert)
    return np.concatenate([np.arange(len(load_E)), np.array(extra, np.int64)])


def pack(weight_N: np.ndarray, capacity_W: np.ndarray, speed_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(pack, place in the pack) of each item, int64 ``[N]``: in descending weight, to the pack that is least loaded.

    Packs of one item keep the items' order, as in the original.
    """
    pack_N, place_N = np.arange(len(weight_N)), np.zeros(len(weight_N), np.int64)
    if (capacity_W == 1).all() and np.ptp(speed_W) == 0:
        return pack_N, place_N
    total_W, used_W = np.zeros(len(capacity_W)), np.zeros(len(capacity_W), np.int64)
    for item in np.argsort(-weight_N, kind="stable"):
        rank = int(np.where(used_W < capacity_W, total_W / speed_W, np.inf).argmin())
        pack_N[item], place_N[item] = rank, used_W[rank]
        total_W[rank] += weight_N[item]
        used_W[rank] += 1
    return pack_N, place_N


def separate_copies(held: list[list[int]], load_E: np.ndarray, speed_W: np.ndarray) -> list[list[int]]:
    """Exchange (or, where no exchange is legal, replace) slots until no rank holds an expert twice."""
    held = [list(experts) for experts in held]
    for rank, experts in enumerate(held):
        for place in range(len(experts)):
            if experts[place] in experts[:place]:
                _separate(held, rank, place, load_E, speed_W)
    return held


def _separate(held: list[list[int]], rank: int, place: int, load_E: np.ndarray, speed_W: np.ndarray) -> None:
    """Make ``held[rank][place]``, a second copy, another expert, by the exchange whose slower side is fastest."""
    twice = held[rank][place]
    copies_E = np.bincount(np.concatenate(held).astype(np.int64), minlength=len(load_E))
    share_E = load_E / copies_E
    total_W = np.array([share_E[experts].sum() for experts in held])
    best = None
    for other, experts in enumerate(held):
        if other == rank or twice in experts:
            continue
        for j, expert in enumerate(experts):
            if expert in held[rank]:
                continue
            gain = share_E[twice] - share_E[expert]
            slower = max((total_W[rank] - gain) / speed_W[rank], (total_W[other] + gain) / speed_W[other])
            if best is None or slower < best[0]:
                best = slower, other, j
    if best is not None:
        _, other, j = best
        held[rank][place], held[other][j] = held[other][j], twice
        return
    absent_E = np.isin(np.arange(len(load_E)), held[rank], invert=True)
    held[rank][place] = int(np.where(absent_E, share_E, -1.0).argmax())


def _nodes(problem: Problem, policy: str) -> list[np.ndarray]:
    """The GPUs that are packed together."""
    if policy == "global":
        return [np.arange(problem.ranks)]
    if policy != "hierarchical":
        raise UserError(f"EPLB policy {policy!r} is unknown; choose global or hierarchical")
    nodes = [np.flatnonzero(problem.topology.node_W == node) for node in np.unique(problem.topology.node_W)]
    slots, E = [problem.slots_W[gpus] for gpus in nodes], problem.shape.num_experts
    if E % len(nodes) or min(s.sum() for s in slots) * len(nodes) < E or problem.slots_W.max() * len(nodes) > E:
        raise UserError(
            f"hierarchical EPLB gives each of {len(nodes)} nodes an equal share of {E} experts; the GPUs of the nodes"
            f" have {[s.tolist() for s in slots]} slots, too few or more than a share; use the global policy"
        )
    return nodes


def _node_experts(load_E: np.ndarray, groups: int, nodes: int) -> list[np.ndarray]:
    """Experts of each node, groups packed on nodes by load; in the order (place in the node, expert)."""
    E = len(load_E)
    if nodes == 1:
        return [np.arange(E)]
    size = E // groups
    load_G = load_E.reshape(groups, size).sum(1)
    pack_G, place_G = pack(load_G, np.full(nodes, groups // nodes), np.ones(nodes))
    members = [np.flatnonzero(pack_G == node) for node in range(nodes)]
    ordered = [groups_of[np.argsort(place_G[groups_of])] for groups_of in members]
    return [(chosen[:, None] * size + np.arange(size)).ravel() for chosen in ordered]
