"""What a run records is what transformers' routers choose on the same tokens: each once, and only real ones."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from recorded import Reference, record
from tiny_checkpoints import save_tiny, tiny_tokenizer

from epmoe.trace import RoutingRecorder
from launch.__main__ import main
from launch.prompts import Prompt
from launch.recording import merge
from launch.tokenizer import tokenizer_sha256
from launch.trace_command import cut, read_texts
from placement.errors import UserError
from placement.plan import MoEShape
from placement.trace import load_trace

ENGINE = {"max_batch_tokens": 24, "max_requests": 4, "max_model_len": 64, "block_size": 8, "record_tokens": 10_000}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "qwen3_moe", num_experts=10, top_k=3, tokenizer=True)


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


def some_requests(count=7, seed=0):
    """Prompts of many lengths, two alike and longer than a block; most decode, some until a token stops them."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, 300, length).tolist() for length in rng.integers(1, 40, count)]
    prompts[-1] = prompts[0] = rng.integers(1, 300, 33).tolist()
    limits = rng.integers(1, 20, count).tolist()
    stops = [[*range(0, 320, 4)] if n % 2 else [] for n in range(count)]
    return [
        (n, p, {"max_tokens": m, "temperature": 0.0, "stop_token_ids": stop})
        for n, (p, m, stop) in enumerate(zip(prompts, limits, stops))
    ]


@pytest.mark.parametrize(
    "world, settings",
    [(1, {"num_blocks": 8}), (1, {}), (2, {"num_blocks": 8}), (2, {"probe_tokens": 4, "overlap": "on"})],
)
def test_equals_transformers(model, reference, rank_pool, world, settings):
    requests = some_requests(7 * world, seed=int("probe_tokens" in settings))
    ranks = rank_pool(world).run(record, {**ENGINE, "model": str(model), "ranks": world, **settings}, requests)
    if "probe_tokens" in settings:
        assert any(rank["moved"] for rank in ranks), "no request changed its home"
    if "num_blocks" in settings:
        assert sum(rank["preemptions"] for rank in ranks), "no sequence was recomputed"
    seen = set()
    for rank in ranks:
        assert not rank["full"] and rank["sequences"].keys() == rank["outputs"].keys()
        for number, (tokens, ids_TLK) in rank["sequences"].items():
            assert tokens.tolist() == requests[number][1] + rank["outputs"][number][:-1]
            assert ids_TLK.dtype == np.uint8
            assert np.array_equal(np.sort(ids_TLK, -1), reference.choices(tokens))
            seen.add(number)
    assert seen == {number for number, *_ in requests}


def test_limit(model, reference, rank_pool):
    requests = some_requests()
    (rank,) = rank_pool(1).run(record, {**ENGINE, "model": str(model), "record_tokens": 50}, requests)
    assert rank["full"] and sum(len(tokens) for tokens, _ in rank["sequences"].values()) == 50
    for number, (tokens, ids_TLK) in rank["sequences"].items():
        whole = requests[number][1] + rank["outputs"][number][:-1]
        assert tokens.tolist() == whole[: len(tokens)]
        assert np.array_equal(np.sort(ids_TLK, -1), reference.choices(whole)[: len(tokens)])


# -- parts ----------------------------------------------------------------------------------------------------------


@dataclass
class FakeRequest:
    id: int
    prompt: list
    known: int

    def tokens(self, start, stop):
        return list(range(start, stop))


