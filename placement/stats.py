"""Statistics of routing: load skew, dependence between layers, repeated paths, similarity of domains."""

from __future__ import annotations

import numpy as np

from placement.trace import Trace

_BLOCK = 8192  # tokens per one-hot block: bounds the temporary at _BLOCK * E float32


def max_over_mean(load_LE: np.ndarray) -> np.ndarray:
    """float64 ``[L]``: the busiest expert's load over the mean; 1 is even (or empty), E is all on one."""
    mean_L = load_LE.mean(-1)
    return np.where(mean_L > 0, load_LE.max(-1) / np.maximum(mean_L, 1e-300), 1.0)


def gini(load_LE: np.ndarray) -> np.ndarray:
    """float64 ``[L]``: Gini coefficient of the experts' loads; 0 is even, ``1 - 1/E`` is all on one expert."""
    E = load_LE.shape[-1]
    ordered_LE = np.sort(load_LE.astype(np.float64), axis=-1)
    total_L = ordered_LE.sum(-1)
    rank_E = np.arange(1, E + 1)
    return np.where(total_L > 0, 2 * (ordered_LE @ rank_E) / np.maximum(E * total_L, 1e-300) - (E + 1) / E, 0.0)


def entropy_share(load_LE: np.ndarray) -> np.ndarray:
    """float64 ``[L]``: entropy of the load over ``log E``; 1 is even, 0 is all on one expert (also for E = 1)."""
    share_LE = load_LE / np.maximum(load_LE.sum(-1, keepdims=True), 1)
    plogp_LE = share_LE * np.log(np.where(share_LE > 0, share_LE, 1.0))
    return -plogp_LE.sum(-1) / max(np.log(load_LE.shape[-1]), 1e-300)


def joint_counts(a_TK: np.ndarray, b_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """float64 ``[E, E]``: over tokens, how often expert e of ``a`` and expert e' of ``b`` are chosen together.

    Sums to ``T * K * K``: every choice of one layer is paired with every choice of the other.
    """
    total_EE = np.zeros((num_experts, num_experts))
    for start in range(0, len(a_TK), _BLOCK):
        rows = slice(start, start + _BLOCK)
        total_EE += one_hot(a_TK[rows], num_experts).T @ one_hot(b_TK[rows], num_experts)
    return total_EE


def one_hot(ids_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """float32 ``[T, E]``: 1 where the token chose the expert."""
    hot_TE = np.zeros((len(ids_TK), num_experts), np.float32)
    np.put_along_axis(hot_TE, ids_TK.astype(np.int64), 1.0, axis=1)
    return hot_TE


def mutual_information(joint_EE: np.ndarray) -> float:
    """Mutual information in nats of a table of joint counts; 0 for an empty table.

    ``sum p(e, e') log(p(e, e') / (p(e) p(e')))``, plug-in estimate: biased upward by about ``(E - 1)^2 / 2N``, which
    is why it is read beside the same figure for shuffled tokens.
    """
    total = joint_EE.sum()
    if total <= 0:
        return 0.0
    p_EE = joint_EE / total
    outer_EE = p_EE.sum(1, keepdims=True) * p_EE.sum(0, keepdims=True)
    seen = p_EE > 0
    return float((p_EE[seen] * np.log(p_EE[seen] / outer_EE[seen])).sum())


def adjacent_information(trace: Trace, seed: int = 0, limit: int = 65536) -> tuple[np.ndarray, np.ndarray]:
    """(real, shuffled) mutual information between consecutive MoE layers, float64 ``[L - 1]`` each, in nats.

    ``shuffled`` pairs each token with another token's next layer: what independent layers of the same loads would
    show at this number of tokens. Only the first ``limit`` tokens are used.
    """
    ids_TLK = trace.expert_ids_TLK[:limit]
    T, L, _ = ids_TLK.shape
    E = trace.shape.num_experts
    other = np.random.default_rng(seed).permutation(T)
    real, shuffled = np.zeros(max(L - 1, 0)), np.zeros(max(L - 1, 0))
    for layer in range(L - 1):
        here, after = ids_TLK[:, layer], ids_TLK[:, layer + 1]
        real[layer] = mutual_information(joint_counts(here, after, E))
        shuffled[layer] = mutual_information(joint_counts(here, after[other], E))
    return real, shuffled


def path_hashes(ids_TLK: np.ndarray, seed: int = 0) -> np.ndarray:
    """uint64 ``[T]``: equal for tokens that chose the same experts in every layer (in any order of the choices).

    A random linear hash modulo 2^64 of the set of (layer, expert): two different paths meet with odds of 2^-40 or
    less at a million tokens, so counts made from it are exact in practice.
    """
    T, L, _ = ids_TLK.shape
    table_LE = np.random.default_rng(seed).integers(0, 2**64, (L, int(ids_TLK.max(initial=0)) + 1), dtype=np.uint64)
    total_T = np.zeros(T, np.uint64)
    for layer in range(L):
        total_T += table_LE[layer][ids_TLK[:, layer]].sum(-1, dtype=np.uint64)
    return total_T


def count_duplicates(hash_T: np.ndarray) -> int:
    """How many tokens share their whole path with another token."""
    counts = np.unique(hash_T, return_counts=True)[1]
    return int(counts[counts > 1].sum())


def domain_cosine(loads: list[np.ndarray]) -> np.ndarray:
    """float64 ``[domains, domains]``: cosine of the load vectors ``[L, E]`` of two domains, averaged over layers."""
    unit = [load / np.maximum(np.linalg.norm(load, axis=-1, keepdims=True), 1e-300) for load in loads]
    return np.array([[float((a * b).sum(-1).mean()) for b in unit] for a in unit])
