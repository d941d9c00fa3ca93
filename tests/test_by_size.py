"""The exchange of each step's size: one for every size, and what a calibration file may say."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from epmoe.comm import Comm, NoPeerMemory
from epmoe.moe import open_exchange as opening
from epmoe.moe.by_size import costs_from, wire_bytes
from epmoe.moe.exchange import ExchangeShape
from epmoe.moe.open_exchange import open_exchange
from epmoe.moe.padded import block_layout
from placement.errors import UserError


def shape(max_tokens: int = 2048, capacity_factor: float = 0.0, graph_tokens: int = 0) -> ExchangeShape:
    return ExchangeShape(4, max_tokens, 64, 2, torch.float32, "exact", capacity_factor, graph_tokens)


class CapturedBlocks:
    """Stands for `Padded` on GPUs."""

    name = "padded"
    capturable, waits_for_counts, may_overflow, buffer_bytes = True, False, False, 0

    def __init__(self, comm, shape) -> None:
        self.comm, self.shape = comm, shape

    def begin_step(self, tokens: int, exact: bool = False) -> None:
        assert tokens <= self.shape.max_tokens


@pytest.mark.parametrize("requests", [64, 512, 1000, 2048])
def test_gpus_without_peer_memory_have_an_exchange_for_every_graph(monkeypatch, requests):
    """Steps that are graphs need one that can be captured, however many requests a rank runs."""

    def no_memory(*_):
        raise NoPeerMemory("the ranks are on several hosts")

    monkeypatch.setattr(opening, "_p2p", no_memory)
    monkeypatch.setattr(opening, "Padded", CapturedBlocks)
    comm = SimpleNamespace(rank=0, world=2, device=SimpleNamespace(type="cuda"), on_nccl=True)
    exchange = open_exchange(comm, shape(graph_tokens=requests), "auto")
    assert exchange.capturable
    for tokens in (1, requests, requests + 1, 2048):
        if tokens <= 2048:
            exchange.begin_step(tokens)
            assert exchange.current.capturable or tokens > requests


def test_blocks_in_one_go_are_priced_with_a_row_for_every_token():
    assert wire_bytes("oneshot", shape(), 4, 100) == wire_bytes("oneshot", shape(capacity_factor=0.5), 4, 100)
    assert wire_bytes("padded", shape(), 4, 100) > wire_bytes("padded", shape(capacity_factor=0.5), 4, 100)


def test_rows_in_8_bits_cost_p2p_less_and_the_others_as_much():
    wide = ExchangeShape(4, 2048, 1024, 2, torch.bfloat16, "reduce")
    narrow = replace(wide, wire="fp8")
    assert wire_bytes("p2p", narrow, 4, 100) == pytest.approx(wire_bytes("p2p", wide, 4, 100) * (1 + 1056 / 2048) / 2)
    for name in ("alltoall", "oneshot", "padded"):
        assert wire_bytes(name, narrow, 4, 100) == wire_bytes(name, wide, 4, 100)


def test_a_huge_capacity_is_a_row_for_every_token():
    assert block_layout(shape(capacity_factor=1e308), 4, 100, False) == block_layout(shape(), 4, 100, False)


@pytest.mark.parametrize("latency", ["-1", "NaN", "1" + "0" * 400])
def test_times_that_are_none_are_refused(latency):
    with pytest.raises(UserError) as caught:
        costs_from(f'{{"costs": {{"padded": {{"latency_us": {latency}, "gb_per_s": 1}}}}}}', "costs.json")
    assert str(caught.value).startswith("costs.json ")


def test_one_rank_needs_none():
    assert open_exchange(Comm(0, 1, torch.device("cpu")), shape(), "padded").name == "local"
