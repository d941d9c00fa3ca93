"""Plans that hold on tokens they were not solved on: load caps shrunk by a bootstrap, and several traffic domains.

The load of a held-out trace differs from the training load by the noise of both.  Resampling whole sequences twice
and adding the difference of the two draws to the training load imitates that; the mean rise of the compute tail is
what a cap must leave free.  Domains are weighed equally (``mean``), or re-weighed towards the one whose objective is
worst (``worst``, multiplicative weights), every domain then keeping the cap on its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement import cost
from placement.errors import UserError
from placement.joint import Budget, add_copies, improve, layer_limits, start_layout
from placement.layout import LayerLimits, Layout, Sample, draw_sample, plan_of
from placement.plan import Plan
from placement.profile import Profile, mix, profile_trace
from placement.solution import Problem, Solution, finish
from placement.trace import Trace

DRAWS = 64
LEAST_CAP = 1.01
WORST_ROUNDS = 4


@dataclass(frozen=True)
class RobustOptions:
    """``domains``: traces that count equally (none: the training trace as one); ``worst``: the worst of them counts.

    ``shrink``: lower the cap by the bootstrap's estimate.
    """

    domains: tuple[Trace, ...] = ()
    worst: bool = False
    shrink: bool = True


def solve_robust(problem: Problem, options: RobustOptions = RobustOptions()) -> Solution:
    """The joint solver under a cap that unseen tokens should keep, for the mean or the worst of the domains.

    The solution's objective is that of ``problem`` (its training tokens as they are).
    """
    if problem.train is None:
        raise UserError("a robust plan needs sequences to resample; give a trace, not only counts")
    started = time.perf_counter()
    domains = options.domains or (problem.train,)
    weights = np.full(len(domains), 1 / len(domains))
    inner = replace(problem, profile=_mixed(domains, weights))
    if options.shrink and problem.cap is not None:
        rehearsal = Budget(started, 0.15 * problem.seconds)
        layout, _ = _solve(inner, _mixed_sample(inner, domains, weights), start_layout(inner), rehearsal, ())
        inner = replace(inner, cap=shrunk_cap(problem, plan_of(inner, layout)))
    rounds = WORST_ROUNDS if options.worst and len(domains) > 1 else 1
    layout, history = start_layout(inner), []
    for step in range(rounds):
        now = time.perf_counter()
        budget = Budget(now, max(0.05, (problem.seconds - (now - started)) / (rounds - step)))
        inner = replace(inner, profile=_mixed(domains, weights))
        sample = _mixed_sample(inner, domains, weights)
        layout, more = _solve(inner, sample, layout, budget, domains if options.worst else ())
        history += [(budget.started - started + at, value, bound) for at, value, bound in more]
        weights = _heavier_worst(inner, domains, plan_of(inner, layout), weights)
    return finish(problem, plan_of(problem, layout), "robust", started, history=history)


def shrunk_cap(problem: Problem, plan: Plan) -> float:
    """The training cap under which the mean compute tail of as many unseen tokens should be ``problem.cap``.

    ``plan`` is one of the kind that will be capped: experts that rise and fall together on one rank raise the noise.
    Never below ``LEAST_CAP``: noise larger than that is not a placement's to remove.
    """
    assert problem.cap is not None and problem.train is not None
    return max(LEAST_CAP, problem.cap - tail_rise(plan, problem.train, problem.topology.speed_W, problem.seed))


def crossed_rise(problem: Problem, solve: Callable[[Problem], Plan]) -> float:
    """Mean rise of the compute tail from one half of every recording's whole sequences to the other, both ways.

    Pieces of a sequence are alike, and recordings drift: drawing pieces from all of a recording sees neither.
    ``solve`` makes the plans.
    """
    assert problem.recordings is not None and problem.train is not None
    last_T = np.repeat(*_half_of_sequences(problem.recordings))  # 1 where a token is of its recording's second half
    assert len(last_T) == problem.train.num_tokens, "recordings are not those of the training tokens"
    second_R = last_T[problem.train.sequence_starts()[:-1]]
    halves = [problem.train.take_sequences(np.flatnonzero(second_R == half)) for half in (0, 1)]
    if not all(half.num_tokens for half in halves):
        return 0.0
    rises, speed_W = [], problem.topology.speed_W
    for half, other in (halves, halves[::-1]):
        plan = solve(replace(problem, train=half, profile=profile_trace(half), homes=None, recordings=None))
        seen, unseen = (cost.compute_tail_L(cost.evaluate(plan, t).load_LW, speed_W).mean() for t in (half, other))
        rises.append(unseen - seen)
    return float(max(0.0, np.mean(rises)))


def drift_variance(crossed: float, drawn: float) -> float:
    """What a rise from half to half has beyond the noise of half as many tokens, squared.

    ``drawn`` is the rise by resampling. Rises go with the standard deviation of loads, and with half the tokens on
    either side the noise has twice the variance; the rest is drift, which more tokens would not remove.
    """
    return max(0.0, crossed**2 - 2 * drawn**2)


def _half_of_sequences(recordings: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(0 or 1, tokens) of each whole sequence: in which half of its recording it is."""
    halves = [np.arange(len(lens)) >= len(lens) - round(len(lens) / 2) for lens in recordings]  # as Trace.split(0.5)
    return np.concatenate(halves).astype(np.int64), np.concatenate(recordings)


