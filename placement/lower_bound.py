"""How good any plan could be: bounds on each objective, valid for every plan that keeps the problem's load caps.

Locality. For consecutive layers let ``Z[e, f] = 1`` where e and f share a GPU. Every plan's Z is in [0, 1], its rows
and columns sum to the slots K of a GPU (b-matching), and ``Z @ load`` and ``load @ Z`` are loads of GPUs, at most the
cap. So ``max <W, Z>`` over such Z bounds the pair, and the sum over pairs bounds the plan. Where all GPUs hold K, also
``Z = J / G + P Z P`` (``P`` removes means) and ``P Z P`` has G - 1 singular values of at most K (Donath-Hoffman), so
for any split ``W = (W - M) + M`` the bound of ``W - M`` by matching plus ``sum(M) / G + K * (top G - 1 singular
values of P M P)`` holds; the best M is sought. All of it is minimised in its dual, where every point is a valid bound:
stopping early loosens the bound, never breaks it.

Fan-out. Of a token's K choices on d GPUs some number c of pairs share a GPU; c is least when they are spread evenly,
so d is at least a convex, falling, piecewise linear function of c, and each of its lines ``a - b * c`` bounds the
token. With any line for each token, the fan-out is at least ``sum(a) - max <sum(b * pairs of the token), Z>``: the same
program, inside one layer. Lines are chosen where they are highest at the Z of the program before.
"""

from __future__ import annotations

import numpy as np

from placement.dual import Pair, effort, pair_bound
from placement.solution import Problem
from placement.states import layer_caps

_FAN_OUT_ROUNDS = 3


def bound(problem: Problem, seconds: float | None = None) -> float | None:
    """The best bound known for the problem's objective (no plan is better), or ``None`` where there is none."""
    name = problem.objective.name
    if problem.objective.terms:
        return None
    if name == "locality":
        return None if problem.profile.transitions_LEE is None else locality_bound(problem, seconds)
    if name in ("compute_tail", "compute_tail_worst_layer", "compute_tail_equal"):
        tail_L = compute_tail_bound_L(problem)
        return float(tail_L.max() if name == "compute_tail_worst_layer" else tail_L.mean())
    if name in ("fan_out", "dispatch_rows") and problem.train is not None:
        fan_out = fan_out_bound(problem, seconds)
        return fan_out if name == "fan_out" else max(0.0, fan_out - 1.0)  # all but the home's own
    return None


def locality_bound(problem: Problem, seconds: float | None = None, *, spectral: bool = True) -> float:
    """Upper bound on locality. ``seconds`` (default: the problem's) sets how many iterations are made."""
    counts_LEE = problem.profile.require_transitions()
    if not counts_LEE.sum():
        return 1.0
    load_LE = _loads_in_caps(problem)
    degree, total = _degree_and_total(problem)
    pairs = [
        Pair(counts_LEE[i], load_LE[i], load_LE[i + 1], degree, total, problem.ranks) for i in range(len(counts_LEE))
    ]
    seconds = problem.seconds if seconds is None else seconds
    spectral = spectral and total is None and problem.ranks > 1
    iterations = effort(counts_LEE.size, counts_LEE.shape[1], seconds, spectral)
    return float(min(1.0, sum(pair_bound(pair, *iterations)[0] for pair in pairs) / counts_LEE.sum()))


