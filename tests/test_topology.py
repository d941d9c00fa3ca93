"""Topologies: shapes of the constructors, the file, and one clear line for each mistake."""

import json

import numpy as np
import pytest

from placement.errors import UserError
from placement.topology import Topology, two_level, uniform


def test_two_level_links_follow_nodes():
    topology = two_level(2, 2, intra=(100.0, 1e-6), inter=(10.0, 5e-6))
    assert topology.ranks == 4
    assert topology.node_W.tolist() == [0, 0, 1, 1]
    assert topology.bandwidth_WW[0].tolist() == [100, 100, 10, 10]
    assert topology.latency_WW[3].tolist() == [5e-6, 5e-6, 1e-6, 1e-6]
    assert not topology.is_uniform
    assert uniform(3).is_uniform
    assert not uniform(2, speed=[1, 2]).is_uniform
    assert not uniform(2, slots=[3, 5]).is_uniform
    np.testing.assert_allclose(uniform(2, speed=[1, 3]).share_W, [0.25, 0.75])


def test_file_round_trip(tmp_path):
    topology = two_level(2, 2, speed=[1, 1, 2, 2], slots=[3, 3, 5, 5])
    topology.save(tmp_path / "t.json")
    again = Topology.load(tmp_path / "t.json")
    off = ~np.eye(4, dtype=bool)
    for name in ("speed_W", "node_W", "slots_W"):
        np.testing.assert_array_equal(getattr(again, name), getattr(topology, name))
    for name in ("bandwidth_WW", "latency_WW"):
        np.testing.assert_array_equal(getattr(again, name)[off], getattr(topology, name)[off])
    assert Topology.from_json(uniform(1).to_json()).ranks == 1


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("speed", [1, 1e300], "speeds must be from"),
        ("bandwidth", [[0, float("inf")], [1e9, 0]], "every bandwidth"),
        ("speed", [1, 0], "speeds must be from"),
        ("speed", [1, float("nan")], "speeds must be from"),
        ("speed", [1, 1, 1], "speed has shape"),
        ("bandwidth", [[0, 0], [1, 0]], "bandwidth"),
        ("latency", [[0, -1], [1, 0]], "latency"),
        ("slots", [2, 0], "slots"),
        ("node", [0], "node has shape"),
        ("ranks", "two", "wrong type"),
        ("format", "other/1", "format is 'other/1'"),
        ("extra", 1, "expected exactly"),
    ],
)
def test_mistakes_are_one_clear_line(key, value, says):
    raw = json.loads(uniform(2).to_json()) | {key: value}
    with pytest.raises(UserError, match=says) as error:
        Topology.from_json(json.dumps(raw), "my.json")
    assert "\n" not in str(error.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(UserError, match="cannot read topology"):
        Topology.load(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        Topology.load(tmp_path / "bad.json")
    with pytest.raises(UserError, match="both must be at least 1"):
        two_level(0, 4)
