"""The weighted sum of rows per token against a loop."""

import moe_cases
import pytest
import torch

from epmoe.ops.combine import weighted_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_sum(dtype):
    torch.manual_seed(0)
    moe_cases.check_sum(weighted_sum, "cpu", dtype)


def test_choices_are_added_in_ascending_order():
    """1 + 1e8 - 1e8 differs from 1e8 - 1e8 + 1 in float32."""
    rows_ND = torch.tensor([[1.0], [1e8], [-1e8]])
    assert weighted_sum(rows_ND, torch.tensor([[0, 1, 2], [1, 2, 0]], dtype=torch.int32)).tolist() == [[0.0], [1.0]]


def test_added_rows_join_after_rounding():
    rows_ND, one = torch.full((1, 4), 1.0).bfloat16(), torch.full((1, 4), 2.0**-8).bfloat16()
    weight = torch.full((1, 1), 1 + 2.0**-9)  # 1 after rounding to bfloat16
    index = torch.zeros((1, 1), dtype=torch.int32)
    assert torch.equal(weighted_sum(rows_ND, index, weight, one), torch.full((1, 4), 1.0).bfloat16() + one)
