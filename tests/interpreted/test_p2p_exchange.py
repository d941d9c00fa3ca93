"""`P2P` through the contract on CPU: every rank's exchange in one process, a stage at a time, kernels interpreted."""

import numpy as np
import pytest
import torch
from p2p_cases import Case, inputs, lockstep_ranks, lockstep_round, reference
from triton import knobs

from epmoe.ops.wire import rounded

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="run by scripts/test with TRITON_INTERPRET=1")


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("copy_from", [100, 0, 5], ids=["put", "copy", "both"])
def test_lanes_and_sizes_take_turns(reduce, copy_from):
    case = Case(2, 4, 6, 2, 16, 3, torch.float16, reduce)
    exchanges = lockstep_ranks(case)
    for exchange in exchanges:
        exchange.copy_from = copy_from
        exchange.memory.local[exchange.layout.at("slot") : exchange.layout.total].fill_(0xFF)
    for seed, (lane, bound, tokens) in enumerate([(0, 6, 4), (1, 5, 5), (0, 2, 0)]):
        for exchange in exchanges:
            exchange.begin_step(bound)
        now = Case(2, tokens, bound, 2, 16, 3, torch.float16, reduce)
        data = inputs(now, seed)
        add = torch.randn(2 * tokens, 16).half()
        y = lockstep_round(exchanges, now, data, lane, add)
        assert torch.equal(y, reference(now, *data, add))
    assert [exchange.failure() for exchange in exchanges] == [None, None]


@pytest.mark.parametrize("copy_from", [100, 0], ids=["put", "copy"])
def test_rows_in_8_bits_are_rounded_alike_wherever_they_go(copy_from):
    case = Case(2, 3, 3, 2, 256, 2, torch.float32, False)
    exchanges = lockstep_ranks(case, wire="fp8")
    for exchange in exchanges:
        exchange.copy_from = copy_from
        exchange.begin_step(3)
    x, slot, weight = inputs(case, 0)
    y = lockstep_round(exchanges, case, (x, slot, weight))
    assert torch.equal(y, reference(case, rounded(x), slot, weight))
    traffic = exchanges[0].traffic()
    assert traffic.dispatch_bytes_W.sum() < 3 * 2 * (256 + 8 + 16) + 200
    assert 0 < traffic.report()["padding"] < 0.1


@pytest.mark.parametrize("copy_from", [100, 0], ids=["put", "copy"])
def test_traffic_counts_what_was_sent(copy_from):
    case = Case(3, 4, 4, 2, 16, 2, torch.float32, False)
    exchanges = lockstep_ranks(case)
    for exchange in exchanges:
        exchange.copy_from = copy_from
        exchange.begin_step(4)
    x, slot, weight = inputs(case, 3)
    lockstep_round(exchanges, case, (x, slot, weight))
    for rank, exchange in enumerate(exchanges):
        mine = slot[rank * 4 : rank * 4 + 4]
        served = torch.where(mine >= 0, mine // 2, -1)
        traffic = exchange.traffic()
        assert traffic.tokens == 4
        assert traffic.rows_W.tolist() == [int((served == w).any(1).sum()) for w in range(3)]
        assert traffic.pairs_W.tolist() == [int((served == w).sum()) for w in range(3)]
        assert traffic.combine_bytes_W.tolist() == (traffic.pairs_W * 64).tolist()


def test_rows_received_are_counted_by_source():
    case = Case(2, 3, 4, 2, 16, 2, torch.float32, False)
    exchanges = lockstep_ranks(case)
    data = inputs(case, 0)
    parts = [[d[:3] for d in data], [d[3:] for d in data]]
    sent = [exchange.dispatch_begin(*part) for exchange, part in zip(exchanges, parts)]
    for rank, exchange in enumerate(exchanges):
        received, _ = exchange.dispatch_end(sent[rank], 2)
        want = [int(((part[1] >= 0) & (part[1] // 2 == rank)).any(1).sum()) for part in parts]
        assert received.count_W.tolist() == want


@pytest.mark.parametrize("copy_from", [100, 0], ids=["put", "copy"])
def test_any_order_of_peers_gives_the_same(copy_from):
    case = Case(4, 2, 2, 2, 16, 2, torch.float32, False)
    exchanges = lockstep_ranks(case)
    traffic = np.ones((4, 4))
    for sender, receiver in ((0, 2), (2, 1), (1, 3), (3, 0)):
        traffic[sender, receiver] = 100
    for exchange in exchanges:
        exchange.copy_from = copy_from
        exchange.expect_traffic(traffic)
        exchange.begin_step(2)
    assert [exchange.lanes[1].ranks.order_VW[0, 0].item() for exchange in exchanges] == [2, 3, 1, 0]
    data = inputs(case, 1)
    assert torch.equal(lockstep_round(exchanges, case, data), reference(case, *data))


@pytest.mark.parametrize("bound,beside,few", [(3, False, True), (256, False, False), (256, True, True)])
def test_a_transfer_that_compute_runs_beside_takes_the_sms_that_it_says(bound, beside, few):
    case = Case(2, 3, bound, 2, 16, 2, torch.float32, False)
    exchanges = lockstep_ranks(case)
    data = inputs(case, 0)
    for rank, exchange in enumerate(exchanges):
        exchange.shares_sms = beside
        exchange.begin_step(bound)
        sending = exchange.dispatch_begin(*(part[rank * 3 : rank * 3 + 3] for part in data))
        assert (sending.by.options.programs == exchange.ctas) == few
