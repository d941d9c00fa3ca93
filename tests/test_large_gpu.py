"""Tensors of more than 2^31 elements, 512 experts and 16 choices: no offset of a MoE kernel wraps around."""

from __future__ import annotations

import fp8_cases
import moe_cases
import pytest
import torch

from epmoe.ops.combine import weighted_sum
from epmoe.ops.experts import ExpertOptions, activate_ref, expert_mlp_triton, expert_sum
from epmoe.ops.experts_fp8 import BY_MEAN, dequantize_gate_up, expert_mlp_fp8_triton
from epmoe.ops.fp8 import FP8, dequantize
from epmoe.ops.moe_index import build_index, build_index_triton
from epmoe.ops.router import RouterRule, route, route_ref
from epmoe.ops.tiles import BLOCKED_128, FORMS, PINNED, PLAIN, POINTERS, SPECIALISED, STREAM, Choice

pytestmark = pytest.mark.gpu
WRAP = 2**31
SLOTS, FEATURES = 264, 2048


@pytest.fixture(autouse=True)
def _gpu():
    if not torch.cuda.is_available():
        pytest.skip("left out: no CUDA device")
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("left out: needs 40 GiB of GPU memory")
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def used_slots(hidden: int, dtype: torch.dtype) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Weights of which three slots are not zero: the first, one in the middle, and the last."""
    gate_up = torch.zeros(SLOTS, 2 * FEATURES, hidden, dtype=torch.uint8 if dtype == FP8 else dtype, device="cuda")
    down = torch.zeros(SLOTS, hidden, FEATURES, dtype=gate_up.dtype, device="cuda")
    gate_up, down = (w.view(FP8) if dtype == FP8 else w for w in (gate_up, down))
    assert down.numel() > WRAP
    used = [0, SLOTS // 2, SLOTS - 1]
    for slot in used:
        gate_up[slot] = (torch.randn(2 * FEATURES, hidden, device="cuda") * hidden**-0.5).to(dtype)
        down[slot] = (torch.randn(hidden, FEATURES, device="cuda") * FEATURES**-0.5).to(dtype)
    return used, gate_up, down


def wanted(x_RD: torch.Tensor, slot_R: torch.Tensor, gate_up: dict, down: dict) -> torch.Tensor:
    """Float32 outputs of rows that each chose one slot; ``gate_up`` and ``down`` are the used slots' matrices."""
    out_RD = torch.zeros(x_RD.shape, device="cuda")
    for slot in gate_up:
        mine = slot_R == slot
        act = activate_ref(x_RD[mine].float() @ gate_up[slot].float().T, "silu")
        out_RD[mine] = act @ down[slot].float().T
    return out_RD.cpu()


@pytest.mark.parametrize("hidden", [4096, 4092])  # by tensor descriptors, and by pointers
def test_weights(hidden):
    used, gate_up, down = used_slots(hidden, torch.bfloat16)
    weights = moe_cases.Weights(gate_up, down)
    slot_R = torch.tensor(used, device="cuda").repeat(67).int()
    x_RD = torch.randn(len(slot_R), hidden, device="cuda").bfloat16()
    want_RD = wanted(x_RD, slot_R, *({s: w[s] for s in used} for w in (gate_up, down)))
    tiles = [(16, STREAM), (64, PINNED), (128, BLOCKED_128), (128, SPECIALISED)]
    for rows, tile in tiles if hidden % 8 == 0 else [(16, POINTERS), (64, PLAIN)]:
        index = build_index_triton(slot_R[:, None], SLOTS, rows)
        out_MD = expert_mlp_triton(x_RD, index, weights, choice=Choice(rows, tile, tile))
        assert moe_cases.relative(out_MD[index.pos_RK[:, 0].long()], want_RD) < 1e-2, tile
    for row in (0, 1, 2):
        index = build_index_triton(slot_R[row, None, None], SLOTS)
        one = expert_sum(x_RD[row, None], index, weights, torch.ones(1, 1, device="cuda"))
        assert moe_cases.relative(one, want_RD[row, None]) < 1e-2, row


