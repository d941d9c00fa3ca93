#!/usr/bin/env python3
"""Check and time all of a layer that is not experts, on one GPU; one line per case, JSON on request.

    scripts/bench_attention.py [--only decode,chunk,latent,rest] [--block-size 64] [--seconds 240] [--flex]
                               [--json FILE]

Attention reads keys from a paged cache in random block order; its peers are torch's own kernels on the same keys,
gathered to contiguous memory beforehand (not timed).  Every case is checked against float32 before it is timed; times
are of graph replays with the L2 cache flushed in between.  The floor is the larger of bytes that must be read or
written over the streaming read rate and flops over the matrix rate, both measured at the start.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epmoe.ops.attention import AttentionBatch, paged_attention  # noqa: E402
from epmoe.ops.decode_batch import DecodeShape, decode_batch  # noqa: E402
from epmoe.ops.latent import latent_attention  # noqa: E402
from epmoe.ops.linear import linear  # noqa: E402
from epmoe.ops.norm import add_rms_norm  # noqa: E402
from epmoe.ops.qkv import HeadNorm, split_qkv  # noqa: E402
from scripts import attention_peers  # noqa: E402
from scripts import moe_bench_lib as lib  # noqa: E402
from scripts.gpu_arguments import parse  # noqa: E402

LIMIT = 2e-2
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Query heads, key heads, columns of a key and of a value."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def latent(self) -> bool:
        return self.value_dim != self.key_dim


QWEN3 = Shape(32, 4, 128, 128)  # Qwen3-30B-A3B
DEEPSEEK, LITE = Shape(128, 1, 576, 512), Shape(16, 1, 576, 512)  # DeepSeek-V3, DeepSeek-V2-Lite; absorbed


@dataclass(frozen=True)
class Case:
    """Sequences of (queries, cached tokens with these)."""

    name: str
    shape: Shape
    lens: tuple[tuple[int, int], ...]

    @property
    def decode(self) -> bool:
        return all(queries == 1 for queries, _ in self.lens)

    @property
    def flops(self) -> float:
        seen = sum(q * kv - q * (q - 1) / 2 for q, kv in self.lens)
        return 2.0 * seen * self.shape.heads * (self.shape.key_dim + self.shape.value_dim)

    @property
    def bytes(self) -> float:
        s = self.shape
        kv = sum(kv for _, kv in self.lens) * s.kv_heads * (s.key_dim if s.latent else 2 * s.key_dim)
        return 2.0 * (kv + sum(q for q, _ in self.lens) * s.heads * (s.key_dim + s.value_dim))


RAGGED = tuple((1, int(128 * 1.0276**n)) for n in range(128))
CASES = {
    "decode": [
        *(Case(f"decode {n} x {kv}", QWEN3, ((1, kv),) * n) for n, kv in ((1, 1024), (8, 1024), (64, 1024))),
        *(Case(f"decode {n} x {kv}", QWEN3, ((1, kv),) * n) for n, kv in ((256, 1024), (1, 16384), (16, 16384))),
        Case("decode 128 x 128..4096", QWEN3, RAGGED),
    ],
    "chunk": [
        Case("prompt 16 x 1024", QWEN3, ((1024, 1024),) * 16),
        Case("prompt 4096", QWEN3, ((4096, 4096),)),
        Case("last 4096 of 16384", QWEN3, ((4096, 16384),)),
        Case("512 of 2048 + 64 decodes", QWEN3, ((512, 2048), *((1, 1024),) * 64)),
    ],
    "latent": [
        *(Case(f"mla {s.heads} decode {n} x {kv}", s, ((1, kv),) * n)
          for s in (DEEPSEEK, LITE) for n, kv in ((1, 1024), (1, 16384), (64, 1024), (64, 4096))),
        *(Case(f"mla {s.heads} prompt 4 x 1024", s, ((1024, 1024),) * 4) for s in (DEEPSEEK, LITE)),
    ],
}  # fmt: skip


class Problem:
    """A case's queries and keys, contiguous and in a cache of shuffled blocks, and its batch."""

    def __init__(self, case: Case, block_size: int, deterministic: bool = False) -> None:
        s, self.case, self.deterministic = case.shape, case, deterministic
        counts = [-(-kv // block_size) for _, kv in case.lens]
        order = torch.randperm(sum(counts)).tolist()
        blocks = [[order.pop() for _ in range(count)] for count in counts]
        sides = 1 if s.latent else 2
        self.cache = torch.randn(sides, s.kv_heads, sum(counts), block_size, s.key_dim, device="cuda", dtype=DTYPE)
        self.tokens = sum(q for q, _ in case.lens)
        self.q = torch.randn(self.tokens, s.heads, s.key_dim, device="cuda", dtype=DTYPE)
        self.scale = 192**-0.5 if s.latent else s.key_dim**-0.5
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, numbers in zip(table, blocks):
            row[: len(numbers)] = torch.tensor(numbers)
        self.table = table.cuda()
        kv_lens = [kv for _, kv in case.lens]
        if case.decode:
            longest = max(kv_lens)
            shape = DecodeShape(
                len(kv_lens), longest, block_size, s.kv_heads, s.heads // s.kv_heads, deterministic, s.latent
            )
            self.batch = decode_batch(shape, torch.device("cuda"))
            self.batch.fill(kv_lens, blocks)
        else:
            self.batch = AttentionBatch([q for q, _ in case.lens], kv_lens, self.table, None, None, block_size)

    def run(self) -> torch.Tensor:
        s = self.case.shape
        if s.latent:
            return latent_attention(self.q, self.cache, self.batch, self.scale, s.value_dim, tiled=self.deterministic)
        return paged_attention(self.q, self.cache, self.batch, self.scale, tiled=self.deterministic)

    def gathered(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[KVH, kv, d]`` of sequence n."""
        kv_len, size = self.case.lens[n][1], self.cache.shape[3]
        rows = self.cache[:, :, self.table[n, : -(-kv_len // size)].long()].flatten(2, 3)[:, :, :kv_len]
        return rows[0], rows[-1][..., : self.case.shape.value_dim]

    def error(self, out_THd: torch.Tensor) -> float:
        """Of up to 8 sequences and 64 queries of each: max difference from float32 over max |value|."""
        first, worst = 0, 0.0
        step = max(1, len(self.case.lens) // 8)
        for n, (queries, kv_len) in enumerate(self.case.lens):
            if n % step == 0:
                at = torch.randperm(queries)[:64].cuda()
                k, v = (x.float().repeat_interleave(self.q.shape[1] // len(x), 0) for x in self.gathered(n))
                score = self.q[first + at].float().transpose(0, 1) @ k.transpose(1, 2) * self.scale
                hidden = torch.arange(kv_len, device="cuda") > (kv_len - queries + at)[:, None]
                want = (score.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)
                worst = max(worst, float((out_THd[first + at].float() - want).abs().max() / want.abs().max()))
            first += queries
        return worst


def time_case(timer: lib.Timer, case: Case, block_size: int, flex: bool) -> dict:
    """Ordinary and deterministic mode and the peers, checked first; a red one is not timed."""
    result = {"case": case.name, "block_size": block_size, "flops": case.flops, "bytes": case.bytes, "error": {}}
    problems = {"ours": Problem(case, block_size)}
    if not case.shape.latent:
        problems["deterministic"] = Problem(case, block_size, deterministic=True)
    functions = {name: problem.run for name, problem in problems.items()}
    for name, problem in problems.items():
        result["error"][name] = problem.error(problem.run())
        if not result["error"][name] < LIMIT:
            print(f"RED {case.name} {name}: {result['error'][name]}")
            functions.pop(name)
    for name, peer in attention_peers.peers(problems["ours"], flex).items():
        try:
            peer()
            functions[name] = peer
        except Exception as error:
            print(f"{name} is left out of {case.name}: {str(error).splitlines()[0][:100]}")
    copies = max(1, min(10, int(2e4 / (case.flops / 3e8 + case.bytes / 3e6 + 10))))
    result["us"] = timer.compare({name: [f] for name, f in functions.items()}, 3, copies)
    if "ours" in functions:
        result["ghz"] = lib.clock_ghz(timer, [functions["ours"]])
    return result


def compile_kernels(job: tuple[Case, int, bool]) -> str | None:
    """Compile what a case, a block size and a mode use; the error if it fails."""
    try:
        Problem(*job).run()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {str(error)[-300:]}"


def compile_all(kinds: list[str], block_sizes: list[int]) -> None:
    """Side by side in processes, through the cache on disk, on tiny lengths."""
    shapes = {case.shape for kind in kinds if kind in CASES for case in CASES[kind]}
    lens = (((1, 300),) * 2, ((40, 600), (50, 50)))
    jobs = product([Case("", shape, some) for shape in shapes for some in lens], block_sizes, (False, True))
    jobs = [(case, size, fixed) for case, size, fixed in jobs if not (fixed and case.shape.latent)]
    with get_context("spawn").Pool(14) as pool:
        for error in pool.imap_unordered(compile_kernels, jobs):
            if error:
                print("does not compile:", error)


def rest_cases(tokens: int) -> dict:
    """Norm, qkv split and linear layers of Qwen3-30B-A3B: name -> (calls over rotating weights, bytes, flops)."""
    D, heads, kv_heads, d, vocabulary = 2048, 32, 4, 128, 151_936
    width = (heads + 2 * kv_heads) * d
    make = lambda *size: torch.randn(*size, device="cuda", dtype=DTYPE)  # noqa: E731
    x, residual, qkv = make(tokens, D), make(tokens, D), make(tokens, width)
    norm, head_norm = make(D), HeadNorm(make(d), make(d), 1e-6)
    cache, cos_sin = make(2, kv_heads, tokens, 16, d), make(tokens, 2, d // 2)
    slot = torch.randperm(tokens * 16, device="cuda")[:tokens]
    cases = {
        "add + norm": ([lambda: add_rms_norm(x, residual, norm, 1e-6)], 8 * tokens * D, 0),
        "qkv split": ([lambda: split_qkv(qkv, cache, slot, cos_sin, head_norm)], 4 * tokens * width, 0),
    }
    for name, n, k in (("qkv", width, D), ("o", D, heads * d), ("router", 128, D), ("head", vocabulary, D)):
        rows = make(tokens, k)
        weights = [make(n, k) for _ in range(1 if name == "head" else 3)]
        size = 2 * (n * k + tokens * (n + k))
        flops = 2.0 * tokens * n * k
        cases[name] = ([lambda w=w, rows=rows: linear(rows, w) for w in weights], size, flops)
        cases[f"{name} cuBLAS"] = ([lambda w=w, rows=rows: functional.linear(rows, w) for w in weights], size, flops)
    return cases


def show(name: str, result: dict, top: dict) -> None:
    us, ours = result["us"], result["us"].get("ours", float("nan"))
    floor = max(result["bytes"] / top["read_tbs"] / 1e6, result["flops"] / top["tflops"] / 1e6)
    others = "  ".join(f"{k} {v:.1f}" for k, v in us.items() if k != "ours")
    print(
        f"{name:26s} bs {result['block_size']:3d} {ours:9.1f} us  floor {floor:8.1f} ({100 * floor / ours:3.0f} %)"
        f" {result['flops'] / ours / 1e6:5.0f} TFLOP/s {result['bytes'] / ours / 1e6:5.2f} TB/s"
        f" {result.get('ghz', float('nan')):.2f} GHz | {others}",
        flush=True,
    )


def run_rest(timer: lib.Timer, top: dict, left) -> list[dict]:
    results = []
    for tokens in (1, 64, 256, 4096):
        for name, (calls, size, flops) in rest_cases(tokens).items():
            if left() < 3 or (tokens == 4096 and "head" in name):
                continue
            us = timer.compare({"ours": calls}, 3, 9 if tokens < 4096 else 3)
            results.append({"case": f"{name} {tokens}", "block_size": 0, "bytes": size, "flops": flops, "us": us})
            results[-1]["ghz"] = lib.clock_ghz(timer, calls)
            show(results[-1]["case"], results[-1], top)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="decode,chunk,latent,rest")
    parser.add_argument("--block-size", default="64")
    parser.add_argument("--seconds", type=float, default=240, help="stop starting new cases after this long")
    parser.add_argument("--flex", action="store_true", help="flex attention too, which compiles for a while")
    parser.add_argument("--json", type=Path)
    args = parse(parser)
    start = time.monotonic()
    left = lambda: args.seconds - (time.monotonic() - start)  # noqa: E731
    kinds, block_sizes = args.only.split(","), [int(size) for size in args.block_size.split(",")]
    compile_all(kinds, block_sizes)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    timer = lib.Timer()
    report = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    report |= {"triton": triton.__version__, "device": torch.cuda.get_device_name(), "cases": []}
    report["ceilings"] = lib.ceilings(timer)
    print({k: report[k] for k in ("device", "torch", "triton", "ceilings")}, flush=True)
    for kind in kinds:
        if kind == "rest":
            report["cases"] += run_rest(timer, report["ceilings"], left)
            continue
        for case in CASES[kind]:
            for block_size in block_sizes:
                if left() < 5:
                    print(f"out of time before {case.name}")
                    continue
                try:
                    report["cases"].append(time_case(timer, case, block_size, args.flex))
                    show(case.name, report["cases"][-1], report["ceilings"])
                except Exception:
                    traceback.print_exc(limit=-4)
                    torch.cuda.synchronize()
                torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(report))
    if args.json:
        args.json.write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
