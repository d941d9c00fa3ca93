#!/usr/bin/env python3
"""transformers over the weights of `bench_decode.py`: one request by ``generate``, many by continuous batching.

    scripts/decode_peer.py          # alone; or beside the engine: scripts/bench_decode.py --peer

The model is made on the meta device and given the engine's own tensors, so it costs no memory.  Rows of gate and up are
interleaved in those, which transformers does not undo: it computes other values, at the same cost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epmoe.model.weights import LayerWeights, ModelWeights  # noqa: E402
from epmoe.model_config import ModelConfig  # noqa: E402
from scripts.gpu_arguments import parse  # noqa: E402

CASES = ((1, (4, 20)), (256, (4, 16)))  # requests, new tokens of the shorter and of the longer run
PROMPT = 16  # tokens


def measure_all(folder: str, config: ModelConfig, weights: ModelWeights) -> list[dict]:
    """All cases, as far as it gets."""
    found = []
    try:
        model = build(folder, config, weights)
        for requests, new in CASES:
            found.append(measure(model, config.vocab_size, requests, PROMPT, new))
            print(f"transformers, {requests} requests: {found[-1]['tokens_per_s']:.1f} tokens/s", found[-1], flush=True)
    except Exception:
        traceback.print_exc()
    return found


def build(folder: str, config: ModelConfig, weights: ModelWeights) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=weights.embed.dtype).eval()
    _assign(model, {"model.embed_tokens.weight": weights.embed, "lm_head.weight": weights.head})
    _assign(model, {"model.norm.weight": weights.final_norm})
    for i, layer in enumerate(weights.layers):
        _assign(model.model.layers[i], _layer(layer, config))
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=settings).to(weights.embed.device)
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    assert not left, f"tensors without values: {left[:4]}"
    return model


def _layer(layer: LayerWeights, config: ModelConfig) -> dict[str, torch.Tensor]:
    attention, heads, kv = layer.attention, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, v = attention.qkv.split((heads, kv, kv))
    return {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_norm,
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": attention.o,
        "self_attn.q_norm.weight": attention.q_norm,
        "self_attn.k_norm.weight": attention.k_norm,
        "mlp.gate.weight": layer.mlp.router,
        "mlp.experts.gate_up_proj": layer.mlp.experts.gate_up,
        "mlp.experts.down_proj": layer.mlp.experts.down,
    }


def _assign(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        parent, _, leaf = name.rpartition(".")
        owner = module.get_submodule(parent)
        assert getattr(owner, leaf).shape == value.shape, name
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False))


def measure(model: nn.Module, vocabulary: int, requests: int, prompt: int, new: tuple[int, int]) -> dict:
    """Tokens per second of decode: what the longer of two runs takes more, so that prefill is not counted."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(requests)
    prompts = torch.randint(0, vocabulary, (requests, prompt), generator=generator)

    def settings(tokens: int) -> GenerationConfig:
        return GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def alone(tokens: int) -> None:
        model.generate(
            prompts.to(device), generation_config=settings(tokens), attention_mask=torch.ones_like(prompts).to(device)
        )

    def together(tokens: int) -> None:
        batching = ContinuousBatchingConfig(max_batch_tokens=max(512, requests), num_blocks=2 * requests)
        done = model.generate_batch(  # the manager stays: its graphs are captured in the first run
            prompts.tolist(), settings(tokens), batching, progress_bar=False, persistent_manager=True
        )
        assert len(done) == requests, f"{len(done)} of {requests} requests came back"

    run = alone if requests == 1 else together
    run(new[1])  # compiles, allocates and captures
    short, long = (_seconds(run, tokens) for tokens in new)
    rate = requests * (new[1] - new[0]) / (long - short)
    return {"requests": requests, "prompt": prompt, "new_tokens": new, "seconds": [short, long], "tokens_per_s": rate}


def _seconds(run: Callable[[int], None], tokens: int) -> float:
    began = time.perf_counter()
    run(tokens)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> int:
    from scripts import model_bench_lib as lib

    parse(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    folder = lib.shape_folder()
    config = ModelConfig.from_folder(folder)
    everything = [range(config.num_experts)] * len(config.moe_layers)
    weights, _ = lib.random_load(Path(folder), config, everything, torch.bfloat16, torch.device("cuda"))
    print(json.dumps(measure_all(folder, config, weights)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
