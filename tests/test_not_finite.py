"""A model whose logits are not finite: the request ends with one clear message, and the others are as they were."""

import json

import pytest
from drive import Script, all_blocks_free, drive, merge
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny

from epmoe import LLM, SamplingParams
from launch.__main__ import main

NEW = 6
PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12, 8, 13], [20]]


def poison(folder, token: int, value: float = float("nan")) -> None:
    """Whoever reads this token gets logits of NaN from there on."""
    (name,) = folder.glob("*.safetensors")
    tensors = load_file(name)
    tensors["model.embed_tokens.weight"][token] = value
    save_file(tensors, name, {"format": "pt"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("whole") / "tiny", "mixtral", num_experts=5, tokenizer=True)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("damaged") / "tiny", "mixtral", num_experts=5, tokenizer=True)
    poison(folder, 8)
    return folder


def script(**params) -> Script:
    return Script([(n, ids, {"max_tokens": NEW, "ignore_eos": True, **params}) for n, ids in enumerate(PROMPTS)])


def run(pool, folder, asked: Script, world: int = 1, **settings):
    config = {"model": str(folder), "ranks": world, "max_model_len": 64, "num_blocks": 32, **settings}
    results = pool(world).run(drive, config, asked)
    assert all_blocks_free(results)
    return merge(results)


@pytest.mark.parametrize(
    "world, settings", [(1, {}), (1, {"async_steps": False}), (2, {"max_batch_tokens": 8, "max_requests": 4})]
)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 9, "seed": 1},
        {"temperature": 0.0, "logprobs": 2, "presence_penalty": 0.5},
    ],
    ids=["greedy", "sampled", "more"],
)
def test_only_requests_that_meet_the_damage_end(rank_pool, whole, damaged, world, settings, params):
    want = run(rank_pool, whole, script(**params), world, **settings)
    assert not any(8 in tokens for n, tokens in want.tokens.items() if n in (0, 3)), "these must not meet it by chance"
    found = run(rank_pool, damaged, script(**params), world, **settings)
    assert found.reasons == {0: "length", 1: "error", 2: "error", 3: "length"}
    assert found.tokens == {0: want.tokens[0], 1: [], 2: [], 3: want.tokens[3]}


def test_damage_met_on_the_way(rank_pool, whole, tmp_path):
    """The token that is drawn third breaks what follows it: the three stay."""
    tokens = run(rank_pool, whole, script(temperature=0.0)).tokens[0]
    assert tokens[2] not in tokens[:2] + PROMPTS[0]
    folder = save_tiny(tmp_path / "tiny", "mixtral", num_experts=5)
    poison(folder, tokens[2], float("inf"))
    found = run(rank_pool, folder, script(temperature=0.0))
    assert (found.tokens[0], found.reasons[0]) == (tokens[:3], "error")


def test_the_command_says_which_request_and_fails(damaged, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in PROMPTS))
    argv = ["generate", "--model", str(damaged), "--prompt-file", str(prompts), "--ignore-eos"]
    argv += ["--max-tokens", str(NEW)]
    assert main([*argv, "--json", str(out)]) == 2
    shown = capsys.readouterr()
    (line,) = [line for line in shown.err.splitlines() if "not finite" in line]
    assert "2 of 4 requests ended early" in line and f"{prompts}, line 2: the logits for position 4 are" in line
    assert "damaged" in line and "dtype float32" in line
    assert "throughput" in shown.out or "tokens/s" in shown.out, "the summary is there all the same"
    entries = json.loads(out.read_text())
    assert [entry["finish_reason"] for entry in entries] == ["length", "error", "error", "length"]
    assert [len(entry["token_ids"]) for entry in entries] == [NEW, 0, 0, NEW]


def test_the_api_says_it_in_the_result(damaged):
    with LLM(damaged, threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        good, bad = llm.generate([PROMPTS[0], PROMPTS[1]], params)
        assert good.outputs[0].finish_reason == "length" and bad.outputs[0].finish_reason == "error"
        assert "position 4" in bad.outputs[0].stop_reason and "not finite" in bad.outputs[0].stop_reason
        (last,) = llm.stream(PROMPTS[1], params)
        assert last.finished and last.outputs[0].finish_reason == "error" and last.outputs[0].token_ids == []
        assert llm.generate(PROMPTS[0], params)[0].outputs == good.outputs


def test_no_trace_of_such_a_model(damaged, tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in PROMPTS))
    argv = ["--model", str(damaged), "--text-file", f"{tmp_path}/text.jsonl", "--split", "lines"]
    assert main(["trace", *argv, "-o", f"{tmp_path}/t.npz"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "t.npz is not written: 2 of 4 sequences" in line and "finite" in line
    assert not (tmp_path / "t.npz").exists()
