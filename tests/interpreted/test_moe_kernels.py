"""The MoE layer's Triton kernels under the interpreter (needs TRITON_INTERPRET=1 before the first import of triton)."""

import moe_cases
import pytest
import torch
from triton import knobs

from epmoe.ops import moe_index
from epmoe.ops.combine import weighted_sum_ref, weighted_sum_triton
from epmoe.ops.down_gemm import down_triton
from epmoe.ops.experts import expert_mlp_triton
from epmoe.ops.experts_sparse import choices_of_one, vector_down, vector_gate_up
from epmoe.ops.gate_up_gemm import gate_up_triton
from epmoe.ops.grouped_gemm import TileConfig
from epmoe.ops.moe_index import build_index_triton
from epmoe.ops.router import route_to_slots_triton, route_triton

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="run by scripts/test with TRITON_INTERPRET=1")
HALF = torch.float16  # the interpreter cannot multiply bfloat16


@pytest.mark.parametrize("name", moe_cases.RULES)
def test_router_equals_its_twin(name):
    moe_cases.check_router(route_triton, name, "cpu", torch.float32)
    moe_cases.check_router(route_triton, name, "cpu", torch.float32, moe_cases.LARGE_ROUTER_SIZES[:1])


def test_router_finds_slots():
    moe_cases.check_router_slots(route_to_slots_triton, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF])
@pytest.mark.parametrize("name", moe_cases.ROUNDING_RULES)
def test_router_rounds_to_the_logits_dtype(name, dtype):
    moe_cases.check_router(route_triton, name, "cpu", dtype)


@pytest.mark.parametrize("kernels", [1, 2, 3])
def test_index(kernels, monkeypatch):
    monkeypatch.setattr(moe_index, "ONE_KERNEL_PAIRS", 1 << 30 if kernels == 1 else 0)
    monkeypatch.setattr(moe_index, "SCAN_RUNS", 1 if kernels == 3 else 1 << 30)
    monkeypatch.setattr(moe_index, "CHUNK", 64)
    monkeypatch.setattr(moe_index, "RUN", 256)
    moe_cases.check_index(build_index_triton, "cpu")


def test_schedule_for_other_blocks():
    index = build_index_triton(moe_cases.slots_of("mixed", 70, 3, 6), 6, 16)
    moe_cases.check_blocks(moe_index.with_block_rows(index, 32))
    for tail in (3, 20):
        moe_cases.check_blocks(moe_index.with_block_rows(index, 16, tail))
        moe_cases.check_blocks(build_index_triton(moe_cases.slots_of("mixed", 70, 3, 6), 6, 16, tail))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (16, TileConfig(128, 32, 4, 2)),
        (16, TileConfig(128, 32, 4, 2, swap=True, per_sm=2)),
        (32, TileConfig(256, 32, 4, 2, group=1)),
    ],
)
def test_experts_in_tiles(rows, config, dtype):
    """Activated rows beyond the pairs are NaN: they must reach no result."""

    def run(x, index, weights, options):
        act_MF = gate_up_triton(x, index, weights, config, options.act)
        act_MF[int(index.offset_L1[-1]) :] = float("nan")
        return down_triton(act_MF, index, weights, config)

    torch.manual_seed(1)
    build = lambda slot, slots: build_index_triton(slot, slots, rows)  # noqa: E731
    moe_cases.check_experts(run, build, "cpu", dtype, moe_cases.SIZES[:3], (1, 33))


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "relu"])
def test_other_activations(act):
    torch.manual_seed(2)
    weights, plain = moe_cases.make_experts(2, 32, 64, torch.float32, "cpu")
    x_RD, slot_RK = torch.randn(3, 32), torch.tensor([[0], [1], [1]], dtype=torch.int32)
    functions = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
    }
    index = build_index_triton(slot_RK, 2)
    out = expert_mlp_triton(x_RD, index, weights, moe_cases.ExpertOptions(act=act))
    want = moe_cases.loop_experts(x_RD, slot_RK, plain, functions[act])
    assert moe_cases.relative(out[index.pos_RK.long()], want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_one_row(dtype):
    """Matrix times vector, unweighted and summed, with choices that live elsewhere."""
    torch.manual_seed(3)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for num_slots, hidden, features, top_k in moe_cases.SIZES:
        weights, plain = moe_cases.make_experts(num_slots, hidden, features, dtype, "cpu")
        for kind in ("mixed", "one", "nowhere"):
            x_1D, slot_1K = torch.randn(1, hidden).to(dtype), moe_cases.slots_of(kind, 1, top_k, num_slots)
            index, mix_1K = build_index_triton(slot_1K, num_slots), torch.rand(1, top_k)
            act_KF = vector_gate_up(x_1D, index, weights, "silu", (16, 64, 4))
            act_KF[int(index.offset_L1[-1]) :] = float("nan")
            rows = vector_down(act_KF, index, weights, None, (16, 64, 4))
            summed = vector_down(act_KF, index, weights, mix_1K, (16, 64, 4))
            unsorted = choices_of_one(slot_1K)
            act_unsorted = vector_gate_up(x_1D, unsorted, weights, "silu", (16, 64, 4))
            act_unsorted[slot_1K[0] < 0] = float("nan")  # never written
            assert torch.equal(vector_down(act_unsorted, unsorted, weights, mix_1K, (16, 64, 4)), summed)
            want = moe_cases.loop_experts(x_1D, slot_1K, plain)
            got = weighted_sum_ref(rows, index.pos_RK, mix_1K)
            want = (want * mix_1K[..., None]).sum(1)
            assert moe_cases.relative(got, want) < tolerance
            assert moe_cases.relative(summed, want) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_weighted_sum(dtype):
    moe_cases.check_sum(weighted_sum_triton, "cpu", dtype)
