"""The Python API: shapes that vLLM's users know, increments, aborts, errors, and nothing left behind."""

import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from recorded import Reference
from tiny_checkpoints import save_tiny, tiny_tokenizer

from epmoe import LLM, RankFailure, SamplingParams, UserError
from launch.completion import Completion
from launch.outputs import Reader
from placement.plan import MoEShape, linear_plan, round_robin_plan
from placement.trace import load_trace

GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "mixtral", num_experts=5, tokenizer=True)


@pytest.fixture(scope="module")
def shape(model):
    return MoEShape((0, 1, 2), 5, 2, "any")


@pytest.fixture(scope="module")
def llm(model, shape):
    with LLM(model, ranks=2, placement=round_robin_plan(shape, 2), threads=1) as llm:
        yield llm


def texts(outputs):
    return [[completion.text for completion in output.outputs] for output in outputs]


def test_shapes(llm):
    tokenizer = tiny_tokenizer()
    ids = tokenizer("the token").input_ids
    prompts = ["the token", ids, {"prompt": "the token"}, {"prompt_token_ids": ids}, "answers"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == ["the token", None, "the token", None, "answers"]
    assert all(o.prompt_token_ids == ids for o in outputs[:4]) and all(o.finished for o in outputs)
    assert len({o.request_id for o in outputs}) == 5 and isinstance(outputs[0].request_id, str)
    assert len({str(o.outputs) for o in outputs[:4]}) == 1 and outputs[4].outputs != outputs[0].outputs
    (completion,) = outputs[0].outputs
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert len(completion.token_ids) == 8 and completion.text == tokenizer.decode(completion.token_ids)
    assert completion.logprobs is None and completion.cumulative_logprob is None
    assert llm.generate("the token", GREEDY)[0].outputs == outputs[0].outputs
    assert llm.generate(ids, GREEDY)[0].outputs == outputs[0].outputs
    assert llm.generate([], GREEDY) == []


def test_params_for_each_prompt(llm):
    whole = llm.generate("the token", GREEDY)[0].outputs[0]
    each = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[whole.token_ids[4]]),
        SamplingParams(temperature=0, max_tokens=8, stop=["never", whole.text[2:4]]),
    ]
    short, by_id, by_text = [o.outputs[0] for o in llm.generate(["the token"] * 3, each)]
    assert short.token_ids == whole.token_ids[:3] and short.finish_reason == "length"
    first = whole.token_ids.index(whole.token_ids[4]) + 1
    assert by_id.token_ids == whole.token_ids[:first]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", whole.token_ids[4])
    assert (by_text.text, by_text.finish_reason) == (whole.text[: whole.text.index(whole.text[2:4])], "stop")
    assert by_text.stop_reason == whole.text[2:4]


