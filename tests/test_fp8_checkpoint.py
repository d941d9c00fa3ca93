"""Checkpoints of block-scaled 8-bit floats: dequantised, or kept for the experts; strictly accounted."""

import shutil
from functools import partial

import fp8_cases
import moe_cases
import pytest
import torch
from drive import Script, drive
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny

from epmoe.checkpoint import load_weights
from epmoe.comm import Comm
from epmoe.layout import empty_weights
from epmoe.model_config import ModelConfig
from epmoe.moe.exchange import Received
from epmoe.moe.layer import MoELayer
from epmoe.ops.experts_fp8 import dequantize_gate_up, expert_mlp_fp8_ref
from epmoe.ops.fp8 import FP8, dequantize
from epmoe.ops.moe_index import build_index_ref
from placement.errors import UserError

EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    return fp8_cases.save_tiny_fp8(folder / "stored", folder / "meant")


def load(folder, held=(3, 1), **options):
    return load_weights(folder, ModelConfig.from_folder(folder), [held], torch.float32, **options)


def tensors_of(weights) -> list[torch.Tensor]:
    if isinstance(weights, torch.Tensor):
        return [weights]
    parts = weights if isinstance(weights, tuple) else vars(weights).values()
    return [tensor for part in parts if part is not None for tensor in tensors_of(part)]


def test_dequantised_where_nothing_is_kept(pair):
    stored, meant = pair
    done = []
    (got, report), (want, plain) = load(stored, progress=lambda *at: done.append(at)), load(meant)
    assert len(tensors_of(got)) == len(tensors_of(want)) > 10
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(got), tensors_of(want)))
    assert done[-1][0] == done[-1][1] and report.bytes_read < plain.bytes_read * 0.6
    assert ModelConfig.from_folder(stored).config_sha256 != ModelConfig.from_folder(meant).config_sha256


def test_experts_are_kept_with_their_scales(pair):
    stored, meant = pair
    got, want = load(stored, keep_fp8=True)[0].layers, load(meant)[0].layers
    experts, plain = got[0].mlp.experts, want[0].mlp.experts
    assert experts.gate_up.dtype == experts.down.dtype == FP8
    for slot in range(2):
        assert torch.equal(dequantize_gate_up(experts, slot), plain.gate_up[slot])
        assert torch.equal(dequantize(experts.down[slot], experts.down_scale[slot], torch.float32), plain.down[slot])
    assert torch.equal(got[0].attention.qkv, want[0].attention.qkv)
    assert torch.equal(got[1].mlp.gate_up, want[1].mlp.gate_up)


def test_the_layer_runs_kept_experts_as_such(pair):
    weights = load(pair[0], keep_fp8=True)[0].layers[0].mlp
    layer = MoELayer(0, weights, None, 2, None, None, False)
    index = build_index_ref(moe_cases.slots_of("some", 5, 2, 2), 2)
    received = Received(torch.randn(5, 128), 5, 10, 10, None, index, None)
    want = expert_mlp_fp8_ref(received.rows_RD, received.index, weights.experts)
    assert torch.equal(layer.experts(received), want)


def run_engine(folder, keep_fp8: bool, requests, **settings):
    config = {"model": str(folder), "max_model_len": 64, "num_blocks": 16, **settings}
    comm = Comm(0, 1, torch.device("cpu"))
    return drive(comm, config, Script(requests, want_logits=True), load=partial(load_weights, keep_fp8=keep_fp8))


def test_the_engine_on_a_quantised_checkpoint(pair):
    """Dequantised it is the checkpoint it means, to the bit; with experts kept at 8 bits it is near that."""
    requests = [(i, list(range(3, 3 + n)), {"temperature": 0.0, "max_tokens": 4}) for i, n in enumerate((1, 9, 20))]
    stored, meant = pair
    want, got = run_engine(meant, False, requests), run_engine(stored, False, requests)
    assert got.tokens == want.tokens
    assert all(torch.equal(got.logits[key], logits) for key, logits in want.logits.items())
    kept = run_engine(stored, True, requests)
    for i, prompt, _ in requests:
        ours, theirs = kept.logits[i, len(prompt)], want.logits[i, len(prompt)]
        assert 0 < moe_cases.relative(ours, theirs) < 0.1


def test_short_blocks_are_dequantised(tmp_path, pair):
    """Sizes that the kernels do not take."""
    config = ModelConfig.from_folder(pair[0])
    kept = empty_weights(config, [[0]], torch.float32, "meta", lambda name: True)[0].layers[0].mlp.experts
    one_not = empty_weights(config, [[0]], torch.float32, "meta", lambda name: "down" not in name)[0]
    assert kept.down.dtype == FP8 and one_not.layers[0].mlp.experts.down.dtype == torch.float32
    small = save_tiny(tmp_path, "qwen3_moe", num_experts=4)
    short = empty_weights(ModelConfig.from_folder(small), [[0]] * 2, torch.float32, "meta", lambda name: True)[0]
    assert short.layers[0].mlp.experts.down.dtype == torch.float32


MUTATIONS = {
    "missing scale": (lambda t: t.pop(f"{EXPERT}_scale_inv"), f"missing: {EXPERT}_scale_inv"),
    "misshapen scale": (
        lambda t: t.update({f"{EXPERT}_scale_inv": torch.ones(1, 2)}),
        f"misshapen: {EXPERT}_scale_inv ([1, 2], config.json asks for [2, 1])",
    ),
    "scale of no 8-bit matrix": (
        lambda t: t.update({EXPERT: torch.randn(256, 128)}),
        f"unknown: {EXPERT}_scale_inv",
    ),
    "a vector of 8 bits": (
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(FP8)}),
        "model.norm.weight (F8_E4M3)",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_changed_checkpoint_is_one_line_that_says_how(mutation, pair, tmp_path):
    change, says = MUTATIONS[mutation]
    folder = shutil.copytree(pair[0], tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as caught:
        load(folder)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_8_bit_matrices_without_a_word_in_the_config(pair, tmp_path):
    folder = shutil.copytree(pair[0], tmp_path / "copy")
    fp8_cases.edit_config(folder, quantization_config=None)
    with pytest.raises(UserError, match=r"\(F8_E4M3\)"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq', implemented is 'fp8'"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
    ],
)
def test_other_quantisations_are_refused(changes, says, pair, tmp_path):
    folder = shutil.copytree(pair[0], tmp_path / "copy")
    fp8_cases.edit_config(folder, quantization_config={**fp8_cases.QUANTIZATION, **changes})
    with pytest.raises(UserError, match=says):
        ModelConfig.from_folder(folder)
