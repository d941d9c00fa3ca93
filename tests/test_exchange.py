"""The exchange against the loops of reference.py, on every rank count, with idle ranks, idle experts and replicas.

Every rank builds all ranks' data from one seed and checks its own part; a row's payload is a function of its global
token index, so a row that went astray says who it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from reference import exchange_exact, exchange_reduce

from epmoe.moe.alltoall import AllToAll
from epmoe.moe.exchange import ExchangeShape
from epmoe.moe.local import LocalExchange
from epmoe.moe.open_exchange import open_exchange
from placement.plan import MoEShape, make_plan

NAN = float("nan")
SPAN = 1000  # global token index = SPAN * home rank + local index


@dataclass(frozen=True)
class Case:
    """One MoE layer. ``tokens_W``: tokens of each home rank; ``only``: the experts that any token may choose."""

    seed: int
    experts: int = 8
    top_k: int = 2
    hidden: int = 16
    dtype: torch.dtype = torch.float32
    combine: str = "exact"
    tokens_W: tuple[int, ...] = (5, 5, 5, 5)
    only: tuple[int, ...] | None = None
    padding: float = 0.0
    copies: int = 0
    served: str = "own-copy"


def layer_plan(case: Case, world: int):
    """Every rank holds at least one expert, else at random; ``copies`` of them are held a second time elsewhere."""
    rng = np.random.default_rng(case.seed)
    held = [[] for _ in range(world)]
    for n, expert in enumerate(rng.permutation(case.experts)):
        held[n if n < world else rng.integers(world)].append(int(expert))
    for expert in rng.permutation(case.experts)[: case.copies]:
        free = [rank for rank in range(world) if expert not in held[rank]]
        for rank in rng.permutation(free)[: rng.integers(1, len(free) + 1)] if free else []:
            held[rank].append(int(expert))
    plan = make_plan(MoEShape((0,), case.experts, case.top_k), world, [held])
    if case.served == "table":  # any copy may serve any home
        holders = [[r for r in range(world) if e in held[r]] for e in range(case.experts)]
        serve = [[[rng.choice(h) for h in holders]] for _ in range(world)]
        plan = replace(plan, serve=np.array(serve, np.int32))
    return plan


def shape_of(case: Case, plan) -> ExchangeShape:
    return ExchangeShape(plan.max_slots, max(case.tokens_W), case.hidden, case.top_k, case.dtype, case.combine)


def home_tokens(case: Case, rank: int):
    """x, chosen experts (-1: padding), weights and the shared experts' output of one home rank's tokens."""
    T = case.tokens_W[rank]
    rng = np.random.default_rng([case.seed, rank])
    pool = np.arange(case.experts) if case.only is None else np.array(case.only)
    expert = np.array([rng.permutation(pool)[: case.top_k] for _ in range(T)], np.int32).reshape(T, case.top_k)
    expert[rng.random(expert.shape) < case.padding] = -1
    weight = rng.random(expert.shape, np.float32)
    weight[expert < 0] = NAN  # a choice that goes nowhere must not be multiplied
    x = torch.stack([row_of(SPAN * rank + t, case) for t in range(T)]) if T else torch.empty(0, case.hidden)
    add = torch.from_numpy(rng.standard_normal((T, case.hidden), np.float32))
    return x.to(case.dtype), torch.from_numpy(expert), torch.from_numpy(weight), add.to(case.dtype)


def row_of(token: int, case: Case) -> torch.Tensor:
    rng = np.random.default_rng([case.seed, 7, token])
    return torch.from_numpy(rng.standard_normal(case.hidden, np.float32)).to(case.dtype)


def expert_row(expert: int, row: torch.Tensor) -> torch.Tensor:
    """A stand-in for an expert's MLP that only that expert gives; elementwise, so any batch has the same bits."""
    return row.float() * (1 + 0.37 * expert) + (expert - 2) / 3


def run_case(comm, case: Case, exchange=None):
    """One layer on this rank, checked here. Returns the (token, choice) pairs this rank's experts served."""
    plan = layer_plan(case, comm.world)
    exchange = exchange or open_exchange(comm, shape_of(case, plan))
    x, expert, weight, add = home_tokens(case, comm.rank)
    slots = torch.from_numpy(np.append(plan.serve_slot_LE(comm.rank)[0], -1))[expert.long()].int()
    sending = exchange.dispatch_begin(x, slots, weight)
    received, route = exchange.dispatch_end(sending, len(plan.slots[0][comm.rank]))
    served = check_received(comm, case, plan, received)
    out = run_experts(case, plan.slots[0][comm.rank], received)
    y = exchange.combine_end(exchange.combine_begin(out, route), add)
    check_answer(comm, case, plan, (x, slots, weight, add), y)
    return served


