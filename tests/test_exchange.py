"""Every exchange against the loops of exchange_reference.py: idle ranks, idle experts, replicas, delays, overflow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from drive import Script, drive, merge
from exchange_cases import (
    Case,
    check_answer,
    check_received,
    home_tokens,
    layer_plan,
    random_case,
    run_case,
    run_cases,
    run_experts,
    shape_of,
    soak,
)
from tiny_checkpoints import save_tiny

from epmoe.moe.alltoall import AllToAll
from epmoe.moe.local import LocalExchange
from epmoe.moe.open_exchange import open_exchange
from epmoe.moe.padded import Padded

KINDS = ["alltoall", "oneshot", "padded"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.soak)])
def test_random_layers(rank_pool, world, kind):
    rng = np.random.default_rng(world)
    cases = [random_case(rng, world, exchange=kind) for _ in range(24)]
    rank_pool(world).run(run_cases, cases)


CORNERS = {
    "no tokens anywhere": Case(seed=1, tokens_W=(0, 0, 0, 0)),
    "one rank has tokens": Case(seed=2, tokens_W=(0, 7, 0, 0)),
    "one token": Case(seed=3, tokens_W=(1, 0, 0, 0), top_k=1),
    "one expert takes all": Case(seed=4, only=(5,), top_k=1),
    "10 experts on 4 ranks": Case(seed=5, experts=10, top_k=4),
    "padding only": Case(seed=6, padding=1.0),
    "every expert chosen and copied": Case(seed=7, experts=4, top_k=4, copies=4),
    "replicas by table": Case(seed=8, experts=9, top_k=3, copies=9, served="table", tokens_W=(0, 5, 1, 30)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("combine", ["exact", "reduce"])
def test_corners_on_four_ranks(rank_pool, combine, kind):
    cases = [replace(case, combine=combine, exchange=kind) for case in CORNERS.values()]
    rank_pool(4).run(run_cases, cases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_rounds_with_delays_and_poisoned_buffers(rank_pool, world, kind):
    rank_pool(world).run(soak, kind, 100 + world, 32, 24)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_thousand_rounds(rank_pool, world, kind):
    rank_pool(world).run(soak, kind, world, 1000, timeout_s=1800)


def both_lanes(comm, case: Case) -> None:
    """Two micro-batches under way at once, the second one empty on some ranks."""
    plan = layer_plan(case, comm.world)
    local = plan.slots[0][comm.rank]
    exchange = open_exchange(comm, shape_of(case, plan), case.exchange)
    lanes = [case, replace(case, seed=case.seed, tokens_W=(0, 4, 0, 2))]
    all_tokens = [[home_tokens(c, plan, rank) for rank in range(comm.world)] for c in lanes]
    mine = [tokens[comm.rank] for tokens in all_tokens]
    exchange.begin_step(5)
    sending = [exchange.dispatch_begin(t.x_TD, t.slot_TK, t.weight_TK, lane) for lane, t in enumerate(mine)]
    sending = [exchange.dispatch_send(each) for each in sending]
    routes, outs = [], []
    for lane, c in enumerate(lanes):
        received, route = exchange.dispatch_end(sending[lane], len(local))
        check_received(comm, c, plan, all_tokens[lane], received)
        routes.append(route)
        outs.append(run_experts(c, local, received))
    returning = [exchange.combine_begin(outs[lane], routes[lane]) for lane in (0, 1)]
    for lane, c in enumerate(lanes):
        check_answer(comm, c, plan, mine[lane], exchange.combine_end(returning[lane], mine[lane].add_TD))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("combine", ["exact", "reduce"])
def test_two_lanes_do_not_mix(rank_pool, combine, kind):
    rank_pool(4).run(both_lanes, Case(seed=30, combine=combine, exchange=kind))


def traffic_and_fan_out(comm, case: Case):
    plan = layer_plan(case, comm.world)
    traffic = run_case(comm, case).traffic()
    chosen = home_tokens(case, plan, comm.rank).slot_TK.tolist()
    ranks = [[slot // plan.max_slots for slot in slots if slot >= 0] for slots in chosen]
    distinct = [sum(w in r for r in ranks) for w in range(comm.world)]
    return traffic, distinct, [sum(r.count(w) for r in ranks) for w in range(comm.world)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_sent_once_per_distinct_rank(rank_pool, kind):
    case = Case(seed=11, experts=6, top_k=4, tokens_W=(20, 0, 7), exchange=kind)
    for rank, (traffic, rows, pairs) in enumerate(rank_pool(3).run(traffic_and_fan_out, case)):
        assert traffic.rows_W.tolist() == rows and traffic.pairs_W.tolist() == pairs
        assert traffic.tokens == case.tokens_W[rank]
        row_bytes = case.hidden * 4
        assert (traffic.dispatch_bytes_W >= traffic.rows_W * row_bytes).all()
        report = traffic.report()
        assert 0 <= report["padding"] <= 1 and report["fan_out"] == pytest.approx(sum(rows) / max(1, traffic.tokens))


def overflow(comm, case: Case) -> tuple[bool, bool, bool]:
    """A step with too little room says so on every rank, and with exact sizes it is right."""
    plan = layer_plan(case, comm.world)
    exchange = open_exchange(comm, replace(shape_of(case, plan), capacity_factor=case.capacity_factor), "padded")
    exchange.begin_step(max(case.tokens_W))
    could = exchange.may_overflow
    mine = home_tokens(case, plan, comm.rank)
    local = plan.slots[0][comm.rank]
    received, route = exchange.dispatch_end(
        exchange.dispatch_begin(mine.x_TD, mine.slot_TK, mine.weight_TK), len(local)
    )
    y = exchange.combine_end(exchange.combine_begin(run_experts(case, local, received), route), mine.add_TD)
    assert y.shape == mine.x_TD.shape and not y.isnan().any(), "a dropped row brought NaN"
    flag, room = bool(exchange.overflowed()), exchange.layout.rows
    traffic = exchange.traffic()
    assert (traffic.rows_W <= room).all() and 0 <= traffic.report()["padding"] <= 1, "dropped rows count as sent"
    if not flag:
        check_answer(comm, case, plan, mine, y)
    exchange.begin_step(max(case.tokens_W), exact=True)
    run_case(comm, replace(case, capacity_factor=0.0), Exact(exchange))
    return could, flag, exchange.may_overflow


def more_than_agreed(comm, case: Case) -> str:
    plan = layer_plan(case, comm.world)
    exchange, mine = open_exchange(comm, shape_of(case, plan), "padded"), home_tokens(case, plan, comm.rank)
    exchange.begin_step(3)
    try:
        exchange.dispatch_begin(mine.x_TD, mine.slot_TK, mine.weight_TK)
    except AssertionError as error:
        return str(error)
    return "rows past the agreed number were dropped"


def test_padded_blocks_take_no_more_than_was_agreed(rank_pool):
    assert rank_pool(2).run(more_than_agreed, Case(seed=44, tokens_W=(5, 5))) == ["5 tokens in a step of at most 3"] * 2


class Exact:
    """An exchange whose steps have been begun already."""

    def __init__(self, exchange) -> None:
        self.exchange = exchange

    def begin_step(self, tokens: int) -> None:
        pass

    def __getattr__(self, name):
        return getattr(self.exchange, name)


@pytest.mark.parametrize("combine", ["exact", "reduce"])
@pytest.mark.parametrize(
    "case, flag",
    [
        (Case(seed=40, only=(2,), top_k=1, tokens_W=(2, 2, 30, 0), capacity_factor=1.2), True),
        (Case(seed=41, top_k=2, tokens_W=(16, 16, 16, 16), capacity_factor=0.1), True),
        (Case(seed=42, top_k=2, tokens_W=(0, 0, 0, 0), capacity_factor=1.0), False),
        (Case(seed=43, experts=16, top_k=4, tokens_W=(40, 0, 0, 1), capacity_factor=3.0), False),
    ],
    ids=["all to one rank", "too small", "no tokens", "room enough"],
)
def test_overflow_is_seen_by_all_and_loses_nothing(rank_pool, case, flag, combine):
    for could, seen, after in rank_pool(4).run(overflow, replace(case, combine=combine)):
        assert seen == flag and not after
        assert could or not flag


def local_and_others(comm, case: Case) -> None:
    plan = layer_plan(case, 1)
    for kind in (AllToAll, Padded, LocalExchange):
        traffic = run_case(comm, case, kind(comm, shape_of(case, plan))).traffic()
        assert (traffic.tokens == 0) == (kind is LocalExchange), "a replayed graph would not count"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_has_one_answer_in_any_exchange(rank_pool, dtype):
    rank_pool(1).run(local_and_others, Case(seed=5, tokens_W=(9,), dtype=dtype))


def swap_two_rows(comm, case: Case) -> list[bool]:
    """Whether the check of the rows, and that of the answer, see that two rows changed places."""
    plan = layer_plan(case, comm.world)
    exchange = open_exchange(comm, shape_of(case, plan), case.exchange)
    tokens = [home_tokens(case, plan, rank) for rank in range(comm.world)]
    mine, local = tokens[comm.rank], plan.slots[0][comm.rank]
    received, route = exchange.dispatch_end(
        exchange.dispatch_begin(mine.x_TD, mine.slot_TK, mine.weight_TK), len(local)
    )
    rows = received.rows_RD.clone()
    rows[[0, 1]] = rows[[1, 0]]
    swapped = replace(received, rows_RD=rows)
    y = exchange.combine_end(exchange.combine_begin(run_experts(case, local, swapped), route), mine.add_TD)
    seen = []
    for check, args in ((check_received, (tokens, swapped)), (check_answer, (mine, y))):
        try:
            check(comm, case, plan, *args)
            seen.append(False)
        except AssertionError:
            seen.append(True)
    return seen


def test_the_checks_can_fail(rank_pool):
    rows, answer = zip(*rank_pool(2).run(swap_two_rows, Case(seed=3, experts=4, top_k=4, tokens_W=(5, 5))))
    assert all(rows) and answer[0], "the swapped rows are tokens of rank 0"


def overflow_script() -> Script:
    rng = np.random.default_rng(0)
    lengths = [40, 1, 9, 9, 30]
    params = {"temperature": 0.7, "max_tokens": 6, "seed": 3}
    return Script([(n, rng.integers(1, 300, length).tolist(), params) for n, length in enumerate(lengths)])


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_run_that_overflows_is_the_run_that_does_not(tmp_path, rank_pool, overlap):
    """Same tokens and loads; some steps ran twice."""
    model = str(save_tiny(tmp_path, "qwen2_moe", num_experts=10, top_k=3))
    config = {"model": model, "ranks": 2, "max_model_len": 128, "num_blocks": 64, "overlap": overlap}
    config |= {"deterministic": True, "exchange": "alltoall", "max_batch_tokens": 64}
    plain = rank_pool(2).run(drive, config, overflow_script())
    tight = rank_pool(2).run(drive, config | {"exchange": "padded", "capacity_factor": 0.8}, overflow_script())
    assert merge(tight).tokens == merge(plain).tokens
    assert [r.report["load_LE"] for r in tight] == [r.report["load_LE"] for r in plain]
    reruns = [r.report["reruns"] for r in tight]
    assert reruns[0] == reruns[1] > 0 and plain[0].report["reruns"] == 0


@pytest.mark.parametrize("kind", ["padded", "oneshot", "auto"])
def test_engines_with_any_exchange_draw_the_same_bits(tmp_path, rank_pool, kind):
    model = str(save_tiny(tmp_path, "mixtral"))
    config = {"model": model, "ranks": 3, "max_model_len": 128, "num_blocks": 64, "deterministic": True}
    script = replace(overflow_script(), want_logits=True)
    plain = merge(rank_pool(3).run(drive, config, script))
    config |= {"exchange": kind, "overlap": "off" if kind == "oneshot" else "on"}
    other = merge(rank_pool(3).run(drive, config, script))
    assert other.tokens == plain.tokens
    assert all(torch.equal(logits, plain.logits[key]) for key, logits in other.logits.items())
