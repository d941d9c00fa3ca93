"""The model that ships in the package: what it is, that it learned, and that its traces are its own."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from epmoe.model_config import ModelConfig
from placement.trace import load_trace

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "epmoe" / "demo_model"
DOMAINS = ("english", "german", "french", "python", "c", "go")

sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def metrics() -> dict:
    return json.loads((FOLDER / "metrics.json").read_text())


def test_sizes():
    config = ModelConfig.from_folder(FOLDER)
    assert config.num_layers >= 8 and config.moe_layers == tuple(range(config.num_layers))
    assert (config.num_experts, config.top_k) == (16, 2)
    assert (FOLDER / "model.safetensors").stat().st_size <= 14 * 2**20
    assert sum(path.stat().st_size for path in FOLDER.glob("trace_*.npz")) <= 2 * 2**20
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_every_version_of_transformers_splits_alike():
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    theirs, ours = AutoTokenizer.from_pretrained(FOLDER), Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert theirs.eos_token_id == ours.token_to_id("<|endoftext|>") == 0
    for text in ("Größe ändern, déjà vu", "def f(x):\n    return x  # 1\n\n", "\tif (p == NULL) {\n", " 漢字 🙂"):
        assert theirs(text)["input_ids"] == ours.encode(text).ids
        assert theirs.decode(ours.encode(text).ids) == text


def test_card_states_the_losses_and_they_are_below_bigram_entropy():
    card = (FOLDER / "MODEL_CARD.md").read_text()
    found = metrics()["domains"]
    assert set(found) == set(DOMAINS)
    for domain in DOMAINS:
        assert found[domain]["loss"] < found[domain]["bigram"] < found[domain]["bigram_trained"]
        assert f"**{found[domain]['loss']:.3f}**" in card


@pytest.mark.parametrize("domain", DOMAINS)
def test_traces_are_held_out_text_and_this_model_s_choices(model, domain):
    from record_transformers_trace import Recorder

    trace = load_trace(FOLDER / f"trace_{domain}.npz")
    shape = ModelConfig.from_folder(FOLDER).moe_shape
    assert (trace.shape.moe_layers, trace.shape.num_experts, trace.shape.top_k) == (
        shape.moe_layers,
        shape.num_experts,
        shape.top_k,
    )
    assert trace.tokenizer_sha256 == hashlib.sha256((FOLDER / "tokenizer.json").read_bytes()).hexdigest()
    sequences = trace.token_ids_T.reshape(len(trace.seq_lens), -1)[:: len(trace.seq_lens) // 4][:4]
    ids_TLK = trace.expert_ids_TLK.reshape(len(trace.seq_lens), -1, *trace.expert_ids_TLK.shape[1:])
    recorder = Recorder(model)
    with torch.inference_mode():
        token_BS = torch.from_numpy(sequences.astype(np.int64))
        logits = model(token_BS, use_cache=False).logits
    chosen_TLK = recorder.take().reshape(4, -1, *trace.expert_ids_TLK.shape[1:])
    same = (np.sort(chosen_TLK, -1) == np.sort(ids_TLK[:: len(ids_TLK) // 4][:4], -1)).mean()
    assert same > 0.97, f"{same:.3f} of the choices are the recorded ones (bfloat16 there, float32 here)"
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), token_BS[:, 1:].flatten()).item()
    stated = metrics()["domains"][domain]
    assert abs(loss - stated["loss"]) < 0.5 and loss < stated["bigram"]


def test_domains_use_different_experts():
    """What placement by trace lives on: the domains' loads are far from alike."""
    loads = {}
    for domain in DOMAINS:
        load_LE = load_trace(FOLDER / f"trace_{domain}.npz").load_LE().astype(float)
        loads[domain] = load_LE / np.linalg.norm(load_LE, axis=1, keepdims=True)
    cosine = np.mean([(loads["german"] * loads[other]).sum(1).mean() for other in ("python", "c", "go")])
    assert cosine < 0.9


def test_continuations_are_of_their_domain(model):
    """Greedy text in each language uses that language's commonest words."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    expected = {
        "To insert a table into the document,": {"the", "a", "to", "of", "and", "is", "you"},
        "Um eine Tabelle in das Dokument einzufügen,": {"die", "der", "das", "Sie", "und", "in", "den", "ist"},
        "Pour insérer un tableau dans le document,": {"le", "la", "de", "les", "vous", "dans", "des", "et", "un"},
        "class Point:\n    def __init__(self, x, y):\n": {"self.x", "self.y", "=", "def", "return", "if"},
    }
    for prompt, words in expected.items():
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(made[0, ids.shape[1] :])
        assert len(words & set(text.replace("(", " ").split())) >= 2, text


def test_greedy_tokens_equal_transformers_on_any_ranks(model, rank_pool):
    """20 prompts of held-out text of all domains, 24 tokens each, on 1, 2 and 4 ranks."""
    from drive import Script
    from scenario import run_script

    prompts = []
    for number in range(20):
        trace = load_trace(FOLDER / f"trace_{DOMAINS[number % len(DOMAINS)]}.npz")
        start = int(trace.sequence_starts()[number % len(trace.seq_lens)])
        prompts.append(trace.token_ids_T[start : start + 3 + 4 * number].tolist())
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    script = Script([(number, prompt, params) for number, prompt in enumerate(prompts)])
    runs = [run_script(rank_pool(world), {"model": str(FOLDER), "max_model_len": 128}, script) for world in (1, 2, 4)]
    for number, prompt in enumerate(prompts):
        drawn = runs[0].tokens[number]
        assert all(run.tokens[number] == drawn for run in runs)
        with torch.inference_mode():  # the likeliest token at every position is the one that was drawn
            logits = model(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == drawn