def check_received(comm, case: Case, plan, received):
    """The rows are exactly the tokens that chose an expert this rank serves, once each, in (home, token) order."""
    want, pairs = [], []
    for home in range(comm.world):
        serving = plan.serve_rank_WLE[home, 0]
        for t, experts in enumerate(home_tokens(case, home)[1].tolist()):
            mine = [k for k, e in enumerate(experts) if e >= 0 and serving[e] == comm.rank]
            if mine or comm.world == 1:
                want.append((home, t))
            pairs += [(SPAN * home + t, k, experts[k]) for k in mine]
    rows = received.rows_RD
    assert received.R_cap == len(rows) == len(want) and rows.dtype == case.dtype
    for row, (home, t) in zip(rows, want):
        assert torch.equal(row, row_of(SPAN * home + t, case)), f"row of token {t} of rank {home} is another one"
    homes = [home for home, _ in want]
    assert received.count_W.tolist() == [homes.count(w) for w in range(comm.world)]
    assert (received.weight_RK is None) == (case.combine == "exact" or comm.world == 1)
    index, local = received.index, plan.slots[0][comm.rank]
    assert index.offset_L1[0] == 0 and index.offset_L1[-1] == len(pairs) <= received.M_cap
    served = []
    for r, (home, t) in enumerate(want):
        for k, m in enumerate(index.pos_RK[r].tolist()):
            if m >= 0:
                slot = int(torch.searchsorted(index.offset_L1, m, right=True)) - 1
                assert index.row_M[m] == r
                served.append((SPAN * home + t, k, local[slot]))
    assert sorted(served) == sorted(pairs), "a (token, choice) was served by the wrong expert, twice or not at all"
    return served


def run_experts(case: Case, local: tuple[int, ...], received) -> torch.Tensor:
    """Outputs in pair order; the rows past the last pair are NaN, as real kernels leave garbage there."""
    index = received.index
    out = torch.full((len(index.row_M) + 3, case.hidden), NAN, dtype=case.dtype)
    for slot, expert in enumerate(local):
        for m in range(index.offset_L1[slot], index.offset_L1[slot + 1]):
            out[m] = expert_row(expert, received.rows_RD[index.row_M[m]]).to(case.dtype)
    return out


def check_answer(comm, case: Case, plan, tokens, y) -> None:
    x, slots, weight, add = tokens
    expert_of = plan.slot_expert_LS[0]
    exact = exchange_exact(x, slots, weight, lambda slot, row: expert_row(int(expert_of[slot]), row), add)
    assert y.dtype == case.dtype and y.shape == x.shape
    if case.combine == "exact" or comm.world == 1:
        assert torch.equal(y, exact), "exact mode is not bitwise the loops"
        return
    stride = plan.max_slots
    loops = exchange_reduce(x, slots, weight, lambda slot, row: expert_row(int(expert_of[slot]), row), stride, add)
    assert torch.equal(y, loops), "reduce mode is not bitwise the loops"
    if len(y):
        bound = {torch.float32: 1e-6, torch.bfloat16: 3e-2}[case.dtype] * exact.float().abs().max()
        assert (y.float() - exact.float()).abs().max() <= bound


def run_cases(comm, cases: list[Case]):
    served = []
    for case in cases:
        try:
            served.append(run_case(comm, case))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    return served


