"""Tiny random checkpoints of every family, made by transformers, in which every part matters to the output.

A random model at its initial scale gives the same tokens with its experts deleted.  So all matrices but the embedding
are scaled, and norms and biases drawn at random; ``tests/test_checkpoint.py`` asserts that rotating the experts by one
changes most argmaxes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe")
SCALE = 15.0
CALM = 5.0  # float32 logits are as near to float64 as a trained model's (6e-7 of the largest; at SCALE 1e-5)
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Expert sizes that blocks of 64 rows do not divide, a head size that is not hidden_size / heads, a dense layer.
PARTICULAR = {
    "mixtral": {"intermediate_size": 80, "head_dim": 24},
    "qwen3_moe": {
        "intermediate_size": 112,
        "moe_intermediate_size": 40,
        "head_dim": 32,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "intermediate_size": 112,
        "moe_intermediate_size": 72,
        "shared_expert_intermediate_size": 96,
        "mlp_only_layers": [0],
    },
    "olmoe": {"intermediate_size": 144, "clip_qkv": 3.0},
}


def tiny_config(family: str, num_experts: int = 8, top_k: int = 2, **changes: Any):
    """A transformers config; ``changes`` are further keys of it."""
    from transformers import AutoConfig

    keys = {**SIZES, **PARTICULAR[family], "num_experts_per_tok": top_k}
    keys["num_local_experts" if family == "mixtral" else "num_experts"] = num_experts
    return AutoConfig.for_model(family, **{**keys, **changes})


def tiny_model(config, seed: int = 0, scale: float = SCALE) -> torch.nn.Module:
    """A float32 transformers model whose every tensor is random and matters."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    embeddings = {id(model.get_input_embeddings().weight)}
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(".bias"):
                tensor.normal_(std=0.5)
            elif tensor.dim() == 1:
                tensor.normal_(mean=1.0, std=0.2)
            elif id(tensor) not in embeddings:
                tensor.normal_(std=0.02 * scale)
    return model


def save_tiny(
    folder: str | Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scale: float = SCALE,
    sharded: bool = False,
    tokenizer: bool = False,
    **changes: Any,
) -> Path:
    """Write a tiny checkpoint (in shards of about 100 kB if ``sharded``); ``changes`` go to ``tiny_config``."""
    if tokenizer:
        changes = {"eos_token_id": 0, **changes}
    model = tiny_model(tiny_config(family, **changes), seed, scale).to(dtype)
    model.save_pretrained(folder, max_shard_size="100KB" if sharded else "1GB")
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


def tiny_tokenizer():
    """A byte-level BPE tokenizer of 300 tokens with ``<eos>`` = 0 and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["the token goes to the expert and the expert answers the token"] * 4, trainer)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", chat_template=template)


def rotate_experts(model: torch.nn.Module) -> None:
    """Expert e gets the weights of expert e - 1, in every layer: the mutation that any test of experts must see."""
    rotated = 0
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".experts." in name:
                assert tensor.dim() == 3, f"{name} is {tuple(tensor.shape)}, expected experts stacked"
                tensor.copy_(tensor.roll(1, 0))
                rotated += 1
    assert rotated, "no expert found"
