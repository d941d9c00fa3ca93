"""MoE ops against loops that state what they mean; each check runs on a device, by twin or by kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from epmoe.ops.block_schedule import block_schedule_ref
from epmoe.ops.experts import ExpertOptions, expert_mlp_triton, interleave_gate_up
from epmoe.ops.moe_index import build_index_triton
from epmoe.ops.router import RouterRule, route_ref, route_to_slots_ref
from epmoe.ops.tiles import Choice

RULES = {
    "softmax": RouterRule(),
    "softmax renormalised": RouterRule(renormalize=True),
    "groups by max": RouterRule(groups=4, top_groups=2, scale=16.0),
    "groups by top2, biased": RouterRule(
        score="sigmoid",
        renormalize=True,
        norm_eps=1e-20,
        groups=4,
        top_groups=2,
        group_score="top2",
        scale=2.5,
    ),
    "sigmoid, eps": RouterRule(score="sigmoid", renormalize=True, norm_eps=1e-6),
    "top-k softmax": RouterRule(score="topk_softmax"),
    "top-k sigmoid": RouterRule(score="topk_sigmoid", weight_input=True),
    "p-norm": RouterRule(renormalize=True, norm_p=2.0),
    "clamped norm": RouterRule(renormalize=True, norm_min=1e-12),
    "sparse mixer": RouterRule(score="sparsemixer"),
}
# Rules that round to the dtype of half-precision logits, at the end or at every step.
ROUNDING_RULES = {
    "Qwen": RouterRule(renormalize=True, weight_dtype="logits"),
    "gpt-oss": RouterRule(score="topk_softmax", round_scores=True),
    "DBRX": RouterRule(renormalize=True, round_scores=True),
    "LFM2": RouterRule(score="sigmoid", renormalize=True, norm_eps=1e-6, round_scores=True),
    "Phi": RouterRule(score="sparsemixer", round_scores=True),
}
BIASED = ("groups by top2, biased", "sigmoid, eps", "clamped norm", "LFM2")
ROUTER_SIZES = ((40, 5), (8, 1))
LARGE_ROUTER_SIZES = ((512, 16), (384, 8), (160, 6))
SIZES = ((5, 64, 64, 2), (3, 80, 128, 1), (4, 36, 20, 3), (2, 40, 100, 2))  # L, D, F, K


class Weights(NamedTuple):
    gate_up: torch.Tensor
    down: torch.Tensor


def make_experts(slots: int, hidden: int, features: int, dtype: torch.dtype, device: str):
    """Interleaved weights, and gate, up and down in float32."""
    gate, up = torch.randn(2, slots, features, hidden) * hidden**-0.5
    down = torch.randn(slots, hidden, features) * features**-0.5
    weights = Weights(interleave_gate_up(gate, up).to(device, dtype), down.to(device, dtype))
    return weights, tuple(w.to(dtype).float() for w in (gate, up, down))


def slots_of(kind: str, rows: int, top_k: int, num_slots: int) -> torch.Tensor:
    """Local slots int32 ``[R, K]``: distinct in a row; some elsewhere, all elsewhere, or slot 0 in every row."""
    slot_RK = torch.rand(rows, num_slots).argsort(1)[:, :top_k].int()
    if kind == "mixed":
        slot_RK[torch.rand(rows, top_k) < 0.3] = -1
    elif kind == "nowhere":
        slot_RK.fill_(-1)
    elif kind == "one":
        slot_RK.fill_(-1)
        slot_RK[:, 0] = 0
    return slot_RK


def loop_experts(x_RD, slot_RK, weights, act=functional.silu) -> torch.Tensor:
    """``[R, K, D]`` float32: one expert on one row at a time; zero where the choice is elsewhere."""
    gate, up, down = weights
    out = torch.zeros(*slot_RK.shape, x_RD.shape[1])
    for r, choices in enumerate(slot_RK.tolist()):
        for k, slot in enumerate(choices):
            if slot >= 0:
                x = x_RD[r].float()
                out[r, k] = down[slot] @ (act(gate[slot] @ x) * (up[slot] @ x))
    return out


def relative(out: torch.Tensor, want: torch.Tensor) -> float:
    return ((out.float().cpu() - want).norm() / want.norm().clamp(min=1e-30)).item()


def check_index(build, device: str) -> None:
    """Loops over pairs: sorted by slot, stable, and positions point back; then the block schedule."""
    for num_slots in (5, 130):
        for top_k in (1, 3):
            for rows in (0, 1, 33, 170):
                for kind in ("mixed", "nowhere", "one"):
                    if top_k > num_slots:
                        continue
                    slot_RK = slots_of(kind, rows, top_k, num_slots)
                    index = build(slot_RK.to(device), num_slots)
                    pairs = [(s, r, k) for r, c in enumerate(slot_RK.tolist()) for k, s in enumerate(c) if s >= 0]
                    pairs.sort(key=lambda pair: pair[0])
                    case = (num_slots, top_k, rows, kind)
                    offsets = [sum(p[0] < s for p in pairs) for s in range(num_slots + 1)]
                    assert index.offset_L1.tolist() == offsets, case
                    assert index.row_M[: len(pairs)].tolist() == [r for _, r, _ in pairs], case
                    want = torch.full((rows, top_k), -1, dtype=torch.int32)
                    for m, (_, r, k) in enumerate(pairs):
                        want[r, k] = m
                    assert torch.equal(index.pos_RK.cpu(), want), case
                    if index.blocks is not None and rows:
                        check_blocks(index)


def check_blocks(index) -> None:
    want = block_schedule_ref(index.offset_L1.cpu(), index.blocks.rows, index.row_M.numel(), index.blocks.tail)
    assert torch.equal(index.blocks.offset_L1.cpu(), want.offset_L1)
    assert torch.equal(index.blocks.slot_B.cpu(), want.slot_B)


def check_experts(run, build, device: str, dtype: torch.dtype, sizes=SIZES, rows=(1, 7, 33)) -> None:
    """``run(x, index, weights, options)`` against the loop; rows beyond the pairs may hold anything."""
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for num_slots, hidden, features, top_k in sizes:
        weights, plain = make_experts(num_slots, hidden, features, dtype, device)
        for count in rows:
            for kind in ("mixed", "one", "nowhere"):
                x_RD = torch.randn(count, hidden).to(dtype)
                slot_RK = slots_of(kind, count, top_k, num_slots)
                index = build(slot_RK.to(device), num_slots)
                out_MD = run(x_RD.to(device), index, weights, ExpertOptions())
                want = loop_experts(x_RD, slot_RK, plain)
                pos_RK = index.pos_RK.long().cpu()
                got = torch.where(pos_RK[..., None] >= 0, out_MD.cpu()[pos_RK.clamp(min=0)], 0.0)
                error = relative(got, want)
                assert error < tolerance, (num_slots, hidden, features, top_k, count, kind, error)


def check_tiles(choice: Choice, dtype: torch.dtype, sizes, rows) -> None:
    """`check_experts` of the GPU's kernels with these tiles."""
    check_experts(
        lambda x, index, weights, options: expert_mlp_triton(x, index, weights, options, choice),
        lambda slot, slots: build_index_triton(slot, slots, choice.rows, choice.tail),
        "cuda",
        dtype,
        sizes,
        rows,
    )


