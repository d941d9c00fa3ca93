"""Plans for unseen tokens and from a plan in force."""

from dataclasses import replace

import numpy as np
import pytest
from test_joint import MIXED, random_trace, require_sound

from placement import cost
from placement.errors import UserError
from placement.joint import solve_joint
from placement.migrate import moved_copies
from placement.plan import linear_plan
from placement.profile import profile_trace
from placement.robust import LEAST_CAP, RobustOptions, crossed_rise, drift_variance, shrunk_cap, solve_robust, tail_rise
from placement.solution import make_problem
from placement.trace import join


def test_bootstrap_foretells_the_rise_of_the_tail():
    """A plan balanced on few tokens rises on new ones, by about what resampling says; on many, by little."""
    few, rest = random_trace(4800, 6, 16, 3).split(0.5)
    problem = make_problem(few, 4, objective="compute_tail")
    plan = solve_joint(problem).plan
    foretold = tail_rise(plan, few)
    seen = cost.evaluate(plan, few).compute_tail
    rose = cost.evaluate(plan, rest).compute_tail - seen
    assert 0.3 * rose < foretold < 3 * rose
    assert shrunk_cap(replace(problem, cap=1.2), plan) == pytest.approx(1.2 - foretold)
    assert shrunk_cap(replace(problem, cap=1.0), plan) == LEAST_CAP


def test_a_drift_between_halves_of_a_recording_is_seen():
    """Two recordings whose second halves use other experts: drawing pieces of both halves cannot foretell that."""
    early, late = (random_trace(320, 3, 16, 3, seed=seed) for seed in (0, 1))
    drifting, steady = join([early, late, early, late], "drifting"), join([early] * 4, "steady")
    recordings = (np.full(40, 16), np.full(40, 16))
    rises = []
    for trace in (drifting, steady):
        pieces = replace(trace, seq_lens=np.full(320, 4))
        problem = make_problem(pieces, 4, cap=1.1, recordings=recordings)
        rises.append(crossed_rise(problem, lambda half: solve_joint(replace(half, seconds=0.3, threads=1)).plan))
    assert rises[0] > 0.1 and rises[1] < 0.02
    assert drift_variance(0.05, 0.05) == 0.0 and drift_variance(0.05, 0.0) == pytest.approx(0.0025)
    alone = make_problem(early, 4, cap=1.1, recordings=(np.array([320]),))
    assert crossed_rise(alone, None) == 0.0  # one sequence has no other half


def test_one_sequence_cannot_be_resampled():
    trace = random_trace(12, 2, 8, 2)
    assert tail_rise(linear_plan(trace.shape, 2), trace) == 0.0


@pytest.mark.parametrize("worst", [False, True])
def test_domains_each_count(worst):
    domains = tuple(random_trace(400 * (1 + 3 * i), 2, 12, 2, seed=i) for i in range(2))
    options = {"cap": 1.3 if worst else None, "seconds": 1.5, "threads": 1}
    problem = make_problem(list(domains), 3, objective=MIXED, **options)
    solution = solve_robust(problem, RobustOptions(domains, worst))
    require_sound(solution.plan, problem)
    if not worst:
        of_domains = [cost.evaluate(solution.plan, trace) for trace in domains]
        of_linear = [cost.evaluate(linear_plan(trace.shape, 3), trace) for trace in domains]
        assert sum(c.fan_out - 4 * c.locality for c in of_domains) < sum(c.fan_out - 4 * c.locality for c in of_linear)
    else:
        tails = [cost.evaluate(solution.plan, trace).compute_tail for trace in domains]
        assert max(tails) <= 1.35


def test_replicas_and_no_cap():
    trace = random_trace(300, 2, 8, 2)
    problem = make_problem(trace, 4, objective="dispatch_rows", seconds=0.5, threads=1, redundant=1)
    require_sound(solve_robust(problem).plan, problem)


def test_counts_alone_are_refused():
    problem = make_problem(profile_trace(random_trace(64, 2, 8, 2)), 2, objective="locality")
    with pytest.raises(UserError, match="give a trace"):
        solve_robust(problem)


def test_moves_are_limited_and_priced():
    trace = random_trace(600, 3, 16, 3)
    old = linear_plan(trace.shape, 4)
    free = make_problem(trace, 4, objective=MIXED, cap=1.5, seconds=1.0, threads=1, old_plan=old)
    unlimited = solve_joint(free)
    moves = moved_copies(unlimited.plan, old)
    assert moves > 12
    limited = solve_joint(replace(free, max_moves=12, seconds=3.0))
    require_sound(limited.plan, free)
    assert 0 < moved_copies(limited.plan, old) <= 12
    dear = solve_joint(replace(free, move_price=100.0))
    assert moved_copies(dear.plan, old) == 0
    none = solve_joint(replace(free, max_moves=0))
    assert moved_copies(none.plan, old) == 0
    start = cost.evaluate(old, trace)
    value = start.fan_out - 4 * start.locality
    assert unlimited.objective < limited.objective < value


def test_load_objective_counts_copies_by_the_plans_rule():
    trace = random_trace(500, 2, 8, 2)
    problem = make_problem(trace, 4, objective="compute_tail", redundant=1)
    solution = solve_joint(problem)
    require_sound(solution.plan, problem)
    assert solution.objective == pytest.approx(cost.evaluate(solution.plan, trace).compute_tail, abs=0.2)
    assert np.isfinite(solution.objective)
