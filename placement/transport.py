"""Large moves where the objective is linear in one layer: all its items at once, the neighbours standing still.

Without row costs (objective locality) a layer's best placement is a transport problem: choose a rank for each item,
so many items per rank, least total cost.  Without caps it is solved by assignment (a slot each); if that breaks a
load cap, by an integer program with load rows.  Only better answers are kept.  Where rows count the problem is not
linear, exchanges are exact, and this is left out.
"""

from __future__ import annotations

import time

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp

from placement.moves import LayerData
from placement.team import ChainData

MAX_CELLS = 1024  # items x ranks of a layer that the integer program is tried on
MILP_SECONDS = 0.5


def is_linear(chain: ChainData) -> bool:
    """No row costs, no copies, and something that binds."""
    plain = all(data.weight_WT is None and data.scale == 0 for data in chain.layers)
    single = all(len(np.unique(data.expert_S)) == len(data.expert_S) for data in chain.layers)
    return plain and single and bool(chain.cross)


def polish(chain: ChainData, rank_LS: list[np.ndarray], deadline: float) -> int:
    """Better one layer after the other until none improves or the clock passes ``deadline``; returns moves made."""
    made, quiet, layer = 0, 0, 0
    while quiet < len(rank_LS) and time.perf_counter() < deadline:
        linear_SW = chain.linear_SW(layer, rank_LS).astype(np.float64)
        better_S = best_layer(chain.layers[layer], linear_SW, rank_LS[layer])
        quiet += 1
        if better_S is not None:
            rank_LS[layer], quiet, made = better_S, 0, made + 1
        layer = (layer + 1) % len(rank_LS)
    return made


def best_layer(data: LayerData, linear_SW: np.ndarray, rank_S: np.ndarray) -> np.ndarray | None:
    """A cheaper placement of one layer's items that keeps counts and caps, or ``None``."""
    S, W = linear_SW.shape
    now = linear_SW[np.arange(S), rank_S].sum()
    slot_rank = np.repeat(np.arange(W), np.bincount(rank_S, minlength=W))
    _, slot_S = linear_sum_assignment(linear_SW[:, slot_rank])
    found_S = slot_rank[slot_S]
    least = linear_SW[np.arange(S), found_S].sum()
    tolerance = 1e-4 * max(1.0, abs(now))
    if least > now - tolerance:
        return None  # no placement of any load is better
    if not _within(data, found_S):
        found_S = _with_caps(data, linear_SW, rank_S) if S * W <= MAX_CELLS else None
    if found_S is None or linear_SW[np.arange(S), found_S].sum() > now - tolerance:
        return None
    return found_S.astype(np.intp)


def _within(data: LayerData, rank_S: np.ndarray) -> bool:
    loads = [np.bincount(rank_S, load_S, data.ranks) for load_S in data.load_DS]
    return all((load_W <= cap_W).all() for load_W, cap_W in zip(loads, data.cap_DW))


def _with_caps(data: LayerData, linear_SW: np.ndarray, rank_S: np.ndarray) -> np.ndarray | None:
    S, W = linear_SW.shape
    eye_S, eye_W = sparse.eye_array(S), sparse.eye_array(W)
    once = sparse.kron(eye_S, np.ones((1, W)))
    count = sparse.kron(np.ones((1, S)), eye_W)
    have_W = np.bincount(rank_S, minlength=W)
    rows = [LinearConstraint(once.tocsr(), 1, 1), LinearConstraint(count.tocsr(), have_W, have_W)]
    for load_S, cap_W in zip(data.load_DS, data.cap_DW):
        rows.append(LinearConstraint(sparse.kron(load_S[None], eye_W).tocsr(), -np.inf, cap_W))
    options = {"time_limit": MILP_SECONDS, "mip_rel_gap": 1e-4}
    result = milp(linear_SW.ravel(), constraints=rows, integrality=np.ones(S * W), bounds=Bounds(0, 1), options=options)
    if result.x is None:
        return None
    found_S = result.x.reshape(S, W).argmax(1)
    return found_S if _within(data, found_S) and (np.bincount(found_S, minlength=W) == have_W).all() else None
