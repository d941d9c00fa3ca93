"""The one cost function: what a plan costs on recorded tokens.

Every solver, test, report and the runtime's own metrics take their figures from here, so that they mean the same.
All figures weigh tokens (not requests).  Per MoE layer a token's row goes once to each distinct remote rank that
serves one of its K experts, and comes back: once per such rank (``combine="reduce"``) or once per remote choice
(``combine="exact"``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from placement.errors import UserError
from placement.plan import Plan
from placement.profile import Profile
from placement.textfiles import parse_json, write_whole
from placement.topology import Topology, uniform
from placement.trace import Trace

CALIBRATION_FORMAT = "epmoe-calibration/1"
_CHUNK_CELLS = 1 << 21  # (token, layer, rank) cells held at a time


@dataclass(frozen=True)
class Calibration:
    """What turns counts into bytes and seconds; measured by a benchmark, read from a JSON file with these keys.

    ``dispatch_row_bytes``/``combine_row_bytes``: one row on the wire. ``pair_seconds``: one (token, choice) through
    one expert on a GPU of speed 1. ``layer_seconds``: the rest of a layer. ``step_tokens``: tokens of a step over all
    ranks. ``overlap``: share of the exchange that other work hides, 0 to 1.
    """

    dispatch_row_bytes: float = 4096.0
    combine_row_bytes: float = 4096.0
    pair_seconds: float = 5e-8
    layer_seconds: float = 1e-4
    step_tokens: float = 8192.0
    overlap: float = 0.0

    @staticmethod
    def load(path: str | Path) -> Calibration:
        known = {f.name for f in fields(Calibration)}
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot read calibration {path}: {reason}; give a file that a benchmark wrote") from None
        raw = parse_json(text, str(path), f"expected an {CALIBRATION_FORMAT} file")
        if not isinstance(raw, dict) or raw.get("format") != CALIBRATION_FORMAT or raw.keys() != known | {"format"}:
            raise UserError(f"{path} must be an object with format {CALIBRATION_FORMAT!r} and the keys {sorted(known)}")
        numbers = [raw[name] for name in known]
        if not all(isinstance(x, (int, float)) and 0 <= x < float("inf") for x in numbers) or raw["overlap"] > 1:
            raise UserError(f"{path}: every calibration value must be a number of at least 0, overlap at most 1")
        return Calibration(**{name: float(raw[name]) for name in known})

    def save(self, path: str | Path) -> None:
        write_whole(path, json.dumps({"format": CALIBRATION_FORMAT, **asdict(self)}) + "\n")


@dataclass(frozen=True, eq=False)
class Costs:
    """Figures of one plan on one trace.

    Args:
        compute_tail: per layer, the fullest rank's load / speed over the balanced one's; mean over layers.
        compute_tail_worst_layer: the largest of those.
        compute_tail_lp: the same mean where replicas are split as well as possible (LPLB's linear program, per
            layer over all tokens); equals ``compute_tail`` without replicas.
        dispatch_rows, combine_rows: rows sent to and back from other ranks, per token and layer.
        fan_out: distinct ranks (home included, if it serves) per token and layer.
        link_tail: seconds of the heaviest link (bytes there and back / bandwidth), mean over layers, of one step.
        locality: share of the K * K expert pairs of consecutive layers that one rank serves (1 where L = 1).
        home_tail: tokens of the fullest home rank over the mean.
        step_bytes, step_seconds: predicted for one step of the calibration.
        tokens: T the figures were taken on.
        load_LW: float64, (token, choice) pairs each rank serves.
        traffic_WW: float64, dispatched rows from home (row) to serving rank (column), all layers; diagonal: local.
    """

    compute_tail: float
    compute_tail_worst_layer: float
    compute_tail_lp: float
    dispatch_rows: float
    combine_rows: float
    fan_out: float
    link_tail: float
    locality: float
    home_tail: float
    step_bytes: float
    step_seconds: float
    tokens: int
    load_LW: np.ndarray
    traffic_WW: np.ndarray

    def to_dict(self, arrays: bool = True) -> dict:
        """Plain numbers and lists for JSON; without ``arrays`` only the scalars."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        lists = {k: v.tolist() for k, v in values.items() if isinstance(v, np.ndarray)}
        scalars = {k: v for k, v in values.items() if k not in lists}
        return scalars | lists if arrays else scalars


