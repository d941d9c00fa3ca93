"""JSON with a key twice is refused; a file is replaced whole or not at all."""

import json
import os
import stat
import threading

import pytest

from placement.errors import UserError
from placement.plan import MoEShape, Plan, linear_plan
from placement.textfiles import parse_json, whole_file, write_whole
from placement.topology import Topology, uniform


def test_a_key_given_twice_is_refused_at_any_depth():
    assert parse_json('{"a": [{"b": 1}, {"b": 2}]}', "f", "") == {"a": [{"b": 1}, {"b": 2}]}
    with pytest.raises(UserError, match="f: the key 'b' is given twice"):
        parse_json('{"a": [{"b": 1, "b": 1}]}', "f", "")
    with pytest.raises(UserError, match="f is not JSON.*; give a plan"):
        parse_json('{"a": ', "f", "give a plan")
    with pytest.raises(UserError, match="nested too deeply"):
        parse_json("[" * 100_000, "f", "")


def test_plans_and_topologies_refuse_a_key_given_twice():
    plan = linear_plan(MoEShape((0,), 4, 2), 2).to_json()
    with pytest.raises(UserError, match="'ranks' is given twice"):
        Plan.from_json(plan[:-1] + ', "ranks": 3}')
    with pytest.raises(UserError, match="'speed' is given twice"):
        Topology.from_json(uniform(2).to_json()[:-1] + ', "speed": [1, 1]}')


@pytest.mark.parametrize("name", ["../p.npz", "", 3, "x" * 300, "a\0b"])
def test_a_plan_names_its_affinity_file_beside_it(name):
    text = linear_plan(MoEShape((0,), 4, 2), 2).to_json()
    with pytest.raises(UserError, match="affinity must be null or the name of a file beside the plan"):
        Plan.from_json(text.replace('"affinity": null', f'"affinity": {json.dumps(name)}'))


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "ä.json"
    write_whole(path, "old")
    with pytest.raises(RuntimeError), whole_file(path) as file:
        file.write(b"half of the ne")
        raise RuntimeError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["ä.json"]
    path.chmod(0o640)
    write_whole(path, "new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o640


def test_links_are_followed_and_pipes_written_to(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_whole(tmp_path / "pipe", "through")
    reader.join()
    assert got == ["through"]
