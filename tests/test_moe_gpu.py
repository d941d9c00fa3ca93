"""The MoE layer's kernels on a GPU: equal to loops and twins, and bitwise batch-invariant in deterministic mode."""

from dataclasses import replace
from functools import partial

import moe_cases
import pytest
import torch
from torch.nn import functional

from epmoe.ops.combine import weighted_sum
from epmoe.ops.experts import ExpertOptions, expert_mlp, expert_mlp_triton, expert_sum, expert_sum_of_one
from epmoe.ops.moe_index import build_index, build_index_triton
from epmoe.ops.router import route, route_to_slots
from epmoe.ops.tiles import (
    BLOCKED_64,
    BLOCKED_128,
    FORMS,
    NARROW,
    SPECIALISED,
    STREAM,
    STREAM_TWO,
    TAIL,
    Choice,
)

pytestmark = pytest.mark.gpu
WHOLE_BLOCKS = Choice(128, SPECIALISED, SPECIALISED)
WITH_TAIL = replace(WHOLE_BLOCKS, tail=TAIL)
VARIANTS = {
    "sparse": (9, Choice(16, STREAM, STREAM_TWO)),
    "blocked": (200, Choice(64, BLOCKED_64, NARROW)),
    "blocked by 128": (300, Choice(128, BLOCKED_128, BLOCKED_128)),
    "specialised": (400, WITH_TAIL),
}
ACTIVATIONS = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _gpu():
    if not torch.cuda.is_available():
        pytest.skip("left out: no CUDA device")
    torch.manual_seed(0)


@pytest.mark.parametrize("name", moe_cases.RULES)
def test_router(name):
    moe_cases.check_router(route, name, "cuda", torch.float32, moe_cases.ROUTER_SIZES + moe_cases.LARGE_ROUTER_SIZES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", moe_cases.ROUNDING_RULES)
def test_router_rounds_to_the_logits_dtype(name, dtype):
    moe_cases.check_router(route, name, "cuda", dtype)


def test_router_finds_slots():
    moe_cases.check_router_slots(route_to_slots, "cuda")


def test_index():
    moe_cases.check_index(build_index, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype):
    moe_cases.check_experts(expert_mlp, build_index, "cuda", dtype, ((5, 64, 64, 2), (4, 40, 100, 3), (3, 128, 192, 1)))


@pytest.mark.parametrize("form", FORMS)
def test_every_tile(form):
    """Slots without pairs, full blocks and short ones."""
    choice = Choice(form.rows, form.tiles, form.tiles, tail=form.tail)
    moe_cases.check_tiles(choice, torch.bfloat16, ((3, 128, 192, 2), (2, 256, 64, 1)), (1, 33, 200))


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name):
    """One case of each, small enough for compute-sanitizer (docs/results/h200.md)."""
    rows, choice = VARIANTS[name]
    moe_cases.check_tiles(choice, torch.bfloat16, ((4, 128, 192, 2),), (rows,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_sum(dtype):
    moe_cases.check_sum(weighted_sum, "cuda", dtype)


def test_sum_of_one_row_is_fused():
    weights, plain = moe_cases.make_experts(6, 128, 192, torch.bfloat16, "cuda")
    x_1D, slot_1K = torch.randn(1, 128).bfloat16(), moe_cases.slots_of("mixed", 1, 4, 6)
    mix_1K = torch.rand(1, 4)
    index = build_index(slot_1K.cuda(), 6)
    got = expert_sum(x_1D.cuda(), index, weights, mix_1K.cuda())
    want = (moe_cases.loop_experts(x_1D, slot_1K, plain) * mix_1K[..., None]).sum(1)
    assert moe_cases.relative(got, want) < 1e-2
    assert torch.equal(expert_sum_of_one(x_1D.cuda(), slot_1K.cuda(), weights, mix_1K.cuda()), got)
    nobody = torch.full_like(slot_1K, -1).cuda()
    assert not expert_sum_of_one(x_1D.cuda(), nobody, weights, mix_1K.cuda()).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_rows_do_not_depend_on_the_batch(dtype):
    weights, _ = moe_cases.make_experts(6, 256, 192, dtype, "cuda")
    """Alone, in order, in another order, beside rows that crowd one slot, and on fewer SMs."""
    x_RD, slot_RK = torch.randn(300, 256).to("cuda", dtype), moe_cases.slots_of("mixed", 300, 3, 6).cuda()
    slot_RK[150:250] = torch.tensor([2, -1, -1], dtype=torch.int32)

    def outputs(rows, num_sms=0):
        index = build_index(slot_RK[rows].contiguous(), 6)
        options = ExpertOptions(deterministic=True, num_sms=num_sms)
        return weighted_sum(expert_mlp(x_RD[rows].contiguous(), index, weights, options), index.pos_RK)

    whole = outputs(slice(0, 300))
    for rows in (slice(7, 8), slice(100, 117), slice(140, 300), torch.randperm(300), torch.randperm(300)[:41]):
        assert torch.equal(outputs(rows), whole[rows])
        assert torch.equal(outputs(rows, 3), whole[rows])


@pytest.mark.parametrize("choice", [None, WHOLE_BLOCKS, WITH_TAIL])
def test_num_sms_changes_nothing(choice):
    weights, _ = moe_cases.make_experts(6, 256, 192, torch.bfloat16, "cuda")
    x_RD = torch.randn(400, 256, device="cuda", dtype=torch.bfloat16)
    index = build_index(moe_cases.slots_of("mixed", 400, 3, 6).cuda(), 6)
    pairs = int(index.offset_L1[-1])
    whole = expert_mlp_triton(x_RD, index, weights, choice=choice)[:pairs]
    few = expert_mlp_triton(x_RD, index, weights, replace(ExpertOptions(), num_sms=5), choice)[:pairs]
    assert torch.equal(few, whole)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("choice", [WHOLE_BLOCKS, WITH_TAIL, Choice(128, BLOCKED_128, BLOCKED_128)])
def test_activations_in_whole_and_short_blocks(choice, act):
    """Blocks of 128 pairs, and last ones of up to 32, up to 64 and more; rows of absent pairs are NaN."""
    weights, plain = moe_cases.make_experts(5, 144, 320, torch.bfloat16, "cuda")
    x_RD = torch.randn(700, 144).bfloat16()
    slot_RK = torch.repeat_interleave(torch.arange(-1, 5), torch.tensor([8, 150, 180, 128, 234, 0])).int()[:, None]
    x_RD[:8] = float("nan")
    index = build_index_triton(slot_RK.cuda(), 5, 128)
    out_MD = expert_mlp_triton(x_RD.cuda(), index, weights, ExpertOptions(act=act), choice).cpu()
    want = moe_cases.loop_experts(x_RD[8:], slot_RK[8:], plain, ACTIVATIONS[act])[:, 0]
    assert moe_cases.relative(out_MD[:692], want) < 1e-2