def evaluate(
    plan: Plan,
    trace: Trace,
    topology: Topology | None = None,
    *,
    homes: np.ndarray | None = None,
    combine: str = "exact",
    calibration: Calibration | None = None,
) -> Costs:
    """All figures of ``plan`` on ``trace``.

    Args:
        topology: defaults to equal GPUs and links.
        homes: int ``[sequences]``, the home rank of each sequence; ``None`` is round-robin in trace order.
    """
    plan.shape.require_same(trace.shape, "the plan", trace.source)
    topology = uniform(plan.ranks) if topology is None else topology
    if topology.ranks != plan.ranks:
        raise UserError(f"the plan has {plan.ranks} ranks, the topology {topology.ranks} GPUs; solve for this topology")
    if combine not in ("exact", "reduce"):
        raise UserError(f"combine is {combine!r}; it is 'exact' or 'reduce'")
    homes = round_robin_homes(len(trace.seq_lens), plan.ranks) if homes is None else checked_homes(homes, plan, trace)
    counts = _count(plan, trace, homes)
    return _costs(plan, trace, topology, counts, combine, calibration or Calibration())


# -- figures from arrays --------------------------------------------------------------------------------------------


def round_robin_homes(sequences: int, ranks: int) -> np.ndarray:
    """int64 ``[sequences]``: sequence i lives on rank ``i % W``."""
    return np.arange(sequences) % ranks


def compute_tail_L(load_LW: np.ndarray, speed_W: np.ndarray | None = None) -> np.ndarray:
    """float64 ``[L]``: time of the fullest rank over that of a split by speed; at least 1, 1 if unloaded."""
    load_LW = np.asarray(load_LW, np.float64)
    speed_W = np.ones(load_LW.shape[-1]) if speed_W is None else speed_W
    fair_L = load_LW.sum(-1) / speed_W.sum()
    slowest_L = (load_LW / speed_W).max(-1)
    return np.divide(slowest_L, fair_L, out=np.ones_like(fair_L), where=fair_L > 0)


def rank_load_LW(load_LE: np.ndarray, plan: Plan, home_share_W: np.ndarray | None = None) -> np.ndarray:
    """float64 ``[L, W]``: load per rank from load per expert by the plan's replica rule.

    ``home_share_W`` is each home's share of the tokens (equal if not given): every home is taken to use experts alike.
    """
    share_W = np.full(plan.ranks, 1 / plan.ranks) if home_share_W is None else np.asarray(home_share_W)
    L, E = plan.shape.num_layers, plan.shape.num_experts
    if (plan.copies_LE == 1).all():
        key_LE = plan.expert_rank_LE + np.arange(L)[:, None] * plan.ranks
        return np.bincount(key_LE.ravel(), np.asarray(load_LE).ravel(), L * plan.ranks).reshape(L, plan.ranks)
    key_WLE = plan.serve_rank_WLE + (np.arange(L) * plan.ranks)[:, None]
    weight_WLE = share_W[:, None, None] * np.broadcast_to(load_LE, (L, E))
    return np.bincount(key_WLE.ravel(), weight_WLE.ravel(), L * plan.ranks).reshape(L, plan.ranks)


def equal_split_LW(load_LE: np.ndarray, plan: Plan) -> np.ndarray:
    """float64 ``[L, W]``: load per rank if the copies of an expert shared its tokens evenly (what EPLB assumes)."""
    has_LEW = plan.copy_slot_LEW >= 0
    return np.einsum("le,lew->lw", load_LE / plan.copies_LE, has_LEW)


def compute_tail_from_load(load_LE: np.ndarray, plan: Plan, speed_W: np.ndarray | None = None) -> tuple[float, float]:
    """(mean over layers, worst layer) of the compute tail, from load per expert."""
    tail_L = compute_tail_L(rank_load_LW(load_LE, plan), speed_W)
    return float(tail_L.mean()), float(tail_L.max())


