"""Block-scaled weights for tests, and checks of the 8-bit experts on a device, by twin or by kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from moe_cases import loop_experts, relative, slots_of

from epmoe.ops.experts import ExpertOptions, interleave_gate_up
from epmoe.ops.fp8 import FP8, dequantize


class Fp8Weights(NamedTuple):
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor
    down_scale: torch.Tensor


def quantize_blocks(weight_OC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., O, C]`` in blocks of 128 x 128 -> float8 and scales; every block's largest magnitude becomes 448."""
    rows, columns = weight_OC.shape[-2:]
    padded = torch.nn.functional.pad(weight_OC.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))  # [..., O/128, 128, C/128, 128]
    scale = blocks.abs().amax((-3, -1)).clamp(min=1e-12) / 448
    stored = (blocks / scale[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return stored[..., :rows, :columns].to(FP8).contiguous(), scale


def make_experts(slots: int, hidden: int, features: int, device: str):
    """Block-scaled weights whose blocks differ in size by up to 16, and gate, up and down in float32."""
    gate, up = torch.randn(2, slots, features, hidden) * hidden**-0.5
    down = torch.randn(slots, hidden, features) * features**-0.5
    for weight in (gate, up, down):
        rows, columns = weight.shape[-2] // 128, weight.shape[-1] // 128
        size = 2.0 ** torch.randint(-2, 3, (slots, rows, columns))
        weight *= size.repeat_interleave(128, -2).repeat_interleave(128, -1)
    stored, scales = zip(*(quantize_blocks(weight) for weight in (gate, up, down)))
    mixed = interleave_gate_up(stored[0].float(), stored[1].float()).to(FP8)
    scale = torch.stack(scales[:2], 1)
    weights = Fp8Weights(*(w.to(device) for w in (mixed, stored[2], scale, scales[2])))
    return weights, tuple(dequantize(w, s, torch.float32) for w, s in zip(stored, scales))


def check_experts(run, build, device: str, dtype: torch.dtype, sizes, rows=(1, 7, 33)) -> None:
    """``run(x, index, weights, options)`` against a float32 loop over the dequantised weights.

    The rows are multiples of a power of two that float8 holds exactly, so only the activated values are rounded to 8
    bits (3 mantissa bits: a relative error of 2.6 % of each, in all about as much).
    """
    for slots, hidden, features, top_k in sizes:
        weights, plain = make_experts(slots, hidden, features, device)
        for count in rows:
            for kind in ("mixed", "one", "nowhere"):
                x_RD = torch.randint(-7, 8, (count, hidden)).to(dtype)
                x_RD[:, ::128] = 7
                slot_RK = slots_of(kind, count, top_k, slots)
                index = build(slot_RK.to(device), slots)
                out_MD = run(x_RD.to(device), index, weights, ExpertOptions())
                assert out_MD.dtype == dtype
                want = loop_experts(x_RD, slot_RK, plain)
                pos_RK = index.pos_RK.long().cpu()
                got = torch.where(pos_RK[..., None] >= 0, out_MD.cpu().float()[pos_RK.clamp(min=0)], 0.0)
                error = relative(got, want)
                assert error < 4e-2, (slots, hidden, features, top_k, count, kind, error)
