"""What solvers need of a trace, in arrays whose size does not grow with its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from placement.errors import UserError
from placement.plan import MoEShape
from placement.trace import Trace

_CHUNK_PAIRS = 1 << 21  # pairs counted at a time: 16 MiB of int64 keys, which stays near the cache


@dataclass(frozen=True, eq=False)
class Profile:
    """Counts of one trace, or of a weighted mix of traces.

    Args:
        shape: the model's MoE shape.
        tokens: T (a weighted mix may make it fractional).
        load_LE: float64, (token, choice) pairs per expert; a layer sums to ``T * K``.
        transitions_LEE: float64 ``[L - 1, E, E]``: ``[l, e, f]`` counts the tokens that use e at layer l and f at
            layer l + 1 (all K * K pairs of a token); ``None`` where only a load table is known.
        coactivation_LEE: float64 ``[L, E, E]``: tokens that use both experts in one layer (the diagonal is the load);
            ``None`` unless asked for.
    """

    shape: MoEShape
    tokens: float
    load_LE: np.ndarray
    transitions_LEE: np.ndarray | None = None
    coactivation_LEE: np.ndarray | None = None

    def __post_init__(self) -> None:
        want = (self.shape.num_layers, self.shape.num_experts)
        if self.load_LE.shape != want:
            raise UserError(f"load table has shape {self.load_LE.shape}, the model has [layers, experts] = {want}")
        if not (np.isfinite(self.load_LE) & (self.load_LE >= 0)).all():
            raise UserError("load table has negative or non-finite entries; give counts of tokens")

    def require_transitions(self) -> np.ndarray:
        if self.transitions_LEE is None:
            raise UserError(
                "only expert loads are known, no transitions of layers; solve for compute_tail or give a trace"
            )
        return self.transitions_LEE


def profile_traces(traces: Iterable[Trace], *, coactivation: bool = False) -> Profile:
    """Count a stream of traces of one model (shards, or domains weighted by their tokens), one in memory at a time."""
    total: Profile | None = None
    for trace in traces:
        part = profile_trace(trace, coactivation=coactivation)
        total = part if total is None else mix([total, part], [1.0, 1.0])
    if total is None:
        raise UserError("no traces to profile; give at least one")
    return total


def profile_trace(trace: Trace, *, coactivation: bool = False) -> Profile:
    """Count one trace."""
    ids, E = trace.expert_ids_TLK, trace.shape.num_experts
    L = trace.shape.num_layers
    return Profile(
        trace.shape,
        float(trace.num_tokens),
        trace.load_LE().astype(np.float64),
        _stack([count_pairs(ids[:, layer], ids[:, layer + 1], E) for layer in range(L - 1)], E),
        _stack([count_pairs(ids[:, layer], ids[:, layer], E) for layer in range(L)], E) if coactivation else None,
    )


def mix(profiles: list[Profile], weights: list[float]) -> Profile:
    """The weighted sum of profiles of one model; parts that one of them lacks are left out."""
    first = profiles[0]
    for other in profiles[1:]:
        first.shape.require_same(other.shape, "one profile", "another profile")

    def add(name: str) -> np.ndarray | None:
        parts = [getattr(p, name) for p in profiles]
        if any(part is None for part in parts):
            return None
        return sum(weight * part for weight, part in zip(weights, parts))

    return replace(
        first,
        tokens=sum(weight * p.tokens for weight, p in zip(weights, profiles)),
        load_LE=add("load_LE"),
        transitions_LEE=add("transitions_LEE"),
        coactivation_LEE=add("coactivation_LEE"),
    )


def count_pairs(first_TK: np.ndarray, second_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """float64 ``[E, E]``: how often (an expert of ``first``, an expert of ``second``) occur in one row."""
    E = num_experts
    counts = np.zeros(E * E, np.int64)
    step = max(1, _CHUNK_PAIRS // max(1, first_TK.shape[1] * second_TK.shape[1]))
    for start in range(0, len(first_TK), step):
        high = first_TK[start : start + step].astype(np.intp) * E
        low = second_TK[start : start + step].astype(np.intp)
        counts += np.bincount((high[:, :, None] + low[:, None, :]).ravel(), minlength=E * E)
    return counts.reshape(E, E).astype(np.float64)


def _stack(parts: list[np.ndarray], num_experts: int) -> np.ndarray:
    return np.stack(parts) if parts else np.zeros((0, num_experts, num_experts))
