"""Steps of any mix in buffers that stay in place, under Triton's interpreter."""

import prompt_cases
import pytest
import torch
from triton import knobs

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="run by scripts/test with TRITON_INTERPRET=1")


@pytest.mark.parametrize("heads", [(4, 2, 24), (20, 1, 16)], ids=str)
def test_prompts_and_decodes_in_refilled_buffers(heads):
    prompt_cases.check_prompt_batch(heads, torch.float32, "cpu", [1, 15, 17, 66, 130])
