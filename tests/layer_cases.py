"""Cases of a layer's small kernels that the interpreter's and the GPU's tests share: kernel against torch twin."""

from __future__ import annotations

import torch
from torch.nn import functional

from epmoe.ops.linear_vector import linear_vector_triton
from epmoe.ops.norm import add_rms_norm_ref, add_rms_norm_triton, rms_norm_ref, rms_norm_triton
from epmoe.ops.qkv import HeadNorm, split_qkv_ref, split_qkv_triton
from epmoe.ops.rotary import rotary_table

BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def random(*shape: int, dtype, device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def require_close(ours: torch.Tensor, want: torch.Tensor) -> None:
    assert ours.shape == want.shape and ours.dtype == want.dtype
    if ours.numel():
        error = float((ours.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-9))
        assert error <= BOUND[ours.dtype], error


def check_norms(dtype, device) -> None:
    for T, D in ((0, 48), (1, 48), (3, 100), (5, 1030)):
        x, residual = random(T, D, dtype=dtype, device=device), random(T, D, dtype=dtype, device=device) * 3
        weight = random(D, dtype=dtype, device=device)
        require_close(rms_norm_triton(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5))
        for ours, want in zip(
            add_rms_norm_triton(x, residual, weight, 1e-5), add_rms_norm_ref(x, residual, weight, 1e-5)
        ):
            require_close(ours, want)


def check_qkv(dtype, device) -> None:
    """Heads 1 to 6, whole and partial rotation, with and without head norms; padding tokens write nothing."""
    for T, heads, kv_heads, d, rotary in ((0, 2, 1, 16, 16), (1, 3, 1, 24, 24), (7, 6, 2, 32, 16)):
        table = rotary_table(50, rotary, 1e4, dtype).to(device)
        position_T = torch.arange(T, device=device) * 7 % 50
        qkv = random(T, (heads + 2 * kv_heads) * d, dtype=dtype, device=device)
        norms = (None, HeadNorm(random(d, dtype=dtype, device=device), random(d, dtype=dtype, device=device), 1e-6))
        for norm in norms:
            ours, twin = (torch.full((2, kv_heads, 3, 4, d), 7.0, dtype=dtype, device=device) for _ in range(2))
            slot_T = torch.arange(T, device=device) + 2
            real = slot_T != 5
            q = split_qkv_triton(qkv, ours, slot_T.where(real, -1), table[position_T], norm)
            split_qkv_ref(qkv[real], twin, slot_T[real], table[position_T][real], norm)
            require_close(ours, twin)
            want = split_qkv_ref(qkv, twin, slot_T, table[position_T], norm)
            require_close(q, want)


def check_vector(dtype, device) -> None:
    for N, D in ((1, 16), (7, 100), (130, 256), (3, 5000), (600, 2048)):
        x, weight = random(1, D, dtype=dtype, device=device), random(N, D, dtype=dtype, device=device)
        for bias in (None, random(N, dtype=dtype, device=device)):
            want = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
            require_close(linear_vector_triton(x, weight, bias), want.to(dtype))
