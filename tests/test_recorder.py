"""The recorder script takes the ids that the experts are called with, whatever rule chose them."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "record_transformers_trace.py"
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("record_transformers_trace", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script, config, tokens=24):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model, script.Recorder(model), torch.randint(0, 64, (1, tokens))


def test_sigmoid_bias_and_groups(script):
    """DeepSeek-V3's rule, recomputed from its gate's inputs; the bias makes it differ from the logits' top-k."""
    config = transformers.DeepseekV3Config(
        **SIZES,
        moe_intermediate_size=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    model, recorder, tokens = run(script, config)
    gates = [layer.mlp.gate for layer in model.model.layers[1:]]
    seen = []
    for gate in gates:
        gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, 16))
        gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].reshape(-1, 32)))
    with torch.inference_mode():
        model(tokens, use_cache=False)
    ids = recorder.take()
    assert recorder.layers == (1, 2) and ids.shape == (24, 2, 4)
    plain_differs = False
    for index, (gate, hidden) in enumerate(zip(gates, seen)):
        logits = hidden.double() @ gate.weight.double().T
        biased = logits.sigmoid() + gate.e_score_correction_bias.double()
        group = biased.view(-1, 4, 4).topk(2, -1).values.sum(-1).topk(2, -1).indices
        allowed = torch.zeros(24, 4, dtype=torch.bool).scatter_(1, group, True).repeat_interleave(4, 1)
        expected = biased.masked_fill(~allowed, -torch.inf).topk(4, -1).indices
        assert np.array_equal(np.sort(ids[:, index]), np.sort(expected.numpy()))
        plain_differs |= not np.array_equal(np.sort(ids[:, index]), np.sort(logits.topk(4).indices.numpy()))
    assert plain_differs


@pytest.mark.parametrize(
    "config, experts, top_k",
    [
        (transformers.MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2), 8, 2),
        (
            transformers.Llama4TextConfig(
                **SIZES, num_local_experts=8, num_experts_per_tok=1, head_dim=16, intermediate_size_mlp=48
            ),
            8,
            1,
        ),
        (transformers.OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, eos_token_id=None), 8, 2),
    ],
    ids=["mixtral", "llama4", "olmoe"],
)
def test_families(script, config, experts, top_k):
    model, recorder, tokens = run(script, config)
    with torch.inference_mode():
        model(tokens, use_cache=False)
    ids = recorder.take()
    assert ids.shape == (24, 3, top_k) and set(recorder.experts_of_layer.values()) == {experts}
    assert ids.min() >= 0 and ids.max() < experts and len(np.unique(ids.reshape(24, -1), axis=0)) > 12


def test_dense_model_is_refused(script):
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    with pytest.raises(script.UserError, match="mixture of experts"):
        script.Recorder(model)
