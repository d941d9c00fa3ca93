"""Routing: router logits ``[T, E]`` -> K experts and weights per token, for every family's rule.

One rule is data (`RouterRule`), not code per family: how logits become scores, how experts are selected, how the
selected scores become weights.  Formulas were read in transformers' modules of the families named beside each field
and in "Sparse Backpropagation for MoE Training" (Liu et al., 2023) for the sparse mixer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from epmoe.ops.launch import pdl_options, triton_dtype
from epmoe.ops.router_kernel import route_kernel

Where = tuple[torch.Tensor, torch.Tensor | None]  # see `route_to_slots_ref`
SCORES = ("softmax", "sigmoid", "topk_softmax", "topk_sigmoid", "sparsemixer")


@dataclass(frozen=True)
class RouterRule:
    """How one family routes.

    Selection is by score (plus the correction bias where one is given), or by the raw logit for the ``topk_*``
    scores and the sparse mixer.  The correction bias moves the selection only, never the weights.
    """

    score: str = "softmax"
    """``softmax`` over E | ``sigmoid`` | ``topk_softmax``: softmax over the K selected logits (gpt-oss, Granite) |
    ``topk_sigmoid``: sigmoid of the selected logits (Llama 4) | ``sparsemixer`` (Phi-3.5, K = 2)."""
    groups: int = 1
    """Experts are ``groups`` equal runs; only the best ``top_groups`` of them are selected from (DeepSeek)."""
    top_groups: int = 1
    group_score: str = "max"
    """``max`` (DeepSeek-V2) or ``top2``: the sum of the two best selection scores (DeepSeek-V3, GLM-4.5)."""
    renormalize: bool = False
    """Divide the K weights by their norm."""
    norm_p: float = 1.0
    """Which norm: 1 = the sum (weights are positive); another p-norm (DBRX)."""
    norm_eps: float = 0.0
    """Added to the norm (1e-20 DeepSeek-V3, 1e-6 LFM2)."""
    norm_min: float = 0.0
    """The norm is at least this (1e-12 ERNIE 4.5)."""
    scale: float = 1.0
    """``routed_scaling_factor``."""
    round_scores: bool = False
    """Every step is rounded to the dtype of the logits (gpt-oss, DBRX, LFM2, Phi); else float32 throughout."""
    weight_dtype: str = "float32"
    """The final weights are rounded to this dtype (and returned as float32); ``logits`` = the dtype of the logits."""
    jitter: float = 0.01
    """The sparse mixer's epsilon (``router_jitter_noise``)."""
    float32_logits: bool = False
    """For the caller: the router's linear layer runs in float32 (DeepSeek, Hunyuan, ERNIE)."""
    weight_input: bool = False
    """For the caller: the weight multiplies the expert's input and the output is summed unweighted (Llama 4)."""

    def __post_init__(self):
        if self.score not in SCORES:
            raise ValueError(f"router score {self.score!r} is none of {', '.join(SCORES)}")
        if self.group_score not in ("max", "top2"):
            raise ValueError(f"group score {self.group_score!r} is neither 'max' nor 'top2'")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"{self.top_groups} of {self.groups} expert groups cannot be selected")


def route_ref(
    logits_TE: torch.Tensor, rule: RouterRule, top_k: int, bias_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select ``top_k`` experts per token.

    Args:
        logits_TE: float32, bfloat16 or float16; T = 0 is legal.
        bias_E: the correction bias, float32, added to the scores for the selection only.

    Returns:
        weight_TK float32 and expert_TK int32, by descending selection score.
    """
    assert top_k <= logits_TE.shape[1], f"{top_k} of {logits_TE.shape[1]} experts"
    if rule.score == "sparsemixer":
        assert top_k == 2, f"the sparse mixer selects 2 experts, not {top_k}"
        weight_TK, expert_TK = _sparsemixer(logits_TE if rule.round_scores else logits_TE.float(), rule.jitter)
        return _round(weight_TK, rule, logits_TE.dtype), expert_TK.int()
    score_TE = _scores(logits_TE, rule)
    choice_TE = score_TE if bias_E is None else score_TE + bias_E
    if rule.groups > 1:
        choice_TE = _keep_best_groups(choice_TE, rule)
    expert_TK = choice_TE.topk(top_k, dim=-1).indices
    weight_TK = _weights(score_TE.gather(1, expert_TK), rule)
    return _round(weight_TK, rule, logits_TE.dtype), expert_TK.int()


def _scores(logits_TE: torch.Tensor, rule: RouterRule) -> torch.Tensor:
    dtype = logits_TE.dtype if rule.round_scores else torch.float32
    if rule.score == "softmax":
        return torch.softmax(logits_TE, dim=-1, dtype=dtype)
    return logits_TE.to(dtype).sigmoid() if rule.score == "sigmoid" else logits_TE.to(dtype)


def _keep_best_groups(choice_TE: torch.Tensor, rule: RouterRule) -> torch.Tensor:
    """Mask the experts outside the best groups with -inf (never 0: biased scores may be negative)."""
    tokens, experts = choice_TE.shape
    assert experts % rule.groups == 0, f"{experts} experts in {rule.groups} groups"
    choice_TGE = choice_TE.view(tokens, rule.groups, experts // rule.groups)
    best = 1 if rule.group_score == "max" else 2
    group_TG = choice_TGE.topk(best, dim=-1).values.sum(-1)
    kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    kept_TG.scatter_(1, group_TG.topk(rule.top_groups, dim=-1).indices, True)
    return choice_TGE.masked_fill(~kept_TG.unsqueeze(-1), float("-inf")).view(tokens, experts)


def _weights(picked_TK: torch.Tensor, rule: RouterRule) -> torch.Tensor:
    if rule.score == "topk_softmax":
        picked_TK = torch.softmax(picked_TK, dim=-1)
    elif rule.score == "topk_sigmoid":
        picked_TK = picked_TK.sigmoid()
    if rule.renormalize:
        norm_T1 = (
            picked_TK.sum(-1, keepdim=True)
            if rule.norm_p == 1
            else torch.linalg.vector_norm(picked_TK, ord=rule.norm_p, dim=-1, keepdim=True)
        )
        picked_TK = picked_TK / (norm_T1 + rule.norm_eps).clamp(min=rule.norm_min)
    return picked_TK if rule.scale == 1 else picked_TK * rule.scale


def _sparsemixer(logits_TE: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Each pick's weight is its softmax among the logits within ``2 * epsilon`` (relative) of the best one."""
    weights, experts = [], []
    left_TE = logits_TE
    for _ in range(2):
        best_T1, expert_T1 = left_TE.max(dim=-1, keepdim=True)
        far_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1) > 2 * epsilon
        near_TE = left_TE.masked_fill(far_TE, float("-inf"))
        weights.append(torch.softmax(near_TE, dim=-1).gather(1, expert_T1))
        experts.append(expert_T1)
        left_TE = left_TE.scatter(1, expert_T1, float("-inf"))
    return torch.cat(weights, dim=1), torch.cat(experts, dim=1)


