"""A round of the p2p protocol with W virtual ranks in one process, and what it must give."""

from dataclasses import dataclass

import torch

from epmoe.comm import Comm, PeerMemory
from epmoe.moe.exchange import ExchangeShape
from epmoe.moe.p2p import P2P, buffer_size
from epmoe.ops.combine import weighted_sum
from epmoe.ops.moe_index import build_index
from epmoe.ops.p2p_combine import combine_put
from epmoe.ops.p2p_dispatch import dispatch_put
from epmoe.ops.p2p_layout import COMBINE, DISPATCH, STATE, STEP, Layout
from epmoe.ops.p2p_plan import combine_plan
from epmoe.ops.p2p_ranks import Outgoing, PutOptions, virtual_ranks
from epmoe.ops.p2p_signal import HOST_WORDS, Place, read_failure, wait_signals


@dataclass(frozen=True)
class Case:
    """``tokens`` of each rank; all positions up to ``bound`` are written."""

    world: int
    tokens: int
    bound: int
    top_k: int
    hidden: int
    slots: int  # of each rank
    dtype: torch.dtype
    reduce: bool

    @property
    def layout(self) -> Layout:
        return Layout(self.world, self.bound, self.top_k, self.hidden, self.dtype, self.reduce)


def inputs(case: Case, seed: int, device="cpu", absent: float = 0.1, only: int | None = None):
    """Rows, slots (some -1; all of rank ``only`` if given) and weights of all ranks behind one another."""
    random = torch.Generator().manual_seed(seed)
    rows = case.world * case.tokens
    x = torch.randn(rows, case.hidden, generator=random).to(case.dtype)
    slot = torch.rand(rows, case.world * case.slots, generator=random).argsort(1)[:, : case.top_k].int()
    if only is not None:
        slot = slot % case.slots + only * case.slots
    slot[torch.rand(slot.shape, generator=random) < absent] = -1
    weight = torch.rand(rows, case.top_k, generator=random)
    return x.to(device), slot.to(device), weight.to(device)


