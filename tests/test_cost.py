"""The cost function equals its definition written as loops, and the figures known of a real trace."""

import json
import time

import numpy as np
import pytest
from placement_cases import random_plan, random_trace
from scipy.optimize import linprog

from placement import cost
from placement.errors import UserError
from placement.plan import MoEShape, linear_plan, make_plan
from placement.profile import count_pairs, mix, profile_trace, profile_traces
from placement.topology import two_level, uniform
from placement.trace import Trace, load_trace, stream_trace


def by_loops(plan, trace, topology, homes, calibration, combine):
    """Every figure from its definition, one token at a time."""
    W, (T, L, K) = plan.ranks, trace.expert_ids_TLK.shape
    home_T = np.repeat(homes, trace.seq_lens)
    rows, pairs, same = np.zeros((L, W, W)), np.zeros((L, W, W)), 0
    for t in range(T):
        before = None
        for layer in range(L):
            ranks = [int(plan.serve_rank_WLE[home_T[t], layer, e]) for e in trace.expert_ids_TLK[t, layer]]
            for rank in ranks:
                pairs[layer, home_T[t], rank] += 1
            for rank in set(ranks):
                rows[layer, home_T[t], rank] += 1
            same += sum(a == b for a in before for b in ranks) if before else 0
            before = ranks
    load_LW = pairs.sum(1)
    tails = [max(load / topology.speed_W) / (load.sum() / topology.speed_W.sum()) for load in load_LW]
    back = (pairs if combine == "exact" else rows).transpose(0, 2, 1)
    scale = calibration.step_tokens / T
    links, seconds, total = [], 0.0, 0.0
    for layer in range(L):
        link = [0.0]
        wire = [[0.0], [0.0]]
        for g in range(W):
            for h in range(W):
                if g == h:
                    continue
                there = rows[layer, g, h] * scale * calibration.dispatch_row_bytes
                again = back[layer, g, h] * scale * calibration.combine_row_bytes
                link.append((there + again) / topology.bandwidth_WW[g, h])
                for one, size in zip(wire, (there, again)):
                    one.append(size / topology.bandwidth_WW[g, h] + topology.latency_WW[g, h])
                total += there + again
        links.append(max(link))
        slowest = max(load_LW[layer] * scale / topology.speed_W) * calibration.pair_seconds
        exposed = (1 - calibration.overlap) * (max(wire[0]) + max(wire[1]))
        seconds += calibration.layer_seconds + slowest + exposed
    off = ~np.eye(W, dtype=bool)
    tokens_W = np.array([trace.seq_lens[homes == w].sum() for w in range(W)])
    return {
        "compute_tail": np.mean(tails),
        "compute_tail_worst_layer": max(tails),
        "dispatch_rows": rows[:, off].sum() / (T * L),
        "combine_rows": back[:, off].sum() / (T * L),
        "fan_out": rows.sum() / (T * L),
        "link_tail": np.mean(links),
        "locality": same / (T * (L - 1) * K * K) if L > 1 else 1.0,
        "home_tail": tokens_W.max() / tokens_W.mean(),
        "step_bytes": total,
        "step_seconds": seconds,
    }


@pytest.mark.parametrize("seed", range(8))
def test_equals_the_definition(seed):
    rng = np.random.default_rng(seed)
    experts, ranks = int(rng.integers(3, 9)), int(rng.integers(1, 4))
    trace = random_trace(seed, 40, int(rng.integers(1, 4)), experts, int(rng.integers(1, 4)))
    plan = random_plan(seed, trace.shape, ranks, extra=2 * (seed % 3))
    topology = two_level(1, ranks, speed=rng.uniform(0.5, 2, ranks)) if seed % 2 else two_level(ranks, 1)
    homes = rng.integers(0, ranks, len(trace.seq_lens))
    calibration = cost.Calibration(100.0, 50.0, 1e-6, 1e-5, 64.0, 0.25)
    combine = ("exact", "reduce")[seed % 2]
    found = cost.evaluate(plan, trace, topology, homes=homes, calibration=calibration, combine=combine)
    for name, value in by_loops(plan, trace, topology, homes, calibration, combine).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9), name
    assert found.load_LW.sum() == trace.expert_ids_TLK.size
    assert found.compute_tail_lp >= 1 - 1e-9


def test_known_figures_of_a_real_trace(shared_dir):
    trace = load_trace(shared_dir / "traces" / "dsv2lite_law.npz")
    _, held_out = trace.split(0.5)
    four = cost.evaluate(linear_plan(trace.shape, 4), held_out)
    eight = cost.evaluate(linear_plan(trace.shape, 8), held_out)
    assert (four.locality, four.compute_tail, four.fan_out) == pytest.approx((0.252, 1.18, 3.36), abs=0.006)
    assert (eight.locality, eight.compute_tail, eight.fan_out) == pytest.approx((0.126, 1.39, 4.55), abs=0.006)


@pytest.mark.parametrize("seed", range(6))
def test_best_split_is_the_optimum_of_the_whole_program(seed):
    """Against a program with a variable for every (expert, rank), also those without replicas."""
    rng = np.random.default_rng(seed)
    shape = MoEShape((0,), 6, 2)
    plan = random_plan(seed, shape, 3, extra=5)
    load_E, speed_W = rng.integers(0, 30, 6).astype(float), rng.uniform(0.5, 2, 3)
    load_E[0] += 1
    allowed_EW = plan.copy_slot_LEW[0] >= 0
    per_rank = np.concatenate([-speed_W[:, None], np.tile(np.eye(3), 6)], axis=1)
    per_expert = np.concatenate([np.zeros((6, 1)), np.kron(np.eye(6), np.ones(3))], axis=1)
    bounds = [(0, None)] + [(0, None if ok else 0) for ok in allowed_EW.ravel()]
    want = linprog([1] + [0] * 18, per_rank, np.zeros(3), per_expert, load_E, bounds).fun
    found = cost.best_split_tail_L(load_E[None], plan, speed_W)
    assert found[0] == pytest.approx(want / (load_E.sum() / speed_W.sum()))
    equal = cost.compute_tail_L(cost.equal_split_LW(load_E[None], plan), speed_W)
    assert found[0] <= equal[0] + 1e-9