def fan_out_bound(problem: Problem, seconds: float | None = None) -> float:
    """Lower bound on distinct ranks per token and layer; needs the training tokens."""
    ids_TLK, K = problem.train.expert_ids_TLK, problem.shape.top_k
    L, E = problem.shape.num_layers, problem.shape.num_experts
    if not len(ids_TLK):
        return 0.0
    degree, total = _degree_and_total(problem)
    load_LE, same = _loads_in_caps(problem), np.eye(E, dtype=bool)
    share = (problem.seconds if seconds is None else seconds) / _FAN_OUT_ROUNDS
    iterations = effort(L * E * E, E, share, total is None and problem.ranks > 1)
    intercept_S, slope_S = _fan_out_lines(K)
    sum_of_layers = 0.0
    for layer in range(L):
        sets, count = _distinct_sets(ids_TLK[:, layer])
        together = np.full((E, E), degree / E)
        best = 0.0
        for round_ in range(_FAN_OUT_ROUNDS):
            pairs_N = (together[sets[:, :, None], sets[:, None, :]].sum((1, 2)) - K) / 2
            line_N = (intercept_S - slope_S * pairs_N[:, None]).argmax(1)
            gain = _weighted_pairs(sets, count * slope_S[line_N], E)
            np.fill_diagonal(gain, 0)
            pair = Pair(gain, load_LE[layer], load_LE[layer], degree, total, problem.ranks, same)
            most, z_EE = pair_bound(pair, *iterations)
            best = max(best, float(count @ intercept_S[line_N]) - most / 2)
            z_EE = (z_EE + z_EE.T) / 2
            np.fill_diagonal(z_EE, 1)
            together = z_EE if round_ == 0 else (together * round_ + z_EE) / (round_ + 1)
        sum_of_layers += best
    return float(max(-(-K // degree), sum_of_layers / (len(ids_TLK) * L)))


def _fan_out_lines(choices: int) -> tuple[np.ndarray, np.ndarray]:
    """(intercepts, slopes) of the lines ``a - b * pairs`` under the fewest ranks that allow so many pairs."""
    ranks = np.arange(choices, 0, -1)
    size, larger = choices // ranks, choices % ranks
    pairs = (ranks - larger) * size * (size - 1) / 2 + larger * (size + 1) * size / 2  # fewest pairs: even spread
    if choices == 1:
        return np.ones(1), np.zeros(1)
    slope = -np.diff(ranks) / np.diff(pairs)
    return ranks[:-1] + slope * pairs[:-1], slope


def _distinct_sets(ids_TK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct sets of experts, int64 ``[N, K]``, and how many tokens chose each."""
    ids_TK = np.ascontiguousarray(np.sort(ids_TK, axis=1))
    as_bytes, count = np.unique(ids_TK.view(f"V{ids_TK.strides[0]}"), return_counts=True)
    return as_bytes.view(ids_TK.dtype).reshape(len(count), -1).astype(np.int64), count


def _weighted_pairs(sets_NK: np.ndarray, weight_N: np.ndarray, num_experts: int) -> np.ndarray:
    key = sets_NK[:, :, None] * num_experts + sets_NK[:, None, :]
    weight = np.broadcast_to(weight_N[:, None, None].astype(np.float64), key.shape)
    return np.bincount(key.ravel(), weight.ravel(), num_experts**2).reshape(num_experts, num_experts)


def compute_tail_bound_L(problem: Problem) -> np.ndarray:
    """Lower bound on each layer's compute tail, float64 ``[L]``: 1, and without replicas also two pigeonholes.

    The hottest expert is on some GPU beside the K - 1 coldest; of the W + 1 hottest two share a GPU.
    """
    speed_W, slots_W = problem.topology.speed_W, problem.slots_W
    load_LE = problem.profile.load_LE
    if problem.spare_slots:
        return np.ones(len(load_LE))
    fair_L = load_LE.sum(1) / speed_W.sum()
    falling_LE = -np.sort(-load_LE, axis=1)
    cold_LE = np.cumsum(falling_LE[:, ::-1], axis=1)
    beside_LW = np.stack([cold_LE[:, n - 2] if n > 1 else np.zeros(len(load_LE)) for n in slots_W], axis=1)
    hottest_L = ((falling_LE[:, :1] + beside_LW) / speed_W).min(1)
    W = problem.ranks
    crowd_L = falling_LE[:, W - 1 : W + 1].sum(1) / speed_W.max() if load_LE.shape[1] > W else np.zeros(len(load_LE))
    slowest_L = np.maximum(hottest_L, crowd_L)
    return np.maximum(1.0, np.divide(slowest_L, fair_L, out=np.ones_like(fair_L), where=fair_L > 0))


# -- constraints ------------------------------------------------------------------------------------------------------


def _degree_and_total(problem: Problem) -> tuple[int, float | None]:
    """Most experts of a GPU, and the most ordered pairs on one GPU (``None``: every GPU holds ``degree`` exactly).

    With replicas each home sees one copy of each expert, and any number up to the slots on one GPU.
    """
    slots_W = np.sort(problem.slots_W)[::-1]
    degree = int(slots_W[0])
    if not problem.spare_slots and slots_W[-1] == degree:
        return degree, None
    used = np.diff(np.minimum(np.concatenate([[0], np.cumsum(slots_W)]), problem.shape.num_experts))
    return degree, float((used.astype(np.float64) ** 2).sum())


def _loads_in_caps(problem: Problem) -> np.ndarray:
    """float64 ``[L, E]``: load in units of the most one GPU may carry; 0 without a cap or with replicas.

    With replicas the cap holds for the sum over homes, not for the one copy of each expert that a home sees.
    """
    load_LE = problem.profile.load_LE
    most_L = layer_caps(problem) * load_LE.sum(1) * problem.topology.share_W.max()
    if problem.spare_slots or problem.cap is None:
        return np.zeros_like(load_LE)
    return np.divide(load_LE, most_L[:, None], out=np.zeros_like(load_LE), where=most_L[:, None] > 0)
