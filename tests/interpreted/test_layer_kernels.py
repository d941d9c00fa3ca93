"""Norm, qkv split and linear kernels under Triton's interpreter, at sizes that divide nothing."""

from __future__ import annotations

import layer_cases
import pytest
import torch
from triton import knobs

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="run by scripts/test with TRITON_INTERPRET=1")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@DTYPES
def test_norms(dtype):
    layer_cases.check_norms(dtype, "cpu")


@DTYPES
def test_qkv(dtype):
    layer_cases.check_qkv(dtype, "cpu")


@DTYPES
def test_linear_of_one_row(dtype):
    layer_cases.check_vector(dtype, "cpu")