def tail_rise(plan: Plan, trace: Trace, speed_W: np.ndarray | None = None, seed: int = 0) -> float:
    """Expected rise of the mean compute tail from ``trace`` to as many unseen sequences of its kind."""
    R, L, W = len(trace.seq_lens), plan.shape.num_layers, plan.ranks
    if R < 2:
        return 0.0
    load_RLW = np.zeros((R, L, W))
    request_T = np.repeat(np.arange(R), trace.seq_lens)
    for layer in range(L):
        rank_TK = plan.serve_rank_WLE[request_T[:, None] % W, layer, trace.expert_ids_TLK[:, layer].astype(np.intp)]
        load_RLW[:, layer] = np.bincount((request_T[:, None] * W + rank_TK).ravel(), minlength=R * W).reshape(R, W)
    rng = np.random.default_rng(seed)
    total_LW = load_RLW.sum(0)
    before = cost.compute_tail_L(total_LW, speed_W).mean()
    draws = np.stack([np.bincount(rng.integers(0, R, R), minlength=R) for _ in range(2 * DRAWS)])
    drawn = np.tensordot(draws.astype(np.float64), load_RLW, 1)
    drawn *= total_LW.sum(-1, keepdims=True) / np.maximum(drawn.sum(-1, keepdims=True), 1e-12)
    unseen = np.maximum(total_LW + drawn[:DRAWS] - drawn[DRAWS:], 0)
    return float(max(0.0, np.mean([cost.compute_tail_L(load_LW, speed_W).mean() for load_LW in unseen]) - before))


def _solve(
    problem: Problem, sample: Sample, layout: Layout, budget: Budget, capped: Sequence[Trace]
) -> tuple[Layout, list]:
    share = 0.5 if problem.spare_slots else 1.0
    limits = _limits(problem, sample, layout, capped)
    first = replace(budget, seconds=share * budget.seconds)
    layout, history = improve(problem, sample, layout, first, limits)
    if problem.spare_slots:
        layout = add_copies(problem, sample, layout)
        rest = Budget(time.perf_counter(), max(0.05, 0.4 * budget.seconds), 0.15)
        layout, more = improve(problem, sample, layout, rest, _limits(problem, sample, layout, capped))
        history += more
    return layout, history


def _limits(problem: Problem, sample: Sample, layout: Layout, capped: Sequence[Trace]) -> list[LayerLimits]:
    """Caps on the mix and on each domain of ``capped`` by itself (as near as exchanges come, if that is too much)."""
    limits = layer_limits(problem, sample, layout)
    if not capped or problem.cap is None:
        return limits
    out, load_DLE = [], np.stack([trace.load_LE() for trace in capped])
    for layer, (limit, expert_S) in enumerate(zip(limits, layout.expert)):
        expert_load_S = np.maximum(problem.profile.load_LE[layer][expert_S], 1e-12)
        share_S = limit.load_DS[0] / expert_load_S  # an item serves the same share of its expert in every domain
        load_DS = load_DLE[:, layer][:, expert_S] * share_S
        cap_DW = problem.cap * load_DS.sum(1, keepdims=True) * problem.topology.share_W
        out.append(LayerLimits(np.concatenate([limit.load_DS, load_DS]), np.concatenate([limit.cap_DW, cap_DW])))
    return out


def _mixed(domains: Sequence[Trace], weights: np.ndarray) -> Profile:
    """Counts in which each domain has its weight, scaled to all tokens together."""
    tokens = sum(trace.num_tokens for trace in domains)
    parts = [profile_trace(trace) for trace in domains]
    return mix(parts, [float(w) * tokens / max(1.0, part.tokens) for w, part in zip(weights, parts)])


def _mixed_sample(problem: Problem, domains: Sequence[Trace], weights: np.ndarray) -> Sample:
    """Tokens drawn from each domain by weight (all, once, where there is one domain), and the mix's loads."""
    if len(domains) == 1:
        return draw_sample(replace(problem, train=domains[0], homes=None))
    rng = np.random.default_rng(problem.seed)
    total = sum(trace.num_tokens for trace in domains)
    parts = []
    for trace, weight in zip(domains, weights):
        count = int(round(total * weight)) if trace.num_tokens else 0
        picks = np.arange(count) % max(1, trace.num_tokens)  # every token as often as any other, give or take one
        parts.append(
            trace.expert_ids_TLK[rng.permutation(trace.num_tokens)[picks]] if count else trace.expert_ids_TLK[:0]
        )
    joined = np.concatenate(parts)
    even = Trace(problem.shape, joined, np.ones(len(joined), np.int64))
    return draw_sample(replace(problem, train=even, homes=None))


def _heavier_worst(problem: Problem, domains: Sequence[Trace], plan: Plan, weights: np.ndarray) -> np.ndarray:
    """Multiplicative weights: a domain gains by how much worse than the mean its objective is."""
    values = []
    for trace in domains:
        costs = cost.evaluate(plan, trace, problem.topology, combine=problem.combine, calibration=problem.calibration)
        values.append(problem.objective.value(costs.to_dict(arrays=False)))
    worse = np.array(values) * (-1 if problem.objective.maximise else 1)
    spread = max(float(np.abs(worse - worse.mean()).max()), 1e-12)
    raised = weights * np.exp(0.5 * (worse - worse.mean()) / spread)
    return raised / raised.sum()
