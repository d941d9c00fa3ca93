"""The command line: each command does its work, each mistake is one line and exit code 2."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

import placement
from placement import methods
from placement.__main__ import COMMANDS, build_parser, main
from placement.cost import Calibration, evaluate
from placement.plan import MoEShape, Plan, linear_plan, make_plan
from placement.topology import two_level
from placement.trace import Trace

E, K, L, GPUS = 16, 2, 4, 4


def make_trace(seed=0, sequences=40, length=30, shape=None):
    """Sequences with a topic that prefers some experts in every layer, so that there is something to place."""
    rng = np.random.default_rng(seed)
    shape = shape or MoEShape(tuple(range(1, L + 1)), E, K, "toy")
    topic = np.repeat(rng.integers(0, 4, sequences), length)
    prefers = np.stack([rng.permutation(E) % 4 for _ in range(L)])
    score = rng.random((sequences * length, L, E)) + 0.6 * (prefers == topic[:, None, None])
    return Trace(shape, np.argsort(-score, -1)[..., :K].astype(np.uint8), np.full(sequences, length))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    trace = make_trace()
    trace.save(folder / "t.npz")
    make_trace(1).save(folder / "u.npz")
    linear_plan(trace.shape, GPUS).save(folder / "linear.json")
    replace(linear_plan(trace.shape, GPUS), affinity="lost.npz").save(folder / "lost.json")
    Calibration(step_tokens=256).save(folder / "calibration.json")
    two_level(2, 2, speed=[1, 1, 2, 2]).save(folder / "topology.json")
    config = {"num_hidden_layers": L + 1, "first_k_dense_replace": 1, "num_experts": E, "num_experts_per_tok": K}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "far.json").write_text(json.dumps([99] * len(trace.seq_lens)))
    np.savetxt(folder / "load.csv", trace.load_LE(), delimiter=",", fmt="%d")
    return folder


@pytest.fixture
def run(files, monkeypatch, capsys):
    """Run a command line in the folder of files: (exit code, stdout, stderr)."""
    monkeypatch.chdir(files)

    def call(line):
        capsys.readouterr()
        try:
            code = main(line.split())
        except SystemExit as stop:  # argparse
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


def ok(result):
    code, out, err = result
    assert code == 0, err
    return out


# -- solve and compare ----------------------------------------------------------------------------------------------


def test_solve_writes_a_plan_and_its_proof(run, files, tmp_path):
    plan_path, json_path = tmp_path / "p.json", tmp_path / "s.json"
    out = ok(run(f"solve --trace t.npz --gpus 4 --method lpt-swap --holdout 0.25 -o {plan_path} --json {json_path}"))
    plan, result = Plan.load(plan_path), json.loads(json_path.read_text())
    assert plan.ranks == 4 and plan.made_by == "lpt-swap" and "held-out" in out
    assert {"status", "objective", "bound", "gap", "seconds", "history", "train", "held_out"} <= result.keys()
    train, held = make_trace().split(0.25)
    assert np.isclose(result["held_out"]["compute_tail"], evaluate(plan, held).compute_tail)
    assert np.isclose(result["train"]["fan_out"], evaluate(plan, train).fan_out)


def test_solve_by_loads_only(run, tmp_path):
    out = ok(run(f"solve --trace load.csv --top-k 2 --gpus 4 --method lpt-swap -o {tmp_path}/p.json"))
    assert "compute_tail" in out and "locality" not in out
    assert Plan.load(tmp_path / "p.json").shape.top_k == 2


def test_solve_on_a_described_machine(run, tmp_path):
    ok(run(f"solve --trace t.npz --topology topology.json --method lpt-swap -o {tmp_path}/p.json"))
    plan = Plan.load(tmp_path / "p.json")
    load = evaluate(plan, make_trace(), two_level(2, 2, speed=[1, 1, 2, 2])).load_LW.sum(0)
    assert load[2:].sum() > 1.25 * load[:2].sum()  # the fast GPUs get the hot experts
    ok(run(f"solve --trace t.npz --nodes 2 --gpus-per-node 2 --inter 25G --method linear -o {tmp_path}/q.json"))


def test_compare_rows(run, tmp_path):
    line = "compare --trace t.npz --gpus 4 --holdout 0.5 --seconds 0.4 --method linear lpt eplb"
    out = ok(run(f"{line} --json {tmp_path}/J"))
    rows = json.loads((tmp_path / "J").read_text())
    assert [row["method"] for row in rows] == ["linear", "lpt", "eplb"]
    figures = {"compute_tail", "compute_tail_worst_layer", "locality", "fan_out", "dispatch_rows", "combine_rows"}
    for row in rows:
        assert set(row["held_out"]) == set(row["train"]) == figures
        assert {"seconds", "objective", "bound", "gap"} <= row.keys()
        assert row["method"] in out
    train, held = make_trace().split(0.5)
    linear = evaluate(linear_plan(train.shape, 4), held)
    assert np.isclose(rows[0]["held_out"]["locality"], linear.locality)
    assert np.isclose(rows[0]["held_out"]["dispatch_rows"], linear.dispatch_rows)


def test_compare_by_loads_only(run, tmp_path):
    line = "compare --trace load.csv --top-k 2 --gpus 4 --redundant 1 --seconds 0.5"
    code, out, err = run(f"{line} --json {tmp_path}/J")
    assert code == 0 and "equal split" in out and "homes left out" in err
    rows = {row["method"]: row for row in json.loads((tmp_path / "J").read_text())}
    assert {"linear", "lpt", "eplb", "balance", "joint"} <= rows.keys() and "homes" not in rows
    load_LE = make_trace().load_LE()
    for row in rows.values():
        assert row["held_out"] is None and row["train"]["compute_tail_lp"] <= row["train"]["compute_tail"] + 1e-9
    tail_L = load_LE.reshape(L, GPUS, -1).sum(-1).max(-1) / (load_LE.sum(-1) / GPUS)
    plain = json.loads(ok(run("compare --trace load.csv --top-k 2 --gpus 4 --method linear --json -")))
    assert np.isclose(plain[0]["train"]["compute_tail"], tail_L.mean())
    code, _, err = run(f"{line} --plot {tmp_path}/p.png")
    assert code == 2 and "loads do not tell" in err
    code, _, err = run("compare --trace load.csv load.csv --top-k 2 --gpus 4")
    assert code == 2 and "add them up" in err


def test_requests_of_one_sequence_stay_on_one_side_of_the_split(run):
    """40 sequences of 30 tokens as requests of 20 and 10: a share of the requests would cut one."""
    out = json.loads(ok(run("solve --trace t.npz --gpus 4 --method linear --cut 20 --holdout 0.11 --json -")))
    assert (out["train"]["tokens"], out["held_out"]["tokens"]) == (36 * 30, 4 * 30)


def test_every_method_solves_and_is_compared(run, tmp_path):
    out = ok(run(f"compare --trace t.npz u.npz --gpus 4 --seconds 0.5 --json {tmp_path}/J"))
    rows = json.loads((tmp_path / "J").read_text())
    assert {"linear", "lpt", "eplb", "joint"} <= {row["method"] for row in rows}
    by_name = {row["method"]: row for row in rows}
    assert by_name["joint"]["held_out"]["fan_out"] < by_name["lpt"]["held_out"]["fan_out"]
    for row in rows:
        if row["bound"] is not None:
            assert np.isclose(row["gap"], abs(row["bound"] - row["objective"]) / abs(row["objective"]))
    assert "joint" in out


@pytest.mark.parametrize("name", methods.METHODS)
def test_methods_resolve(name):
    assert callable(methods.find(name).load()) and methods.find(name).summary


def test_homes_write_an_affinity_file_that_report_uses(run, tmp_path):
    out = ok(run(f"solve --trace t.npz --gpus 4 --method homes --seconds 1 --cut 15 -o {tmp_path}/p.json"))
    assert "homes probe:32" in out and (tmp_path / "p.affinity.npz").exists()
    assert Plan.load(tmp_path / "p.json").affinity == "p.affinity.npz"
    figures = {}
    for rule in ("probe:32", "round-robin"):
        ok(run(f"report --plan {tmp_path}/p.json --trace u.npz --cut 15 --homes {rule} --json {tmp_path}/r.json"))
        figures[rule] = json.loads((tmp_path / "r.json").read_text())["after"]["dispatch_rows"]
    assert figures["probe:32"] < figures["round-robin"]


def test_domains_and_old_plans(run, tmp_path):
    ok(run(f"solve --trace t.npz u.npz --gpus 4 --method domains --worst --seconds 0.5 -o {tmp_path}/p.json"))
    line = f"solve --trace t.npz --gpus 4 --seconds 0.5 --old-plan {tmp_path}/p.json --max-moves 6"
    ok(run(f"{line} -o {tmp_path}/q.json"))
    old, new = (Plan.load(tmp_path / name).copy_slot_LEW >= 0 for name in ("p.json", "q.json"))
    assert (new & ~old).sum() <= 6


# -- report, inspect, simulate, convert, validate -------------------------------------------------------------------


def test_report_gives_the_loads_of_the_trace(run, tmp_path):
    ok(run(f"solve --trace t.npz --gpus 4 --method lpt --json {tmp_path}/s.json -o {tmp_path}/p.json"))
    homes = np.arange(40) * 7 % 4
    (tmp_path / "homes.json").write_text(json.dumps(homes.tolist()))
    line = f"report --plan {tmp_path}/p.json --trace t.npz --homes {tmp_path}/homes.json --json {tmp_path}/r.json"
    out = ok(run(f"{line} --solution {tmp_path}/s.json --plot {tmp_path}/r.png"))
    assert "compute_tail" in out and (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    result, trace = json.loads((tmp_path / "r.json").read_text()), make_trace()
    assert result["expert_load"] == trace.load_LE().tolist()
    costs = evaluate(Plan.load(tmp_path / "p.json"), trace, homes=homes)
    assert np.allclose(result["after"]["load_LW"], costs.load_LW)
    assert np.allclose(result["after"]["traffic_WW"], costs.traffic_WW)


def test_report_beside_another_plan_counts_moves(run, tmp_path):
    shape = make_trace().shape
    slots = [list(map(list, layer)) for layer in linear_plan(shape, GPUS).slots]
    slots[0][0][0], slots[0][1][0] = slots[0][1][0], slots[0][0][0]
    make_plan(shape, GPUS, slots).save(tmp_path / "swapped.json")
    out = ok(run(f"report --plan {tmp_path}/swapped.json --before linear.json --trace t.npz"))
    assert "2 expert copies move" in out


def test_inspect(run, tmp_path):
    out = ok(run(f"inspect t.npz u.npz --json {tmp_path}/i.json"))
    result = json.loads((tmp_path / "i.json").read_text())
    assert "max/mean" in out and "cosine" in out
    assert len(result["recordings"]) == 2 and len(result["recordings"][0]["layers"]) == L
    assert np.allclose(np.diag(result["similarity"]), 1)
    assert "loads only" in ok(run("inspect load.csv --top-k 2"))
    assert "40 sequences" in ok(run("inspect --trace t.npz"))  # as the other commands spell it


def test_simulate(run, tmp_path):
    line = "simulate --trace t.npz --plan linear linear.json --gpus 4 --calibration calibration.json"
    out = ok(run(f"{line} --json {tmp_path}/s.json"))
    first, second = json.loads((tmp_path / "s.json").read_text())
    assert first["seconds"] == second["seconds"] and "tokens/s" in out
    assert first["steps"] == -(-300 // 64) and first["tokens"] == sum(first["per_step"]["tokens"]) == 1200
    assert np.isclose(first["tokens_per_second"], 1200 / sum(first["per_step"]["seconds"]))


def test_a_trace_that_names_its_homes(run, tmp_path):
    """As the engine records it: cut into requests and simulated like any other."""
    trace = make_trace()
    replace(trace, homes=np.zeros(len(trace.seq_lens), np.int32)).save(tmp_path / "h.npz")
    for line in ("simulate --plan linear.json", "simulate --plan linear.json --cut 7", "report --plan linear.json"):
        plain = ok(run(f"{line} --trace t.npz"))
        assert ok(run(f"{line} --trace {tmp_path}/h.npz")) == plain.replace("t.npz", f"{tmp_path}/h.npz")


def test_one_step_of_everything_is_the_cost_of_the_trace(run, tmp_path):
    Calibration(step_tokens=1200).save(tmp_path / "c.json")
    ok(run(f"simulate --trace t.npz --plan linear.json --calibration {tmp_path}/c.json --json {tmp_path}/s.json"))
    (result,) = json.loads((tmp_path / "s.json").read_text())
    trace = make_trace()
    expected = evaluate(linear_plan(trace.shape, GPUS), trace, calibration=Calibration(step_tokens=1200))
    assert result["steps"] == 1 and np.isclose(result["seconds"], expected.step_seconds)
    assert np.isclose(result["step_bytes_mean"], expected.step_bytes)


@pytest.mark.parametrize("kind", ["sglang", "vllm", "vllm-ascend", "epmoe"])
def test_convert_there_and_back(run, tmp_path, kind):
    ok(run(f"solve --trace t.npz --gpus 4 --redundant 1 --method eplb -o {tmp_path}/p.json"))
    ok(run(f"convert {tmp_path}/p.json --to {kind} --like config.json -o {tmp_path}/x.json"))
    ok(run(f"convert {tmp_path}/x.json --to epmoe --like config.json --gpus 4 -o {tmp_path}/back.json"))
    assert Plan.load(tmp_path / "back.json").slots == Plan.load(tmp_path / "p.json").slots
    if kind == "sglang":
        table = json.loads((tmp_path / "x.json").read_text())["physical_to_logical_map"]
        assert len(table) == L + 1  # the dense layer is counted
    ok(run(f"validate {tmp_path}/x.json --model config.json --gpus 4 --trace t.npz"))


def test_convert_a_recording(run, tmp_path):
    ids = make_trace().expert_ids_TLK
    np.save(tmp_path / "ids.npy", ids.astype(np.int16))
    ok(run(f"convert {tmp_path}/ids.npy --to trace --like config.json --sequence-length 30 -o {tmp_path}/t.npz"))
    ok(run(f"inspect {tmp_path}/t.npz"))
    assert "40 sequences" in ok(run(f"inspect {tmp_path}/t.npz"))


def test_help_teaches(run):
    for command in COMMANDS:
        name = command.__name__.rsplit(".", 1)[-1]
        out = ok(run(f"{name} --help"))
        assert f"epmoe-placement {name} " in out.split("examples" if name != "convert" else "plans", 1)[1]
    assert build_parser().prog == "epmoe-placement"


# -- mistakes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(files):
    data = (files / "t.npz").read_bytes()
    (files / "cut.npz").write_bytes(data[: len(data) // 2])
    (files / "empty.npz").write_bytes(b"")
    (files / "folder").mkdir(exist_ok=True)
    zeros = np.zeros((50, L, 1), np.uint8)
    Trace(MoEShape(tuple(range(L)), E, 1), zeros, np.array([25, 25]), source="z").save(files / "zeros.npz")
    make_trace(shape=MoEShape(tuple(range(L)), E, K, "other")).save(files / "other.npz")
    (files / "bad.json").write_text('{"format": "epmoe-plan/1"}')
    (files / "text.json").write_text("hello")
    return files


MISTAKES = [
    ("solve --trace none.npz --gpus 4", "none.npz"),
    ("solve --trace folder --gpus 4", "folder"),
    ("solve --trace cut.npz --gpus 4", "cut.npz"),
    ("solve --trace empty.npz --gpus 4", "empty.npz"),
    ("solve --trace zeros.npz --gpus 4", "capture did not run"),
    ("solve --trace t.npz other.npz --gpus 4", "moe_layers"),
    ("solve --trace t.npz", "--gpus"),
    ("solve --trace t.npz --gpus 4 --nodes 2 --gpus-per-node 2", "describe the machine once"),
    ("solve --trace t.npz --nodes 2", "--gpus-per-node"),
    ("solve --trace t.npz --gpus 4 --inter 5G", "--inter is for several nodes"),
    ("solve --trace t.npz --topology topology.json --speed 1,1,1,1", "leave out"),
    ("solve --trace t.npz --topology none.json", "none.json"),
    ("solve --trace t.npz --topology linear.json", "epmoe-topology/1"),
    ("solve --trace t.npz --gpus 40", "40"),
    ("solve --trace t.npz --gpus 4 --slots 10", "cannot hold 16 experts"),
    ("solve --trace t.npz --gpus 4 --slots 80", "at most 64 slots"),
    ("solve --trace t.npz --gpus 4 --slots 20 --redundant 1", "not both"),
    ("solve --trace t.npz --gpus 0", "at least 1"),
    ("solve --trace t.npz --gpus four", "whole number"),
    ("solve --trace t.npz --gpus 4 --cap 0.9", "at least the mean load"),
    ("solve --trace t.npz --gpus 4 --cap nan", "not a number"),
    ("solve --trace t.npz --gpus 4 --seconds 0", "give more"),
    ("solve --trace t.npz --gpus 4 --holdout 1", "less than 1"),
    ("solve --trace t.npz --gpus 4 --method magic", "magic"),
    ("solve --trace t.npz --gpus 4 --objective beauty", "beauty"),
    ("solve --trace t.npz --gpus 4 --speed 1,2", "speed"),
    ("solve --trace t.npz --gpus 4 --speed 1,2,x,4", "no list of numbers"),
    ("solve --trace t.npz --gpus 4 --method linear --max-moves 3", "--old-plan"),
    ("solve --trace t.npz --gpus 4 --old-plan bad.json", "bad.json"),
    ("solve --trace t.npz --gpus 4 --method lpt --old-plan linear.json", "starts anew"),
    ("solve --trace t.npz --gpus 8 --old-plan linear.json", "4"),
    ("solve --trace t.npz --gpus 4 --method linear -o folder", "it is a folder"),
    ("solve --trace t.npz --gpus 4 --method linear -o nowhere/p.json", "no folder nowhere"),
    ("solve --trace load.csv --gpus 4 --method lpt", "--top-k"),
    ("solve --trace load.csv --top-k 2 --gpus 4 --method joint --objective locality", "trace"),
    ("solve --trace t.npz --gpus 4 --method linear --calibration linear.json", "epmoe-calibration/1"),
    ("solve --trace t.npz --gpus 4 --method linear -o -", "name a file"),
    ("solve --trace t.npz --gpus 4 --method linear -o x.json --json x.json", "two outputs go to x.json"),
    ("compare --trace t.npz --gpus 4 --holdout 0", "--holdout"),
    ("compare --trace t.npz --gpus 4 --holdout 0.001", "leaves one side empty"),
    ("solve --trace load.csv --top-k 2 --gpus 4 --method domains", "more than one trace"),
    ("solve --trace t.npz --gpus 4 --method domains", "more than one trace"),
    ("compare --trace load.csv load.csv --top-k 2 --gpus 4", "add them up first"),
    ("compare --trace t.npz --gpus 4 --method linear nothing", "nothing"),
    ("compare --trace t.npz --gpus 4 --method linear --plot none/x.png", "no folder none"),
    ("compare --trace t.npz --gpus 4 --method linear --plot x.xyz", ".png"),
    ("report --plan none.json --trace t.npz", "none.json"),
    ("report --plan text.json --trace t.npz", "not JSON"),
    ("report --plan bad.json --trace t.npz", "lacks"),
    ("report --plan linear.json --trace other.npz", "moe_layers"),
    ("report --plan linear.json --trace t.npz --gpus 8", "8"),
    ("report --plan linear.json --trace t.npz --homes none.json", "none.json"),
    ("report --plan linear.json --trace t.npz --solution linear.json", "no solution"),
    ("simulate --trace t.npz --plan linear", "--gpus"),
    ("simulate --trace t.npz --plan linear.json --homes topology.json", "homes"),
    ("simulate --trace t.npz --plan linear.json --homes far.json", "ranks in 0..3"),
    ("simulate --trace t.npz --plan linear.json --homes probe:x", "prompt:N or probe:N"),
    ("report --plan linear.json --trace t.npz --homes probe:8", "has no affinity file"),
    ("validate /dev/zero", "device"),
    ("convert none.json --to vllm -o x.json", "none.json"),
    ("convert linear.json --to trace -o x.npz", "no known recording"),
    ("convert linear.json --to sglang --model-layers 2 -o x.json", "model-layers"),
    ("validate bad.json", "bad.json"),
    ("validate linear.json --gpus 8", "8"),
    ("validate lost.json", "cannot read affinity file"),
    ("validate linear.json --trace other.npz", "moe_layers"),
    ("validate linear.json --model topology.json", "topology.json"),
    ("inspect", "FILE"),
    ("inspect text.json", "no known recording"),
    ("inspect t.npz --json nowhere/x.json", "no folder nowhere"),
    ("", "COMMAND"),
    ("explode", "explode"),
]


@pytest.mark.parametrize("line, named", MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistakes_are_one_line_and_exit_2(run, broken, line, named):
    code, out, err = run(line)
    assert code == 2, (code, out, err)
    (told,) = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert named in told and told.startswith("epmoe-placement"), err
    assert out == ""


def test_version(run):
    assert ok(run("--version")) == f"epmoe-placement {placement.__version__}\n"


def test_read_only_output(run, files, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, _, err = run(f"solve --trace t.npz --gpus 4 --method linear -o {tmp_path}/p.json")
    assert code == 2 and "no permission" in err