def _round(weight_TK: torch.Tensor, rule: RouterRule, logits_dtype: torch.dtype) -> torch.Tensor:
    dtype = logits_dtype if rule.weight_dtype == "logits" else getattr(torch, rule.weight_dtype)
    return weight_TK.to(dtype).float()


def route_triton(
    logits_TE: torch.Tensor, rule: RouterRule, top_k: int, bias_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route_ref` in one kernel (E up to 512, K up to 16)."""
    return route_to_slots_triton(logits_TE, rule, top_k, bias_E, None)[:2]


def route_to_slots_triton(
    logits_TE: torch.Tensor, rule: RouterRule, top_k: int, bias_E: torch.Tensor | None, where: Where | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`route_to_slots_ref` in the same kernel; ``where`` None: without slots."""
    tokens, experts = logits_TE.shape
    assert rule.score != "sparsemixer" or top_k == 2, f"the sparse mixer selects 2 experts, not {top_k}"
    assert top_k <= experts and experts % rule.groups == 0, (top_k, experts, rule.groups)
    logits_TE = logits_TE.contiguous()
    weight_TK = torch.empty((tokens, top_k), dtype=torch.float32, device=logits_TE.device)
    expert_TK = torch.empty((tokens, top_k), dtype=torch.int32, device=logits_TE.device)
    serve_E, valid_T = where or (None, None)
    slot_TK = None if where is None else torch.empty_like(expert_TK)
    if tokens:
        final = logits_TE.dtype if rule.weight_dtype == "logits" else getattr(torch, rule.weight_dtype)
        rows = 4 if tokens >= 512 else 1
        route_kernel[(triton.cdiv(tokens, rows),)](
            logits_TE,
            bias_E,
            weight_TK,
            expert_TK,
            serve_E,
            valid_T if valid_T is None else valid_T.view(torch.uint8),
            slot_TK,
            tokens,
            E=experts,
            K=top_k,
            E2=triton.next_power_of_2(experts),
            K2=triton.next_power_of_2(top_k),
            BT=rows,
            RULE=rule,
            STEP=triton_dtype(logits_TE.dtype if rule.round_scores else torch.float32),
            FINAL=triton_dtype(final),
            num_warps=4 if rows == 4 else 1,
            **pdl_options(logits_TE),
        )
    return weight_TK, expert_TK, slot_TK


def route(
    logits_TE: torch.Tensor, rule: RouterRule, top_k: int, bias_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route_ref`; the kernel on CUDA."""
    return (route_triton if logits_TE.is_cuda else route_ref)(logits_TE, rule, top_k, bias_E)


def route_to_slots_ref(
    logits_TE: torch.Tensor, rule: RouterRule, top_k: int, bias_E: torch.Tensor | None, where: Where
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`route_ref`, and the slot of each choice, int32 ``[T, K]``.

    Args:
        where: the slot that serves each expert, int32 ``[E]``; which rows are tokens, bool ``[T]``, ``None`` is all:
            the others get slots of -1.
    """
    weight_TK, expert_TK = route_ref(logits_TE, rule, top_k, bias_E)
    serve_E, valid_T = where
    slot_TK = serve_E[expert_TK]
    return weight_TK, expert_TK, slot_TK if valid_T is None else slot_TK.where(valid_T[:, None], -1)


def route_to_slots(
    logits_TE: torch.Tensor, rule: RouterRule, top_k: int, bias_E: torch.Tensor | None, where: Where
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`route_to_slots_ref`; the kernel on CUDA."""
    run = route_to_slots_triton if logits_TE.is_cuda else route_to_slots_ref
    return run(logits_TE, rule, top_k, bias_E, where)