def expert(rows: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """A stand-in that is exact in any order: row * a power of two of the global slot, negated for odd slots."""
    sign = 1.0 - 2.0 * (slot % 2).float()
    return (rows.float() * (sign * torch.exp2((slot % 5).float()))[:, None]).to(rows.dtype)


def reference(case: Case, x, slot, weight, add=None) -> torch.Tensor:
    """What the exchange must give, bit by bit: all answers here, summed by the op that home and expert ranks use."""
    tokens, top_k = slot.shape
    rows = torch.stack([expert(x, slot[:, k]) for k in range(top_k)], 1).flatten(0, 1)
    row_TK = torch.arange(tokens * top_k, dtype=torch.int32, device=x.device).view(tokens, top_k)
    if not case.reduce:
        return weighted_sum(rows, row_TK.where(slot >= 0, -1), weight, add)
    parts, hits = [], []
    for w in range(case.world):
        here = (slot >= 0) & (slot // case.slots == w)
        parts.append(weighted_sum(rows, row_TK.where(here, -1), weight))
        hits.append(here.any(1))
    part_TW = torch.arange(tokens * case.world, dtype=torch.int32, device=x.device).view(tokens, case.world)
    return weighted_sum(torch.stack(parts, 1).flatten(0, 1), part_TW.where(torch.stack(hits, 1), -1), None, add)


FEW = PutOptions(programs=2)


class VirtualExchange:
    """All ranks of a case; ``round`` takes every rank through dispatch, experts and combine, one launch a stage."""

    def __init__(self, case: Case, device="cpu", options: PutOptions = FEW):
        self.case, self.layout, self.options = case, case.layout, options
        self.buffers, self.ranks = virtual_ranks(self.layout, torch.device(device))
        pinned = self.buffers.is_cuda
        self.host = torch.zeros(HOST_WORDS, dtype=torch.int64, pin_memory=pinned)
        self.place = Place(layer=7, limit_s=2.0)

    def poison(self) -> None:
        """Fill all that travels with NaN bits, so that a row read but never written shows."""
        for buffer in self.buffers:
            buffer[self.layout.at("slot") :].fill_(0xFF)

    def set_step(self, step: int) -> None:
        for buffer in self.buffers:
            self.layout.view(buffer, "state", torch.int64, STATE)[STEP] = step

    def dispatch(self, x, slot, weight, bound: int | None = None) -> torch.Tensor:
        sent = Outgoing(x, slot, weight, bound or self.case.bound, self.case.slots)
        return dispatch_put(self.ranks, self.layout, sent, self.options)

    def wait(self, direction: int) -> torch.Tensor:
        return wait_signals(self.ranks, self.host, self.layout, direction, self.case.bound, self.place)

    def failure(self):
        return read_failure(int(self.host[1]))

    def round(self, x, slot, weight, add=None) -> torch.Tensor:
        case, layout = self.case, self.layout
        index = self.dispatch(x, slot, weight)
        self.wait(DISPATCH)
        outs, positions, weights = [], [], []
        rows_cap = case.world * case.bound
        for me, buffer in enumerate(self.buffers):
            slot_RK = layout.view(buffer, "slot", torch.int32, rows_cap, case.top_k)
            built = build_index(slot_RK, case.slots)
            rows = layout.view(buffer, "rows", case.dtype, rows_cap, case.hidden)
            pair_slot = torch.zeros(rows_cap * case.top_k, dtype=torch.int64, device=x.device)
            pos = built.pos_RK.flatten().long()
            pair_slot[pos[pos >= 0]] = slot_RK.flatten().long()[pos >= 0]
            pairs = torch.arange(len(pair_slot), device=x.device)
            row_M = torch.where(pairs < built.offset_L1[-1], built.row_M, 0).long()
            outs.append(expert(rows[row_M], pair_slot + me * case.slots))
            positions.append(built.pos_RK)
            if case.reduce:
                weights.append(layout.view(buffer, "weight", torch.float32, rows_cap, case.top_k))
        plan = combine_plan(
            self.ranks, layout, torch.stack(positions), torch.stack(weights) if weights else None, case.bound
        )
        combine_put(self.ranks, layout, torch.cat(outs), plan, case.bound, self.options)
        self.wait(COMBINE)
        answers = []
        for me, buffer in enumerate(self.buffers):
            mine = slice(me * case.tokens, (me + 1) * case.tokens)
            returned = layout.view(buffer, "returned", case.dtype, layout.tokens * layout.answers, case.hidden)
            answers.append(weighted_sum(returned, index[mine], None if case.reduce else weight[mine], add))
        return torch.cat(answers)


def run_experts(received, slots: int, rank: int) -> torch.Tensor:
    """`expert` over the pairs of a `Received`; fixed shapes, so that it may be captured."""
    index = received.index
    row_M, pairs = index.row_M, index.row_M.numel()
    slot_M = torch.searchsorted(index.offset_L1[1:], torch.arange(pairs, device=row_M.device), right=True)
    row_M = torch.where(slot_M < slots, row_M, 0)  # undefined from the last pair on
    return expert(received.rows_RD[row_M.long()], slot_M.clamp(max=slots - 1) + rank * slots)


def shape_of(case: Case, wire: str = "model") -> ExchangeShape:
    combine = "reduce" if case.reduce else "exact"
    return ExchangeShape(case.slots, case.bound, case.hidden, case.top_k, case.dtype, combine, wire=wire)


def lockstep_ranks(case: Case, device="cpu", wire: str = "model") -> list[P2P]:
    """Every rank's exchange in this process, over plain memory; the waits find their signals if all ranks go a stage
    at a time."""
    device, shape = torch.device(device), shape_of(case, wire)
    size = buffer_size(case.world, shape)
    buffers = list(torch.zeros((case.world, size), dtype=torch.uint8, device=device))
    table = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)
    return [
        P2P(Comm(rank, case.world, device), shape, PeerMemory(buffers[rank], buffers, table, []), limit_s=2.0)
        for rank in range(case.world)
    ]


def lockstep_round(exchanges: list[P2P], case: Case, data, lane: int = 0, add=None) -> torch.Tensor:
    """One layer through all ranks, a stage at a time; the answers behind one another."""
    tokens = data[0].shape[0] // case.world
    mine = [[part[n * tokens : (n + 1) * tokens] for part in data] for n in range(case.world)]
    sent = [exchange.dispatch_begin(*part, lane) for exchange, part in zip(exchanges, mine)]
    sent = [exchange.dispatch_send(sending) for exchange, sending in zip(exchanges, sent)]
    arrived = [exchange.dispatch_end(sending, case.slots) for exchange, sending in zip(exchanges, sent)]
    back = [
        exchange.combine_begin(run_experts(received, case.slots, exchange.comm.rank), route)
        for exchange, (received, route) in zip(exchanges, arrived)
    ]
    added = [None if add is None else add[n * tokens : (n + 1) * tokens] for n in range(case.world)]
    return torch.cat([exchange.combine_end(*pair) for exchange, *pair in zip(exchanges, back, added)])
