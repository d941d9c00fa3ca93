"""Times the p2p exchange's kernels: virtual ranks on one GPU, or real ranks with a GPU each.

    python scripts/bench_p2p.py                  # 8 virtual ranks in one process, one launch a stage
    python scripts/bench_p2p.py --gpus 2         # put, signal and wait between GPUs, beside a peer copy; then whole
                                                 # dispatches and combines by put and by copy
    python scripts/bench_p2p.py --gpus 2 --calibrate FILE      # their costs, for --exchange-costs

Virtual ranks share one GPU's memory, so their figures say what the kernels can do, not what a link does.  The floor is
the distinct bytes read and written over the copy rate measured in the same run; a row is read once and written once
for each rank that it goes to.  Times are per call inside a replayed graph.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gpu_arguments import parse

from epmoe.comm import Comm, open_buffers, open_comm
from epmoe.moe.by_size import wire_bytes as exchange_bytes
from epmoe.moe.exchange import ExchangeShape
from epmoe.moe.p2p import P2P
from epmoe.ops.moe_index import build_index
from epmoe.ops.p2p_combine import combine_put
from epmoe.ops.p2p_dispatch import dispatch_put
from epmoe.ops.p2p_layout import COMBINE, DISPATCH, Layout
from epmoe.ops.p2p_plan import combine_plan
from epmoe.ops.p2p_ranks import Outgoing, PutOptions, Ranks, peer_order, virtual_ranks
from epmoe.ops.p2p_signal import HOST_WORDS, RECORD, Place, read_failure, wait_signals
from epmoe.ops.wire import to_wire, wire_bytes

SLOTS = 32  # of a rank


def graph_us(call: Callable, copies: int, repeats: int = 7) -> float:
    """Median microseconds of one call among ``copies`` in a replayed graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            call()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / copies)
    return sorted(times[2:])[repeats // 2]


def copy_rate() -> float:
    """GB/s of large copies one after another, bytes read and written."""
    source = torch.ones(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for n in range(60):
        if n == 30:
            begin.record()
        target.copy_(source)
    end.record()
    end.synchronize()
    return 30 * 2 * source.nbytes / begin.elapsed_time(end) / 1e6


def bench_virtual(args) -> None:
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, {args.world} virtual ranks, copy {rate:.0f} GB/s, hidden {args.hidden}")
    for reduce in (mode == "reduce" for mode in args.modes):
        most = max(args.tokens)
        layout = Layout(args.world, most, args.top_k, args.hidden, torch.bfloat16, reduce)
        buffers, ranks = virtual_ranks(layout, torch.device("cuda"))
        for tokens in args.tokens:
            for line in _virtual_case(args, layout, buffers, ranks, tokens, rate):
                print(("reduce " if reduce else "exact  ") + line, flush=True)
        del buffers


def _virtual_case(args, layout: Layout, buffers, ranks: Ranks, T: int, rate: float):
    """Lines of both directions, for all ranks in one launch and for rank 0 alone."""
    W, K = layout.world, layout.top_k
    x = torch.randn(W * T, layout.hidden, device="cuda", dtype=layout.dtype)
    slot = torch.rand(W * T, W * SLOTS, device="cuda").argsort(1)[:, :K].int()
    weight = torch.rand(W * T, K, device="cuda")
    hit_TW = torch.zeros(W * T, W, device="cuda").scatter_(1, slot.long() // SLOTS, 1)
    all_ranks, alone = PutOptions(args.programs), PutOptions(args.alone)
    first = Ranks(ranks.table_W, ranks.order_VW[:1].contiguous(), 0, 1)
    everybody, mine = Outgoing(x, slot, weight, T, SLOTS), Outgoing(x[:T], slot[:T], weight[:T], T, SLOTS)
    dispatch_put(ranks, layout, everybody, all_ranks)
    pos, weights = [], None
    for buffer in buffers:
        pos.append(build_index(layout.view(buffer, "slot", torch.int32, W * T, K), SLOTS).pos_RK)
    if layout.reduce:
        weights = torch.stack([layout.view(buffer, "weight", torch.float32, W * T, K) for buffer in buffers])
    plan = combine_plan(ranks, layout, torch.stack(pos), weights, T)
    plan0 = combine_plan(first, layout, pos[0], None if weights is None else weights[0], T)
    pairs_V = plan.total_V.tolist()
    out = torch.randn(W * max(pairs_V), layout.hidden, device="cuda", dtype=layout.dtype)
    rows, pairs = int(hit_TW.sum()), W * T * K
    rows0, back0 = int(hit_TW[:T].sum()), int(hit_TW[:, 0].sum()) if layout.reduce else pairs_V[0]
    copies, out0 = max(2, min(10, 4096 // T)), out[: max(pairs_V)]
    calls = (
        ("dispatch", alone, T, rows0, lambda: dispatch_put(first, layout, mine, alone)),
        ("combine", alone, pairs_V[0], back0, lambda: combine_put(first, layout, out0, plan0, T, alone)),
        ("dispatch", all_ranks, W * T, rows, lambda: dispatch_put(ranks, layout, everybody, all_ranks)),
        (
            "combine", all_ranks, pairs, rows if layout.reduce else pairs,
            lambda: combine_put(ranks, layout, out, plan, T, all_ranks),
        ),
    )  # fmt: skip
    for name, options, read, written, call in calls:
        us = graph_us(call, copies)
        floor = (read + written) * layout.row_bytes / rate / 1e3
        who = "rank 0 alone" if options is alone else f"all {W} ranks  "
        speed = written * layout.row_bytes / us / 1e3
        yield (
            f"{name:8} {T:5} tokens, {who}, {options.programs} programs: {us:7.1f} us, "
            f"{speed:5.0f} GB/s written, {us / floor:.2f}x the floor of {floor:.1f} us"
        )
    us = graph_us(lambda: combine_plan(first, layout, pos[0], None if weights is None else weights[0], T), copies)
    yield f"plan     {T:5} tokens, rank 0 alone: {us:7.1f} us (before the experts)"


def bench_rank(rank: int, args, rendezvous: str) -> None:
    """Rows from each rank to the next one, ``args.rows`` of them, against a peer copy of as many."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    comm = open_comm(rank, args.gpus, device, rendezvous, 60.0)
    most = max(args.rows)
    layout = Layout(args.gpus, most, 1, args.hidden, torch.bfloat16, False)
    memory = open_buffers(comm, layout.total)
    ranks = Ranks(memory.table_W, peer_order(args.gpus, rank, 1).to(device), rank, 1)
    host = torch.zeros(HOST_WORDS, dtype=torch.int64, pin_memory=True)
    source = torch.randn(most, args.hidden, device=device, dtype=torch.bfloat16)
    for T in args.rows:
        copy_us = None
        for name, call in _real_calls(args, layout, memory, ranks, host, source[:T]):
            call()
            torch.cuda.synchronize()
            comm.all_gather_headers(np.zeros(1, np.int64))
            us = graph_us(call, max(3, min(20, 20000 // T)))
            copy_us = copy_us or us
            if rank == 0:
                speed = T * layout.row_bytes / us / 1e3
                print(
                    f"{T:5} rows, {name:22}: {us:6.1f} us, {speed:4.0f} GB/s, {copy_us / us:.2f} of the copy",
                    flush=True,
                )
    failure = read_failure(int(host[RECORD]))
    assert failure is None, failure
    measured = [bench_transports(comm, args, T) for T in args.transports]
    if args.calibrate and rank == 0:
        write_costs(Path(args.calibrate), measured)
    os._exit(0)


def write_costs(path: Path, measured: list[dict[str, tuple[float, float]]]) -> None:
    """Latency and bandwidth of both transports among the costs in ``path``, which may hold other exchanges'."""
    costs = json.loads(path.read_text(encoding="utf-8"))["costs"] if path.exists() else {}
    for name in ("put", "copy"):
        wire, us = np.array([times[name] for times in measured]).T
        slope, latency = np.polyfit(wire, us, 1, w=1 / us)  # every size counts alike
        costs[name] = {"latency_us": max(float(latency), 0.0), "gb_per_s": 1e-3 / max(float(slope), 1e-9)}
    path.write_text(json.dumps({"costs": costs}, indent=1) + "\n", encoding="utf-8")


def bench_transports(comm: Comm, args, T: int) -> dict[str, tuple[float, float]]:
    """A dispatch and a combine of T tokens a rank, evenly routed, with no experts between them, launched eagerly; the
    bytes on the wire and the microseconds of each transport, the slowest rank's."""
    shape = ExchangeShape(SLOTS, T, args.hidden, args.top_k, torch.bfloat16, args.combine)
    exchange, rounds = P2P(comm, shape), 6
    slots = comm.world * SLOTS
    x = torch.randn(T, args.hidden, device=comm.device, dtype=torch.bfloat16)
    slot = torch.rand(T, slots, device=comm.device).argsort(1)[:, : args.top_k].int()
    weight = torch.rand(T, args.top_k, device=comm.device)
    remote = (slot // SLOTS != comm.rank).float()
    once = T * (comm.world - 1) * (1 - (1 - 1 / comm.world) ** args.top_k)  # (token, other rank) with even routing
    back = float(remote.sum()) if args.combine == "exact" else once
    moved = (once + back) * exchange.layout.row_bytes
    measured = {}
    for name, copy_from in (("put", T + 1), ("copy", 0)):
        exchange.copy_from = copy_from
        exchange.begin_step(T)
        times, out = [], None
        for _ in range(rounds):
            comm.all_gather_headers(np.zeros(1, np.int64))
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            marks[0].record()
            received, route = exchange.dispatch_end(exchange.dispatch_begin(x, slot, weight), SLOTS)
            marks[1].record()
            if out is None or len(out) < received.M_cap:
                out = torch.zeros(received.M_cap, args.hidden, device=comm.device, dtype=torch.bfloat16)
            marks[2].record()
            exchange.combine_end(exchange.combine_begin(out[: received.M_cap], route))
            marks[3].record()
            torch.cuda.synchronize()
            times.append([marks[0].elapsed_time(marks[1]) * 1e3, marks[2].elapsed_time(marks[3]) * 1e3])
        exchange.raise_if_failed()
        dispatch, combine = np.median(times[2:], 0)
        if comm.rank == 0:
            speed = moved / (dispatch + combine) / 1e3
            line = f"dispatch {dispatch:7.1f}, combine {combine:7.1f} us, {speed:4.0f} GB/s to peers"
            print(f"{T:5} tokens, {name:4}: {line}", flush=True)
        slowest = comm.all_gather_headers(np.array([1e3 * (dispatch + combine)], np.int64)).max() / 1e3
        measured[name] = (exchange_bytes("p2p", shape, comm.world, T), float(slowest))
    return measured


def _real_calls(args, layout: Layout, memory, ranks: Ranks, host, x) -> list[tuple[str, Callable]]:
    """A peer copy of ``x`` first, then each direction at each number of programs."""
    T, device = len(x), x.device
    to = (ranks.first + 1) % layout.world
    target = layout.view(memory.peers[to], "rows", layout.dtype, T, layout.hidden)
    slot = torch.full((T, 1), to, device=device, dtype=torch.int32)
    weight = torch.ones(T, 1, device=device)

    def wait(direction: int) -> None:
        wait_signals(ranks, host, layout, direction, T, Place(0, 5.0))

    def dispatch(options: PutOptions) -> None:
        dispatch_put(ranks, layout, Outgoing(x, slot, weight, T, 1), options)
        wait(DISPATCH)

    dispatch(PutOptions())
    pos_RK = build_index(layout.view(memory.local, "slot", torch.int32, layout.world * T, 1), 1).pos_RK
    plan = combine_plan(ranks, layout, pos_RK, None, T)

    def combine(options: PutOptions) -> None:
        combine_put(ranks, layout, x, plan, T, options)
        wait(COMBINE)

    narrow = replace(layout, sent_bytes=wire_bytes(layout.hidden))  # same places for all but the rows

    def in_8_bits(options: PutOptions) -> None:
        dispatch_put(ranks, narrow, Outgoing(to_wire(x), slot, weight, T, 1), options)
        wait(DISPATCH)

    calls = [("peer copy", lambda: target.copy_(x))]
    for function in (dispatch, combine, in_8_bits):
        for programs in args.sweep:
            options = PutOptions(programs)
            calls.append((f"{function.__name__}, {programs} programs", partial(function, options)))
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="real ranks, a GPU each; 0: virtual ranks")
    parser.add_argument("--world", type=int, default=8, help="virtual ranks")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 4096], help="a virtual rank's")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 128, 588, 4096, 18800], help="to the next real rank")
    parser.add_argument("--modes", choices=("exact", "reduce"), nargs="+", default=["exact", "reduce"], help="virtual")
    parser.add_argument("--transports", type=int, nargs="*", default=[256, 1024, 2048, 4096, 8192], help="real tokens")
    parser.add_argument("--combine", choices=("exact", "reduce"), default="exact", help="of whole rounds")
    parser.add_argument("--calibrate", metavar="FILE", help="add the costs of put and copy to those that FILE may hold")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--programs", type=int, default=16, help="of each rank, all ranks together")
    parser.add_argument("--alone", type=int, default=24, help="of a rank alone")
    parser.add_argument("--sweep", type=int, nargs="+", default=[16, 24], help="programs between real ranks")
    args = parse(parser)
    if not args.gpus:
        bench_virtual(args)
        return
    print(f"{torch.cuda.get_device_name()}, {args.gpus} GPUs, put + signal + wait, rows of {args.hidden} bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        torch.multiprocessing.spawn(bench_rank, (args, rendezvous), args.gpus)


if __name__ == "__main__":
    main()