@dataclass
class FakeChunk:
    request: FakeRequest
    start: int
    count: int


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("experts, dtype", [(256, np.uint8), (300, np.uint16)])
def test_recorder_keeps_each_position_once(device, experts, dtype):
    """Choices are a function of (request, position) but where a position is run again; padding is never kept."""
    recorder = RoutingRecorder(MoEShape((0, 2), experts, 2), 16, 100, torch.device(device))
    a, b = FakeRequest(7, [0] * 6, 9), FakeRequest(3, [0] * 2, 3)
    steps = [[(a, 0, 4)], [(a, 4, 2), (b, 0, 2)], [(a, 0, 7), (b, 2, 1)], [(a, 7, 1), (b, 3, 1)], [(a, 8, 1)], []]
    again = False
    for step in steps:
        layers = [
            [
                (100 * layer + 20 * (r.id == 3) + p if not (again and p < 6) else experts - 1, experts - 2)
                for r, start, count in step
                for p in range(start, start + count)
            ]
            for layer in range(2)
        ]
        expert_LTK = torch.tensor([[*rows, (-1, -1)] for rows in layers], dtype=torch.int32, device=device)  # padded
        recorder(expert_LTK[:, :1], 0)  # in two lanes
        recorder(expert_LTK[:, 1:], 1)
        recorder.keep([FakeChunk(*chunk) for chunk in step])
        again = len(step) == 2 and step[0][2] == 2
    found = {number: (tokens, ids) for number, tokens, ids in recorder.sequences()}
    assert list(found) == [7, 3]
    assert found[7][0].tolist() == list(range(8)) and found[3][0].tolist() == [0, 1]
    for number, first in ((7, 0), (3, 20)):
        ids_TLK = found[number][1]
        assert ids_TLK.dtype == dtype
        assert ids_TLK[:, :, 0].tolist() == [[first + p, 100 + first + p] for p in range(len(ids_TLK))]
        assert (ids_TLK[:, :, 1] == experts - 2).all()


def test_merge():
    shape = MoEShape((1,), 4, 2, "m")

    def sequence(number, tokens):
        ids = np.array([[[number % 4, (number + 1) % 4]]] * len(tokens), np.uint8)
        return [number, np.array(tokens, np.uint32).tobytes(), ids.tobytes()]

    messages = [
        {"rank": 1, "full": False, "sequences": [sequence(2, [5, 6, 7])]},
        {"rank": 0, "full": True, "sequences": [sequence(9, [8]), sequence(1, [1, 2])]},
        {"rank": 1, "full": False, "sequences": []},
    ]
    recorded = merge(messages, shape, {1: 2, 2: 2, 9: 4, 10: 3}, "abc")
    assert recorded.full and recorded.trace.homes.tolist() == [0, 1, 0]
    trace = recorded.trace
    assert trace.token_ids_T.tolist() == [1, 2, 5, 6, 8] and trace.seq_lens.tolist() == [2, 2, 1]
    assert trace.expert_ids_TLK[:, 0, 0].tolist() == [1, 1, 2, 2, 1] and trace.tokenizer_sha256 == "abc"
    assert "5 tokens of 3 sequences" in recorded.describe("f") and "limit" in recorded.describe("f")
    assert merge(messages[2:], shape, {}, "") is None