def test_samples(llm):
    """A sample is a function of seed and index; other prompts, and how many samples there are, do not matter."""
    params = SamplingParams(n=3, seed=5, max_tokens=6)
    (output,) = llm.generate("the token", params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    again = llm.generate(["answers", "the token"], SamplingParams(n=2, seed=5, max_tokens=6))[1]
    assert texts([again])[0] == texts([output])[0][:2]
    unseeded = SamplingParams(n=2, max_tokens=6)
    first, second = texts(llm.generate(["the token"] * 2, unseeded))
    assert len({*first, *second}) == 4


def test_logprobs(llm, model):
    """Of the model itself, whatever the temperature."""
    params = SamplingParams(temperature=1.3, max_tokens=6, logprobs=3, seed=1)
    completion = llm.generate("the token", params)[0].outputs[0]
    prompt = tiny_tokenizer()("the token").input_ids
    expected = Reference(model).logits(prompt + completion.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
    total = 0.0
    for token, entry, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
        order = row.argsort(descending=True).tolist()
        assert set(entry) == {token, *order[:3]}
        for id_, found in entry.items():
            assert math.isclose(found.logprob, row[id_], abs_tol=1e-3)
            assert found.rank == order.index(id_) + 1 and found.decoded_token == llm.tokenizer.decode([id_])
        total += entry[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    assert any(entry[token].rank > 3 for token, entry in zip(completion.token_ids, completion.logprobs))


def test_chat(llm, monkeypatch):
    ask, tell = {"role": "user", "content": "the token"}, {"role": "system", "content": "answers"}
    one = llm.chat([tell, ask], GREEDY)
    assert one[0].prompt == "system: answers\nuser: the token\nassistant:"
    assert texts(one) == texts(llm.generate(one[0].prompt, GREEDY))
    assert [o.prompt[:5] for o in llm.chat([[ask], [tell]], GREEDY)] == ["user:", "syste"]
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="conversation 0.*roles must alternate"):
        llm.chat([ask], GREEDY, chat_template=refusing)
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="no chat template.*generate"):
        llm.chat([ask], GREEDY)


def test_stream_adds_up(llm):
    params = SamplingParams(n=2, seed=3, max_tokens=20, logprobs=1)
    (whole,) = llm.generate("the token", params)
    increments = list(llm.stream("the token", params))
    assert len(increments) > 5 and [o.finished for o in increments] == [False] * (len(increments) - 1) + [True]
    for expected in whole.outputs:
        parts = [c for o in increments for c in o.outputs if c.index == expected.index]
        assert "".join(c.text for c in parts) == expected.text
        assert sum((c.token_ids for c in parts), []) == expected.token_ids
        streamed = sum((c.logprobs for c in parts), [])  # of another batch: equal to rounding, as promised
        assert [list(step) for step in streamed] == [list(step) for step in expected.logprobs]
        for ours, theirs in zip(streamed, expected.logprobs):
            for token in theirs:
                assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
        assert parts[-1].cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
        assert [c.finish_reason for c in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]


def test_stream_keeps_back_what_could_be_a_stop_string():
    tokenizer = tiny_tokenizer()
    params = SamplingParams(stop=("en goes on", "never"))
    completion = Completion("", [1], tokenizer, params.stop)
    reader, given = Reader(completion, params, tokenizer), []
    for token in tokenizer("the token goes to a token goes on").input_ids:
        completion.take([token], None)
        if (piece := reader.read()) is not None:
            given.append(piece.text)
    assert "".join(given) == completion.text == "the token goes to a tok"
    assert given[-1] == "" and piece.stop_reason == "en goes on" and reader.read() is None


def test_closing_a_stream_aborts(llm, monkeypatch):
    aborted = []
    session = llm._requests.session
    monkeypatch.setattr(session, "abort", lambda id_, abort=session.abort: (aborted.append(id_), abort(id_)))
    stream = llm.stream("the token", LONG)
    assert not next(stream).finished
    stream.close()
    assert len(aborted) == 1
    assert not any(llm._groups.values())
    assert len(llm.generate("the token", GREEDY)[0].outputs[0].token_ids) == 8


def test_interrupted(llm, monkeypatch):
    """Ctrl-C while ``generate`` waits: its requests are aborted, and the next call is as ever."""
    session, looks, aborted = llm._requests.session, [], []

    def events(events=session.events):
        looks.append(1)
        if len(looks) == 4:
            raise KeyboardInterrupt
        return events()

    monkeypatch.setattr(session, "events", events)
    monkeypatch.setattr(session, "abort", lambda id_, abort=session.abort: (aborted.append(id_), abort(id_)))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the token"] * 3, LONG)
    assert len(aborted) == 3
    assert len(llm.generate("the token", GREEDY)[0].outputs[0].token_ids) == 8


def test_abort(llm):
    """By a stream's reader, and from another thread; what runs beside it is not touched."""
    stream = llm.stream("the token", LONG)
    increments = [next(stream)]
    llm.abort(increments[0].request_id)
    increments += stream
    assert increments[-1].outputs[0].finish_reason == "abort" and increments[-1].finished
    assert 0 < sum(len(o.outputs[0].token_ids) for o in increments) < 480

    results = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate("the token", LONG)))
    thread.start()
    deadline = time.monotonic() + 30
    while not llm._groups and time.monotonic() < deadline:
        time.sleep(0.001)
    beside = llm.generate("the token", GREEDY)  # two threads read at once
    llm.abort(next(iter(llm._groups)))
    thread.join(60)
    assert results[0].outputs[0].finish_reason == "abort"
    assert beside[0].outputs[0].finish_reason == "length"
    llm.abort("no such request")


