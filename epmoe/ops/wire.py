"""Rows in 8 bits for the way to the experts: e4m3 with one float32 scale per 128 columns.

A row's bytes are its D values, then its D / 128 scales, padded to a multiple of 16.  A row is rounded once, at its
home, also if it stays there: where its experts lie does not show.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, wait_for_inputs

RUN = 128
LARGEST = 448.0  # of e4m3


def wire_bytes(hidden: int) -> int:
    """Bytes of a row of ``hidden`` columns, a multiple of 128."""
    size = hidden + 4 * (hidden // RUN)
    return size + -size % 16


def to_wire_ref(x_TD: torch.Tensor) -> torch.Tensor:
    """uint8 ``[T, wire_bytes(D)]`` of rows in the model dtype: the largest of a run of 128 becomes 448; zero runs have
    scale 1.  Padding bytes are undefined."""
    tokens, hidden = x_TD.shape
    run_TGR = x_TD.float().view(tokens, hidden // RUN, RUN)
    largest_TG = run_TGR.abs().amax(-1)
    scale_TG = largest_TG / largest_TG.new_tensor(LARGEST)  # a plain number would be multiplied by its inverse
    scale_TG = scale_TG.where(scale_TG > 0, 1.0)
    value_TD = (run_TGR / scale_TG[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(tokens, hidden)
    wire_TB = torch.zeros((tokens, wire_bytes(hidden)), dtype=torch.uint8, device=x_TD.device)
    wire_TB[:, :hidden] = value_TD.view(torch.uint8)
    packed_TG = scale_TG.clone(memory_format=torch.contiguous_format)  # of no row, strides may be 0
    wire_TB[:, hidden : hidden + 4 * (hidden // RUN)] = packed_TG.view(torch.uint8)
    return wire_TB


def from_wire_ref(wire_RB: torch.Tensor, slot_RK: torch.Tensor | None, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``[R, D]`` of what `to_wire_ref` made.

    Args:
        slot_RK: int32; rows whose slots are all -1 are left undefined. None: all rows are wanted.
    """
    value_RGR = wire_RB[:, :hidden].view(torch.float8_e4m3fn).float().unflatten(1, (-1, RUN))
    scale_RG = wire_RB[:, hidden : hidden + 4 * (hidden // RUN)].contiguous().view(torch.float32)
    return (value_RGR * scale_RG[..., None]).flatten(1).to(dtype)


@triton.jit
def _to_wire_kernel(x_ptr, wire_ptr, G: tl.constexpr, G2: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """One program a row; ``wire_ptr`` in bytes."""
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, G2)
    col = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + t * (G * 128) + col, mask=(g < G)[:, None], other=0.0).to(tl.float32)
    scale = tl.math.div_rn(tl.max(tl.abs(x), 1), 448.0 + tl.zeros([G2], tl.float32))
    scale = tl.where(scale > 0, scale, 1.0)
    value = tl.math.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    value = tl.minimum(tl.maximum(value, -448.0), 448.0).to(tl.float8e4nv)
    tl.store((wire_ptr + t * B).to(tl.pointer_type(tl.float8e4nv)) + col, value, mask=(g < G)[:, None])
    tl.store((wire_ptr + t * B + G * 128).to(tl.pointer_type(tl.float32)) + g, scale, mask=g < G)


@triton.jit
def _from_wire_kernel(
    wire_ptr, slot_ptr, rows_ptr, G: tl.constexpr, G2: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
    K2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    r = tl.program_id(0).to(tl.int64)
    wanted = 0
    if slot_ptr is not None:
        k = tl.arange(0, K2)
        wanted = tl.max(tl.load(slot_ptr + r * K + k, mask=k < K, other=-1), 0)
    if wanted >= 0:
        g = tl.arange(0, G2)
        inside = (g < G)[:, None]
        col = g[:, None] * 128 + tl.arange(0, 128)[None, :]
        value = tl.load((wire_ptr + r * B).to(tl.pointer_type(tl.float8e4nv)) + col, mask=inside, other=0.0)
        scale = tl.load((wire_ptr + r * B + G * 128).to(tl.pointer_type(tl.float32)) + g, mask=g < G, other=0.0)
        row = (value.to(tl.float32) * scale[:, None]).to(rows_ptr.dtype.element_ty)
        tl.store(rows_ptr + r * (G * 128) + col, row, mask=inside)


def to_wire_triton(x_TD: torch.Tensor) -> torch.Tensor:
    """`to_wire_ref` in one kernel."""
    tokens, hidden = x_TD.shape
    wire_TB = torch.empty((tokens, wire_bytes(hidden)), dtype=torch.uint8, device=x_TD.device)
    runs = hidden // RUN
    if tokens:
        _to_wire_kernel[(tokens,)](
            x_TD.contiguous(),
            wire_TB,
            G=runs,
            G2=triton.next_power_of_2(runs),
            B=wire_TB.shape[1],
            num_warps=4,
            **pdl_options(x_TD),
        )
    return wire_TB


def from_wire_triton(
    wire_RB: torch.Tensor, slot_RK: torch.Tensor | None, hidden: int, dtype: torch.dtype
) -> torch.Tensor:
    """`from_wire_ref` in one kernel."""
    rows_RD = torch.empty((len(wire_RB), hidden), dtype=dtype, device=wire_RB.device)
    runs, top_k = hidden // RUN, 1 if slot_RK is None else slot_RK.shape[1]
    if len(wire_RB):
        _from_wire_kernel[(len(wire_RB),)](
            wire_RB,
            slot_RK,
            rows_RD,
            G=runs,
            G2=triton.next_power_of_2(runs),
            B=wire_RB.shape[1],
            K=top_k,
            K2=triton.next_power_of_2(top_k),
            num_warps=4,
            **pdl_options(wire_RB),
        )
    return rows_RD


def to_wire(x_TD: torch.Tensor) -> torch.Tensor:
    """`to_wire_ref`; the kernel on CUDA."""
    return (to_wire_triton if x_TD.is_cuda else to_wire_ref)(x_TD)


def from_wire(wire_RB: torch.Tensor, slot_RK: torch.Tensor | None, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """`from_wire_ref`; the kernel on CUDA."""
    return (from_wire_triton if wire_RB.is_cuda else from_wire_ref)(wire_RB, slot_RK, hidden, dtype)


def rounded(x_TD: torch.Tensor) -> torch.Tensor:
    """Rows as they arrive: for exchanges that send the model dtype."""
    return from_wire(to_wire(x_TD), None, x_TD.shape[1], x_TD.dtype)
