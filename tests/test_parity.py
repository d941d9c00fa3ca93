"""The engine gives the tokens of transformers, on any number of ranks and under any placement.

transformers sees each prompt with our output behind it, once: where its likeliest token at every position is the one
we drew, its own greedy decoding would have drawn the same.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from drive import Script
from scenario import Run, random_plan, run_script
from tiny_checkpoints import rotate_experts, save_tiny

from epmoe.model_config import ModelConfig

PROMPT_LENGTHS = (1, 2, 5, 15, 16, 17, 31, 40)
MAX_TOKENS = 64
# Of the largest logit.  These models amplify rounding: along a decode transformers' own float32 logits are up to 1.5e-5
# from its float64 ones.
TOLERANCE = {"prefill": 1e-5, "decode": 3e-5}
PLANS = [(1, 1), (2, 2), (4, 3)]  # (ranks, seed of a random placement)
MORE_PLANS = [(world, seed) for world in (1, 2, 4) for seed in (1, 2, 3)]
MODELS = ("mixtral", "qwen3_moe", "ten experts", "small32x4")


@dataclass(frozen=True)
class Reference:
    """A checkpoint, the prompts, and transformers' model of it."""

    folder: Path
    script: Script
    model: torch.nn.Module


@pytest.fixture(scope="module")
def reference(request, tmp_path_factory) -> Reference:
    from transformers import AutoModelForCausalLM

    if request.param == "small32x4":
        folder = request.getfixturevalue("shared_dir") / "models" / "small32x4"
    else:
        folder = tmp_path_factory.mktemp("parity")
        if request.param == "ten experts":
            save_tiny(folder, "qwen3_moe", num_experts=10, top_k=3, seed=2)
        else:
            save_tiny(folder, request.param, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocabulary = ModelConfig.from_folder(folder).vocab_size
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, vocabulary, length).tolist() for length in PROMPT_LENGTHS]
    params = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    script = Script([(number, prompt, params) for number, prompt in enumerate(prompts)], want_logits=True)
    return Reference(folder, script, model)


def generate(pool, reference: Reference, plan: str | None = None, **settings) -> Run:
    config = {"model": str(reference.folder), "max_model_len": 128, "plan": plan, **settings}
    return run_script(pool, config, reference.script)


@torch.inference_mode()
def require_parity(model: torch.nn.Module, script: Script, run: Run) -> None:
    """Every logit within ``TOLERANCE``, first of each prompt's last token (the prefill), then of every
    drawn one; and every drawn token the likeliest."""
    sequences = [prompt + run.tokens[number] for number, prompt, _ in script.requests]
    assert [len(run.tokens[number]) for number, _, _ in script.requests] == [MAX_TOKENS] * len(script.requests)
    longest = max(len(sequence) for sequence in sequences)
    padded = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    theirs = model(padded).logits  # causal: what pads the right end is never seen
    for stage, stop in (("prefill", 1), ("decode", MAX_TOKENS)):
        rows, ours = [], []
        for n, (number, prompt, _) in enumerate(script.requests):
            for position in range(len(prompt), len(prompt) + stop):
                rows.append(theirs[n, position - 1])
                ours.append(run.logits[number, position])
        a, b = torch.stack(ours), torch.stack(rows)
        error = ((a - b).abs().max() / b.abs().max()).item()
        assert error <= TOLERANCE[stage], f"{stage}: largest difference {error:.1e} of the largest logit"
    drawn = torch.tensor([run.tokens[number] for number, _, _ in script.requests]).flatten()
    assert (b.argmax(-1) == drawn).all(), "transformers would have drawn other tokens"


def require_same_everywhere(rank_pool, reference: Reference, plans: list[tuple[int, int]]) -> None:
    tokens = None
    for world, seed in plans:
        run = generate(rank_pool(world), reference, random_plan(reference.folder, world, seed))
        if tokens is None:
            require_parity(reference.model, reference.script, run)
            tokens = run.tokens
        assert run.tokens == tokens, f"{world} ranks, plan {seed}"
        assert sum(run.homes_W) == len(PROMPT_LENGTHS) and min(run.homes_W) > 0, "some rank was home to nobody"


@pytest.mark.parametrize("reference", MODELS, indirect=True)
def test_same_tokens_on_any_ranks_under_any_placement(rank_pool, reference):
    require_same_everywhere(rank_pool, reference, PLANS)


@pytest.mark.parametrize("reference", ["qwen2_moe", "olmoe"], indirect=True)
def test_other_families(rank_pool, reference):
    require_same_everywhere(rank_pool, reference, [(2, 1)])


@pytest.mark.parametrize("reference", ["qwen3_moe"], indirect=True)
def test_reduce_mode_with_replicas(rank_pool, reference):
    plan = random_plan(reference.folder, 4, 4, copies=0.4)
    require_parity(reference.model, reference.script, generate(rank_pool(4), reference, plan, combine="reduce"))


@pytest.mark.soak
@pytest.mark.parametrize("reference", [*MODELS, "qwen2_moe", "olmoe"], indirect=True)
def test_every_rank_count_under_every_placement(rank_pool, reference):
    require_same_everywhere(rank_pool, reference, MORE_PLANS)


def zero_one_expert(model: torch.nn.Module) -> None:
    """Expert 0 of every layer gives nothing."""
    stacks = [p for name, p in model.named_parameters() if name.endswith("experts.down_proj")]
    assert stacks and all(down.dim() == 3 for down in stacks)
    with torch.no_grad():
        for down in stacks:
            down[0] = 0


def drop_renormalisation(model: torch.nn.Module) -> None:
    """The weights of the chosen experts stay their shares among all experts."""

    def hook(router, inputs, outputs):
        logits, _, chosen = outputs
        return logits, torch.softmax(logits.float(), -1).gather(-1, chosen).to(logits.dtype), chosen

    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    assert routers, "no router found"
    for router in routers:
        router.register_forward_hook(hook)


@pytest.mark.parametrize(
    "reference", ["mixtral", "qwen3_moe", pytest.param("small32x4", marks=pytest.mark.soak)], indirect=True
)
def test_the_comparison_sees_mutations(rank_pool, reference):
    run = generate(rank_pool(2), reference)
    require_parity(reference.model, reference.script, run)
    for mutate in (rotate_experts, zero_one_expert, drop_renormalisation):
        mutant = copy.deepcopy(reference.model)
        mutate(mutant)
        with pytest.raises(AssertionError, match="largest difference"):
            require_parity(mutant, reference.script, run)
