"""The kernel of router.py: scores, group limit, top-k, weights and slots of a few tokens in one program."""

from __future__ import annotations

import triton
import triton.language as tl

from epmoe.ops.launch import wait_for_inputs


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _softmax(x):
    e = tl.exp(x - tl.max(x, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@triton.jit
def _kept_groups(choice, col, E: tl.constexpr, RULE: tl.constexpr):
    """Mask of the experts in the best groups; groups need not be a power of two wide."""
    GROUPS: tl.constexpr = RULE.groups
    KEPT: tl.constexpr = RULE.top_groups
    G2: tl.constexpr = triton.next_power_of_2(GROUPS)
    group = col // (E // GROUPS)
    g = tl.arange(0, G2)[None, :]
    total = tl.full([choice.shape[0], G2], float("-inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        mine = tl.where(group == i, choice, float("-inf"))
        best, at = tl.max(mine, 1, return_indices=True)
        if RULE.group_score == "top2":
            best += tl.max(tl.where(col == at[:, None], float("-inf"), mine), 1)
        total = tl.where(g == i, best[:, None], total)
    kept = group < 0
    for _ in tl.static_range(KEPT):
        _, at = tl.max(total, 1, return_indices=True)
        kept = kept | (group == at[:, None])
        total = tl.where(g == at[:, None], float("-inf"), total)
    return kept


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    logits_ptr,
    bias_ptr,
    weight_ptr,
    expert_ptr,
    serve_ptr,
    valid_ptr,
    slot_ptr,
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    E2: tl.constexpr,
    K2: tl.constexpr,
    BT: tl.constexpr,
    RULE: tl.constexpr,
    STEP: tl.constexpr,
    FINAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program routes BT tokens; scores stay in registers and K arg-max rounds select (lowest index on ties).

    ``RULE`` is the rule itself; ``STEP`` and ``FINAL`` are the dtypes that scores and final weights are rounded to.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    col = tl.arange(0, E2)[None, :]
    j = tl.arange(0, K2)[None, :]
    live = (t < tokens)[:, None]
    wait_for_inputs(PDL)
    x = tl.load(logits_ptr + t.to(tl.int64)[:, None] * E + col, mask=live & (col < E), other=float("-inf"))
    x = x.to(tl.float32)
    score = x
    if RULE.score == "softmax":
        score = _rounded(_softmax(x), STEP)
    if RULE.score == "sigmoid":
        score = _rounded(tl.sigmoid(x), STEP)
    choice = score
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + col, mask=col < E, other=0.0)
    choice = tl.where(col < E, choice, float("-inf"))
    if RULE.groups > 1:
        choice = tl.where(_kept_groups(choice, col, E, RULE), choice, float("-inf"))
    picked = tl.full([BT, K2], float("-inf"), tl.float32)
    experts = tl.zeros([BT, K2], tl.int32)
    for k in tl.static_range(K):
        best, at = tl.max(choice, 1, return_indices=True)
        at = tl.minimum(at, E - 1)
        hit = col == at[:, None]
        if RULE.score == "sparsemixer":
            far = _rounded(_rounded(best[:, None] - x, STEP) / tl.maximum(tl.abs(x), best[:, None]), STEP)
            near = tl.where(far > 2 * RULE.jitter, float("-inf"), choice)
            value = 1.0 / tl.sum(tl.exp(near - best[:, None]), 1)
        elif bias_ptr is None and RULE.groups == 1:
            value = best
        else:
            value = tl.sum(tl.where(hit, score, 0.0), 1)
        picked = tl.where(j == k, value[:, None], picked)
        experts = tl.where(j == k, at[:, None].to(tl.int32), experts)
        choice = tl.where(hit, float("-inf"), choice)
    if RULE.score == "topk_softmax":
        picked = _softmax(picked)
    if RULE.score == "topk_sigmoid":
        picked = tl.sigmoid(picked)
    picked = tl.where(j < K, _rounded(picked, STEP), 0.0)
    if RULE.renormalize:
        if RULE.norm_p == 1.0:
            norm = tl.sum(picked, 1)
        else:
            norm = tl.exp2(tl.log2(tl.sum(tl.exp2(tl.log2(picked) * RULE.norm_p), 1)) / RULE.norm_p)
        norm = tl.maximum(_rounded(_rounded(norm, STEP) + RULE.norm_eps, STEP), RULE.norm_min)
        picked = _rounded(tl.div_rn(picked, tl.broadcast_to(norm[:, None], picked.shape)), STEP)
    picked = _rounded(_rounded(picked * RULE.scale, STEP), FINAL)
    out = t.to(tl.int64)[:, None] * K + j
    tl.store(weight_ptr + out, picked, mask=live & (j < K))
    tl.store(expert_ptr + out, experts, mask=live & (j < K))
    if slot_ptr is not None:
        slot = tl.load(serve_ptr + experts)
        if valid_ptr is not None:
            slot = tl.where(tl.load(valid_ptr + t, mask=t < tokens, other=0)[:, None] != 0, slot, -1)
        tl.store(slot_ptr + out, slot, mask=live & (j < K))