def test_texts_are_cut(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one\ntwo\n\n \nthree\n")
    where = str(path)
    assert [p.text for p in read_texts(where, "windows", 100)] == ["one\ntwo\n\n \nthree\n"]
    assert [p.text for p in read_texts(where, "paragraphs", 100)] == ["one\ntwo", "three\n"]
    assert read_texts(where, "lines", 100)[2] == Prompt("three", None, f"{where}, line 5")
    assert list(cut(iter([[1, 2, 3, 4, 5], [6], [7, 8]]), 2, 7)) == [[1, 2], [3, 4], [5], [6], [7]]
    path.write_text(" \n\n")
    for split in ("windows", "paragraphs", "lines"):
        with pytest.raises(UserError, match="text.txt holds no"):
            read_texts(where, split, 100)


# -- commands -------------------------------------------------------------------------------------------------------


def test_trace_command(model, reference, tmp_path, capsys):
    text = "the token goes to the expert\n" * 20
    (tmp_path / "text").write_text(text)
    argv = ["trace", "--model", str(model), "--text-file", str(tmp_path / "text"), "-o", str(tmp_path / "t.npz")]
    assert main([*argv, "--ranks", "2", "--max-tokens-per-sequence", "25", "--record-tokens", "90"]) == 0
    trace = load_trace(tmp_path / "t.npz")
    assert "90 tokens of 4 sequences; the limit was reached" in capsys.readouterr().out
    assert trace.seq_lens.tolist() == [25, 25, 25, 15]
    assert trace.token_ids_T.tolist() == tiny_tokenizer()(text).input_ids[:90]
    assert trace.tokenizer_sha256 == tokenizer_sha256(str(model)) != ""
    assert (trace.shape.moe_layers, trace.shape.num_experts) == ((0, 2), 10)
    check_against(reference, trace)


def test_generate_records(model, reference, tmp_path, capsys):
    """Two samples of each prompt, some ended by a stop string, which only the front sees."""
    argv = ["generate", "--model", str(model), "--prompt", "the token goes to the expert", "--prompt", "answers"]
    more = ["--n", "2", "--temperature", "1", "--max-tokens", "12", "--logprobs", "1", "--stop", "e", "--stop", "t"]
    files = ["--record-trace", str(tmp_path / "t.npz"), "--json", str(tmp_path / "out.json")]
    assert main([*argv, *more, *files, "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    results = json.loads((tmp_path / "out.json").read_text())
    assert [(r["prompt"], r["index"]) for r in results] == [(p, i) for p in (argv[4], argv[6]) for i in (0, 1)]
    assert all(len(r["logprobs"]) == len(r["token_ids"]) for r in results)
    trace = load_trace(tmp_path / "t.npz")
    run = [r["prompt_token_ids"] + r["token_ids"][:-1] for r in results]
    assert trace.seq_lens.tolist() == [len(tokens) for tokens in run]
    assert trace.token_ids_T.tolist() == sum(run, [])
    assert "on this run's recorded routing: compute_tail" in out
    check_against(reference, trace)


@pytest.mark.parametrize(
    "more, words",
    [
        (["--text-file", "/nowhere/t.txt"], ["/nowhere/t.txt", "No such file"]),
        (["--max-tokens-per-sequence", "512"], ["512", "511"]),
        (["--record-tokens", "0"], ["record_tokens", "0", "at least 1"]),
        (["-o", "/nowhere/t.npz"], ["/nowhere/t.npz"]),
        (["--split", "words"], ["words", "windows"]),
    ],
)
def test_mistakes(model, tmp_path, capsys, more, words):
    (tmp_path / "text").write_text("the token")
    argv = ["trace", "--model", str(model), "--text-file", str(tmp_path / "text"), "-o", str(tmp_path / "t.npz")]
    assert main([*argv, *more]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(word in err for word in words), err


def test_real_checkpoint(shared_dir, tmp_path):
    """Loads per (layer, expert) of a bf16 checkpoint run in float32 equal those of transformers."""
    folder = shared_dir / "models" / "small32x4"
    (tmp_path / "text").write_text("def main(argv):\n    return len(argv)\n\nDie Datei wird gelesen.\n" * 5)
    argv = ["trace", "--model", str(folder), "--text-file", str(tmp_path / "text"), "-o", str(tmp_path / "t.npz")]
    assert main([*argv, "--ranks", "2", "--dtype", "float32", "--split", "paragraphs"]) == 0
    trace = load_trace(tmp_path / "t.npz")
    assert len(trace.seq_lens) == 6
    check_against(Reference(folder), trace)


def check_against(reference, trace):
    load_LE = np.zeros((trace.shape.num_layers, trace.shape.num_experts), np.int64)
    starts = trace.sequence_starts()
    for start, stop in zip(starts[:-1], starts[1:]):
        expected = reference.choices(trace.token_ids_T[start:stop])
        assert np.array_equal(np.sort(trace.expert_ids_TLK[start:stop], -1), expected)
        for layer in range(len(load_LE)):
            load_LE[layer] += np.bincount(expected[:, layer].ravel(), minlength=load_LE.shape[1])
    assert np.array_equal(trace.load_LE(), load_LE)
    assert (load_LE.sum(1) == trace.num_tokens * trace.shape.top_k).all()
