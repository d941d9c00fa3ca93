"""Times of one exchange for one size: what is moved, how long it takes, and beside it plain all_to_all_single."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import distributed

from epmoe.comm import Comm
from epmoe.moe.exchange import Exchange, ExchangeShape
from epmoe.moe.open_exchange import open_exchange


@dataclass(frozen=True)
class Case:
    """One layer on every rank. ``routing``: "even", or "skewed" (expert e is chosen with weight 1 / (e + 4))."""

    exchange: str
    tokens: int
    hidden: int
    top_k: int
    routing: str = "even"
    combine: str = "reduce"
    dtype: str = "bfloat16"
    experts: int = 128

    def shape(self, world: int, max_tokens: int) -> ExchangeShape:
        dtype = getattr(torch, self.dtype)
        slots = -(-self.experts // world)
        sizes = (slots, max_tokens, self.hidden, self.top_k, dtype, self.combine)
        return ExchangeShape(*sizes, graph_tokens=max_tokens)


@dataclass(frozen=True)
class Times:
    """Microseconds, the slowest rank's, median over rounds; ``remote_mb``: megabytes that the busiest rank sends to
    others. ``plain_us``: see `plain`. ``graph_us``: a replayed graph."""

    case: Case
    dispatch_us: float
    combine_us: float
    graph_us: float | None
    plain_us: float
    dispatch_mb: float
    combine_mb: float

    @property
    def best_us(self) -> float:
        return min(self.dispatch_us + self.combine_us, self.graph_us or float("inf"))

    @property
    def gb_per_s(self) -> float:
        return 1e3 * (self.dispatch_mb + self.combine_mb) / self.best_us

    def record(self, link_gb_per_s: float) -> dict:
        values = asdict(self)
        values["case"] = asdict(self.case)
        values |= {"us": self.best_us, "gb_per_s": self.gb_per_s, "share_of_link": self.gb_per_s / link_gb_per_s}
        return values | {"ratio_to_plain": self.best_us / self.plain_us}

    def line(self, link_gb_per_s: float) -> str:
        case = self.case
        graph = f"{self.graph_us:8.1f}" if self.graph_us else "       -"
        return (
            f"{case.exchange:9s} {case.combine:6s} T {case.tokens:5d} D {case.hidden:5d} K {case.top_k}"
            f" {case.routing:6s}"
            f" dispatch {self.dispatch_us:8.1f} combine {self.combine_us:8.1f} graph {graph} us"
            f" {self.dispatch_mb + self.combine_mb:8.2f} MB {self.gb_per_s:6.1f} GB/s"
            f" {100 * self.gb_per_s / link_gb_per_s:5.1f} % of the link, {self.best_us / self.plain_us:5.2f}x plain"
        )


def routed(case: Case, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, global slots (experts in order over the ranks) and weights of a rank's tokens."""
    rng = np.random.default_rng([case.tokens, case.top_k, rank])
    weight_E = np.ones(case.experts) if case.routing == "even" else 1 / (np.arange(case.experts) + 4)
    score = np.log(weight_E) + rng.gumbel(size=(case.tokens, case.experts))
    slot = np.argpartition(-score, case.top_k - 1, axis=1)[:, : case.top_k].astype(np.int32)
    x = torch.randn(case.tokens, case.hidden, device=device).to(getattr(torch, case.dtype))
    weight = torch.rand(case.tokens, case.top_k, device=device)
    return x, torch.from_numpy(slot).to(device), weight


def measure(comm: Comm, case: Case, exchange: Exchange, rounds: int = 15) -> Times:
    """All ranks call it together, each case in the same order."""
    x, slot, weight = routed(case, comm.rank, comm.device)
    num_slots = exchange.shape.slots_per_rank
    exchange.begin_step(case.tokens)
    state: dict = {}

    def dispatch() -> None:
        sending = exchange.dispatch_send(exchange.dispatch_begin(x, slot, weight))
        state["received"], state["route"] = exchange.dispatch_end(sending, num_slots)

    def combine() -> None:
        state["y"] = exchange.combine_end(exchange.combine_begin(state["out"], state["route"]))

    dispatch()
    rows = len(state["received"].index.row_M)
    state["out"] = torch.ones((max(rows, 1), case.hidden), dtype=x.dtype, device=comm.device)
    combine()
    times = [timed(comm, (dispatch, combine)) for _ in range(rounds)]
    dispatch_us, combine_us = np.median(slowest(comm, np.array(times)), 0)
    graph_us = replayed(comm, lambda: (dispatch(), combine())) if exchange.capturable else None
    sent_W2 = moved(case, slot, num_slots, comm.world)
    plain_us = plain(comm, case, sent_W2, rounds)
    remote = np.delete(sent_W2, comm.rank, 0).sum(0) * exchange.shape.row_bytes / 1e6
    dispatch_mb, combine_mb = slowest(comm, remote)
    return Times(case, dispatch_us, combine_us, graph_us, plain_us, dispatch_mb, combine_mb)


