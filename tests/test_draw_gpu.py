"""Draws on a GPU are those of the CPU (``pytest -m gpu``)."""

import draw_cases
import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 300, 9001])
def test_draws_are_those_of_the_cpu(vocabulary, dtype):
    draw_cases.check(vocabulary, dtype, "cuda")


def test_ties():
    draw_cases.check_ties("cuda")


def test_no_token_without_finite_logits():
    draw_cases.check_broken("cuda")
