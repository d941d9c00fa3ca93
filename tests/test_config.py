"""Configuration: what config.json means, what is refused by name, and the engine's own settings."""

import json
from dataclasses import fields, replace

import pytest
from tiny_checkpoints import FAMILIES, tiny_config

from epmoe.config import EngineConfig, check_engine
from epmoe.hf_config import normalise
from epmoe.model_config import ModelConfig, model_config
from placement.errors import UserError

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3 = {**MIXTRAL, "model_type": "qwen3_moe", "moe_intermediate_size": 32, "norm_topk_prob": True}


def read(raw, **changes) -> ModelConfig:
    raw = {key: value for key, value in {**raw, **changes}.items() if value is not ...}
    return model_config(normalise(raw), "tiny")


def message_of(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_real_checkpoint(shared_dir):
    config = ModelConfig.from_folder(shared_dir / "models" / "small32x4")
    assert (config.family, config.name, config.num_layers, config.hidden_size) == ("qwen3_moe", "small32x4", 12, 256)
    assert (config.num_experts, config.top_k, config.moe_intermediate_size) == (32, 4, 64)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rotary_dim) == (8, 4, 32, 32)
    assert config.moe_layers == tuple(range(12)) and config.qk_norm == "head" and config.router.renormalize
    assert config.tie_word_embeddings and config.dtype == "bfloat16" and config.eos_token_ids == (0,)
    assert config.moe_shape.num_layers == 12 and config.moe_shape.config_sha256 == config.config_sha256


def test_older_names_mean_the_same():
    v5 = {**QWEN3, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "dtype": "bfloat16"}
    v4 = {**QWEN3, "rope_theta": 500000, "rope_scaling": None, "torch_dtype": "torch.bfloat16", "num_experts": 8}
    del v4["num_local_experts"]
    assert read(v4) == read(v5)
    assert read(v5).rope_theta == 5e5 and read(v5).dtype == "bfloat16"
    assert "num_experts is given twice, as 8 and 16" in message_of(read, QWEN3, num_experts=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_what_transformers_assumes(family):
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(family)
    sizes = {**QWEN3, "shared_expert_intermediate_size": 48}
    del sizes["norm_topk_prob"]
    ours = read(sizes, model_type=family)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.router.renormalize == getattr(theirs, "norm_topk_prob", True)
    assert ours.qkv_bias == bool(getattr(theirs, "qkv_bias", getattr(theirs, "attention_bias", False)))
    assert ours.head_dim == 16 and ours.moe_layers == (0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_transformers_are_read(family, tmp_path):
    theirs = tiny_config(family, num_experts=10, top_k=3, eos_token_id=[5, 7])
    theirs.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert (config.num_experts, config.top_k, config.eos_token_ids) == (10, 3, (5, 7))
    assert config.hidden_size == theirs.hidden_size and config.vocab_size == theirs.vocab_size


REFUSED = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "clip_qkv": 8.0,
    "partial_rotary_factor": 0.5,
    "use_sliding_window": True,
    "sliding_window": 128,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_scaling": {"type": "linear", "factor": 4.0},
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
    "model_type": "llama",
    "dtype": "float8_e4m3fn",
    "num_experts_per_tok": 9,
    "num_key_value_heads": 3,
    "vocab_size": 0,
    "hidden_size": "64",
    "moe_intermediate_size": 0,
    "rms_norm_eps": "tiny",
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_changes_the_maths_is_refused_by_name(key):
    base = MIXTRAL if key in ("attention_bias", "sliding_window") else QWEN3
    text = message_of(read, base, **{key: REFUSED[key]})
    value = REFUSED[key]
    shown = {"rope_scaling": "linear", "rope_parameters": "yarn", "layer_types": "sliding_attention"}.get(key, value)
    named = {"rope_scaling": "rope type", "rope_parameters": "rope type"}.get(key, key)
    assert named in text and str(shown) in text and ";" in text, text


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": None, "clip_qkv": None, "sliding_window": None},
        {"sliding_window": 4096},  # beyond the last position
        {"sliding_window": 128, "use_sliding_window": False},
        {"layer_types": ["full_attention", "full_attention"]},
        {"rope_scaling": {"rope_type": "default"}},
        {"routed_scaling_factor": 1.0, "attention_dropout": 0.1, "router_aux_loss_coef": 0.3, "made_up": 1},
    ],
)
def test_what_changes_nothing_is_ignored(changes):
    assert read(QWEN3, **changes) == read(QWEN3)


def test_the_hash_follows_the_maths_only():
    base = read(QWEN3)
    same = read(QWEN3, torch_dtype="float16", eos_token_id=3, max_position_embeddings=64, made_up=1)
    assert same.config_sha256 == base.config_sha256
    assert model_config(normalise(QWEN3), "other").config_sha256 == base.config_sha256
    changed = {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "vocab_size": 321,
        "moe_intermediate_size": 33,
        "num_local_experts": 9,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "decoder_sparse_step": 2,
        "head_dim": 32,
    }
    hashes = {read(QWEN3, **{key: value}).config_sha256 for key, value in changed.items()}
    assert len(hashes | {base.config_sha256}) == len(changed) + 1


