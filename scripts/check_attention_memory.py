#!/usr/bin/env python3
"""Attention cases small enough for compute-sanitizer; each checks its result.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python3 scripts/check_attention_memory.py grouped|latent|products

Without the caching allocator every tensor is an allocation of its own, so that a read beyond one is seen.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import attention_cases as cases  # noqa: E402

from scripts.gpu_arguments import parse  # noqa: E402

BF16 = torch.bfloat16


def grouped() -> None:
    """Prompts and mixed steps with keys by the copy engine; decode buffers refilled, ordinary and deterministic."""
    cases.check_mixed((8, 1, 32), BF16, "cuda", False, [1, 17, 66, 600], block_size=64)
    for tiled in (False, True):
        cases.check_decode_batch((4, 2, 24), BF16, "cuda", tiled, [1, 17, 66, 130, 700])


def latent() -> None:
    """Prompts, mixed steps and decode of few heads."""
    cases.check_latent((16, 64, 16), BF16, "cuda", False, [1, 17, 66, 600], 64)


def products() -> None:
    """Latent decode of many heads by two products."""
    cache = cases.latent_cache((128, 512, 64), BF16, "cuda", [1, 257, 600], 64)
    cases.check_latent_decode(cache, 512, False)


if __name__ == "__main__":
    checks = {"grouped": grouped, "latent": latent, "products": products}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=checks)
    chosen = parse(parser).check
    checks[chosen]()
    print(chosen, "checked", flush=True)
