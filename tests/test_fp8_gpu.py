"""8-bit experts on a GPU: equal to loops and twins, and bitwise batch-invariant in deterministic mode."""

from functools import partial

import fp8_cases
import moe_cases
import pytest
import torch
from drive import Script, drive

from epmoe.checkpoint import load_weights
from epmoe.comm import Comm
from epmoe.ops.combine import weighted_sum
from epmoe.ops.experts import ExpertOptions
from epmoe.ops.experts_fp8 import BY_MEAN, STREAM, expert_mlp_fp8_ref, expert_mlp_fp8_triton
from epmoe.ops.fp8 import quantize_rows_ref, quantize_rows_triton
from epmoe.ops.moe_index import build_index, build_index_triton
from epmoe.ops.tiles import Choice

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu():
    if not torch.cuda.is_available():
        pytest.skip("left out: no CUDA device")
    torch.manual_seed(0)


def test_rows_are_quantised_as_by_the_twin():
    x_TD = torch.randn(9, 18 * 128) * torch.tensor([1.0, 1e-3, 1e4, 0.0] * 2 + [1.0])[:, None]
    got, scale = quantize_rows_triton(x_TD.cuda())
    want, want_scale = quantize_rows_ref(x_TD)
    torch.testing.assert_close(scale.cpu(), want_scale)
    assert (got.cpu().float() != want.float()).float().mean() < 1e-3
    torch.testing.assert_close(got.cpu().float(), want.float(), rtol=0.13, atol=2**-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [*BY_MEAN, (1, 16, STREAM, STREAM)])
def test_every_tile(tile, dtype):
    """Slots without pairs, full blocks and short ones; also against the twin, which rounds at the same places."""
    _, rows, gate_up, down = tile

    def run(x, index, weights, options):
        out_MD = expert_mlp_fp8_triton(x, index, weights, options, Choice(rows, gate_up, down))
        pairs = int(index.offset_L1[-1])
        twin = expert_mlp_fp8_ref(x, index, weights, options)
        assert not pairs or moe_cases.relative(out_MD[:pairs], twin[:pairs].float().cpu()) < 1e-2
        return out_MD

    build = lambda slot, slots: build_index_triton(slot, slots, rows)  # noqa: E731
    fp8_cases.check_experts(run, build, "cuda", dtype, ((3, 384, 256, 2), (2, 256, 128, 1)), (1, 33, 200))


def test_deterministic_rows_depend_neither_on_the_batch_nor_on_num_sms():
    weights, _ = fp8_cases.make_experts(6, 256, 384, "cuda")
    x_RD, slot_RK = torch.randn(300, 256).to("cuda", torch.bfloat16), moe_cases.slots_of("mixed", 300, 3, 6).cuda()

    def outputs(rows, num_sms=0):
        index = build_index(slot_RK[rows].contiguous(), 6)
        options = ExpertOptions(deterministic=True, num_sms=num_sms)
        return weighted_sum(expert_mlp_fp8_triton(x_RD[rows].contiguous(), index, weights, options), index.pos_RK)

    whole = outputs(slice(0, 300))
    assert torch.equal(outputs(slice(0, 300), 7), whole)
    for rows in (slice(7, 8), slice(100, 117), slice(250, 300)):
        assert torch.equal(outputs(rows), whole[rows])


def run_engine(folder, device: str, requests, **settings):
    """On a CPU by the twins, with 8-bit experts there too."""
    config = {"model": str(folder), "device": device, "max_model_len": 256, "num_blocks": 64, **settings}
    comm = Comm(0, 1, torch.device(device))
    return drive(comm, config, Script(requests, want_logits=True), load=partial(load_weights, keep_fp8=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    return fp8_cases.save_tiny_fp8(folder / "stored", folder / "meant")[0]


REQUESTS = [(i, list(range(3, 3 + n)), {"temperature": 0.0, "max_tokens": 8}) for i, n in enumerate((1, 9, 100))]


def test_the_engine_agrees_with_the_twins_on_a_cpu(checkpoint):
    cpu, gpu = (run_engine(checkpoint, device, REQUESTS) for device in ("cpu", "cuda"))
    for i, prompt, _ in REQUESTS:
        assert moe_cases.relative(gpu.logits[i, len(prompt)], cpu.logits[i, len(prompt)].float()) < 2e-2


def test_the_engine_is_bitwise_in_deterministic_mode(checkpoint):
    settings = {"dtype": "bfloat16", "deterministic": True}
    batch = run_engine(checkpoint, "cuda", REQUESTS, **settings)
    alone = run_engine(checkpoint, "cuda", REQUESTS[2:], **settings, max_batch_tokens=33, max_requests=3)
    assert all(torch.equal(logits, batch.logits[key]) for key, logits in alone.logits.items())
