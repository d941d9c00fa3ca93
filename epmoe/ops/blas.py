"""What cuBLAS may do: how it sums, and how many SMs it takes, so that kernels on another stream find some free."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import lru_cache

import torch


def sum_in_float32() -> None:
    """Products of this process add in float32 to the end.

    By default cuBLAS may round the partial sums of a split reduction to the inputs' dtype, and whether it splits
    depends on the number of rows.  On H200 products of 2 to 4096 rows with the weights of Qwen3-30B-A3B and of a
    DeepSeek-V3-like layer have the same bits and times either way.  Deterministic mode does not use cuBLAS.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_tf32 = False


@contextlib.contextmanager
def blas_sms(num_sms: int) -> Iterator[None]:
    """Matrix products issued inside leave the others free beside ``num_sms`` SMs; 0 is all. Without effect where there
    is no cuBLAS.

    They are told an eighth less: on Hopper they run in clusters of four SMs of one GPC, and the programs of another
    kernel, spread over the GPCs, cost each GPC a whole cluster. One that finds no place runs after all the others.
    """
    set_target = _sm_count_target() if num_sms else None
    if set_target is None:
        yield
        return
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    set_target(handle, num_sms - num_sms // 8)
    try:
        yield
    finally:
        set_target(handle, 0)


@lru_cache
def _sm_count_target():
    """cublasSetSmCountTarget of the library that torch has loaded, or None."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")
        return library.cublasSetSmCountTarget
    except (OSError, AttributeError):
        return None