def test_weights_in_8_bits():
    used, gate_up, down = used_slots(4096, FP8)
    scales = (torch.ones(SLOTS, 2, FEATURES // 128, 32), torch.ones(SLOTS, 32, FEATURES // 128))
    weights = fp8_cases.Fp8Weights(gate_up, down, *(scale.cuda() for scale in scales))
    meant = (
        {s: dequantize_gate_up(weights, s) for s in used},
        {s: dequantize(down[s], scales[1][s].cuda(), torch.float32) for s in used},
    )
    slot_R = torch.tensor(used, device="cuda").repeat(67).int()
    x_RD = torch.randn(len(slot_R), 4096, device="cuda").bfloat16()
    want_RD = wanted(x_RD, slot_R, *meant)
    for _, rows, *tiles in BY_MEAN:
        index = build_index_triton(slot_R[:, None], SLOTS, rows)
        out_MD = expert_mlp_fp8_triton(x_RD, index, weights, ExpertOptions(), Choice(rows, *tiles))
        assert moe_cases.relative(out_MD[index.pos_RK[:, 0].long()], want_RD) < 6e-2, tiles
    for row in (0, 1, 2):
        index = build_index_triton(slot_R[row, None, None], SLOTS)
        assert moe_cases.relative(expert_mlp_fp8_triton(x_RD[row, None], index, weights), want_RD[row, None]) < 6e-2


def test_rows():
    """Hidden rows, activated features, outputs and sums each of more than 2^31 elements, checked at both ends."""
    hidden = features = 4096
    rows = WRAP // hidden + 300
    weights, _ = moe_cases.make_experts(2, hidden, features, torch.bfloat16, "cuda")
    x_RD = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    slot_R = (torch.arange(rows, device="cuda") % 2).int()
    ends = torch.cat([torch.arange(40), torch.arange(rows - 40, rows)]).cuda()
    want_RD = wanted(x_RD[ends], slot_R[ends], *({s: w[s] for s in (0, 1)} for w in weights))
    index = build_index(slot_R[:, None], 2)
    one_RK = torch.ones(rows, 1, device="cuda")
    for tile in (BLOCKED_128, SPECIALISED):
        out_MD = expert_mlp_triton(x_RD, index, weights, choice=Choice(128, tile, tile))
        sum_RD = weighted_sum(out_MD, index.pos_RK, one_RK)
        assert moe_cases.relative(sum_RD[ends], want_RD) < 1e-2, tile
        del out_MD, sum_RD
    few = build_index(slot_R[:, None].where(torch.isin(torch.arange(rows, device="cuda"), ends)[:, None], -1), 2)
    out_MD = expert_mlp_triton(x_RD, few, weights, choice=Choice(16, STREAM, STREAM))
    assert moe_cases.relative(out_MD[few.pos_RK[ends, 0].long()], want_RD) < 1e-2


def test_rows_in_8_bits():
    hidden, features = 4096, 4096
    rows = WRAP // hidden + 300
    weights, plain = fp8_cases.make_experts(2, hidden, features, "cuda")
    x_RD = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    slot_R = (torch.arange(rows, device="cuda") % 2).int()
    ends = torch.cat([torch.arange(40), torch.arange(rows - 40, rows)]).cuda()
    meant = [{s: dequantize_gate_up(weights, s) for s in (0, 1)}, {s: plain[2][s].cuda() for s in (0, 1)}]
    index = build_index(slot_R[:, None], 2)
    out_MD = expert_mlp_fp8_triton(x_RD, index, weights)
    got_RD = out_MD[index.pos_RK[ends, 0].long()]
    assert moe_cases.relative(got_RD, wanted(x_RD[ends], slot_R[ends], *meant)) < 6e-2


def test_router():
    experts, top_k = 512, 16
    tokens = WRAP // experts + 9
    logits_TE = torch.randn(tokens, experts, device="cuda")
    weight_TK, expert_TK = route(logits_TE, RouterRule(renormalize=True), top_k)
    want_weight, want_expert = route_ref(logits_TE[-9:].cpu(), RouterRule(renormalize=True), top_k)
    assert torch.equal(expert_TK[-9:].cpu(), want_expert)
    torch.testing.assert_close(weight_TK[-9:].cpu(), want_weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_512_experts_and_16_choices(dtype):
    """The whole layer at the largest sizes that are promised, and with more tokens than one index kernel takes."""
    weights, plain = moe_cases.make_experts(512, 128, 64, dtype, "cuda")
    rule = RouterRule(renormalize=True)
    for tokens in (1, 33, 3000):
        x_TD = torch.randn(tokens, 128).to(dtype)
        weight_TK, expert_TK = route(torch.randn(tokens, 512, device="cuda"), rule, 16)
        index = build_index(expert_TK, 512)
        got = expert_sum(x_TD.cuda(), index, weights, weight_TK)
        some = torch.randperm(tokens)[:20]
        outs = moe_cases.loop_experts(x_TD[some], expert_TK.cpu()[some], plain)
        want = (outs * weight_TK.cpu()[some, :, None]).sum(1)
        assert moe_cases.relative(got[some.cuda()], want) < 1e-2, tokens


@pytest.mark.parametrize("form", FORMS)
def test_every_tile_in_half_precision(form):
    choice = Choice(form.rows, form.tiles, form.tiles, tail=form.tail)
    moe_cases.check_tiles(choice, torch.float16, ((3, 128, 192, 2),), (33, 200))
