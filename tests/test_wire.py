"""Rows in 8 bits: how far from the rows, and that every exchange rounds them alike."""

import pytest
import torch

from epmoe.ops.wire import from_wire, rounded, to_wire, wire_bytes


def test_error_is_that_of_three_bits_and_runs_do_not_disturb_each_other():
    torch.manual_seed(0)
    x = torch.randn(6, 512)
    x[:, 128:256] *= 1e4
    x[2, 256:384] = 0
    y = rounded(x)
    assert (y[2, 256:384] == 0).all()
    run_x, run_y = x.view(6, 4, 128), y.view(6, 4, 128)
    assert float(((run_x - run_y).norm(dim=-1) / run_x.norm(dim=-1).clamp(min=1e-9)).max()) < 0.04
    largest = run_x.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    assert float(((run_x - run_y).abs() / largest).max()) <= 16 / 448 + 1e-6


def test_bytes_are_values_then_scales():
    x = torch.arange(1.0, 129.0).repeat(2, 1).bfloat16()
    wire = to_wire(x)
    assert wire.shape == (2, wire_bytes(128)) == (2, 144)
    assert wire[:, :128].view(torch.float8_e4m3fn)[0, 127] == 448.0
    assert torch.equal(wire[0, 128:132].view(torch.float32), torch.tensor([128 / 448]))
    assert torch.equal(from_wire(wire, None, 128, torch.bfloat16)[0, 127], torch.tensor(128.0).bfloat16())


def test_empty():
    assert rounded(torch.empty(0, 256)).shape == (0, 256)


@pytest.mark.parametrize("tokens", [0, 1, 2])
@pytest.mark.parametrize("runs", [1, 2])
def test_few_rows_and_few_runs(tokens, runs):
    row_TD = torch.arange(1.0, 1 + tokens)[:, None].expand(tokens, 128 * runs).clone()
    assert from_wire(to_wire(row_TD), None, 128 * runs, torch.float32).equal(row_TD)
