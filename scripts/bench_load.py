#!/usr/bin/env python3
"""How fast a checkpoint comes onto the GPU: from the disk (page cache dropped) and from memory (page cache filled).

    scripts/bench_load.py [--gigabytes 16] [--folder FOLDER] [--json FILE]

Writes a random checkpoint of that size (layers of Qwen3-30B-A3B) to the folder, loads it as the engine does, checks
every loaded tensor's sum against what was written, and prints beside it what the same threads read without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epmoe.checkpoint import load_weights  # noqa: E402
from epmoe.layout import empty_weights  # noqa: E402
from epmoe.model_config import ModelConfig  # noqa: E402
from epmoe.reading import PART_BYTES, READERS  # noqa: E402
from scripts import model_bench_lib as lib  # noqa: E402
from scripts.gpu_arguments import parse  # noqa: E402

LAYER_GB = 1.25


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        layers = max(1, round(args.gigabytes / LAYER_GB))
        (folder / "config.json").write_text(json.dumps({**lib.QWEN3_30B, "num_hidden_layers": layers}))
        config = ModelConfig.from_folder(folder)
        began = time.perf_counter()
        total = write(folder, config, args.device)
        files = sorted(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files) / 1e9
        print(f"{size:.1f} GB in {len(files)} files written in {time.perf_counter() - began:.1f} s", flush=True)
        runs = []
        for state in ("disk", "memory", "memory"):
            for what in ("files read", "loaded"):
                if state == "disk":
                    drop(files)
                seconds = read(files) if what == "files read" else load(folder, config, args.device, total)
                runs.append({"from": state, "what": what, "seconds": seconds, "gb_per_s": size / seconds})
                print(f"{state:7s} {what:11s} {seconds:6.2f} s  {size / seconds:5.1f} GB/s", flush=True)
    if args.json:
        report = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "gigabytes": size}
        args.json.write_text(json.dumps({**report, "readers": READERS, "runs": runs}, indent=1) + "\n")
    return 0


def write(folder: Path, config: ModelConfig, device: str) -> float:
    """A checkpoint of random bf16 values, one file a layer; returns the sum over all its values."""
    everything = [range(config.num_experts)] * len(config.moe_layers)
    _, pieces = empty_weights(config, everything, torch.bfloat16, "meta")
    shapes = {piece.name: piece.shape for piece in pieces}
    index = {name: f"model-{name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors" for name in shapes}

    def shard(file: str) -> float:
        names = [name for name in shapes if index[name] == file]
        tensors = {name: torch.randn(shapes[name], device=device, dtype=torch.bfloat16) for name in names}
        total = sum([tensor.sum(dtype=torch.float64) for tensor in tensors.values()])
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / file)
        return float(total)

    torch.manual_seed(0)
    with ThreadPoolExecutor(4) as pool:
        total = sum(pool.map(shard, dict.fromkeys(index.values())))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return total


def load(folder: Path, config: ModelConfig, device: str, total: float) -> float:
    """Seconds of `load_weights`; what came is checked afterwards."""
    local = [range(config.num_experts)] * len(config.moe_layers)
    began = time.perf_counter()
    weights, _ = load_weights(folder, config, local, torch.bfloat16, torch.device(device))
    seconds = time.perf_counter() - began
    found = float(sum([tensor.sum(dtype=torch.float64) for tensor in lib.tensors_of(weights)]))
    assert abs(found - total) < 1e-6 * abs(total) + 1.0, (found, total)
    return seconds


def read(files: list[Path]) -> float:
    """Seconds to read all bytes with as many threads and as large parts as loading takes, into memory of their own."""
    parts = [(file, start) for file in files for start in range(0, file.stat().st_size, PART_BYTES)]
    own = threading.local()

    def one(part: tuple[Path, int]) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = bytearray(PART_BYTES)
        handle = os.open(part[0], os.O_RDONLY)
        os.preadv(handle, [own.buffer], part[1])
        os.close(handle)

    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(one, parts))
    return time.perf_counter() - began


def drop(files: list[Path]) -> None:
    """Take the files out of the page cache."""
    os.sync()
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=16)
    parser.add_argument("--folder", help="on the disk to be measured; default: the temporary folder's")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    return parse(parser)


if __name__ == "__main__":
    sys.exit(main())
