"""Tuned tiles: the file, which case a layer takes, and how the engine and the command come by it."""

import json
from dataclasses import replace

import pytest
import torch

from epmoe.ops.experts import ExpertOptions
from epmoe.ops.tile_candidates import candidates
from epmoe.ops.tiles import BLOCKED_64, STREAM, TAIL, Choice
from epmoe.ops.tuned import Tuned, TunedCase
from epmoe.tune import clearly_fastest
from launch import args, tune
from launch.__main__ import main
from placement.errors import UserError

CASE = TunedCase("H200", 128, 8, 2048, 768, "bfloat16", 64, 280.5, 290.25, Choice(16, STREAM, BLOCKED_64))
CASES = (
    replace(CASE, tokens=1, choice=Choice(16, STREAM, STREAM, ((2, 1024, 2), (4, 1024, 4)))),
    CASE,
    replace(CASE, tokens=1024, choice=Choice(64, BLOCKED_64, BLOCKED_64)),
    replace(CASE, experts=16, choice=Choice(32, STREAM, STREAM)),
)
DTYPES = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
BLOCKS = (16, 32, 64, 128)
MACHINE = ("H200", "bfloat16")


def test_a_file_holds_what_was_measured():
    assert Tuned.from_json(Tuned(CASES).to_json()).cases == CASES


def test_newer_cases_replace_older_ones():
    newer = replace(CASE, tuned_us=1.0)
    cases = Tuned(CASES).merged([newer]).cases
    assert len(cases) == len(CASES) and newer in cases and CASE not in cases


@pytest.mark.parametrize(
    ("layer", "taken"),
    [
        ((128, 2048, 768, 512, False), 1),
        ((128, 2048, 768, 1000, False), 1),  # nearest below a factor of two
        ((128, 2048, 768, 5000, False), 2),
        ((128, 2048, 768, 8, True), 0),
        ((128, 2048, 768, 8, False), None),  # several rows take no tiles of a single one
        ((128, 2048, 768, 2500, False), None),  # more than a factor of two from both
        ((64, 2048, 768, 256, False), 1),  # another number of slots, as many pairs in each
        ((16, 2048, 768, 512, False), 3),
        ((128, 2048, 1024, 512, False), None),
        ((128, 2048, 768, 0, False), None),
    ],
)
def test_the_nearest_case_is_taken(layer, taken):
    assert Tuned(CASES).find(MACHINE, *layer) == (None if taken is None else CASES[taken].choice)


def test_another_device_or_dtype_has_no_case():
    assert Tuned(CASES).find(("H100", "bfloat16"), 128, 2048, 768, 512, False) is None
    assert Tuned(CASES).find(("H200", "float16"), 128, 2048, 768, 512, False) is None


def test_deterministic_mode_keeps_its_one_tile(monkeypatch):
    weights = type("Weights", (), {"down": torch.empty(4, 64, 64, dtype=torch.float16), "gate_up": None})
    x_RD = torch.empty(8, 64, dtype=torch.float16)
    tuned = Tuned(())
    monkeypatch.setattr(tuned, "choice", lambda *_: CASE.choice)
    assert ExpertOptions(tuned=tuned).measured(x_RD, 16, weights) == CASE.choice
    assert ExpertOptions(tuned=tuned, deterministic=True).measured(x_RD, 16, weights) is None


