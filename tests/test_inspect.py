"""The statistics of inspect, against values known in closed form and figures recorded for the real traces."""

import numpy as np
import pytest

from placement import stats
from placement.errors import UserError
from placement.inspect import inspect_stream, similarity
from placement.plan import MoEShape
from placement.trace import Trace, load_trace


def toy(ids, experts, seq_lens=None):
    ids = np.asarray(ids)
    shape = MoEShape(tuple(range(ids.shape[1])), experts, ids.shape[2], "toy")
    return Trace(shape, ids.astype(np.uint8), np.asarray(seq_lens or [len(ids)]))


def test_skew_of_even_and_concentrated_loads():
    load = np.array([[5, 5, 5, 5], [20, 0, 0, 0], [0, 0, 0, 0]])
    assert stats.max_over_mean(load).tolist() == [1, 4, 1]
    assert np.allclose(stats.gini(load), [0, 0.75, 0])
    assert np.allclose(stats.entropy_share(load), [1, 0, 0])


def test_gini_is_the_mean_absolute_difference():
    load = np.random.default_rng(0).integers(0, 100, (3, 17))
    pairs = np.abs(load[:, :, None] - load[:, None, :]).mean((1, 2))
    assert np.allclose(stats.gini(load), pairs / (2 * load.mean(-1)))


def test_entropy_of_one_expert_is_defined():
    assert stats.entropy_share(np.array([[7]])).tolist() == [0]


def test_joint_counts_equal_a_loop():
    rng = np.random.default_rng(1)
    a, b = (np.argsort(rng.random((50, 6)), -1)[:, :2] for _ in range(2))
    expected = np.zeros((6, 6))
    for row_a, row_b in zip(a, b):
        for e in row_a:
            for f in row_b:
                expected[e, f] += 1
    assert np.array_equal(stats.joint_counts(a, b, 6), expected)


def test_mutual_information_of_equal_and_independent_layers():
    assert np.isclose(stats.mutual_information(np.eye(8)), np.log(8))
    assert np.isclose(stats.mutual_information(np.ones((8, 8))), 0)
    assert stats.mutual_information(np.zeros((8, 8))) == 0


def test_duplicates_ignore_the_order_of_choices():
    trace = toy([[[0, 1], [2, 3]], [[1, 0], [3, 2]], [[0, 1], [2, 1]], [[0, 2], [2, 3]]], 4)
    assert inspect_stream([trace]).duplicates == 2  # tokens 0 and 1


def test_shards_add_up_to_the_whole():
    rng = np.random.default_rng(2)
    ids = np.argsort(rng.random((90, 3, 8)), -1)[..., :2]
    whole, parts = toy(ids, 8, [30, 60]), [toy(ids[:30], 8), toy(ids[30:], 8)]
    a, b = inspect_stream([whole]), inspect_stream(iter(parts))
    assert (a.tokens, a.sequences, a.duplicates) == (b.tokens, b.sequences, b.duplicates) == (90, 2, a.duplicates)
    assert np.array_equal(a.load_LE, b.load_LE)


def test_one_layer_and_one_token():
    rows = inspect_stream([toy([[[2]]], 4)]).to_dict()["layers"]
    assert rows[0]["information_to_next"] is None and rows[0]["unused_experts"] == 3
    with pytest.raises(UserError, match="no tokens"):
        inspect_stream([])


def test_real_traces(shared_dir):
    names = ("intent", "law", "summary")
    found = {n: inspect_stream([load_trace(shared_dir / "traces" / f"dsv2lite_{n}.npz")]) for n in names}
    assert found["intent"].duplicates == 2189  # of 8,222: prompts share a prefix
    assert 0.43 <= np.mean([f.information.mean() for f in found.values()]) <= 0.6
    assert max(f.shuffled.max() for f in found.values()) < 0.007
    cosine = similarity(list(found.values()))
    off = cosine[~np.eye(3, dtype=bool)]
    assert np.allclose(np.diag(cosine), 1) and 0.58 < off.min() < off.max() < 0.74


def test_domains_of_two_models_are_refused(shared_dir):
    traces = [load_trace(shared_dir / "traces" / f"{n}.npz") for n in ("small8x2_de_man", "small32x4_de_man")]
    with pytest.raises(UserError, match="another model"):
        similarity([inspect_stream([t]) for t in traces])