def random_cases(world: int, count: int) -> list[Case]:
    """Every ingredient at random: an idle rank or expert, padding, one choice, uneven slots, replicas, both dtypes."""
    rng = np.random.default_rng(world)
    cases = []
    for seed in range(count):
        experts = int(rng.integers(max(world, 2), 12))
        only = tuple(rng.permutation(experts)[: rng.integers(1, experts + 1)].tolist()) if rng.random() < 0.4 else None
        cases.append(
            Case(
                seed=seed,
                experts=experts,
                top_k=int(rng.integers(1, min(4, experts if only is None else len(only)) + 1)),
                hidden=int(rng.choice([4, 16, 40])),
                dtype=[torch.float32, torch.bfloat16][seed % 2],
                combine=["exact", "reduce"][seed // 2 % 2],
                tokens_W=tuple(rng.choice([0, 0, 1, 3, 9], world).tolist()),
                only=only,
                padding=float(rng.choice([0, 0, 0.3, 1])),
                copies=int(rng.choice([0, experts // 2, experts])),
                served=["own-copy", "table"][seed // 4 % 2],
            )
        )
    return cases


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_layers(rank_pool, world):
    cases = random_cases(world, 48)
    by_rank = rank_pool(world).run(run_cases, cases)
    for number, case in enumerate(cases):
        require_served_once(case, world, [ranks[number] for ranks in by_rank])


def require_served_once(case: Case, world: int, served_W) -> None:
    """Over all ranks every (token, choice) was served exactly once, by a copy of the expert that was chosen."""
    chosen = [
        (SPAN * home + t, k, e)
        for home in range(world)
        for t, experts in enumerate(home_tokens(case, home)[1].tolist())
        for k, e in enumerate(experts)
        if e >= 0
    ]
    assert sorted(pair for served in served_W for pair in served) == sorted(chosen), case


@pytest.mark.parametrize("combine", ["exact", "reduce"])
@pytest.mark.parametrize(
    "case",
    [
        Case(seed=1, tokens_W=(0, 0, 0, 0)),
        Case(seed=2, tokens_W=(0, 7, 0, 0)),
        Case(seed=3, tokens_W=(1, 0, 0, 0), top_k=1),
        Case(seed=4, only=(5,), top_k=1),
        Case(seed=5, experts=10, top_k=4),
        Case(seed=6, padding=1.0),
        Case(seed=7, experts=4, top_k=4, copies=4),
        Case(seed=8, experts=9, top_k=3, copies=9, served="table", tokens_W=(0, 5, 1, 30)),
    ],
    ids=[
        "no tokens anywhere",
        "one rank has tokens",
        "one token",
        "one expert takes all",
        "10 experts on 4 ranks",
        "padding only",
        "every expert chosen and copied",
        "replicas by table",
    ],
)
def test_corners_on_four_ranks(rank_pool, case, combine):
    case = replace(case, combine=combine)
    require_served_once(case, 4, [served[0] for served in rank_pool(4).run(run_cases, [case])])


def both_lanes(comm, case: Case) -> None:
    """Two micro-batches under way at once, the second one empty on some ranks."""
    plan = layer_plan(case, comm.world)
    exchange = open_exchange(comm, shape_of(case, plan))
    lanes = [case, replace(case, seed=case.seed + 1, tokens_W=(0, 4, 0, 2))]
    serve = torch.from_numpy(plan.serve_slot_LE(comm.rank)[0])
    tokens, sending, routes, outs = [], [], [], []
    for lane, c in enumerate(lanes):
        x, expert, weight, add = home_tokens(c, comm.rank)
        tokens.append((x, serve[expert.long()].int(), weight, add))
        sending.append(exchange.dispatch_begin(*tokens[lane][:3], lane))
    for lane, c in enumerate(lanes):
        received, route = exchange.dispatch_end(sending[lane], len(plan.slots[0][comm.rank]))
        routes.append(route)
        outs.append(run_experts(c, plan.slots[0][comm.rank], received))
    returning = [exchange.combine_begin(outs[lane], routes[lane]) for lane in (0, 1)]
    for lane, c in enumerate(lanes):
        y = exchange.combine_end(returning[lane], tokens[lane][3])
        check_answer(comm, c, plan, tokens[lane], y)


@pytest.mark.parametrize("combine", ["exact", "reduce"])
def test_two_lanes_do_not_mix(rank_pool, combine):
    rank_pool(4).run(both_lanes, Case(seed=30, combine=combine))


def fan_out(comm, case: Case):
    plan = layer_plan(case, comm.world)
    exchange = open_exchange(comm, shape_of(case, plan))
    run_case(comm, case, exchange)
    serving = plan.serve_rank_WLE[comm.rank, 0]
    chosen = home_tokens(case, comm.rank)[1].tolist()
    ranks = [{int(serving[e]) for e in experts} for experts in chosen]
    return exchange.traffic().rows_W.tolist(), [sum(w in r for r in ranks) for w in range(comm.world)]


def test_a_token_is_sent_once_per_distinct_rank(rank_pool):
    for sent, distinct in rank_pool(3).run(fan_out, Case(seed=11, experts=6, top_k=4, tokens_W=(20, 0, 7))):
        assert sent == distinct


def local_and_alltoall(comm, case: Case) -> None:
    plan = layer_plan(case, 1)
    run_case(comm, case, AllToAll(comm, shape_of(case, plan)))
    run_case(comm, case, LocalExchange(comm, shape_of(case, plan)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_has_one_answer_in_either_exchange(rank_pool, dtype):
    rank_pool(1).run(local_and_alltoall, Case(seed=5, tokens_W=(9,), dtype=dtype))


def swap_two_rows(comm, case: Case) -> list[bool]:
    """Whether the check of the rows, and that of the answer, see that two rows changed places."""
    plan = layer_plan(case, comm.world)
    exchange = open_exchange(comm, shape_of(case, plan))
    x, expert, weight, add = home_tokens(case, comm.rank)
    slots = torch.from_numpy(plan.serve_slot_LE(comm.rank)[0])[expert.long()].int()
    received, route = exchange.dispatch_end(exchange.dispatch_begin(x, slots, weight), len(plan.slots[0][comm.rank]))
    rows = received.rows_RD.clone()
    rows[[0, 1]] = rows[[1, 0]]
    swapped = replace(received, rows_RD=rows)
    out = run_experts(case, plan.slots[0][comm.rank], swapped)
    y = exchange.combine_end(exchange.combine_begin(out, route), add)
    seen = []
    for check, args in ((check_received, (swapped,)), (check_answer, ((x, slots, weight, add), y))):
        try:
            check(comm, case, plan, *args)
            seen.append(False)
        except AssertionError:
            seen.append(True)
    return seen


def test_the_checks_can_fail(rank_pool):
    rows, answer = zip(*rank_pool(2).run(swap_two_rows, Case(seed=3, experts=4, top_k=4, tokens_W=(5, 5))))
    assert all(rows) and answer[0], "the swapped rows are tokens of rank 0"
