"""Block-scaled weights for tests, and checks of the 8-bit experts on a device, by twin or by kernel."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from moe_cases import loop_experts, relative, slots_of
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny

from epmoe.ops.experts import ExpertOptions, interleave_gate_up
from epmoe.ops.fp8 import FP8, dequantize

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
NOT_QUANTIZED = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight")


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


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def save_tiny_fp8(stored: Path, meant: Path) -> tuple[Path, Path]:
    """A Qwen3-MoE whose linear layers are 8-bit floats, as the published ones store it, and the values it means."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 2, "mlp_only_layers": [1]}
    save_tiny(meant, "qwen3_moe", num_experts=4, top_k=2, **sizes)
    shutil.copytree(meant, stored)
    tensors, plain = load_file(meant / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if weight.dim() == 2 and not any(part in name for part in NOT_QUANTIZED):
            tensors[name], scale = quantize_blocks(weight)
            tensors[f"{name}_scale_inv"] = scale.bfloat16()
            weight = dequantize(tensors[name], scale.bfloat16(), torch.float32)
        plain[name] = weight.contiguous()
    save_file(tensors, stored / "model.safetensors")
    save_file(plain, meant / "model.safetensors")
    edit_config(stored, quantization_config=QUANTIZATION)
    return stored, meant