def check_sum(run, device: str, dtype: torch.dtype) -> None:
    """Ascending choices in float32, -1 skipped although the row it would read and its weight are NaN."""
    for tokens, choices, hidden, n in ((0, 2, 16, 3), (1, 3, 24, 4), (9, 8, 600, 40), (5, 2, 8, 0)):
        rows_ND = torch.randn(max(n, 1), hidden).to(dtype)
        rows_ND[0] = float("nan")
        index_TJ = torch.randint(1, max(n, 2), (tokens, choices), dtype=torch.int32)
        index_TJ[torch.rand(tokens, choices) < 0.3] = -1
        if n == 0:
            index_TJ.fill_(-1)
        weight_TJ = torch.rand(tokens, choices)
        add_TD = torch.randn(tokens, hidden).to(dtype)
        for weight in (None, weight_TJ.masked_fill(index_TJ < 0, float("nan"))):
            for add in (None, add_TD):
                want = torch.zeros(tokens, hidden)
                for t in range(tokens):
                    for j in range(choices):
                        if index_TJ[t, j] >= 0:
                            part = rows_ND[index_TJ[t, j]].float()
                            want[t] += part if weight is None else part * weight[t, j]
                want = want.to(dtype)
                want = want if add is None else want + add
                got = run(*(None if v is None else v.to(device) for v in (rows_ND[:n], index_TJ, weight, add)))
                assert got.dtype == dtype
                torch.testing.assert_close(got.cpu(), want, rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=1e-5)


def distinct_logits(tokens: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of which no two in a row are equal, nor their scores: ties are decided differently by each device.

    In half precision that holds up to 64 experts.
    """
    steps = torch.stack([torch.randperm(experts) for _ in range(tokens)]) if tokens else torch.zeros(0, experts)
    step = max(16.0, experts / 8)  # within +-4: the sigmoid of larger ones is 1
    return ((steps - experts / 2) / step + 0.3).to(dtype)  # off centre: no two sums of sigmoids are equal either


def check_router_slots(run, device: str) -> None:
    """The slots of the choices, with and without padding rows, against the twin."""
    rule, serve_E = RULES["softmax"], torch.arange(10, 16).int()
    for tokens in (0, 1, 9, 600):
        for valid_T in (None, torch.arange(tokens) % 3 != 1):
            logits_TE = distinct_logits(tokens, 6, torch.float32)
            want = route_to_slots_ref(logits_TE, rule, 2, None, (serve_E, valid_T))
            where = (serve_E.to(device), None if valid_T is None else valid_T.to(device))
            got = run(logits_TE.to(device), rule, 2, None, where)
            for ours, theirs in zip(got[1:], want[1:]):
                assert torch.equal(ours.cpu(), theirs), (tokens, valid_T)


def check_router(run, name: str, device: str, dtype: torch.dtype, sizes=ROUTER_SIZES) -> None:
    rule = (RULES | ROUNDING_RULES)[name]
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps  # roundings may go the other way
    for experts, top_k in sizes:
        if rule.score == "sparsemixer":
            top_k = 2
        if rule.groups > 1 and top_k > experts // rule.groups * rule.top_groups:
            continue
        for tokens in (0, 1, 9):
            for bias in (None, torch.randn(experts) * 0.2) if name in BIASED else (None,):
                logits_TE = distinct_logits(tokens, experts, dtype)
                want = route_ref(logits_TE, rule, top_k, bias)
                got = run(logits_TE.to(device), rule, top_k, None if bias is None else bias.to(device))
                assert got[0].dtype == torch.float32 and got[1].dtype == torch.int32
                assert torch.equal(got[1].cpu(), want[1]), (name, experts, top_k, tokens)
                torch.testing.assert_close(got[0].cpu(), want[0], rtol=tolerance, atol=1e-6)
