"""The sampling kernels under Triton's interpreter (needs TRITON_INTERPRET=1 before triton is imported)."""

import draw_cases
import pytest
import torch
from triton import knobs

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="run by scripts/test with TRITON_INTERPRET=1")


@pytest.mark.parametrize("vocabulary, every", [(300, 13), (1, 60), (9001, 45)], ids=str)
def test_draws_are_those_of_the_cpu(vocabulary, every):
    draw_cases.check(vocabulary, torch.bfloat16, "cpu", every)


def test_ties():
    draw_cases.check_ties("cpu", draws=3)


def test_no_token_without_finite_logits():
    draw_cases.check_broken("cpu")