@pytest.mark.parametrize(
    "prompts, params, words",
    [
        (["a", "b"], [GREEDY], "1 sampling_params for 2 prompts"),
        (["the", ""], GREEDY, "prompt 1.*no token"),
        ([[]], GREEDY, "prompt 0.*no token"),
        ([["a"]], GREEDY, "prompt 0 is list.*token ids"),
        (3, GREEDY, "prompt 0 is int"),
        ({"text": "a"}, GREEDY, "prompt 0 has the keys.*prompt_token_ids"),
        ({"prompt": [1]}, GREEDY, "prompt 0: prompt is list"),
        ([[1, 320]], GREEDY, "prompt 0: token id 320.*320"),
        ([[1, -1]], GREEDY, "token id -1"),
        ([[1] * 512], GREEDY, "512 tokens.*max_model_len 512"),
        ("a", {"max_tokens": 3}, "sampling_params is dict"),
    ],
)
def test_mistakes(llm, prompts, params, words):
    with pytest.raises(UserError, match=words):
        llm.generate(prompts, params)


@pytest.mark.parametrize("messages", [None, "hello", {"role": "user", "content": "x"}])
def test_a_conversation_is_a_list(llm, messages):
    with pytest.raises(UserError, match="messages is .*list"):
        llm.chat(messages, GREEDY)


def test_chat_tokenizes_itself(llm):
    with pytest.raises(UserError, match="leave tokenize"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, tokenize=True)


def test_a_closed_llm_says_so(model):
    llm = LLM(model, threads=1)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate(["the", "token"], GREEDY), lambda: list(llm.stream("the", GREEDY))):
        with pytest.raises(UserError, match="ended; open a new LLM"):
            call()


def test_stream_takes_one_prompt(llm):
    with pytest.raises(UserError, match="2 prompts"):
        llm.stream(["a", "b"], GREEDY)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": 6}, "5 experts"),
        ({"block": 16}, "unknown keys.*block"),
        ({"placement": "best"}, "best is unknown"),
        ({"placement": "auto"}, "auto.*trace"),
        ({"placement": linear_plan(MoEShape((0, 1, 2), 5, 2, "x"), 3), "ranks": 2}, "3 ranks.*has 2"),
        ({"record_trace": "/nowhere/t.npz"}, "/nowhere/t.npz"),
        ({"record_trace": "t.npz", "record_tokens": 0}, "record_tokens is 0"),
        ({"record_trace": "t.npz", "record_tokens": "many"}, "record_tokens is 'many'"),
        ({"record_trace": 5}, "record_trace is 5.*path"),
        ({"placement": "greedy", "trace": 5}, "trace is 5.*file"),
        ({"placement": "greedy", "trace": ["t.npz", 5]}, "trace is .*5.*file"),
    ],
)
def test_mistakes_at_the_start(model, settings, words):
    with pytest.raises(UserError, match=words):
        LLM(model, **settings)


# -- ends -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import psutil
from epmoe import LLM, SamplingParams
llm = LLM(sys.argv[2], threads=1, record_trace=sys.argv[3])
llm.generate("the token", SamplingParams(max_tokens=3, ignore_eos=True))
print(llm._requests.session.run_dir, *(child.pid for child in psutil.Process().children()))
"""


def test_a_plain_script_leaves_nothing_behind(model, tmp_path):
    """No main guard, no close, another folder: the end of the interpreter writes the trace and ends the rank."""
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(__file__).resolve().parents[1])
    argv = [sys.executable, "script.py", root, str(model), "t.npz"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    run_dir, *pids = done.stdout.split()
    assert pids and not any(psutil.pid_exists(int(pid)) for pid in pids)
    assert not Path(run_dir).exists()
    assert load_trace(tmp_path / "t.npz").num_tokens == len(tiny_tokenizer()("the token").input_ids) + 2


def test_a_killed_rank_is_one_error(model):
    llm = LLM(model, ranks=2, threads=1)
    session = llm._requests.session
    pids = session._ranks.pids
    stream = llm.stream("the token", LONG)
    next(stream)
    psutil.Process(pids[1]).kill()
    with pytest.raises(RankFailure, match="rank 1: was killed by SIGKILL"):
        list(stream)
    assert not any(psutil.pid_exists(pid) for pid in pids) and not session.run_dir.exists()
    with pytest.raises(UserError, match="ended .rank 1: was killed by SIGKILL.*open a new LLM"):
        llm.generate("the token", GREEDY)
    llm.close()
