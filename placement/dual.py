"""Matching programs bounded by their dual: the engine of ``lower_bound.py``, which states the models.

Every point of the dual is a valid bound.  It is minimised by L-BFGS after smoothing (softplus for ``max(0, r)``, a
quadratic for singular values) at falling temperatures, and read without smoothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

_TEMPERATURES = (1.0, 0.3, 0.1, 0.03, 0.01)  # of the smoothed dual, in units of the mean entry of W
_CELL_EVALUATIONS_PER_SECOND = 1.2e7  # of the smoothed dual on one core
_SVD_CELLS_PER_SECOND = 1.6e6  # with the singular values, at 64 x 64; they grow with the side
_SPLIT_TEMPERATURES = (0.1, 0.03, 0.01)
_SHORT_MATCHING = 15  # iterations per temperature that prepare the split well enough


@dataclass(frozen=True, eq=False)
class Pair:
    """One matching problem: ``max <gain, Z>`` with the constraints stated in ``lower_bound.py``.

    ``row_load``/``column_load`` are loads in units of what one GPU may carry (``inf`` cap: zeros), so every weighted
    row and column sum is at most 1. ``total`` caps the sum of Z where group sizes differ, else ``None``: rows sum to
    ``degree`` exactly. ``forced`` marks entries that are 1 in every plan.
    """

    gain_EE: np.ndarray
    row_load_E: np.ndarray
    column_load_E: np.ndarray
    degree: int
    total: float | None
    groups: int
    forced_EE: np.ndarray | None = None


def effort(cells: int, side: int, seconds: float, spectral: bool) -> tuple[int, int]:
    """Iterations per temperature of the matching and of the split (0: no split), from the size of all pairs.

    They follow from the time allowed by fixed rates, not from a clock, so that a bound can be repeated.
    """
    per_second = _CELL_EVALUATIONS_PER_SECOND / max(1, cells)
    short = len(_TEMPERATURES) * _SHORT_MATCHING / per_second
    svd_per_second = _SVD_CELLS_PER_SECOND * 64 / side / max(1, cells)
    split = int(min(120, (seconds - short) * svd_per_second / len(_SPLIT_TEMPERATURES)))
    if spectral and split >= 8:
        return _SHORT_MATCHING, split
    return max(4, int(min(80, seconds * per_second / len(_TEMPERATURES)))), 0


def pair_bound(pair: Pair, matching: int, split: int) -> tuple[float, np.ndarray]:
    """The least exact dual value met, and the Z of the last smoothed program."""
    scale = pair.gain_EE.mean() or 1.0
    E = len(pair.gain_EE)
    gain_EE = pair.gain_EE / scale
    x = np.zeros(4 * E + 1)
    place = max(0, E - pair.degree)  # the K-th largest of a row is near the price of a place
    x[:E] = np.partition(gain_EE, place, axis=1)[:, place] / 2
    x[E : 2 * E] = np.maximum(np.partition(gain_EE - x[:E, None], place, axis=0)[place], 0)
    lower = np.zeros(x.size)
    if pair.total is None:
        lower[: 2 * E] = -np.inf  # prices of equalities
    best = _exact(pair, gain_EE, x, None)
    for temperature in _TEMPERATURES:
        x = _descend(_smooth_matching, x, lower, (pair, gain_EE, temperature), matching)
        best = min(best, _exact(pair, gain_EE, x, None))
    z_EE = _softened(x, pair, gain_EE, temperature)[2]
    if split:
        x = np.concatenate([x, np.zeros(E * E)])
        lower = np.concatenate([lower, np.full(E * E, -np.inf)])
        for temperature in _SPLIT_TEMPERATURES:
            x = _descend(_smooth_split, x, lower, (pair, gain_EE, temperature), split)
            prices, split_EE = x[: 4 * E + 1], x[4 * E + 1 :].reshape(E, E)
            best = min(best, _exact(pair, gain_EE, prices, split_EE))
        z_EE = _softened(prices, pair, gain_EE - split_EE, temperature)[2]
    return best * scale * (1 + 1e-12), z_EE


def _descend(function, x: np.ndarray, lower: np.ndarray, args: tuple, iterations: int) -> np.ndarray:
    bounds = np.stack([lower, np.full(x.size, np.inf)], axis=1)
    options = {"maxiter": iterations, "maxfun": iterations * 3 // 2}
    return minimize(function, x, args, "L-BFGS-B", jac=True, bounds=bounds, options=options).x


def _reduced(pair: Pair, gain_EE: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, float]:
    """Gain minus prices of row, column, their loads and the total; and what the prices cost."""
    E = len(gain_EE)
    row, column, row_load, column_load = x[: 4 * E].reshape(4, E)
    price_E = row_load[:, None] * pair.column_load_E + pair.row_load_E[:, None] * column_load
    reduced = gain_EE - row[:, None] - column - price_E
    cost = pair.degree * (row.sum() + column.sum()) + row_load.sum() + column_load.sum()
    if pair.total is not None:
        reduced = reduced - x[4 * E]
        cost += pair.total * x[4 * E]
    return reduced, cost


def _exact(pair: Pair, gain_EE: np.ndarray, x: np.ndarray, split_EE: np.ndarray | None) -> float:
    """The dual value, without smoothing: valid for any prices and any split."""
    spectral = 0.0
    if split_EE is not None:
        values = np.linalg.svd(_centred(split_EE), compute_uv=False)
        spectral = split_EE.sum() / pair.groups + pair.degree * values[: pair.groups - 1].sum()
        gain_EE = gain_EE - split_EE
    reduced, cost = _reduced(pair, gain_EE, x)
    taken = np.maximum(reduced, 0)
    if pair.forced_EE is not None:
        taken = np.where(pair.forced_EE, reduced, taken)
    return float(cost + taken.sum() + spectral)


def _smooth_matching(x: np.ndarray, pair: Pair, gain_EE: np.ndarray, temperature: float) -> tuple[float, np.ndarray]:
    value, gradient, _ = _softened(x, pair, gain_EE, temperature)
    return value, gradient


def _smooth_split(x: np.ndarray, pair: Pair, gain_EE: np.ndarray, temperature: float) -> tuple[float, np.ndarray]:
    """The matching of ``gain - M`` and the spectral bound of M, whose sum of top singular values
    ``max <s, sigma>, 0 <= s <= 1, sum(s) <= G - 1`` is smoothed by a quadratic in s."""
    prices, split_EE = x[: 4 * len(gain_EE) + 1], x[4 * len(gain_EE) + 1 :].reshape(gain_EE.shape)
    value, gradient, z_EE = _softened(prices, pair, gain_EE - split_EE, temperature)
    left, sigma, right = np.linalg.svd(_centred(split_EE), full_matrices=False)
    width = temperature * pair.degree
    taken = _capped_simplex(sigma / width, pair.groups - 1)
    value += split_EE.sum() / pair.groups + pair.degree * (taken @ sigma - width / 2 * (taken @ taken))
    slope_EE = 1 / pair.groups + pair.degree * _centred((left * taken) @ right) - z_EE
    return value, np.concatenate([gradient, slope_EE.ravel()])


def _softened(
    x: np.ndarray, pair: Pair, gain_EE: np.ndarray, temperature: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """The dual with ``max(0, r)`` as softplus; its gradient in the prices; the Z it stands for."""
    reduced, cost = _reduced(pair, gain_EE, x)
    scaled = reduced / temperature
    tail = np.exp(-np.abs(scaled))
    soft = np.maximum(scaled, 0) + np.log1p(tail)
    z_EE = np.where(scaled >= 0, 1, tail) / (1 + tail)
    if pair.forced_EE is not None:
        soft, z_EE = np.where(pair.forced_EE, scaled, soft), np.where(pair.forced_EE, 1.0, z_EE)
    gradient = np.concatenate(
        [
            pair.degree - z_EE.sum(1),
            pair.degree - z_EE.sum(0),
            1 - z_EE @ pair.column_load_E,
            1 - pair.row_load_E @ z_EE,
            [0.0 if pair.total is None else pair.total - z_EE.sum()],
        ]
    )
    return cost + temperature * soft.sum(), gradient, z_EE


def _centred(matrix_EE: np.ndarray) -> np.ndarray:
    """``P M P``: without row and column means."""
    rows = matrix_EE - matrix_EE.mean(0)
    return rows - rows.mean(1, keepdims=True)


def _capped_simplex(value: np.ndarray, total: float) -> np.ndarray:
    """The nearest point with ``0 <= s <= 1`` and ``sum(s) <= total``; ``value`` is not negative."""
    clipped = np.minimum(value, 1)
    if clipped.sum() <= total:
        return clipped
    shifts = np.sort(np.concatenate([value, value - 1]))  # the sum of the shifted is linear between these
    sums = np.clip(value - shifts[:, None], 0, 1).sum(1)
    return np.clip(value - np.interp(-total, -sums, shifts), 0, 1)
