"""Predicted step times and bytes of a plan over a trace: steps are formed as a scheduler would, then costed one by one.

Every rank works through the sequences it is home to, in trace order, with an equal share of the step's token budget, so
steps are as uneven as the homes and the moments make them; an average over the whole trace hides that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from placement import cost
from placement.errors import UserError
from placement.plan import Plan
from placement.topology import Topology, uniform
from placement.trace import Trace


@dataclass(frozen=True, eq=False)
class Simulation:
    """Per step: tokens int64, seconds, bytes, compute_tail float64, all ``[steps]``."""

    tokens: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray
    compute_tail: np.ndarray

    def summary(self) -> dict[str, float]:
        """Totals and quantiles: ``tokens_per_second`` is all tokens over all seconds."""
        total = float(self.seconds.sum())
        return {
            "steps": len(self.tokens),
            "tokens": int(self.tokens.sum()),
            "seconds": total,
            "tokens_per_second": float(self.tokens.sum()) / total if total else 0.0,
            "step_seconds_mean": float(self.seconds.mean()),
            "step_seconds_p50": float(np.quantile(self.seconds, 0.5)),
            "step_seconds_p99": float(np.quantile(self.seconds, 0.99)),
            "step_bytes_mean": float(self.bytes.mean()),
            "compute_tail_mean": float(self.compute_tail.mean()),
            "compute_tail_p99": float(np.quantile(self.compute_tail, 0.99)),
        }

    def to_dict(self) -> dict:
        steps = {name: getattr(self, name).tolist() for name in ("tokens", "seconds", "bytes", "compute_tail")}
        return {**self.summary(), "per_step": steps}


def simulate(
    plan: Plan,
    trace: Trace,
    topology: Topology | None = None,
    *,
    homes: np.ndarray | None = None,
    combine: str = "exact",
    calibration: cost.Calibration | None = None,
) -> Simulation:
    """Run the trace through ``plan``. ``homes`` int ``[sequences]``: ``None`` is round-robin in trace order."""
    calibration = calibration or cost.Calibration()
    topology = topology or uniform(plan.ranks)
    if not trace.num_tokens:
        raise UserError(f"{trace.source} has no tokens to simulate; give a trace with at least one")
    sequences = len(trace.seq_lens)
    homes = cost.round_robin_homes(sequences, plan.ranks) if homes is None else cost.checked_homes(homes, plan, trace)
    budget = int(calibration.step_tokens // plan.ranks)
    if budget < 1:
        raise UserError(f"step_tokens {calibration.step_tokens:g} are under one per rank of {plan.ranks}; raise it")
    found = []
    for rows, home_T in _steps(trace, homes, plan.ranks, budget):
        step = replace(
            trace,
            expert_ids_TLK=trace.expert_ids_TLK[rows],
            seq_lens=np.ones(len(rows), np.int64),
            token_ids_T=None,
            expert_weights_TLK=None,
            homes=None,
        )
        priced = replace(calibration, step_tokens=float(len(rows)))
        costs = cost.evaluate(plan, step, topology, homes=home_T, combine=combine, calibration=priced)
        found.append((len(rows), costs.step_seconds, costs.step_bytes, costs.compute_tail))
    tokens, seconds, moved, tail = (np.array(column) for column in zip(*found))
    return Simulation(tokens, seconds, moved, tail)


def _steps(trace: Trace, homes: np.ndarray, ranks: int, budget: int):
    """(token rows, home of each) of every step: the next ``budget`` tokens of each rank's sequences."""
    home_T = np.repeat(homes, trace.seq_lens)
    queues = [np.flatnonzero(home_T == rank) for rank in range(ranks)]
    for start in range(0, max(len(q) for q in queues), budget):
        rows = np.concatenate([q[start : start + budget] for q in queues])
        yield rows, home_T[rows]
