"""Times functions on a GPU by graph replay: what a layer takes inside a decode graph, without launch gaps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import sm_count

FLUSH_BYTES = 192 << 20


@triton.jit
def read_kernel(x_ptr, sink_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        total += tl.load(x_ptr + start + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(sink_ptr + tl.program_id(0), tl.sum(total, 0))


class Timer:
    """Times functions by graph replay, the L2 cache flushed by a read before each call (reads leave no dirty lines)."""

    def __init__(self):
        self.buffer = torch.ones(FLUSH_BYTES // 4, device="cuda")
        self.sink = torch.empty(sm_count(self.buffer.device) * 8, device="cuda")
        self.flush_us = {}

    def flush(self):
        read_kernel[(self.sink.numel(),)](self.buffer, self.sink, self.buffer.numel(), BLOCK=4096, num_warps=8)

    def capture(self, calls: list, flush: bool) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
            self.flush()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                if flush:
                    self.flush()
                call()
        return graph

    def flush_time(self, copies: int) -> float:
        if copies not in self.flush_us:
            self.flush_us[copies] = min(replay(self.capture([lambda: None] * copies, True)) for _ in range(3))
        return self.flush_us[copies]

    def compare(self, functions: dict, rounds: int = 3, copies: int = 5, flush: bool = True) -> dict:
        """Median microseconds of one call of each function; replays alternate A B A B."""
        graphs = {
            name: self.capture([calls[i % len(calls)] for i in range(copies)], flush)
            for name, calls in functions.items()
        }
        times = {name: [] for name in functions}
        for _ in range(rounds):
            for name, graph in graphs.items():
                times[name].append(replay(graph))
        base = self.flush_time(copies) if flush else 0.0
        return {name: (sorted(t)[len(t) // 2] - base) / copies for name, t in times.items()}


def replay(graph: torch.cuda.CUDAGraph, warm_us: float = 15e3, timed_us: float = 8e3) -> float:
    """Microseconds of one replay, under the clocks that the load itself brings about.

    A matrix-bound kernel runs into the power limit some milliseconds after it starts, so replays go on for
    ``warm_us`` before the timed ones.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    marks[0].record()
    graph.replay()
    marks[1].record()
    marks[1].synchronize()
    once = max(marks[0].elapsed_time(marks[1]) * 1e3, 1.0)
    for _ in range(int(warm_us / once)):
        graph.replay()
    count = max(1, int(timed_us / once))
    marks[1].record()
    for _ in range(count):
        graph.replay()
    marks[2].record()
    marks[2].synchronize()
    return marks[1].elapsed_time(marks[2]) * 1e3 / count