def locality_from_profile(plan: Plan, profile: Profile) -> float:
    """Locality of a plan without replicas, exact from transition counts."""
    assert (plan.copies_LE == 1).all(), "with replicas locality depends on homes: use evaluate"
    transitions_LEE, rank_LE = profile.require_transitions(), plan.expert_rank_LE
    total = transitions_LEE.sum()
    same_LEE = rank_LE[:-1, :, None] == rank_LE[1:, None, :]
    return float(transitions_LEE[same_LEE].sum() / total) if total else 1.0


def best_split_tail_L(load_LE: np.ndarray, plan: Plan, speed_W: np.ndarray | None = None) -> np.ndarray:
    """float64 ``[L]``: compute tail where each layer's load is split over replicas as well as possible.

    LPLB's program, per layer: ``min t`` with ``sum_e x[e, w] <= t * speed_w`` per rank and ``sum_w x[e, w] = load_e``
    per expert, ``x >= 0`` on ranks that hold a copy.
    """
    speed_W = np.ones(plan.ranks) if speed_W is None else speed_W
    has_LEW = plan.copy_slot_LEW >= 0
    tail = np.ones(len(load_LE))
    for layer, load_E in enumerate(np.asarray(load_LE, np.float64)):
        if load_E.sum() > 0:
            tail[layer] = _best_split(load_E / load_E.sum(), has_LEW[layer], speed_W) * speed_W.sum()
    return tail


def _best_split(load_E: np.ndarray, has_EW: np.ndarray, speed_W: np.ndarray) -> float:
    from scipy import sparse
    from scipy.optimize import linprog

    W = len(speed_W)
    single_E = has_EW.sum(1) == 1
    fixed_W = load_E[single_E] @ has_EW[single_E]
    if single_E.all():
        return float((fixed_W / speed_W).max())
    expert_X, rank_X = np.nonzero(has_EW & ~single_E[:, None])
    column_X = np.arange(1, len(expert_X) + 1)  # column 0 is t
    rows = np.concatenate([rank_X, np.arange(W)])
    columns = np.concatenate([column_X, np.zeros(W, np.int64)])
    values = np.concatenate([np.ones(len(expert_X)), -speed_W])
    per_rank = sparse.coo_array((values, (rows, columns)), shape=(W, len(expert_X) + 1))
    _, row_X = np.unique(expert_X, return_inverse=True)
    per_expert = sparse.coo_array((np.ones(len(row_X)), (row_X, column_X)), shape=(row_X.max() + 1, len(expert_X) + 1))
    cost = np.zeros(len(expert_X) + 1)
    cost[0] = 1
    result = linprog(cost, per_rank.tocsr(), -fixed_W, per_expert.tocsr(), load_E[~single_E], method="highs")
    assert result.status == 0, f"the split program has no solution: {result.message}"
    return float(result.fun)


# -- counting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Counts:
    """Rows (distinct ranks) and pairs (choices) from home to serving rank, and tokens per home, all float64."""

    rows_LWW: np.ndarray
    pairs_LWW: np.ndarray
    local_transitions: float
    tokens_W: np.ndarray


