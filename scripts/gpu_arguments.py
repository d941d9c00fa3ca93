"""Arguments of scripts that measure a GPU."""

from __future__ import annotations

import argparse

import torch


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; where they ask for a GPU (without a ``--device`` they always do) and torch sees none, one line and
    exit code 2."""
    args = parser.parse_args()
    if getattr(args, "device", "cuda") == "cuda" and not torch.cuda.is_available():
        parser.error(
            "torch sees no NVIDIA GPU here, and this measures one"
            + ("; use --device cpu, or a CUDA build of torch" if hasattr(args, "device") else "")
        )
    return args
