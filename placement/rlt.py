"""The joint integer program: every layer's placement at once, for a handful of layers.

Binaries ``y[l, e, g]`` (expert e of layer l on GPU g) and products ``z[l, e, f, g] = y[l, e, g] * y[l + 1, f, g]``::

    max  sum W[l, e, f] z[l, e, f, g]
    s.t. sum_g y[l, e, g] = 1           sum_e y[l, e, g] = slots_g
         sum_f z[l, e, f, g] = slots_g y[l, e, g]     sum_e z[l, e, f, g] = slots_g y[l + 1, f, g]
         sum_e load[l, e] y[l, e, g] <= cap_l * share_g * total load of l

The sums over z are the equalities of a level-1 reformulation-linearisation; with them alone the relaxation already is
as strong as the b-matching bound, where plain ``z <= y`` gives locality 1.
"""

from __future__ import annotations

import time

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from placement.greedy import lpt_swap
from placement.plan import plan_from_ranks
from placement.solution import Problem, Solution, finish
from placement.states import layer_caps

MAX_PRODUCTS = 4_000  # beyond this HiGHS proves nothing in a minute


def count_products(problem: Problem) -> int:
    """How many z the program has."""
    return (problem.shape.num_layers - 1) * problem.shape.num_experts**2 * problem.ranks


def solve_rlt(problem: Problem) -> Solution:
    """Maximise locality by HiGHS within the time budget; ``feasible`` with HiGHS's bound if that runs out."""
    assert problem.objective.name == "locality" and not problem.spare_slots, "rlt maximises locality of single copies"
    started = time.perf_counter()
    L, E, W = problem.shape.num_layers, problem.shape.num_experts, problem.ranks
    counts_LEE = problem.profile.require_transitions()
    total = counts_LEE.sum() or 1.0
    num_y, num_z = L * E * W, count_products(problem)
    gain = np.concatenate([np.zeros(num_y), np.repeat(counts_LEE.ravel() / total, W)])
    upper = np.ones(num_y + num_z)
    if problem.topology.is_uniform and np.ptp(problem.slots_W) == 0:
        # like GPUs: number them by their first expert in layer 0
        upper[: E * W].reshape(E, W)[np.arange(E)[:, None] < np.arange(W)] = 0
    result = milp(
        -gain,
        constraints=_constraints(problem),
        integrality=np.concatenate([np.ones(num_y), np.zeros(num_z)]),
        bounds=Bounds(0, upper),
        options={"time_limit": problem.seconds, "mip_rel_gap": 0.0},
    )
    assert result.status in (0, 1), f"the joint program is infeasible or failed: {result.message}"
    if result.x is not None:
        rank_LE = result.x[:num_y].reshape(L, E, W).argmax(-1)
    else:  # no incumbent in time; this one keeps the caps
        rank_LE = lpt_swap(problem.profile.load_LE, problem.slots_W, problem.topology.speed_W)
    bound = -result.mip_dual_bound if result.mip_dual_bound is not None else 1.0
    plan = plan_from_ranks(problem.shape, W, rank_LE)
    return finish(problem, plan, "exact-rlt", started, bound=min(1.0, bound + 1e-9), proven=result.status == 0)


def _constraints(problem: Problem) -> list[LinearConstraint]:
    L, E, W = problem.shape.num_layers, problem.shape.num_experts, problem.ranks
    y = np.arange(L * E * W).reshape(L, E, W)
    z = y.size + np.arange(count_products(problem)).reshape(L - 1, E, E, W)
    columns = y.size + z.size
    slots_W, load_LE = problem.slots_W.astype(np.float64), problem.profile.load_LE
    share_L = load_LE.sum(1)[:, None] * problem.topology.share_W
    caps_LW = np.minimum(layer_caps(problem), 1e9)[:, None] * share_L * (1 + 1e-12)
    ones_EW = np.ones((L, E, W))
    once = _rows(y, ones_EW, columns)
    filled = _rows(y.swapaxes(1, 2), ones_EW.swapaxes(1, 2), columns)
    loads = _rows(y.swapaxes(1, 2), np.broadcast_to(load_LE[:, None, :], (L, W, E)), columns)
    right = _rows(z.swapaxes(2, 3), np.ones(z.swapaxes(2, 3).shape), columns)  # [L-1, E, W] rows, over f
    left = _rows(z.transpose(0, 2, 3, 1), np.ones(z.shape).transpose(0, 2, 3, 1), columns)  # over e
    of_right = _rows(y[:-1, ..., None], np.broadcast_to(slots_W[:, None], (L - 1, E, W, 1)), columns)
    of_left = _rows(y[1:, ..., None], np.broadcast_to(slots_W[:, None], (L - 1, E, W, 1)), columns)
    return [
        LinearConstraint(once, 1, 1),
        LinearConstraint(filled, np.tile(slots_W, L), np.tile(slots_W, L)),
        LinearConstraint(loads, -np.inf, caps_LW.ravel()),
        LinearConstraint(right - of_right, 0, 0),
        LinearConstraint(left - of_left, 0, 0),
    ]


def _rows(column: np.ndarray, value: np.ndarray, columns: int) -> sparse.csr_array:
    """One row per leading index of ``column``; its last axis lists the row's columns."""
    width = column.shape[-1]
    rows = np.repeat(np.arange(column.size // width), width)
    shape = (column.size // width, columns)
    return sparse.coo_array((value.ravel(), (rows, np.ascontiguousarray(column).ravel())), shape=shape).tocsr()
