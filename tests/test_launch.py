"""The command line: what it accepts, what it refuses in one line, and what a run gives back."""

import argparse
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cli import Run, one_line
from tiny_checkpoints import save_tiny, tiny_tokenizer

import epmoe
from epmoe.config import EngineConfig, RankInfo
from epmoe.engine.worker import Outputs
from epmoe.model_config import ModelConfig
from launch import plans, session
from launch.__main__ import main
from launch.args import add_engine_arguments, add_model_arguments, engine_config
from launch.completion import Completion
from launch.detokenize import Detokenizer
from launch.failure import read_error_files
from launch.front import Front
from launch.plans import choose_plan
from launch.prompts import Prompt, read_prompts, require_writable, write_results
from launch.report import served_LW
from launch.tokenizer import encode, load_tokenizer
from placement.cost import evaluate
from placement.errors import UserError
from placement.plan import MoEShape, linear_plan, make_plan
from placement.trace import Trace


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "mixtral", tokenizer=True, num_experts=5)


@pytest.fixture(scope="module")
def shape(model):
    return ModelConfig.from_folder(model).moe_shape


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory, shape):
    """A trace in which experts 0 and 1 take almost everything: linear puts both on rank 0 of 2."""
    rng = np.random.default_rng(0)
    rare = rng.integers(2, 5, (400, shape.num_layers))
    ids = np.stack([np.where(rng.random(rare.shape) < 0.9, 0, rare), np.ones_like(rare)], -1).astype(np.uint8)
    path = tmp_path_factory.mktemp("trace") / "hot.npz"
    Trace(shape, ids, np.array([250, 150])).save(path)
    return path


# -- mistakes of the user: one line that names value, rule and remedy, and exit code 2 ------------------------------


def plan_for_three_ranks(tmp_path, shape):
    linear_plan(shape, 3).save(tmp_path / "plan3.json")
    return ["--placement", str(tmp_path / "plan3.json")]


def plan_of_another_model(tmp_path, shape):
    other = MoEShape((0, 1), 8, 2, "other")
    linear_plan(other, 2).save(tmp_path / "other.json")
    return ["--placement", str(tmp_path / "other.json")]


def plan_with_empty_rank(tmp_path, shape):
    text = linear_plan(shape, 2).to_json().replace("[[0, 1, 2], [3, 4]]", "[[0, 1, 2, 3, 4], []]", 1)
    (tmp_path / "empty.json").write_text(text)
    return ["--placement", str(tmp_path / "empty.json")]


def plan_with_too_few_slots(tmp_path, shape):
    text = linear_plan(shape, 2).to_json().replace("[[0, 1, 2], [3, 4]]", "[[0, 1, 2], [3]]", 1)
    (tmp_path / "few.json").write_text(text)
    return ["--placement", str(tmp_path / "few.json")]


def trace_of_another_shape(tmp_path, shape):
    other = MoEShape((0,), 8, 2, "other")
    Trace(other, np.zeros((4, 1, 2), np.uint8) + np.arange(2, dtype=np.uint8), np.array([4])).save(tmp_path / "t.npz")
    return ["--placement", "greedy", "--trace", str(tmp_path / "t.npz")]


def bad_jsonl(tmp_path, shape):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": 3}\n')
    return ["--prompt-file", str(tmp_path / "p.jsonl")]


def broken_jsonl(tmp_path, shape):
    (tmp_path / "p.txt").write_text('{"prompt": "a"}\nnot json\n')
    return ["--prompt-file", str(tmp_path / "p.txt")]


def deep_jsonl(tmp_path, shape):
    (tmp_path / "p.jsonl").write_text("[" * 50_000)
    return ["--prompt-file", str(tmp_path / "p.jsonl")]


def deep_config(tmp_path, shape):
    (tmp_path / "engine.json").write_text("[" * 50_000)
    return ["--config", str(tmp_path / "engine.json")]


def unknown_config_key(tmp_path, shape):
    (tmp_path / "engine.json").write_text('{"max_batch": 4}')
    return ["--config", str(tmp_path / "engine.json")]


def config_of_ranks(tmp_path, shape):
    (tmp_path / "engine.json").write_text('{"ranks": 3}')
    return ["--config", str(tmp_path / "engine.json")]


def config_of_wrong_type(tmp_path, shape):
    (tmp_path / "engine.json").write_text('{"block_size": "16"}')
    return ["--config", str(tmp_path / "engine.json")]


