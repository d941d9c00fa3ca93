"""The training router against its formulas, spelled out in loops."""

import math

import pytest
import torch

from epmoe.moe.router_training import balance_loss, noisy_logits, route_for_training
from epmoe.ops.router import RouterRule, route_ref

T, E, K = 37, 8, 2
QWEN3 = RouterRule(score="softmax", renormalize=True)


def logits(seed: int = 0, tokens: int = T) -> torch.Tensor:
    return torch.randn(tokens, E, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("counted, choices", [("first", 1), ("all", K)])
def test_balance_loss_is_the_formula(counted, choices):
    routed = route_for_training(logits(), QWEN3, K)
    expected = 0.0
    for expert in range(E):
        picked = sum(int(routed.expert_TK[t, k]) == expert for t in range(T) for k in range(choices))
        prob = sum(math.exp(logits()[t, expert]) / sum(math.exp(x) for x in logits()[t]) for t in range(T)) / T
        expected += E * picked / (T * choices) * prob
    assert balance_loss(routed.prob_TE, routed.expert_TK, counted).item() == pytest.approx(expected, rel=1e-5)


def test_balance_loss_at_its_ends():
    even_TE = torch.full((E, E), 1 / E)
    assert balance_loss(even_TE, torch.arange(E)[:, None]).item() == pytest.approx(1.0)
    one_TE = torch.zeros(5, E)
    one_TE[:, 3] = 1.0
    assert balance_loss(one_TE, torch.full((5, 1), 3)).item() == pytest.approx(E)


def test_balance_loss_matches_transformers():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    routed = route_for_training(logits(), QWEN3, K)
    theirs = load_balancing_loss_func((logits(),), E, K)  # sums over the K choices where ours is their mean
    assert balance_loss(routed.prob_TE, routed.expert_TK).item() == pytest.approx(theirs.item() / K, rel=1e-5)


def test_padding_does_not_count():
    routed = route_for_training(logits(), QWEN3, K)
    real_T = torch.arange(T) < 20
    some = balance_loss(routed.prob_TE, routed.expert_TK, real_T=real_T)
    assert some.item() == pytest.approx(balance_loss(routed.prob_TE[:20], routed.expert_TK[:20]).item(), rel=1e-6)
    assert balance_loss(routed.prob_TE, routed.expert_TK, real_T=torch.zeros(T, dtype=torch.bool)).item() == 0


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    routed = route_for_training(logits(tokens=tokens), QWEN3, K)
    assert routed.weight_TK.shape == routed.expert_TK.shape == (tokens, K)
    assert torch.isfinite(balance_loss(routed.prob_TE, routed.expert_TK))


def test_descending_the_loss_evens_the_load():
    skewed_TE = (logits() + torch.linspace(0, 3, E)).requires_grad_()
    before = max_load(skewed_TE)
    for _ in range(200):
        routed = route_for_training(skewed_TE, QWEN3, K)
        (gradient_TE,) = torch.autograd.grad(balance_loss(routed.prob_TE, routed.expert_TK), skewed_TE)
        skewed_TE = (skewed_TE - 5 * T / E * gradient_TE).detach().requires_grad_()
    assert before > 2 * T * K / E and max_load(skewed_TE) < 0.7 * before


def max_load(logits_TE: torch.Tensor) -> int:
    return torch.bincount(route_ref(logits_TE, QWEN3, K)[1].flatten().long(), minlength=E).max().item()


def test_noise_is_the_formula_and_follows_its_generator():
    spread_TE = logits(1)
    noisy_TE = noisy_logits(logits(), spread_TE, torch.Generator().manual_seed(7))
    normal_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(7))
    for t in range(T):
        for e in range(E):
            std = math.log(1 + math.exp(spread_TE[t, e]))
            assert noisy_TE[t, e].item() == pytest.approx((logits()[t, e] + normal_TE[t, e] * std).item(), abs=1e-5)
    assert not torch.equal(noisy_TE, noisy_logits(logits(), spread_TE, torch.Generator().manual_seed(8)))


def test_noise_spreads_the_choice_and_none_leaves_it():
    near_tie_TE = torch.zeros(2000, E).index_fill(1, torch.tensor([0, 1]), 0.1)
    still = route_for_training(noisy_logits(near_tie_TE, torch.tensor(-50.0)), QWEN3, K)
    moved = route_for_training(noisy_logits(near_tie_TE, torch.tensor(1.0), torch.Generator().manual_seed(0)), QWEN3, K)
    assert set(still.expert_TK.flatten().tolist()) == {0, 1}
    assert torch.bincount(moved.expert_TK.flatten().long(), minlength=E).min() > 0.5 * 2000 * K / E


@pytest.mark.parametrize("rule", [QWEN3, RouterRule(score="sigmoid", renormalize=True), RouterRule("topk_softmax")])
def test_route_is_inference_and_its_gradient_is_right(rule):
    logits_TE = logits().double().requires_grad_()
    routed = route_for_training(logits_TE, rule, K)
    weight_TK, expert_TK = route_ref(logits_TE.detach(), rule, K)
    assert torch.equal(routed.weight_TK, weight_TK) and torch.equal(routed.expert_TK, expert_TK)
    assert torch.allclose(routed.prob_TE.sum(-1), torch.ones(T))
    target_TK = logits(2)[:, :K]
    (gradient_TE,) = torch.autograd.grad((routed.weight_TK * target_TK).sum(), logits_TE)
    step_TE = logits(3).double()
    ahead, behind = (
        (route_ref(logits_TE.detach() + sign * 1e-3 * step_TE, rule, K)[0] * target_TK).sum(-1) for sign in (1, -1)
    )
    same_T = torch.stack(
        [(route_ref(logits_TE.detach() + s * 1e-3 * step_TE, rule, K)[1] == expert_TK).all(-1) for s in (1, -1)]
    ).all(0)
    assert same_T.sum() > 0.9 * T
    slope_T = (gradient_TE * step_TE).sum(-1)
    assert torch.allclose(slope_T[same_T].float(), ((ahead - behind) / 2e-3)[same_T], atol=2e-3)


def test_noise_gradient_reaches_the_spread():
    spread_TE = logits(1).requires_grad_()
    routed = route_for_training(noisy_logits(logits(), spread_TE, torch.Generator().manual_seed(0)), QWEN3, K)
    (gradient_TE,) = torch.autograd.grad(routed.weight_TK[:, 0].sum(), spread_TE)
    assert (gradient_TE != 0).any()


def test_unknown_count_is_refused():
    with pytest.raises(ValueError, match="'second'"):
        balance_loss(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), "second")
