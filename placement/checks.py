"""Is this recording what it claims to be?  Findings name the place; errors refuse the trace, warnings do not.

Ids out of range, repeated ids and cut files are refused earlier, when a ``Trace`` is made. What remains are captures
that have the right shape and the wrong content: a hook that did not run, warm-up passes, layers from different tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from placement import stats
from placement.errors import UserError
from placement.trace import Trace

MIN_RUN = 16  # identical consecutive paths from here on are padding or warm-up, not text
MIN_TOKENS = 64  # below, a constant layer or a low mutual information can be chance


@dataclass(frozen=True)
class Finding:
    """``severity`` is "error" or "warning"; ``message`` names the place and what to do."""

    severity: str
    check: str
    message: str


def check_trace(trace: Trace, seed: int = 0) -> list[Finding]:
    """Everything wrong or suspicious about a trace, errors first."""
    if trace.num_tokens and trace.shape.top_k == trace.shape.num_experts:
        return []  # every token chooses every expert: nothing to tell apart
    found = [*_constant(trace), *_repeated_paths(trace), *_unused_layers(trace), *_not_aligned(trace, seed)]
    return sorted(found, key=lambda f: f.severity != "error")


def require_sound(trace: Trace, note: Callable[[str], None], seed: int = 0) -> None:
    """Raise ``UserError`` for the first error, pass every warning to ``note``."""
    for finding in check_trace(trace, seed):
        if finding.severity == "error":
            raise UserError(finding.message)
        note(finding.message)


def _constant(trace: Trace) -> list[Finding]:
    """A capture where tokens do not differ: no hook ran, or it wrote one buffer again and again."""
    ids_TLK, source = trace.expert_ids_TLK, trace.source
    if not len(ids_TLK):
        return [Finding("error", "empty", f"{source} has no tokens; record while requests are served")]
    if len(ids_TLK) < 2:
        return []
    same_L = (np.sort(ids_TLK, -1) == np.sort(ids_TLK[:1], -1)).all((0, 2))
    if same_L.all():
        return [
            Finding(
                "error",
                "constant",
                f"{source}: all {len(ids_TLK)} tokens chose the experts {ids_TLK[0, 0].tolist()} in layer 0 and one"
                " path through all layers; the capture did not run (a fused kernel may bypass its hook)",
            )
        ]
    if len(ids_TLK) < MIN_TOKENS:
        return []
    return [
        Finding(
            "error",
            "constant",
            f"{source}: layer {trace.shape.moe_layers[layer]} (row {layer}) chose {ids_TLK[0, layer].tolist()} for"
            " every token; that layer was not captured, record it again",
        )
        for layer in np.flatnonzero(same_L)
    ]


def _repeated_paths(trace: Trace) -> list[Finding]:
    """Long runs of one path: at the start they are warm-up passes, elsewhere padding."""
    hash_T = stats.path_hashes(trace.expert_ids_TLK)
    edges = np.flatnonzero(np.concatenate([[True], hash_T[1:] != hash_T[:-1], [True]]))
    lengths = np.diff(edges)
    long_runs = np.flatnonzero(lengths >= MIN_RUN)
    if not len(long_runs) or len(lengths) == 1:  # one run in all is a constant capture, reported as such
        return []
    first = long_runs[0]
    start, stop, tokens = edges[first], edges[first + 1], int(lengths[long_runs].sum())
    kind = "warm-up" if start == 0 else "padding"
    return [
        Finding(
            "warning",
            kind,
            f"{trace.source}: tokens {start} to {stop - 1} repeat one path ({tokens} in {len(long_runs)} such runs);"
            f" they look like {kind} and distort the loads, drop them before solving",
        )
    ]


def _unused_layers(trace: Trace) -> list[Finding]:
    """A layer that never uses most experts, where others use them all: another model's ids, or half a capture."""
    used_L = (trace.load_LE() > 0).sum(-1)
    usual = int(np.median(used_L))
    return [
        Finding(
            "warning",
            "unused-experts",
            f"{trace.source}: layer {trace.shape.moe_layers[layer]} (row {layer}) uses {used_L[layer]} of"
            f" {trace.shape.num_experts} experts, other layers {usual}; was it recorded like them?",
        )
        for layer in np.flatnonzero(used_L * 4 < usual)
    ]


def _not_aligned(trace: Trace, seed: int) -> list[Finding]:
    """Consecutive layers of the same tokens depend on each other; rows of different tokens do not."""
    if trace.num_tokens < MIN_TOKENS or trace.shape.num_layers < 2:
        return []
    real, shuffled = stats.adjacent_information(trace, seed, limit=16384)
    loose, layers = np.flatnonzero(real <= 1.2 * shuffled), trace.shape.moe_layers
    if not len(loose):
        return []
    i, more = loose[0], f" (and {len(loose) - 1} more pairs)" if len(loose) > 1 else ""
    return [
        Finding(
            "warning",
            "not-aligned",
            f"{trace.source}: layers {layers[i]} and {layers[i + 1]}{more} share {real[i]:.4f} nat of information,"
            f" shuffled tokens {shuffled[i]:.4f}: their rows look like different tokens (or random routing),"
            " affinity between them is noise",
        )
    ]