@pytest.mark.parametrize(("likely", "expected"), [(0, 16), (5, 5), (40, 16)])
def test_tiles_are_asked_for_as_many_pairs_as_are_likely(monkeypatch, likely, expected):
    """Of the tuned tiles first, else of the heuristic."""
    asked, tuned = [], Tuned(())
    monkeypatch.setattr(tuned, "choice", lambda rows_RD, pairs, weights: asked.append(pairs))
    heuristic = lambda rows_RD, pairs, weights, deterministic: (pairs, deterministic)  # noqa: E731
    assert ExpertOptions(likely=likely, tuned=tuned).tiles(None, 16, None, heuristic) == (expected, False)
    assert asked == [expected]
    assert ExpertOptions(likely=likely, deterministic=True).tiles(None, 16, None, heuristic) == (expected, True)
    monkeypatch.setattr(tuned, "choice", lambda rows_RD, pairs, weights: CASE.choice)
    assert ExpertOptions(likely=likely, tuned=tuned).tiles(None, 16, None, heuristic) == CASE.choice


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda raw: raw.update(format="epmoe-tuned/0"), "epmoe-tuned/0"),
        (lambda raw: raw["cases"][0].pop("tokens"), "tokens"),
        (lambda raw: raw["cases"][0].update(tokens=0), "tokens is 0"),
        (lambda raw: raw["cases"][0]["choice"]["gate_up"].update(colour=3), "colour"),
        (lambda raw: raw.update(cases=[1]), "epmoe tune"),
    ],
)
def test_other_files_are_refused(damage, says):
    raw = json.loads(Tuned(CASES).to_json())
    damage(raw)
    with pytest.raises(UserError, match=says):
        Tuned.from_json(json.dumps(raw))


def run(capsys, *argv: str) -> tuple[int, str]:
    code = main(["tune", *argv])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--shape", "8,2,64"], "E,K,D,F"),
        (["--shape", "2,3,64,64"], "K is at most E"),
        (["--shape", "8,2,64,64", "--ranks", "9"], "8 experts"),
        (["--shape", "8,2,64,64", "--tokens", "4", "0"], "--tokens has 0"),
        (["--shape", "8,2,64,64", "--dtype", "int8"], "int8"),
        (["--shape", "8,2,256,64", "--dtype", "float8"], "multiple of 128"),
        (["--model", "demo", "--shape", "8,2,64,64"], "not allowed"),
        (["--shape", "8,2,64,64"], "no GPU is visible"),
        (["--model", "demo"], "no GPU is visible"),
    ],
)
def test_mistakes_are_one_line(argv, says, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "has_gpu", lambda: False)
    code, err = run(capsys, *argv, "-o", str(tmp_path / "tuned.json"))
    assert code == 2 and err.count("\n") == 1 and says in err, err


def test_a_file_of_something_else_is_not_overwritten(capsys, tmp_path):
    (tmp_path / "notes").write_text("{}")
    code, err = run(capsys, "--shape", "8,2,64,64", "-o", str(tmp_path / "notes"))
    assert code == 2 and "notes" in err and (tmp_path / "notes").read_text() == "{}"


def test_the_layer_is_one_rank_of_the_model():
    of = lambda *argv: tune.shape_of(_parsed(*argv))  # noqa: E731
    shape, dtype = of("--shape", "128,8,2048,768", "--ranks", "48")
    assert (str(shape), dtype) == ("3,3,2048,768", "bfloat16")
    assert of("--shape", "8,2,64,96", "--dtype", "float16")[1] == "float16"


def _parsed(*argv: str):
    parser = args.Parser()
    tune.add_arguments(parser)
    return parser.parse_args(argv)


def test_results_are_kept_and_shown(capsys, monkeypatch, tmp_path):
    """With the measurement itself replaced."""
    path = tmp_path / "new" / "tuned.json"
    monkeypatch.setattr(tune, "has_gpu", lambda: True)
    for tokens, us in ((64, 300.0), (1024, 400.0), (64, 280.0)):
        measured = replace(CASE, tokens=tokens, tuned_us=us, heuristic_us=420.0)
        monkeypatch.setattr(tune, "measure", lambda *_, measured=measured: [measured])
        assert main(["tune", "--shape", "128,8,2048,768", "-o", str(path)]) == 0
    assert "50.0 % slower (64 tokens)" in capsys.readouterr().out
    assert {(case.tokens, case.tuned_us) for case in tune.read_tuned(path).cases} == {(64, 280.0), (1024, 400.0)}


def interrupted(*cases: TunedCase):
    yield from cases
    raise KeyboardInterrupt