def test_load_alone_gives_the_same_compute_tail():
    trace = random_trace(3, 200, 3, 8, 2)
    plan = random_plan(3, trace.shape, 3)
    found = cost.evaluate(plan, trace)
    assert cost.compute_tail_from_load(trace.load_LE(), plan) == pytest.approx(
        (found.compute_tail, found.compute_tail_worst_layer)
    )
    assert cost.locality_from_profile(plan, profile_trace(trace)) == pytest.approx(found.locality)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    trace = random_trace(0, tokens)
    found = cost.evaluate(linear_plan(trace.shape, 3), trace)
    assert found.tokens == tokens
    assert np.isfinite(list(found.to_dict(arrays=False).values())).all()
    assert found.compute_tail >= 1
    json.dumps(found.to_dict())


def test_all_tokens_to_one_expert():
    shape = MoEShape((0, 1), 4, 1)
    trace = Trace(shape, np.full((9, 2, 1), 3, np.uint8), np.array([9]))
    found = cost.evaluate(linear_plan(shape, 4), trace)
    assert (found.compute_tail, found.locality, found.fan_out, found.dispatch_rows) == (4, 1, 1, 1)
    both = make_plan(shape, 4, [[[0, 3], [1], [2], [3]]] * 2)
    assert cost.evaluate(both, trace).dispatch_rows == 0  # home 0 has its own copy
    assert cost.evaluate(both, trace).compute_tail_lp == pytest.approx(2)


def test_faster_ranks_may_carry_more():
    assert cost.compute_tail_L(np.array([[2.0, 1.0]]), np.array([2.0, 1.0])) == pytest.approx([1.0])
    assert cost.compute_tail_L(np.zeros((1, 2))) == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"homes": [0]}, "give one rank for each"),
        ({"homes": "far"}, "ranks in 0..2"),
        ({"combine": "sum"}, "'exact' or 'reduce'"),
        ({"topology": uniform(2)}, "the plan has 3 ranks"),
    ],
)
def test_mistakes_are_one_clear_line(options, says):
    trace = random_trace(0)
    if options.get("homes") == "far":
        options = {"homes": np.full(len(trace.seq_lens), 3)}
    with pytest.raises(UserError, match=says):
        cost.evaluate(linear_plan(trace.shape, 3), trace, **options)


def test_calibration_file(tmp_path):
    calibration = cost.Calibration(dispatch_row_bytes=7.0, overlap=0.5)
    calibration.save(tmp_path / "c.json")
    assert cost.Calibration.load(tmp_path / "c.json") == calibration
    raw = json.loads((tmp_path / "c.json").read_text())
    for bad in (raw | {"overlap": 2}, raw | {"more": 1}, raw | {"pair_seconds": "fast"}, [1]):
        (tmp_path / "bad.json").write_text(json.dumps(bad))
        with pytest.raises(UserError, match="bad.json"):
            cost.Calibration.load(tmp_path / "bad.json")


def test_profile_counts_pairs():
    trace = random_trace(5, 30, 3, 5, 2)
    profile = profile_trace(trace, coactivation=True)
    want = np.zeros((2, 5, 5))
    for row in trace.expert_ids_TLK:
        for layer in range(2):
            for e in row[layer]:
                for f in row[layer + 1]:
                    want[layer, e, f] += 1
    np.testing.assert_array_equal(profile.transitions_LEE, want)
    np.testing.assert_array_equal(np.diagonal(profile.coactivation_LEE, axis1=1, axis2=2), trace.load_LE())
    halves = profile_traces(trace.split(0.5), coactivation=True)
    for name in ("load_LE", "transitions_LEE", "coactivation_LEE"):
        np.testing.assert_array_equal(getattr(halves, name), getattr(profile, name))
    np.testing.assert_allclose(mix([profile, profile], [0.25, 0.5]).load_LE, 0.75 * profile.load_LE)
    assert count_pairs(np.zeros((0, 2), np.uint8), np.zeros((0, 2), np.uint8), 3).sum() == 0


def test_a_stream_of_shards_is_counted_fast_enough_for_fifty_million_rows(tmp_path):
    """Reading, checking and counting: 120 s of one core for 50 million (token, layer) rows, by their share here."""
    shape, tokens = MoEShape(tuple(range(24)), 128, 8), 10_000
    rng = np.random.default_rng(0)
    for shard in range(2):
        first_TL1 = rng.zipf(1.5, (tokens, 24, 1)) % 128
        ids = (first_TL1 + np.arange(8) * rng.integers(1, 15, (tokens, 24, 1))) % 128
        Trace(shape, ids.astype(np.uint8), np.full(100, 100)).save(tmp_path / f"t.{shard:03d}.npz")
    started = time.process_time()
    profile = profile_traces(stream_trace(tmp_path / "t.npz"))
    seconds = time.process_time() - started
    rows = 2 * tokens * 24
    assert profile.load_LE.sum() == rows * 8
    assert profile.transitions_LEE.sum() == 2 * tokens * 23 * 64
    assert seconds / rows * 50e6 < 120