def _count(plan: Plan, trace: Trace, homes: np.ndarray) -> _Counts:
    T, (L, K), W = trace.num_tokens, trace.expert_ids_TLK.shape[1:], plan.ranks
    home_T = np.repeat(homes, trace.seq_lens)
    serve_WLE = plan.serve_rank_WLE
    layer_L = np.arange(L)[:, None]
    rows, pairs, local = np.zeros((W, L * W)), np.zeros((W, L * W)), 0.0
    step = max(1, _CHUNK_CELLS // (L * max(W, K)))
    for start in range(0, T, step):
        ids_TLK = trace.expert_ids_TLK[start : start + step].astype(np.intp)
        home = home_T[start : start + step]
        rank_TLK = serve_WLE[home[:, None, None], layer_L, ids_TLK]
        n = len(ids_TLK)
        cell_TL1 = (np.arange(n)[:, None] * L + np.arange(L))[..., None] * W
        count_TLW = np.bincount((cell_TL1 + rank_TLK).ravel(), minlength=n * L * W).reshape(n, L, W).astype(np.float32)
        is_home_WT = (home == np.arange(W)[:, None]).astype(np.float32)
        rows += is_home_WT @ (count_TLW > 0).reshape(n, -1).astype(np.float32)
        pairs += is_home_WT @ count_TLW.reshape(n, -1)
        local += float(np.einsum("tlw,tlw->", count_TLW[:, :-1], count_TLW[:, 1:], dtype=np.float64))
    by_layer = [np.ascontiguousarray(x.reshape(W, L, W).transpose(1, 0, 2)) for x in (rows, pairs)]
    return _Counts(*by_layer, local, np.bincount(home_T, minlength=W).astype(np.float64))


def _costs(
    plan: Plan, trace: Trace, topology: Topology, counts: _Counts, combine: str, calibration: Calibration
) -> Costs:
    T, (L, K), W = trace.num_tokens, trace.expert_ids_TLK.shape[1:], plan.ranks
    cells = max(1, T * L)
    off_WW = ~np.eye(W, dtype=bool)
    load_LW = counts.pairs_LWW.sum(1)
    tail_L = compute_tail_L(load_LW, topology.speed_W)
    replicated = bool((plan.copies_LE > 1).any())
    tail_lp = best_split_tail_L(trace.load_LE(), plan, topology.speed_W).mean() if replicated else tail_L.mean()
    back_LWW = (counts.pairs_LWW if combine == "exact" else counts.rows_LWW).transpose(0, 2, 1)
    per_step = calibration.step_tokens / max(1, T)
    there = counts.rows_LWW * off_WW * (per_step * calibration.dispatch_row_bytes)
    back = back_LWW * off_WW * (per_step * calibration.combine_row_bytes)
    seconds = _step_seconds(load_LW * per_step, there, back, topology, calibration)
    transitions = T * (L - 1) * K * K
    return Costs(
        compute_tail=float(tail_L.mean()),
        compute_tail_worst_layer=float(tail_L.max()),
        compute_tail_lp=float(tail_lp),
        dispatch_rows=float(counts.rows_LWW[:, off_WW].sum() / cells),
        combine_rows=float(back_LWW[:, off_WW].sum() / cells),
        fan_out=float(counts.rows_LWW.sum() / cells),
        link_tail=float(((there + back) / _off_bandwidth(topology)).max((1, 2)).mean()),
        locality=counts.local_transitions / transitions if transitions else 1.0,
        home_tail=float(compute_tail_L(counts.tokens_W[None])[0]),
        step_bytes=float(there.sum() + back.sum()),
        step_seconds=seconds,
        tokens=T,
        load_LW=load_LW,
        traffic_WW=counts.rows_LWW.sum(0),
    )


def _off_bandwidth(topology: Topology) -> np.ndarray:
    return np.where(np.eye(topology.ranks, dtype=bool), np.inf, topology.bandwidth_WW)


def _step_seconds(
    load_LW: np.ndarray, there_LWW: np.ndarray, back_LWW: np.ndarray, topology: Topology, calibration: Calibration
) -> float:
    """Sum over layers of: the rest, the slowest rank's experts, and the slowest link there and then back."""
    latency_WW = np.where(np.eye(topology.ranks, dtype=bool), 0, topology.latency_WW)
    wire_L = sum((x / _off_bandwidth(topology) + latency_WW).max((1, 2)) for x in (there_LWW, back_LWW))
    compute_L = (load_LW / topology.speed_W).max(1) * calibration.pair_seconds
    return float((calibration.layer_seconds + compute_L + (1 - calibration.overlap) * wire_L).sum())


def checked_homes(homes: np.ndarray, plan: Plan, trace: Trace) -> np.ndarray:
    """int64 ``[sequences]``; ``UserError`` unless each is a rank of the plan."""
    homes = np.asarray(homes)
    if homes.shape != trace.seq_lens.shape:
        raise UserError(f"homes has shape {homes.shape}; give one rank for each of the {len(trace.seq_lens)} sequences")
    if homes.size and not (np.issubdtype(homes.dtype, np.integer) and homes.min() >= 0 and homes.max() < plan.ranks):
        raise UserError(f"homes must be ranks in 0..{plan.ranks - 1}, got {np.unique(homes)[:4].tolist()}...")
    return homes.astype(np.int64)