def test_what_was_measured_before_a_stop_is_kept_and_not_measured_again(capsys, monkeypatch, tmp_path):
    path, asked = tmp_path / "tuned.json", []
    argv = ["tune", "--shape", "128,8,2048,768", "--tokens", "1", "64", "1024", "-o", str(path)]
    monkeypatch.setattr(tune, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "H200")
    monkeypatch.setattr(tune, "measure", lambda *_: interrupted(*CASES[:2]))
    assert main(argv) == 130
    assert "2 of 3 cases are in" in capsys.readouterr().err
    assert tune.read_tuned(path).cases == CASES[:2]
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"]

    monkeypatch.setattr(tune, "measure", lambda shape, dtype, tokens, console: asked.append(tokens) or iter(CASES[2:3]))
    assert main([*argv, "--resume", "--json"]) == 0
    assert asked == [[1024]]
    assert [case["tokens"] for case in json.loads(capsys.readouterr().out)] == [1, 64, 1024]
    assert tune.read_tuned(path).cases == CASES[:3]
    assert main([*argv, "--resume"]) == 0 and len(asked) == 1  # nothing is missing
    assert main([*argv, "--resume", "--dtype", "float16"]) == 0 and asked[1] == [1, 64, 1024]  # another layer


def test_candidates_are_near_the_mean_and_try_tails_where_there_are_any():
    for pairs, fewest, most in ((1, 16, 32), (2500, 16, 64), (12800, 64, 128), (100000, 64, 128)):
        assert {rows for rows, _, _ in candidates(pairs, 100)} <= {rows for rows in BLOCKS if fewest <= rows <= most}
        assert all(tiles.specialised for _, tail, tiles in candidates(pairs, 100) if tail)
    assert {tail for _, tail, tiles in candidates(12800, 100) if tiles.specialised} == {0, TAIL}


def test_times_beside_other_work_are_refused():
    small, large = Choice(16, STREAM, STREAM), Choice(64, BLOCKED_64, BLOCKED_64)
    assert clearly_fastest({small: 90.0, large: 100.0}, large) == small
    assert clearly_fastest({small: 99.9, large: 100.0}, large) == large
    with pytest.raises(UserError, match="other work is on this GPU"):
        clearly_fastest({small: -3.0, large: 100.0}, large)


def test_runs_read_the_users_file_on_a_gpu_only(monkeypatch, tmp_path):
    monkeypatch.setattr(args, "tuned_file", lambda: tmp_path / "tuned.json")
    assert args._tuned_text(None, on_cpu=False) is None
    (tmp_path / "tuned.json").write_text(Tuned(CASES).to_json())
    assert Tuned.from_json(args._tuned_text(None, on_cpu=False)).cases == CASES
    assert args._tuned_text("off", on_cpu=False) is None
    assert args._tuned_text(None, on_cpu=True) is None
    (tmp_path / "other.json").write_text(Tuned(CASES[:1]).to_json())
    assert Tuned.from_json(args._tuned_text(str(tmp_path / "other.json"), on_cpu=False)).cases == CASES[:1]
    with pytest.raises(UserError, match="gone.json"):
        args._tuned_text(str(tmp_path / "gone.json"), on_cpu=False)
    assert args._tuned_text(str(tmp_path / "other.json"), on_cpu=True) is None
    with pytest.raises(UserError, match="gone.json"):  # also where it would not be used
        args._tuned_text(str(tmp_path / "gone.json"), on_cpu=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_measured_tiles_are_taken_by_the_layer(dtype, capsys, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("left out: no CUDA device")
    path = tmp_path / "tuned.json"
    argv = ["tune", "--shape", "4,2,256,128", "--tokens", "1", "40", "--dtype", dtype, "-o", str(path), "--json"]
    assert main(argv) == 0
    cases = json.loads(capsys.readouterr().out)
    assert [case["tokens"] for case in cases] == [1, 40]
    assert all(0 < case["tuned_us"] <= case["heuristic_us"] for case in cases)
    assert main([*argv[:6], "400", *argv[6:], "--resume"]) == 0  # 200 pairs per expert: also with tails
    later = json.loads(capsys.readouterr().out)
    assert later[:2] == cases and later[2]["tokens"] == 400
    weights = type("Weights", (), {"down": torch.empty(4, 256, 128, device="cuda").to(DTYPES[dtype])})
    tuned = tune.read_tuned(path)
    for case in tuned.cases:
        x_TD = torch.empty(case.tokens, 256, dtype=torch.bfloat16, device="cuda")
        assert ExpertOptions(tuned=tuned).measured(x_TD, case.tokens * 2, weights) == case.choice
