"""How many SMs cuBLAS may take, so that kernels on another stream find some free."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import lru_cache

import torch


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
