"""Each entry of the family table against transformers: tensors, layer kinds, router rule."""

import pytest
import torch
from tiny_checkpoints import FAMILIES, rotate_experts, save_tiny, tiny_config, tiny_model

from epmoe.checkpoint import load_weights
from epmoe.model.weights import MoEWeights
from epmoe.model_config import ModelConfig
from epmoe.ops.experts import split_gate_up
from epmoe.ops.router import route_ref
from placement.plan import linear_plan

GATE_UP = ("gate", "up")
CASES = [(family, experts, top_k) for family in FAMILIES for experts, top_k in ((8, 2), (10, 3), (32, 1))]


@pytest.mark.parametrize(("family", "experts", "top_k"), CASES)
def test_every_expert_matters_in_the_tiny_models(family, experts, top_k):
    """The parity tests can only fail if this holds: rotating all experts by one changes most argmaxes."""
    model = tiny_model(tiny_config(family, experts, top_k))
    token_ids = torch.randint(0, model.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(token_ids).logits.argmax(-1)
        rotate_experts(model)
        after = model(token_ids).logits.argmax(-1)
    assert (before != after).float().mean() > 0.5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_lands_where_transformers_has_it(family, tied, tmp_path):
    save_tiny(tmp_path, family, num_experts=10, sharded=True, tie_word_embeddings=tied)
    theirs = dict(tiny_model(tiny_config(family, num_experts=10, tie_word_embeddings=tied)).state_dict())
    config = ModelConfig.from_folder(tmp_path)
    experts = linear_plan(config.moe_shape, 1).slots
    weights, _ = load_weights(tmp_path, config, [layer[0] for layer in experts], torch.float32)

    def take(name: str) -> torch.Tensor:
        return theirs.pop(name)

    assert torch.equal(weights.embed, take("model.embed_tokens.weight"))
    assert torch.equal(weights.final_norm, take("model.norm.weight"))
    assert torch.equal(weights.head, take("lm_head.weight"))
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}."
        attention = f"{prefix}self_attn."
        assert torch.equal(layer.input_norm, take(f"{prefix}input_layernorm.weight"))
        assert torch.equal(layer.post_norm, take(f"{prefix}post_attention_layernorm.weight"))
        assert torch.equal(layer.attention.qkv, torch.cat([take(f"{attention}{n}_proj.weight") for n in "qkv"]))
        assert torch.equal(layer.attention.o, take(f"{attention}o_proj.weight"))
        if config.qkv_bias:
            assert torch.equal(layer.attention.qkv_bias, torch.cat([take(f"{attention}{n}_proj.bias") for n in "qkv"]))
        if config.qk_norm:
            assert torch.equal(layer.attention.q_norm, take(f"{attention}q_norm.weight"))
            assert torch.equal(layer.attention.k_norm, take(f"{attention}k_norm.weight"))
        if not isinstance(layer.mlp, MoEWeights):
            assert torch.equal(layer.mlp.gate_up, torch.cat([take(f"{prefix}mlp.{n}_proj.weight") for n in GATE_UP]))
            assert torch.equal(layer.mlp.down, take(f"{prefix}mlp.down_proj.weight"))
            continue
        assert torch.equal(layer.mlp.router, take(f"{prefix}mlp.gate.weight"))
        assert torch.equal(layer.mlp.experts.down, take(f"{prefix}mlp.experts.down_proj"))
        stacked = take(f"{prefix}mlp.experts.gate_up_proj")  # gate rows first
        for expert in range(10):
            gate, up = split_gate_up(layer.mlp.experts.gate_up[expert].T.contiguous())
            assert torch.equal(torch.cat([gate.T, up.T]), stacked[expert])
        if config.shared_intermediate_size:
            shared = f"{prefix}mlp.shared_expert."
            both = torch.cat([take(f"{shared}{n}_proj.weight") for n in GATE_UP])
            assert torch.equal(layer.mlp.shared.gate_up, both)
            assert torch.equal(layer.mlp.shared.down, take(f"{shared}down_proj.weight"))
            assert torch.equal(layer.mlp.shared_gate, take(f"{prefix}mlp.shared_expert_gate.weight"))
    assert not theirs, f"not loaded: {sorted(theirs)}"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize(("step", "dense"), [(1, []), (2, []), (3, [2]), (1, [0, 4])])
def test_the_same_layers_are_moe(family, step, dense, tmp_path):
    theirs = tiny_config(family, decoder_sparse_step=step, mlp_only_layers=dense, num_hidden_layers=6)
    theirs.save_pretrained(tmp_path)
    layers = tiny_model(theirs).model.layers
    moe = tuple(i for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts"))
    assert ModelConfig.from_folder(tmp_path).moe_layers == moe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_router_rule_is_the_familys(family, renormalise, dtype, tmp_path):
    theirs = tiny_config(family, num_experts=16, top_k=4, norm_topk_prob=renormalise)
    theirs.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    gate = tiny_model(theirs).model.layers[2].mlp.gate.to(dtype)
    x_TD = torch.randn(64, config.hidden_size, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.no_grad():
        logits_TE, weight_TK, expert_TK = gate(x_TD)
    ours_TK, ours_expert_TK = route_ref(logits_TE, config.router, config.top_k)
    assert torch.equal(ours_expert_TK.long(), expert_TK)
    assert torch.equal(ours_TK, weight_TK.float())


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_attention_biases_are_loaded(family, tmp_path):
    save_tiny(tmp_path, family, attention_bias=True)
    theirs = tiny_model(tiny_config(family, attention_bias=True)).model.layers[1].self_attn
    config = ModelConfig.from_folder(tmp_path)
    weights, _ = load_weights(tmp_path, config, [[0]] * len(config.moe_layers), torch.float32)
    ours = weights.layers[1].attention
    assert torch.equal(ours.o_bias, theirs.o_proj.bias)
    assert torch.equal(ours.qkv_bias, torch.cat([theirs.q_proj.bias, theirs.k_proj.bias, theirs.v_proj.bias]))
