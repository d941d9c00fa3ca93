"""The 8-bit kernels under the interpreter, against their twins."""

import fp8_cases
import moe_cases
import pytest
import torch
from triton import knobs

from epmoe.ops.experts_fp8 import down_fp8_triton, expert_mlp_fp8_ref, gate_up_fp8_triton
from epmoe.ops.fp8 import quantize_rows_ref, quantize_rows_triton
from epmoe.ops.grouped_gemm import TileConfig
from epmoe.ops.moe_index import build_index_ref, build_index_triton

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="run by scripts/test with TRITON_INTERPRET=1")


def test_rows_are_quantised_as_by_the_twin():
    torch.manual_seed(0)
    x_TD = torch.randn(5, 18 * 128) * torch.tensor([1.0, 1e-3, 1e4, 0.0, 1.0])[:, None]
    got, scale = quantize_rows_triton(x_TD)
    want, want_scale = quantize_rows_ref(x_TD)
    torch.testing.assert_close(scale, want_scale)
    assert (got.float() != want.float()).float().mean() < 1e-3  # multiplied by 1 / scale, not divided: other ties
    torch.testing.assert_close(got.float(), want.float(), rtol=0.13, atol=2**-9)


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (16, TileConfig(128, 128, 4, 2, swap=True, per_sm=2)),
        (32, TileConfig(128, 128, 4, 2, group=1)),
    ],
)
def test_experts_in_tiles(rows, config):
    """Activated rows and scales beyond the pairs are NaN: they must reach no result."""

    def run(x, index, weights, options):
        act_MF, scale_MB = gate_up_fp8_triton(x, index, weights, config, "silu")
        beyond = int(index.offset_L1[-1])
        act_MF.view(torch.uint8)[beyond:] = 0x7F
        scale_MB[beyond:] = float("nan")
        out_MD = down_fp8_triton((act_MF, scale_MB), index, weights, config, 0, x.dtype)
        twin = expert_mlp_fp8_ref(x, index, weights, options)
        assert not beyond or moe_cases.relative(out_MD[:beyond], twin[:beyond].float()) < 1e-2
        return out_MD

    torch.manual_seed(1)
    build = lambda slot, slots: build_index_triton(slot, slots, rows)  # noqa: E731
    fp8_cases.check_experts(run, build, "cpu", torch.float16, ((3, 384, 256, 2),), (1, 33))


def test_twin():
    torch.manual_seed(2)
    fp8_cases.check_experts(expert_mlp_fp8_ref, build_index_ref, "cpu", torch.float32, ((5, 256, 384, 3),))