MISTAKES = {
    "no prompt file": (["--prompt-file", "/nowhere/p.txt"], ["/nowhere/p.txt", "No such file", "give"]),
    "no trace": (["--placement", "greedy"], ["greedy", "--trace"]),
    "no trace for auto": (["--placement", "auto"], ["auto", "--trace"]),
    "unknown placement": (["--placement", "best"], ["best", "linear", "plan file"]),
    "missing plan": (["--placement", "/nowhere/plan.json"], ["/nowhere/plan.json", "No such file"]),
    "missing trace": (["--placement", "greedy", "--trace", "/nowhere/t.npz"], ["/nowhere/t.npz"]),
    "unknown option": (["--rank", "2"], ["--rank", "--help"]),
    "not a number": (["--max-tokens", "many"], ["--max-tokens", "many", "int"]),
    "temperature": (["--temperature", "-1"], ["temperature", "-1"]),
    "top-p": (["--top-p", "0"], ["top_p", "0"]),
    "no ranks": (["--ranks", "0"], ["--ranks", "0", "at least 1"]),
    "more ranks than experts": (["--ranks", "6"], ["6", "5 experts"]),
    "dtype": (["--dtype", "int8"], ["int8", "float32"]),
    "combine": (["--combine", "sum"], ["sum", "exact", "reduce"]),
    "too long": (["--max-model-len", "9000"], ["9000", "512"]),
    "nowhere to write": (["--json", "/nowhere/out.json"], ["/nowhere/out.json"]),
    "plan for three ranks": (plan_for_three_ranks, ["3 ranks", "has 2"]),
    "plan of another model": (plan_of_another_model, ["num_experts", "8", "5"]),
    "plan with an empty rank": (plan_with_empty_rank, ["layer 0", "rank 1", "no expert"]),
    "plan with too few slots": (plan_with_too_few_slots, ["layer 0", "expert 4", "no rank"]),
    "trace of another shape": (trace_of_another_shape, ["num_experts", "8", "5"]),
    "prompt is no text": (bad_jsonl, ["p.jsonl, line 3", "string"]),
    "line is no JSON": (broken_jsonl, ["p.txt, line 2", "not JSON"]),
    "line nested too deeply": (deep_jsonl, ["p.jsonl, line 1", "not JSON"]),
    "settings nested too deeply": (deep_config, ["engine.json", "not JSON"]),
    "unknown key": (unknown_config_key, ["max_batch", "engine.json", "max_batch_tokens"]),
    "setting chosen elsewhere": (config_of_ranks, ["engine.json", "ranks", "--ranks"]),
    "more threads than any machine has": (["--threads", "100000"], ["threads", "100000", "at most"]),
    "more samples than memory holds": (["--n", "1000000000"], ["n is", "1000000000", "16384"]),
    "no path": (["--json", ""], ["''", "path"]),
    "wrong type": (config_of_wrong_type, ["block_size", "'16'", "int"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake(mistake, model, shape, tmp_path, capsys):
    extra, words = MISTAKES[mistake]
    argv = ["generate", "--model", str(model), "--ranks", "2", "--prompt", "the token"]
    assert main([*argv, *(extra(tmp_path, shape) if callable(extra) else extra)]) == 2
    line = one_line(capsys)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "argv, words",
    [
        (["generate"], ["--model"]),
        (["produce"], ["produce", "generate"]),
        (["generate", "--model", "/nowhere/m", "--prompt", "x"], ["/nowhere/m", "folder", "hub id"]),
        (["generate", "--model", ".", "--prompt", "x"], ["config.json"]),
        (["generate", "--model", "."], ["--prompt"]),
    ],
)
def test_mistake_before_the_model(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    line = one_line(capsys)
    assert all(word in line for word in words), line


def test_interrupted_before_there_is_anything_to_drain(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("launch.generate._prompts", interrupted)
    assert main(["generate", "--model", "demo", "--prompt", "x"]) == 130
    assert capsys.readouterr().err == "epmoe: stopped by SIGINT\n"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"epmoe {epmoe.__version__}\n"


def test_setting_that_changes_the_maths(model, tmp_path, capsys):
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    assert main(["generate", "--model", str(tmp_path), "--prompt", "x"]) == 2
    line = one_line(capsys)
    assert "hidden_act" in line and "gelu" in line


@pytest.mark.parametrize("content", [None, "", "{", "{}", "[]", '{"model": 1, "added_tokens": []}'])
def test_a_tokenizer_that_cannot_be_read(model, tmp_path, content):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=f"cannot load the tokenizer of {tmp_path}: .{{5,}}; put its files"):
        load_tokenizer(str(tmp_path))


def test_no_room_for_the_run(model, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert main(["generate", "--model", str(model), "--prompt", "x"]) == 2
    line = one_line(capsys)
    assert "No such file" in line and "TMPDIR" in line


TRACE = "epmoe/demo_model/trace_c.npz"


@pytest.mark.parametrize(
    "words, target, code",
    [
        ("launch --help", ">/dev/full", 1),
        ("launch --help", ">&-", 0),
        ("launch --help", "| true", 141),
        (f"placement inspect {TRACE}", ">/dev/full", 1),
        (f"placement inspect {TRACE}", ">$0", 1),
    ],
)
def test_output_that_nobody_takes(words, target, code, tmp_path):
    """The last case: a file may not be larger than a kilobyte."""
    command = ["bash", "-c", f"set -o pipefail; ulimit -f 1; {sys.executable} -m {words} {target}", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == (code > 0) and "Traceback" not in done.stderr, done.stderr


def test_hub_out_of_reach(capsys, tmp_path, monkeypatch):
    """Quick and one line; the address is one that nothing can answer at."""
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.hf_api.HfApi.model_info", _refuse)
    started = time.monotonic()
    assert main(["generate", "--model", "nobody/no-such-model-here", "--prompt", "x"]) == 2
    assert time.monotonic() - started < 10
    line = one_line(capsys)
    assert "nobody/no-such-model-here" in line and "folder" in line and "refused" in line


def _refuse(*args, **kwargs):
    raise ConnectionError("connection refused")


# -- parts ----------------------------------------------------------------------------------------------------------


def test_prompt_files(tmp_path):
    (tmp_path / "plain.txt").write_text("one\r\n\n{two}\n  three\n", encoding="utf-8")
    plain = read_prompts(str(tmp_path / "plain.txt"))
    assert [p.text for p in plain] == ["one", "{two}", "  three"]
    assert plain[1].where.endswith("plain.txt, line 3")
    (tmp_path / "ids.txt").write_text('{"prompt_token_ids": [1, 2]}\n{"prompt": "x\\ny"}', encoding="utf-8")
    ids, text = read_prompts(str(tmp_path / "ids.txt"))
    assert (ids.token_ids, ids.text) == ((1, 2), None) and (text.token_ids, text.text) == (None, "x\ny")


def test_a_list_of_results_is_no_text(tmp_path):
    """As ``--json`` writes it: its lines are no prompts."""
    assert write_results(str(tmp_path / "r.json"), [{"prompt": "the"}]) is None
    with pytest.raises(UserError, match="r.json, line 1 is not JSON .* a line is an object"):
        read_prompts(str(tmp_path / "r.json"))


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, line in {"a.txt": "the", "b.txt": '{"prompt": "the"}', "c.jsonl": '{"prompt": "the"}'}.items():
        (tmp_path / name).write_text(line, encoding="utf-8-sig")
        assert [prompt.text for prompt in read_prompts(str(tmp_path / name))] == ["the"]


def test_half_a_surrogate_pair_is_refused(model):
    config = EngineConfig(model=str(model))
    with pytest.raises(UserError, match="line 2: the prompt holds half a surrogate"):
        encode(Prompt("a\ud800", None, "p, line 2"), tiny_tokenizer(), config, ModelConfig.from_folder(model))


def test_a_path_that_may_not_be_written_is_refused_before_the_run(tmp_path, monkeypatch):
    (tmp_path / "r.json").write_text("kept")
    require_writable(str(tmp_path / "r.json"), None, "/dev/null", "/dev/null")
    with pytest.raises(UserError, match="two outputs"):
        require_writable(str(tmp_path / "r.json"), str(tmp_path / ".." / tmp_path.name / "r.json"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for path in (tmp_path / "r.json", tmp_path / "new.json"):
        with pytest.raises(UserError, match="permission"):
            require_writable(str(path))


def test_text_comes_in_whole_characters():
    tokenizer = tiny_tokenizer()
    text = "the expert häß 日本 🙂 answers"
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.push([token]) for token in tokenizer(text).input_ids]
    assert "".join(parts) == text
    assert "" in parts and not any("\ufffd" in part for part in parts)


def test_text_cut_inside_a_character_is_shown():
    tokenizer = tiny_tokenizer()
    completion = Completion("", [1], tokenizer, ())
    ids = tokenizer("a日").input_ids[:-1]
    completion.take(ids, "length")
    assert completion.text == tokenizer.decode(ids) and completion.text.startswith("a\ufffd")


def test_graphs_are_captured_before_the_first_request_unless_refused(model):
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    add_engine_arguments(parser)
    for argv, graphs, at_start in (([], True, True), (["--no-graphs"], False, False)):
        args = parser.parse_args(["--model", str(model), "--device", "cuda", *argv])
        engine, _ = engine_config(args, session.spawned(1))
        assert (engine.graphs, engine.capture_at_start) == (graphs, at_start)
    engine, _ = engine_config(parser.parse_args(["--model", str(model), "--device", "cpu"]), session.spawned(1))
    assert not engine.capture_at_start


def test_rank_0_says_how_far_starting_has_come(tmp_path):
    """Not more often than anybody reads, and always the end."""
    front = Front(tmp_path)
    infos = [RankInfo(rank, 2, rank, "", "", front.addresses.outputs, str(tmp_path)) for rank in range(2)]
    outputs = [Outputs(info) for info in infos]
    for each in outputs:
        reached = each.progress("loading weights, MB", 1e-6)
        for done in range(2001):
            reached(done * 10**6, 2000 * 10**6)
        each.send("ready", report={})
    heard, starting = [], session.Session.__new__(session.Session)
    starting.world, starting.ready, starting._reached, starting._front = 2, {}, None, front
    starting._ranks = SimpleNamespace(check=lambda ending: None)
    starting.wait_ready(lambda *at: heard.append(at))
    assert set(starting.ready) == {0, 1}
    assert heard[-1] == ("loading weights, MB", 2000, 2000) and len(heard) < 100
    front.close()
    for each in outputs:
        each.context.destroy(linger=0)


def test_stop_string_over_two_tokens():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("the token goes to").input_ids
    completion = Completion("", [1], tokenizer, ("n go", "never"))
    told = [completion.take([token], None) for token in ids]
    assert (completion.text, completion.finish_reason) == ("the toke", "stop")
    assert told.count(True) == 1
    assert tokenizer.decode(completion.token_ids) in ("the token go", "the token goes")


def test_placements(shape, trace_file):
    linear, trace = choose_plan("linear", None, shape, 2)
    assert trace is None and linear.slots[0] == ((0, 1, 2), (3, 4))
    assert choose_plan("round-robin", None, shape, 2)[0].slots[0] == ((0, 2, 4), (1, 3))
    greedy, trace = choose_plan("greedy", str(trace_file), shape, 2)
    assert trace.num_tokens == 400
    assert all(max(len(held) for held in layer) <= 3 for layer in greedy.slots)
    assert (greedy.expert_rank_LE[:, 0] != greedy.expert_rank_LE[:, 1]).all()


def test_auto_placement_keeps_the_load_even(shape, trace_file, monkeypatch):
    monkeypatch.setattr(plans, "AUTO_SECONDS", 0.5)
    auto, trace = choose_plan("auto", str(trace_file), shape, 2)
    assert evaluate(auto, trace).compute_tail < evaluate(linear_plan(shape, 2), trace).compute_tail


def test_rows_served_by_replicas():
    shape = MoEShape((0,), 3, 1)
    plan = make_plan(shape, 2, [[[0, 1], [1, 2]]])
    load_WLE = np.array([[[5, 7, 1]], [[2, 3, 4]]])
    assert served_LW(load_WLE, plan).tolist() == [[5 + 7 + 2, 1 + 3 + 4]]


def test_earliest_report_wins(tmp_path):
    for rank, at in ((0, 20.0), (1, 10.0), (2, 30.0)):
        report = {"rank": rank, "step": 3, "layer": -1, "stage": "agree", "kind": "E", "message": "m", "time": at}
        (tmp_path / f"error.rank{rank}.json").write_text(json.dumps(report | {"traceback": ""}))
    (tmp_path / "error.rank3.json").write_text('{"rank": 3, "st')
    assert [failure.rank for failure in read_error_files(tmp_path)] == [1, 0, 2]
    assert read_error_files(tmp_path)[0].block() == "epmoe: rank 1 failed: step 3, agree: E: m"


# -- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": "the token goes"}, {"prompt_token_ids": [5, 9, 7, 30]}, {"prompt": "ex"}, {"prompt": "answers"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def spawned(model, prompts, trace_file, tmp_path_factory):
    """(run, results) of two spawned ranks with a greedy placement."""
    folder = tmp_path_factory.mktemp("spawned")
    more = ["--ranks", "2", "--placement", "greedy", "--trace", str(trace_file)]
    return _finished(Run(folder / "run", *_generate(model, prompts, folder / "out.json"), *more), folder)


def _generate(model, prompts, out):
    limits = ["--max-tokens", "6", "--temperature", "0", "--dtype", "float32"]
    return ["generate", "--model", str(model), "--prompt-file", str(prompts), "--json", str(out), *limits]


def _finished(run, folder):
    code = run.end()
    run.close()
    assert code == 0, run.err
    assert run.leftovers() == []
    return run, json.loads((folder / "out.json").read_text())


def test_results_in_order_of_prompts(spawned):
    _, results = spawned
    tokenizer = tiny_tokenizer()
    assert [r["prompt"] for r in results] == ["the token goes", None, "ex", "answers"]
    assert results[1]["prompt_token_ids"] == [5, 9, 7, 30]
    assert results[0]["prompt_token_ids"] == tokenizer("the token goes").input_ids
    for r in results:
        assert list(r) == ["prompt", "prompt_token_ids", "token_ids", "text", "finish_reason"]
        assert r["text"] == tokenizer.decode(r["token_ids"], skip_special_tokens=True)
        assert r["finish_reason"] == "length" and len(r["token_ids"]) == 6 or r["finish_reason"] == "stop"


def test_report(spawned, shape):
    run, results = spawned
    new = sum(len(r["token_ids"]) for r in results)
    old = sum(len(r["prompt_token_ids"]) for r in results)
    assert f"4 prompts ({old} tokens), {new} new tokens" in run.out and "tokens/s" in run.out
    assert "combine exact" in run.out and "placement greedy" in run.out
    lines = run.out.splitlines()
    table = next(i for i, line in enumerate(lines) if "expert rows" in line)
    cells = [lines[table + 1 + rank].split() for rank in range(2)]
    assert [c[0] for c in cells] == ["0", "1"]
    assert sum(int(c[2]) for c in cells) == (old + new - len(results)) * shape.num_layers * shape.top_k
    assert sum(float(c[3].rstrip("%")) for c in cells) == pytest.approx(100, abs=0.2)
    assert all(float(c[1]) > 0 for c in cells)
    assert "compute_tail of this run" in run.out and "tokens of the given traces: compute_tail" in run.out


def test_a_rank_that_is_done_does_not_fail_in_tear_down(model, tmp_path, monkeypatch, capsys):
    """Threads of gloo and torch can abort a process while the interpreter is taken down; here it always does."""
    code = "import atexit, os, sys\nif 'launch.rank' in sys.orig_argv: atexit.register(os.abort)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    argv = ["generate", "--model", str(model), "--ranks", "2", "--threads", "1", "--prompt", "the token"]
    assert main([*argv, "--max-tokens", "2"]) == 0, capsys.readouterr().err


def test_a_stop_token_ends_the_output_and_a_full_disk_loses_nothing(spawned, model, prompts, capsys):
    _, results = spawned
    want = results[0]["token_ids"]
    stop = ["--stop-token-id", str(want[2])]
    assert main([*_generate(model, prompts, "/dev/full"), *stop]) == 2
    out, err = capsys.readouterr()
    assert "/dev/full" in err and "No space left" in err and err.count("error") == 1
    first = out.split("=== ")[1]
    assert first == f"the token goes\n{tiny_tokenizer().decode(want[:3], skip_special_tokens=True)}\n\n"


@pytest.mark.parametrize("option", ["--timeline", "--record-trace"])
def test_a_full_disk_costs_its_file_and_not_the_summary(model, prompts, tmp_path, capsys, option):
    argv = _generate(model, prompts, tmp_path / "out.json")
    assert main([*argv, option, "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert err.count("cannot write /dev/full: No space left on device") == 1 and "Traceback" not in err
    assert "combine exact" in out and ("communication hidden" in out) == (option == "--timeline")


def test_a_reader_that_leaves_costs_the_output_and_not_the_files(model, prompts, tmp_path):
    argv = [*_generate(model, prompts, tmp_path / "out.json"), "--record-trace", str(tmp_path / "trace.npz")]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "launch", *argv],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    os.close(write)
    assert done.returncode == 141 and done.stderr.splitlines()[-1].startswith("epmoe: stopped: nobody reads")
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out.json").exists() and (tmp_path / "trace.npz").exists()


def test_a_terminal_without_the_letters(model, monkeypatch):
    bytes_out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_out, encoding="ascii"))
    assert main(["generate", "--model", str(model), "--prompt", "日", "--max-tokens", "2"]) == 0
    assert b"=== \\u65e5" in bytes_out.getvalue()


def test_torchrun_gives_the_same(spawned, model, prompts, tmp_path):
    run = Run(tmp_path / "run", *_generate(model, prompts, tmp_path / "out.json"), torchrun=2)
    _, results = _finished(run, tmp_path)
    assert results == spawned[1]
    assert "2 ranks" in run.out and "placement linear" in run.out