@pytest.mark.parametrize(
    "key, value",
    [
        ("model_type", ["qwen3_moe"]),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_parameters", {"rope_type": "default", "rope_theta": float("nan")}),
        ("clip_qkv", -1.0),
        ("tie_word_embeddings", "false"),
        ("norm_topk_prob", "false"),
        ("attention_bias", "no"),
        ("decoder_sparse_step", 0),
        ("decoder_sparse_step", "2"),
        ("mlp_only_layers", 1),
        ("mlp_only_layers", ["1"]),
        ("layer_types", 5),
        ("sliding_window", "4096"),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [[1]]),
        ("num_hidden_layers", 1 << 30),
        ("num_local_experts", 1 << 30),
    ],
)
def test_values_of_no_use_are_refused_by_name(key, value):
    named = {"rope_parameters": "rope_theta", "num_local_experts": "num_experts"}.get(key, key)
    shown = value["rope_theta"] if isinstance(value, dict) else value
    text = message_of(read, {**QWEN3, "max_position_embeddings": 8192}, **{key: value})
    assert f"{named} is {shown!r}" in text and ";" in text, text


def test_a_dense_layer_needs_a_size():
    assert "intermediate_size is -96" in message_of(read, QWEN3, mlp_only_layers=[0], intermediate_size=-96)


def test_an_older_rotary_block_counts_beside_a_newer_one():
    text = message_of(read, QWEN3, rope_parameters={"rope_theta": 1e6}, rope_scaling={"type": "yarn", "factor": 4.0})
    assert "rope type is 'yarn'" in text


@pytest.mark.parametrize("key", ["hidden_size", "num_local_experts", "vocab_size", "moe_intermediate_size"])
def test_a_missing_size_is_named(key):
    text = message_of(read, QWEN3, **{key: ...})
    assert key.replace("num_local_experts", "num_experts") in text and "add it" in text


def test_no_moe_layer_is_refused():
    assert "no layer is a MoE layer" in message_of(read, QWEN3, mlp_only_layers=[0, 1], intermediate_size=96)


def test_unreadable_files(tmp_path):
    assert "No such file" in message_of(ModelConfig.from_folder, tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in message_of(ModelConfig.from_folder, tmp_path)
    (tmp_path / "config.json").write_text("[" * 50_000)
    assert "not JSON" in message_of(ModelConfig.from_folder, tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "list" in message_of(ModelConfig.from_folder, tmp_path)


def test_end_tokens_of_the_generation_config_win(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "eos_token_id": 1}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (2, 3)


# -- the engine's own settings ----------------------------------------------------------------------------------------


def test_engine_config_survives_json():
    config = EngineConfig(
        model="m",
        ranks=3,
        device="cuda",
        dtype="bfloat16",
        combine="reduce",
        max_batch_tokens=100,
        max_requests=7,
        max_model_len=50,
        block_size=8,
        num_blocks=70,
        threads=2,
        seed=5,
        async_steps=False,
        plan='{"format": "x"}',
    )
    assert EngineConfig.from_json(config.to_json()) == config
    defaults = EngineConfig(model="m")
    changed = [item.name for item in fields(config) if getattr(config, item.name) != getattr(defaults, item.name)]
    assert len(changed) >= 13


def test_an_unknown_engine_key_is_an_error():
    text = message_of(EngineConfig.from_json, json.dumps({"model": "m", "rank": 2}))
    assert "rank" in text and "ranks" in text
    assert "model" in message_of(EngineConfig.from_json, "{}")
    assert "not JSON" in message_of(EngineConfig.from_json, "{")
    assert "list" in message_of(EngineConfig.from_json, "[]")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ranks", 0),
        ("ranks", "2"),
        ("ranks", True),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("combine", "sum"),
        ("exchange", "smoke"),
        ("block_size", 0),
        ("max_batch_tokens", -1),
        ("num_blocks", 2),
        ("threads", 0),
        ("deterministic", 1),
    ],
)
def test_engine_values_are_checked(key, value):
    text = message_of(EngineConfig, **{"model": "m", key: value})
    assert key in text and str(value) in text


def test_engine_values_that_contradict_each_other():
    assert "max_requests 9" in message_of(EngineConfig, model="m", max_requests=9, max_batch_tokens=8)
    assert "deterministic" in message_of(EngineConfig, model="m", deterministic=True, combine="reduce")
    for exchange, device in (("oneshot", "cuda"), ("p2p", "cpu")):
        assert f"on {device} use auto" in message_of(EngineConfig, model="m", ranks=2, exchange=exchange, device=device)


def test_engine_and_model_must_fit():
    model = read(QWEN3)
    engine = EngineConfig(model="m", ranks=8, max_model_len=512)
    check_engine(engine, model)
    assert "at most 8" in message_of(check_engine, replace(engine, ranks=9), model)
    assert "512" in message_of(check_engine, replace(engine, max_model_len=513), model)