def moved(case: Case, slot: torch.Tensor, num_slots: int, world: int) -> np.ndarray:
    """int64 ``[W, 2]``: rows this rank sends to each on dispatch, and gets back from each on combine."""
    rank = slot.cpu().numpy() // num_slots
    rows = np.array([(rank == w).any(1).sum() for w in range(world)])
    pairs = np.array([(rank == w).sum() for w in range(world)])
    return np.stack((rows, rows if case.combine == "reduce" else pairs), 1)


def timed(comm: Comm, stages: tuple[Callable, ...]) -> list[float]:
    """Microseconds of each stage on this rank, after a barrier."""
    barrier(comm)
    if comm.device.type != "cuda":
        at = [time.perf_counter()]
        for stage in stages:
            stage()
            at.append(time.perf_counter())
        return [1e6 * (b - a) for a, b in zip(at, at[1:])]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(stages) + 1)]
    events[0].record()
    for stage, event in zip(stages, events[1:]):
        stage()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in zip(events, events[1:])]


def replayed(comm: Comm, step: Callable, layers: int = 8, rounds: int = 9) -> float:
    """Microseconds of one dispatch and combine in a graph of several, replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(layers):
            step()
    graph.replay()
    times = np.array([timed(comm, (graph.replay,)) for _ in range(rounds)])
    return float(np.median(slowest(comm, times))) / layers


def plain(comm: Comm, case: Case, sent_W2: np.ndarray, rounds: int) -> float:
    """Microseconds of torch's all_to_all_single with exactly these rows, there and back; sizes are known.  On NCCL in a
    replayed graph, which is several times faster than launched from the host."""
    gathered = comm.all_gather_headers(sent_W2.ravel()).reshape(comm.world, comm.world, 2)
    there, back = sent_W2[:, 0].tolist(), gathered[:, comm.rank, 1].tolist()
    arriving, returning = gathered[:, comm.rank, 0].tolist(), sent_W2[:, 1].tolist()
    options = {"dtype": getattr(torch, case.dtype), "device": comm.device}
    buffers = [torch.zeros((max(sum(each), 1), case.hidden), **options) for each in (there, arriving, back, returning)]
    views = [buffer[: sum(each)] for buffer, each in zip(buffers, (there, arriving, back, returning))]

    def both() -> None:
        for source, target, sizes in ((views[0], views[1], (arriving, there)), (views[2], views[3], (returning, back))):
            distributed.all_to_all_single(target.view(torch.uint8), source.view(torch.uint8), *sizes, group=comm.data)

    both()
    if comm.on_nccl:
        return replayed(comm, both)
    return float(np.median(slowest(comm, np.array([timed(comm, (both,)) for _ in range(rounds)]))))


def link_limit(comm: Comm, megabytes: int) -> float:
    """GB/s that a rank sends to others in a plain all_to_all_single of so many megabytes for each."""
    block = torch.zeros((comm.world, megabytes << 20), dtype=torch.uint8, device=comm.device)
    out = torch.empty_like(block)

    def once() -> None:
        distributed.all_to_all_single(out.view(-1), block.view(-1), group=comm.data)

    once()
    us = float(np.median(slowest(comm, np.array([timed(comm, (once,)) for _ in range(5)]))))
    return (comm.world - 1) * (megabytes << 20) / us / 1e3


def barrier(comm: Comm) -> None:
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
    comm.all_gather_headers(np.zeros(1, np.int64))


def slowest(comm: Comm, values: np.ndarray) -> np.ndarray:
    """Elementwise maximum over the ranks."""
    flat = np.round(values.ravel() * 1e6).astype(np.int64)
    return comm.all_gather_headers(flat).max(0).reshape(values.shape) / 1e6


def open_for(comm: Comm, case: Case, most_tokens: int) -> Exchange:
    return open_exchange(comm, case.shape(comm.world, most_tokens), case.exchange)


def check_against(comm: Comm, case: Case, exchange: Exchange) -> None:
    """The answer of a small layer equals that of exact sizes, bit for bit."""
    small = replace(case, tokens=min(case.tokens, 17))
    x, slot, weight = routed(small, comm.rank, comm.device)
    answers = []
    for each in (exchange, open_exchange(comm, exchange.shape, "alltoall")):
        each.begin_step(small.tokens)
        received, route = each.dispatch_end(each.dispatch_begin(x, slot, weight), exchange.shape.slots_per_rank)
        row_M = received.index.row_M.clamp(0, max(received.R_cap - 1, 0)).long()
        answers.append(each.combine_end(each.combine_begin(received.rows_RD[row_M], route)))
    assert torch.equal(*answers), f"{case.exchange} differs from exact sizes"
