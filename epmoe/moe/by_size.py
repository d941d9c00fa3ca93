"""The exchange that takes another one step by step: whichever the cost model finds cheapest for the agreed size.

The model is a latency and a bandwidth per exchange (`Cost`), measured by ``bench_exchange.py --calibrate``, over
the bytes that even routing puts on the wire.  Every rank has the same figures, so all choose alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from epmoe.comm import Comm
from epmoe.moe.exchange import Exchange, ExchangeShape, Received, Traffic
from epmoe.moe.padded import block_layout
from epmoe.ops import wire
from placement.errors import UserError


@dataclass(frozen=True)
class Cost:
    """Time of a dispatch and a combine: ``latency_us``, and the bytes on the wire of one rank at ``gb_per_s``."""

    latency_us: float
    gb_per_s: float

    def us(self, wire_bytes: float) -> float:
        return self.latency_us + wire_bytes / (1e3 * self.gb_per_s)


# Measured: gloo between two processes on one machine; on two H200, p2p and padded in replayed graphs, alltoall as the
# host launches it and waits for it.
GLOO = {"alltoall": Cost(900, 1.5), "oneshot": Cost(600, 1.5), "padded": Cost(600, 1.5)}
NCCL = {"alltoall": Cost(2200, 250), "padded": Cost(50, 260), "p2p": Cost(30, 260)}


def costs_from(text: str, source: str) -> dict[str, Cost]:
    """The ``costs`` of a calibration file: ``{exchange: {"latency_us", "gb_per_s"}}``."""
    try:
        raw = json.loads(text)
        costs = {name: Cost(float(each["latency_us"]), float(each["gb_per_s"])) for name, each in raw["costs"].items()}
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError, RecursionError):
        rule = 'expected {"costs": {exchange: {"latency_us", "gb_per_s"}}}'
        raise UserError(f"{source} is no calibration; {rule}, as bench_exchange.py --calibrate writes") from None
    if bad := [name for name, cost in costs.items() if not cost.latency_us >= 0 or not cost.gb_per_s > 0]:
        raise UserError(f"{source} has a negative time or no bandwidth for {', '.join(bad)}; calibrate again")
    return costs


def wire_bytes(name: str, shape: ExchangeShape, world: int, tokens: int) -> float:
    """Bytes that a rank sends in a dispatch and a combine when every rank has ``tokens`` tokens, its own included."""
    layout = block_layout(shape, world, tokens, exact=name == "oneshot")
    rows = tokens * world * (1 - (1 - 1 / world) ** shape.top_k)
    answers = rows if shape.combine == "reduce" else tokens * shape.top_k
    if name in ("oneshot", "padded"):
        rows = world * layout.block_rows
    if name == "padded":
        answers = world * layout.answers
    narrow = name == "p2p" and shape.wire == "fp8"  # the others send rounded rows in the model dtype
    return rows * (wire.wire_bytes(shape.hidden) if narrow else shape.row_bytes) + answers * shape.row_bytes


class BySize:
    """See the module's docstring and the contract in ``moe.exchange``.

    Args:
        options: at least one of them takes any size; one with smaller buffers is left out of larger steps.
        costs: by name of the exchange.
        notes: why others are not among the options, for people.
    """

    name = "auto"

    def __init__(self, options: list[Exchange], costs: Mapping[str, Cost], notes: list[str]) -> None:
        self.options, self.costs, self.notes = options, costs, notes
        self.comm: Comm = options[0].comm
        self.shape = max((option.shape for option in options), key=lambda shape: shape.max_tokens)
        self.capturable = any(option.capturable for option in options)
        self.buffer_bytes = sum(option.buffer_bytes for option in options)
        self.steps = {option.name: 0 for option in options}
        self.current = options[0]
        self.begin_step(self.shape.max_tokens)
        self.steps = dict.fromkeys(self.steps, 0)

    def choice(self, tokens: int) -> Exchange:
        """The cheapest for a step of at most ``tokens`` tokens; one that a graph may hold, where steps are graphs."""
        fitting = [option for option in self.options if tokens <= option.shape.max_tokens]
        if self.capturable and tokens <= self.shape.graph_tokens:
            fitting = [option for option in fitting if option.capturable]

        def us(option: Exchange) -> float:
            return self.costs[option.name].us(wire_bytes(option.name, option.shape, self.comm.world, tokens))

        return min(fitting, key=us)

    def expect_traffic(self, rows_WW: np.ndarray) -> None:
        for option in self.options:
            option.expect_traffic(rows_WW)

    def begin_step(self, tokens: int, exact: bool = False) -> None:
        self.current = self.choice(tokens)
        self.steps[self.current.name] += 1
        self.current.begin_step(tokens, exact)

    @property
    def waits_for_counts(self) -> bool:
        return self.current.waits_for_counts

    @property
    def may_overflow(self) -> bool:
        return self.current.may_overflow

    @property
    def ctas(self) -> int:
        """SMs that the present step's exchange takes beside compute."""
        return getattr(self.current, "ctas", 0)

    @property
    def shares_sms(self) -> bool:
        return self.current.shares_sms

    @shares_sms.setter
    def shares_sms(self, value: bool) -> None:
        self.current.shares_sms = value

    def overflowed(self) -> torch.Tensor | None:
        return self.current.overflowed()

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0):
        return self.current.dispatch_begin(x_TD, slot_TK, weight_TK, lane)

    def dispatch_send(self, sending):
        return self.current.dispatch_send(sending)

    def dispatch_end(self, sending, num_slots: int) -> tuple[Received, object]:
        return self.current.dispatch_end(sending, num_slots)

    def combine_begin(self, out_MD: torch.Tensor, route):
        return self.current.combine_begin(out_MD, route)

    def combine_end(self, returning, add_TD: torch.Tensor | None = None) -> torch.Tensor:
        return self.current.combine_end(returning, add_TD)

    def traffic(self) -> Traffic:
        total = Traffic.none(self.comm.world)
        for option in self.options:
            total = total + option.traffic()
        return total

    def raise_if_failed(self, patience_s: float = 0.0) -> None:
        for option in self.options:
            option.raise_if_failed(patience_s)

    def watch_peers(self) -> None:
        for option in self.options:
            option.watch_peers()
