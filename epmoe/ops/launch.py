"""What every kernel launch shares: programmatic dependent launch, and dtypes.

A kernel launched with programmatic dependent launch may start before the kernel ahead of it has ended.  The rule of
this package makes that safe: every program calls `wait_for_inputs` before it reads what the kernel ahead wrote and
before it writes anything, and that call returns only when all earlier kernels are complete.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait for the kernels ahead, then let the kernel behind start its own preamble."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def start_next_and_wait(PDL: tl.constexpr):
    """Let the kernel behind start at once, then wait: its weights come in while the kernels ahead still run.

    Only where that kernel reads before its own wait nothing that any kernel wrote: weights, or what the host sent.
    What a kernel writes need not wait for more than the kernel ahead: that one has ended only when its own wait is
    over, and so on up the stream.  Hence every program waits, also one without work.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return _TRITON_DTYPES[dtype]


def pdl_options(tensor: torch.Tensor) -> dict:
    """Launch options of a kernel with a ``PDL`` argument, for the device of ``tensor``."""
    on = tensor.is_cuda and has_hopper_features(tensor.device)
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


@lru_cache
def has_hopper_features(device: torch.device) -> bool:
    """Tensor memory access and programmatic dependent launch: compute capability 9 on."""
    return torch.cuda.get_device_capability(device)[0] >= 9


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Warpgroup products (wgmma): compute capability 9 alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a small number on CPU, where only the interpreter runs kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
