"""From a problem to what the search works on, and back: items, loads by home, weights of the objective's parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from placement.errors import UserError
from placement.moves import LayerData
from placement.plan import Plan, make_plan
from placement.profile import count_pairs
from placement.solution import Problem
from placement.team import ChainData

MAX_SAMPLE_CELLS = 1 << 22  # (token, layer, choice) cells that rows are counted on; loads use every token
_ROW_FIGURES = ("fan_out", "dispatch_rows", "combine_rows", "link_tail", "step_seconds", "step_bytes")


@dataclass(frozen=True)
class Weights:
    """The objective as a sum to be lowered, per token and layer: of reached ranks (``fan``), reached remote ranks
    (``remote``, each times its link's relative cost), remote choices (``choices``), and minus locality."""

    fan: float = 0.0
    remote: float = 0.0
    choices: float = 0.0
    locality: float = 0.0


def weights_of(problem: Problem) -> Weights:
    """What the search lowers for the problem's objective.

    Times are stood in for by the rows that cause them; the final choice among plans uses the objective itself.
    """
    sign, found = (-1.0 if problem.objective.maximise else 1.0), Weights()
    for name, weight in problem.objective.terms or ((problem.objective.name, 1.0),):
        weight *= sign
        if name == "fan_out":
            found = replace(found, fan=found.fan + weight)
        elif name == "dispatch_rows" or (name == "combine_rows" and problem.combine == "reduce"):
            found = replace(found, remote=found.remote + weight)
        elif name == "combine_rows":
            found = replace(found, choices=found.choices + weight)
        elif name == "locality":
            found = replace(found, locality=found.locality - weight)
        elif name in _ROW_FIGURES:
            found = replace(found, remote=found.remote + abs(weight))
    return found


@dataclass(frozen=True, eq=False)
class Sample:
    """Tokens the rows are counted on, and the loads of all tokens.

    Args:
        ids_TLK: intp experts; T may be 0 where only a profile is known.
        home_T: int64 home rank of each.
        load_LHE: float64 ``[L, W, E]``, (token, choice) pairs by layer, home and expert, over all training tokens.
        request_T: int64, the sequence each is of.
    """

    ids_TLK: np.ndarray
    home_T: np.ndarray
    load_LHE: np.ndarray
    request_T: np.ndarray


def draw_sample(problem: Problem) -> Sample:
    """At most ``MAX_SAMPLE_CELLS`` cells of random tokens (all of them if they are fewer).

    Round-robin homes say nothing of a token, so without given homes each token draws its own: what is fitted then holds
    for any mix of requests, not for this one's.
    """
    shape, W = problem.shape, problem.ranks
    L, E, K = shape.num_layers, shape.num_experts, shape.top_k
    if problem.train is None or problem.train.num_tokens == 0:
        load_LHE = np.repeat(problem.profile.load_LE[:, None] / W, W, axis=1)
        return Sample(np.zeros((0, L, K), np.intp), np.zeros(0, np.int64), load_LHE, np.zeros(0, np.int64))
    trace = problem.train
    rng = np.random.default_rng(problem.seed)
    if problem.homes is None:
        home_T = rng.permutation(np.arange(trace.num_tokens) % W)
        load_LHE = np.repeat(problem.profile.load_LE[:, None] / W, W, axis=1)
    else:
        home_T = np.repeat(np.asarray(problem.homes, np.int64), trace.seq_lens)
        load_LHE = np.stack([_load_HE(trace.expert_ids_TLK[:, layer], home_T, W, E) for layer in range(L)])
    limit = max(1, MAX_SAMPLE_CELLS // (L * K))
    which = np.arange(trace.num_tokens)
    if len(which) > limit:
        which = np.sort(rng.choice(len(which), limit, replace=False))
    request_T = np.repeat(np.arange(len(trace.seq_lens)), trace.seq_lens)
    return Sample(trace.expert_ids_TLK[which].astype(np.intp), home_T[which], load_LHE, request_T[which])


def _load_HE(ids_TK: np.ndarray, home_T: np.ndarray, ranks: int, experts: int) -> np.ndarray:
    cell = home_T[:, None] * experts + ids_TK
    return np.bincount(cell.ravel(), minlength=ranks * experts).reshape(ranks, experts).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Layout:
    """A plan as the search sees it. Items of a layer are numbered in no particular order.

    Args:
        expert: ``[L]`` of int64 ``[S]``, the expert of each item.
        rank: ``[L]`` of int64 ``[S]``, where it is.
        serve: ``[L]`` of intp ``[W, E]``, the item that serves tokens of a home.
    """

    expert: list[np.ndarray]
    rank: list[np.ndarray]
    serve: list[np.ndarray]


def layout_of(plan: Plan) -> Layout:
    expert, rank, serve = [], [], []
    for layer, held in enumerate(plan.slots):
        expert.append(np.concatenate([np.asarray(h, np.int64) for h in held]))
        rank.append(np.repeat(np.arange(plan.ranks), [len(h) for h in held]))
        item_EW = np.full((plan.shape.num_experts, plan.ranks), -1, np.intp)
        item_EW[expert[-1], rank[-1]] = np.arange(len(expert[-1]))
        serve.append(item_EW[np.arange(plan.shape.num_experts), plan.serve_rank_WLE[:, layer]])
    return Layout(expert, rank, serve)


def plan_of(problem: Problem, layout: Layout) -> Plan:
    """The plan; with replicas its rule is the explicit table."""
    ranks = range(problem.ranks)
    slots = [[np.sort(e[r == rank]).tolist() for rank in ranks] for e, r in zip(layout.expert, layout.rank)]
    serve = None
    if any(len(np.unique(e)) < len(e) for e in layout.expert):
        serve = np.stack([r[s] for r, s in zip(layout.rank, layout.serve)], axis=1).astype(np.int32)
    return make_plan(problem.shape, problem.ranks, slots, serve=serve)


def item_loads(layout: Layout, load_LHE: np.ndarray) -> list[np.ndarray]:
    """``[L]`` of float64 ``[S]``."""
    return [
        np.bincount(serve.ravel(), load_HE.ravel(), len(expert))
        for expert, serve, load_HE in zip(layout.expert, layout.serve, load_LHE)
    ]


def home_weights(problem: Problem) -> np.ndarray:
    """float32 ``[home, rank]``: cost of a token reaching a rank."""
    weights = weights_of(problem)
    return np.float32(weights.fan) + np.float32(weights.remote) * link_weight_WW(problem)


def link_weight_WW(problem: Problem) -> np.ndarray:
    """float32 ``[home, rank]``: cost of a row by its link, 0 at home, mean 1 over remote links."""
    off = ~np.eye(problem.ranks, dtype=bool)
    slow_WW = np.where(off, 1 / np.where(off, problem.topology.bandwidth_WW, 1.0), 0.0)
    return (slow_WW / (slow_WW[off].mean() if off.any() else 1.0)).astype(np.float32)


def chain_data(problem: Problem, sample: Sample, layout: Layout, limits: list[LayerLimits]) -> ChainData:
    """What the search of ``layout`` needs; ``limits`` gives each layer's domains and caps."""
    weights = weights_of(problem)
    weight_WT = None
    if weights.remote:
        weight_WT = np.ascontiguousarray(home_weights(problem).T[:, sample.home_T])
    items = [serve[sample.home_T[:, None], sample.ids_TLK[:, layer]] for layer, serve in enumerate(layout.serve)]
    scale = weights.fan if weight_WT is None else 1.0
    layers = []
    for item_TK, expert_S, limit in zip(items, layout.expert, limits):
        even = even_price(problem, sample, limit)
        noise_SS = load_noise(sample, item_TK, limit) if even else None
        loads = limit.load_DS, limit.cap_DW
        layers.append(LayerData(item_TK, expert_S, *loads, weight_WT, scale, even, noise_SS))
    cross = _cross(problem, sample, items, layout)
    return ChainData(layers, cross, _base(problem, sample, items, layout), problem.seed)


def even_price(problem: Problem, sample: Sample, limit: LayerLimits) -> float:
    """Cost, in the sample's rows, of a squared pair of (token, choice) that a rank has above its fair load."""
    total = float(limit.load_DS[0].sum())
    if not problem.even or problem.cap is None or not total:
        return 0.0
    counted = len(sample.home_T) * problem.shape.top_k / total
    return problem.even * counted * problem.ranks / total


def load_noise(sample: Sample, item_TK: np.ndarray, limit: LayerLimits) -> np.ndarray:
    """float32 ``[S, S]``: covariance of what the items' loads on unseen tokens differ by from their training loads.

    Both have the noise of drawing requests, which is estimated from how the requests of one home differ; how many
    tokens a home has is no noise, for requests are given homes evenly.
    """
    S, pairs = limit.load_DS.shape[1], max(1, item_TK.size)
    request_T, first, row_T, tokens_R = np.unique(sample.request_T, True, True, True)
    load_RS = np.bincount((row_T[:, None] * S + item_TK).ravel(), minlength=len(request_T) * S).reshape(-1, S)
    load_RS = load_RS * (float(limit.load_DS[0].sum()) / pairs)  # the sample's tokens stand for all
    for home in np.unique(sample.home_T):
        mine = sample.home_T[first] == home
        load_RS[mine] -= np.outer(tokens_R[mine] / tokens_R[mine].sum(), load_RS[mine].sum(0))
    return (2 * load_RS.T @ load_RS).astype(np.float32)


@dataclass(frozen=True, eq=False)
class LayerLimits:
    """Load of each item in each domain, and the most each rank may have: float64 ``[D, S]``, ``[D, W]``."""

    load_DS: np.ndarray
    cap_DW: np.ndarray


def _cross(problem: Problem, sample: Sample, items: list[np.ndarray], layout: Layout) -> list[np.ndarray]:
    weights, shape, n = weights_of(problem), problem.shape, len(sample.home_T)
    L, K = shape.num_layers, shape.top_k
    if not weights.locality or L == 1:
        return []
    per_pair = weights.locality * L / ((L - 1) * K * K)
    single = all(len(e) == shape.num_experts for e in layout.expert)
    if single and problem.profile.transitions_LEE is not None:  # counted on all tokens
        per_pair *= max(1, n) / max(problem.profile.tokens, 1e-12)
        found = problem.profile.transitions_LEE
        pairs = [c[low][:, high] for c, low, high in zip(found, layout.expert, layout.expert[1:])]
        return [(-per_pair * p).astype(np.float32) for p in pairs]
    if not n:
        raise UserError("locality with replicas needs recorded tokens, not only their counts; give a trace")
    most = [len(e) for e in layout.expert]
    pairs = [count_pairs(a, b, max(most))[:x, :y] for a, b, x, y in zip(items, items[1:], most, most[1:])]
    return [(-per_pair * p).astype(np.float32) for p in pairs]


def _base(problem: Problem, sample: Sample, items: list[np.ndarray], layout: Layout) -> list[np.ndarray] | None:
    """Costs of an item on a rank by itself: remote choices, and moved copies."""
    weights, W, n = weights_of(problem), problem.ranks, len(sample.home_T)
    base = [np.zeros((len(e), W), np.float32) for e in layout.expert]
    if weights.choices:
        link_WW = link_weight_WW(problem) * weights.choices
        for item_TK, table in zip(items, base):
            count_HS = _load_HE(item_TK, sample.home_T, W, len(table))
            table += count_HS.T.astype(np.float32) @ link_WW
    if problem.old_plan is not None and problem.move_price:
        # a move costs move_price in units of the objective; one unit of the objective is n * L counts
        price = problem.move_price * max(1, n) * problem.shape.num_layers
        for layer, table in enumerate(base):
            had_EW = problem.old_plan.copy_slot_LEW[layer] >= 0
            table += np.where(had_EW[layout.expert[layer]], 0, price).astype(np.float32)
    return base if weights.choices or (problem.old_plan is not None and problem.move_price) else None
