"""Home affinity: balanced homes, scores that mean rows, tables that predict them."""

import doctest
from dataclasses import replace

import numpy as np
import pytest
from test_joint import random_trace, require_sound

from placement import cost, homes
from placement.cohome import place_with_homes
from placement.errors import UserError
from placement.homes import Affinity, _ridge, assign_homes, fit_affinity, remote_rows_RW, score_prompt, score_routing
from placement.plan import MoEShape, linear_plan, make_plan
from placement.solution import make_problem


def test_docstrings():
    assert doctest.testmod(homes).failed == 0


@pytest.mark.parametrize("requests", [0, 1, 3, 40])
def test_homes_are_balanced_and_good(requests):
    rng = np.random.default_rng(requests)
    score_RW, tokens_R = rng.normal(size=(requests, 4)), rng.integers(20, 60, requests)
    found = assign_homes(score_RW, tokens_R, 1.1)
    assert found.shape == (requests,)
    if requests == 40:
        load = np.bincount(found, tokens_R, 4)
        assert load.max() <= 1.1 * tokens_R.sum() / 4
        mean = score_RW.mean()
        assert np.average(score_RW[np.arange(40), found], weights=tokens_R) > mean + 0.5


def test_homes_without_limit_are_each_requests_best():
    score_RW = np.random.default_rng(1).normal(size=(9, 3))
    assert (assign_homes(score_RW, np.full(9, 7), slack=100.0) == score_RW.argmax(1)).all()


@pytest.mark.parametrize("replicas", [False, True])
def test_rows_of_a_home_are_those_of_the_cost_function(replicas):
    trace = random_trace(90, 2, 8, 3)
    plan = linear_plan(trace.shape, 4)
    if replicas:
        slots = [[[*held, (held[-1] + 1) % 8] for held in layer] for layer in plan.slots]
        plan = make_plan(trace.shape, 4, slots)
    rows_RW = remote_rows_RW(plan, trace)
    for request in (0, len(trace.seq_lens) - 1):
        alone = trace.take_sequences(np.array([request]))
        for home in range(4):
            want = cost.evaluate(plan, alone, homes=np.array([home])).dispatch_rows
            assert rows_RW[request, home] == pytest.approx(want)


def test_tables_predict_the_homes_of_new_requests():
    """Two topics that use disjoint experts and words: a probe, and the words alone, tell which home is right."""
    rng = np.random.default_rng(0)
    topic = np.arange(24) % 2
    ids = rng.permuted(np.tile(np.arange(4), (24, 12, 2, 1)), axis=-1)[..., :2] + 4 * topic[:, None, None, None]
    words = rng.integers(0, 10, (24, 12)) + 10 * topic[:, None]
    base = random_trace(24 * 12, 2, 8, 2)
    ids = ids.reshape(-1, 2, 2).astype(np.uint8)
    words = words.ravel().astype(np.uint32)
    trace = replace(base, expert_ids_TLK=ids, seq_lens=np.full(24, 12), token_ids_T=words)
    train, new = trace.split(0.5)
    plan = linear_plan(trace.shape, 2)
    affinity = fit_affinity(plan, train, probe=4)
    starts = new.sequence_starts()[:-1]
    for request, start in enumerate(starts):
        want = request % 2
        assert score_routing(new.expert_ids_TLK[start : start + 4], affinity.expert_rank_LEW).argmax() == want
        assert score_prompt(new.token_ids_T[start : start + 4], affinity.token_rank_VW).argmax() == want
    assert np.isfinite(score_prompt(np.array([10**6]), affinity.token_rank_VW)).all()
    assert np.isfinite(score_prompt(np.array([], int), affinity.token_rank_VW)).all()


def test_affinity_file_round_trip_and_refusal(tmp_path):
    affinity = Affinity(np.ones((5, 2), np.float16), np.ones((1, 3, 2), np.float16), "abc")
    affinity.save(tmp_path / "a.npz")
    back = Affinity.load(tmp_path / "a.npz")
    assert back.tokenizer_sha256 == "abc" and (back.token_rank_VW == affinity.token_rank_VW).all()
    with np.load(tmp_path / "a.npz") as raw:
        assert raw["token_rank"].dtype == np.float16
    (tmp_path / "b.npz").write_bytes(b"no")
    with pytest.raises(UserError, match="b.npz"):
        Affinity.load(tmp_path / "b.npz")
    replace(affinity, token_rank_VW=np.full((5, 2), np.nan, np.float16)).save(tmp_path / "c.npz")
    with pytest.raises(UserError, match="no finite numbers"):
        Affinity.load(tmp_path / "c.npz")
    affinity.require_fits(linear_plan(MoEShape((0,), 3, 1), 2))
    with pytest.raises(UserError, match=r"the plan needs \[1, 4, 2\]"):
        affinity.require_fits(linear_plan(MoEShape((0,), 4, 1), 2))


@pytest.mark.parametrize("redundant", [0, 1])
def test_placing_with_homes_saves_rows_of_unseen_requests(redundant):
    train, new = random_trace(1600, 3, 16, 3).split(0.5)
    problem = make_problem(train, 4, objective="dispatch_rows", cap=1.2, seconds=3.0, threads=1, redundant=redundant)
    solution, chosen, affinity = place_with_homes(problem, slack=1.1, probe=8)
    require_sound(solution.plan, problem)
    assert np.bincount(chosen, train.seq_lens, 4).max() <= 1.1 * train.num_tokens / 4
    starts = new.sequence_starts()[:-1]
    score_RW = np.stack([score_routing(new.expert_ids_TLK[s : s + 8], affinity.expert_rank_LEW) for s in starts])
    best = cost.evaluate(solution.plan, new, homes=assign_homes(score_RW, new.seq_lens, 1.1))
    linear = cost.evaluate(linear_plan(new.shape, 4), new)
    assert best.dispatch_rows < 0.9 * linear.dispatch_rows
    assert best.home_tail <= 1.1


def test_requests_are_needed():
    problem = make_problem(random_trace(0, 2, 8, 2), 2, objective="dispatch_rows")
    with pytest.raises(UserError, match="give a trace"):
        place_with_homes(problem)


def test_tables_do_not_depend_on_the_way_they_are_solved():
    """More requests than features are solved in the primal: the same as the dual of features without counts."""
    rng = np.random.default_rng(0)
    feature_RX, score_RW, weight_R = rng.normal(size=(40, 25)), rng.normal(size=(40, 3)), rng.random(40)
    slope, constant = _ridge(feature_RX, score_RW, weight_R)
    padded, same = _ridge(np.pad(feature_RX, ((0, 0), (0, 30))), score_RW, weight_R)
    np.testing.assert_allclose(padded[:25], slope, atol=1e-9)
    np.testing.assert_allclose(same, constant, atol=1e-9)
    assert np.abs(padded[25:]).max() < 1e-12
