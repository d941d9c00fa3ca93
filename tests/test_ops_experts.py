"""Experts on CPU: against loops, in every form, and bitwise row-invariant in deterministic mode."""

import moe_cases
import pytest
import torch

from epmoe.ops.experts import ExpertOptions, activate_ref, expert_mlp, expert_sum, interleave_gate_up, split_gate_up
from epmoe.ops.moe_index import build_index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_experts(dtype, deterministic):
    torch.manual_seed(0)
    options = ExpertOptions(deterministic=deterministic)
    moe_cases.check_experts(lambda x, i, w, _: expert_mlp(x, i, w, options), build_index, "cpu", dtype)


@pytest.mark.parametrize("features", [1, 20, 64, 100, 192])
def test_interleave_and_split_are_inverse(features):
    gate, up = torch.randn(2, 3, features, 8)
    mixed = interleave_gate_up(gate, up)
    assert mixed.shape == (3, 2 * features, 8)
    assert torch.equal(mixed[:, : min(features, 64)], gate[:, :64])
    back_gate, back_up = split_gate_up(mixed[0].T.contiguous())
    assert torch.equal(back_gate.T, gate[0]) and torch.equal(back_up.T, up[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(256, 64), (96, 100), (64, 512)])
def test_deterministic_rows_do_not_depend_on_the_batch(dtype, sizes):
    torch.manual_seed(1)
    weights, _ = moe_cases.make_experts(6, *sizes, dtype, "cpu")
    x_RD, slot_RK = torch.randn(70, sizes[0]).to(dtype), moe_cases.slots_of("mixed", 70, 3, 6)
    mix_RK = torch.rand(70, 3)

    def outputs(rows):
        index = build_index(slot_RK[rows], 6)
        return expert_sum(x_RD[rows], index, weights, mix_RK[rows], ExpertOptions(deterministic=True))

    whole = outputs(torch.arange(70))
    for rows in (torch.tensor([37]), torch.arange(20, 41), torch.randperm(70)):
        assert torch.equal(outputs(rows), whole[rows])


@pytest.mark.parametrize(
    ("act", "function"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("relu", torch.relu),
    ],
)
def test_activations(act, function):
    h_M2F = torch.randn(5, 2 * 80)
    gate, up = split_gate_up(h_M2F)
    torch.testing.assert_close(activate_ref(h_M2F, act), function(gate) * up)


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="swish"):
        ExpertOptions(act="swish")
