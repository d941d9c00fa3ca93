"""The router's training form: noise on the logits, and the loss that keeps the experts evenly loaded.

Selection and weights are those of inference (`epmoe.ops.router.route_ref`, which gradients flow through), so that a
model trained with this routes the same way when it is served.

    logits_TE = noisy_logits(router(x_TD), spread(x_TD), generator)     # optional, training only
    routed = route_for_training(logits_TE, rule, top_k)
    loss = loss + coefficient * balance_loss(routed.prob_TE, routed.expert_TK)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from epmoe.ops.router import RouterRule, route_ref

COUNTED = ("all", "first")


@dataclass(frozen=True)
class TrainingRoute:
    """One layer's routing of T tokens. ``weight_TK`` and ``prob_TE`` carry gradients to the logits.

    ``prob_TE`` float32: the probabilities over all experts that the balance loss averages: the softmax of the logits,
    or, under a sigmoid rule, the sigmoid scores divided by their sum (as DeepSeek-V3 does).
    """

    weight_TK: torch.Tensor
    expert_TK: torch.Tensor
    prob_TE: torch.Tensor


def noisy_logits(
    logits_TE: torch.Tensor, spread_TE: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """``logits + normal(0, 1) * softplus(spread)``, in float32: "Outrageously Large Neural Networks" (2017), eq. 4.

    ``spread_TE``: ``x @ W_noise``, or anything that broadcasts to ``[T, E]`` for a fixed amount of noise. Gradients
    reach both arguments. The same generator state gives the same noise.
    """
    normal_TE = torch.randn(logits_TE.shape, generator=generator, device=logits_TE.device, dtype=torch.float32)
    return logits_TE.float() + normal_TE * functional.softplus(spread_TE.float())


def route_for_training(
    logits_TE: torch.Tensor, rule: RouterRule, top_k: int, bias_E: torch.Tensor | None = None
) -> TrainingRoute:
    """Route as inference does and keep the probabilities; arguments as of `epmoe.ops.router.route`."""
    weight_TK, expert_TK = route_ref(logits_TE, rule, top_k, bias_E)
    if rule.score == "sigmoid":
        score_TE = logits_TE.float().sigmoid()
        prob_TE = score_TE / score_TE.sum(-1, keepdim=True)
    else:
        prob_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    return TrainingRoute(weight_TK, expert_TK, prob_TE)


def balance_loss(
    prob_TE: torch.Tensor, expert_TK: torch.Tensor, counted: str = "all", real_T: torch.Tensor | None = None
) -> torch.Tensor:
    """``E * sum_e f_e * P_e``, a float32 scalar: 1 when even, E when one expert takes all with certainty.

    f_e: the share of the counted choices that went to expert e (no gradient); P_e: the mean of ``prob_TE[:, e]``.
    ``counted="first"`` counts each token's best expert only: with K = 1 the loss of Switch Transformers (2021), eq. 4,
    and with K = 2 ``E * E`` times that of GShard (2020), algorithm 1. ``"all"`` counts the K choices alike.

    Args:
        expert_TK: the best expert of each token first.
        real_T: bool, which tokens count (padding does not); all by default. No real token gives 0.
    """
    if counted not in COUNTED:
        raise ValueError(f"counted={counted!r} is neither of {COUNTED}")
    tokens, num_experts = prob_TE.shape
    if real_T is None:
        real_T = torch.ones(tokens, dtype=torch.bool, device=prob_TE.device)
    chosen_TK = expert_TK[:, :1] if counted == "first" else expert_TK
    with torch.no_grad():
        experts_E = torch.arange(num_experts, device=prob_TE.device)
        pairs_TE = (chosen_TK.unsqueeze(-1) == experts_E).sum(1)  # no scatter: the same bits on every run
        total = real_T.sum().clamp(min=1)
        share_E = (pairs_TE * real_T.unsqueeze(-1)).sum(0) / (total * chosen_TK.shape[1])
    mean_E = prob_TE.masked_fill(~real_T.unsqueeze(-1), 0.0).sum(0) / total
    return num_experts * (share_E * mean_E).sum()
