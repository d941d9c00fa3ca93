"""The padded exchange's Triton kernels under the interpreter."""

import padded_cases
import pytest
from triton import knobs

from epmoe.ops.padded_answers import pack_answers_triton
from epmoe.ops.padded_rows import pack_rows_triton

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="run by scripts/test with TRITON_INTERPRET=1")


@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("layout", padded_cases.LAYOUTS)
def test_rows(layout, tokens):
    padded_cases.check_pack_rows(pack_rows_triton, layout, tokens, "cpu")


@pytest.mark.parametrize("layout", [layout for layout in padded_cases.LAYOUTS if not layout.reduce])
def test_answers(layout):
    padded_cases.check_pack_answers(pack_answers_triton, layout, "cpu")
