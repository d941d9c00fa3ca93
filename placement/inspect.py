"""What a recording looks like before anything is solved: skew, dependence between layers, domains, repeats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from placement import stats
from placement.errors import UserError
from placement.plan import MoEShape
from placement.trace import Trace


@dataclass(frozen=True, eq=False)
class Inspection:
    """Figures of one recording; per-layer arrays are float64 ``[L]``, between layers ``[L - 1]``.

    ``information``/``shuffled``: mutual information of consecutive layers in nats, and the same for shuffled tokens.
    ``duplicates``: tokens whose path through all layers is also another token's.
    """

    source: str
    shape: MoEShape
    tokens: int
    sequences: int
    load_LE: np.ndarray
    duplicates: int
    information: np.ndarray
    shuffled: np.ndarray

    def layers(self) -> list[dict]:
        """One dict per MoE layer, for tables and JSON."""
        figures = zip(stats.max_over_mean(self.load_LE), stats.gini(self.load_LE), stats.entropy_share(self.load_LE))
        rows = []
        for index, (peak, gini, entropy) in enumerate(figures):
            linked = index < len(self.information)
            rows.append(
                {
                    "layer": self.shape.moe_layers[index],
                    "max_over_mean": float(peak),
                    "gini": float(gini),
                    "entropy_share": float(entropy),
                    "unused_experts": int((self.load_LE[index] == 0).sum()),
                    "information_to_next": float(self.information[index]) if linked else None,
                    "information_shuffled": float(self.shuffled[index]) if linked else None,
                }
            )
        return rows

    def to_dict(self) -> dict:
        return {
            "source": self.source,
            "model": self.shape.name,
            "num_experts": self.shape.num_experts,
            "top_k": self.shape.top_k,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "duplicate_paths": self.duplicates,
            "layers": self.layers(),
        }


def inspect_stream(traces: Iterable[Trace], seed: int = 0) -> Inspection:
    """Figures of a recording read piece by piece; memory grows by 8 bytes per token.

    Mutual information is taken from the first piece (at most 65,536 tokens), everything else from all tokens.
    """
    first, load_LE, tokens, sequences, hashes = None, 0, 0, 0, []
    information = shuffled = np.zeros(0)
    for trace in traces:
        if first is None:
            first = trace
            information, shuffled = stats.adjacent_information(trace, seed)
        load_LE = load_LE + trace.load_LE()
        tokens += trace.num_tokens
        sequences += len(trace.seq_lens)
        hashes.append(stats.path_hashes(trace.expert_ids_TLK))
    if first is None:
        raise UserError("no tokens to inspect; give a recording with at least one")
    duplicates = stats.count_duplicates(np.concatenate(hashes))
    return Inspection(first.source, first.shape, tokens, sequences, load_LE, duplicates, information, shuffled)


def similarity(inspections: list[Inspection]) -> np.ndarray:
    """float64 ``[domains, domains]``: cosine of per-layer loads, averaged over layers."""
    first = inspections[0]
    for other in inspections[1:]:
        first.shape.require_same(other.shape, first.source, other.source)
    return stats.domain_cosine([i.load_LE.astype(np.float64) for i in inspections])
