"""The two-stage split without integer programs: balance each layer, then relabel clusters to follow the tokens.

With the clusters of every layer fixed, equal links and GPUs, and the sum objective, layers couple only through the
labels of GPUs; then the best labels are one assignment problem per pair of layers, and MoETuner's second program is
not needed.
"""

from __future__ import annotations

import time

import numpy as np
from scipy.optimize import linear_sum_assignment

from placement.greedy import lpt_swap, plan_of_ranks, single_slots_W
from placement.solution import Problem, Solution, finish


def solve_two_stage(problem: Problem) -> Solution:
    """LPT with pair swaps, then the best labels of each next layer's clusters."""
    started = time.perf_counter()
    slots_W = single_slots_W(problem)
    rank_LE = lpt_swap(problem.profile.load_LE, slots_W, problem.topology.speed_W)
    if problem.profile.transitions_LEE is not None:
        rank_LE = np.take_along_axis(chain_labels(problem, rank_LE), rank_LE, axis=1)
    return finish(problem, plan_of_ranks(problem, rank_LE), "two-stage", started)


def chain_labels(problem: Problem, cluster_LE: np.ndarray) -> np.ndarray:
    """int64 ``[L, C]``: each next layer's clusters assigned to the GPUs they receive most from (like GPUs only)."""
    W, like = problem.ranks, like_GPUs(problem)
    traffic_LCC = cluster_traffic(problem, cluster_LE)
    forbidden = -1.0 - 2 * np.abs(traffic_LCC).sum((1, 2)) if len(traffic_LCC) else []
    place_LC = [np.arange(W)]
    for traffic_CC, never in zip(traffic_LCC, forbidden):
        from_GC = np.empty((W, W))
        from_GC[place_LC[-1]] = traffic_CC
        gpu, cluster = linear_sum_assignment(np.where(like, from_GC, never), maximize=True)
        place_C = np.empty(W, np.int64)
        place_C[cluster] = gpu
        place_LC.append(place_C)
    return np.stack(place_LC)


def cluster_traffic(problem: Problem, cluster_LE: np.ndarray) -> np.ndarray:
    """float64 ``[L - 1, C, C]``: share of all transitions of a layer from cluster to cluster of the next."""
    one_hot = (cluster_LE[..., None] == np.arange(problem.ranks)).astype(np.float64)
    counts_LEE = problem.profile.require_transitions()
    traffic = np.einsum("lec,lef,lfd->lcd", one_hot[:-1], counts_LEE, one_hot[1:], optimize=True)
    total = traffic.sum((1, 2), keepdims=True)
    return np.divide(traffic, total, out=np.zeros_like(traffic), where=total > 0)


def like_GPUs(problem: Problem) -> np.ndarray:
    """bool ``[W, W]``: the same speed and slots."""
    speed_W, slots_W = problem.topology.speed_W, single_slots_W(problem)
    return (speed_W[:, None] == speed_W) & (slots_W[:, None] == slots_W)
