"""How often each expert was chosen in a step, added to running counters: one kernel for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, wait_for_inputs


def count_experts_ref(expert_LTK: torch.Tensor, load_LE: torch.Tensor, active_L: torch.Tensor) -> None:
    """Add a step's choices to ``load_LE``, and the number of experts with any choice to ``active_L``.

    Args:
        expert_LTK: int32, -1 is no choice (padding); T = 0 is legal.
        load_LE, active_L: int64, changed in place.
    """
    here_LN = expert_LTK.flatten(1) >= 0
    step_LE = torch.zeros_like(load_LE)
    step_LE.scatter_add_(1, expert_LTK.flatten(1).clamp(min=0).long(), here_LN.long())
    load_LE += step_LE
    active_L += (step_LE > 0).sum(1)


@triton.jit(do_not_specialize=["choices"])
def _count_kernel(
    expert_ptr,
    load_ptr,
    active_ptr,
    choices,
    E: tl.constexpr,
    E2: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program l: all choices of layer l."""
    wait_for_inputs(PDL)
    layer = tl.program_id(0).to(tl.int64)
    count = tl.zeros([E2], tl.int32)
    for start in range(0, choices, STEP):
        n = start + tl.arange(0, STEP)
        expert = tl.load(expert_ptr + layer * choices + n, mask=n < choices, other=-1)
        count += tl.histogram(tl.maximum(expert, 0), E2, mask=expert >= 0)
    e = tl.arange(0, E2)
    spot = load_ptr + layer * E + e
    tl.store(spot, tl.load(spot, mask=e < E, other=0) + count, mask=e < E)
    tl.store(active_ptr + layer, tl.load(active_ptr + layer) + tl.sum((count > 0).to(tl.int32), 0))


def count_experts_triton(expert_LTK: torch.Tensor, load_LE: torch.Tensor, active_L: torch.Tensor) -> None:
    """`count_experts_ref` in one kernel."""
    layers, E = load_LE.shape
    _count_kernel[layers,](
        expert_LTK.contiguous(),
        load_LE,
        active_L,
        expert_LTK[0].numel(),
        E=E,
        E2=max(16, triton.next_power_of_2(E)),
        STEP=1024,
        **pdl_options(load_LE),
    )


def count_experts(expert_LTK: torch.Tensor, load_LE: torch.Tensor, active_L: torch.Tensor) -> None:
    """`count_experts_ref`; the kernel on CUDA."""
    (count_experts_triton if load_LE.is_cuda else count_experts_ref)(expert_LTK, load_LE, active_L)
