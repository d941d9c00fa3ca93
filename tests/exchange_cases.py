"""One MoE layer through an exchange on this rank, checked against the loops of exchange_reference.py.

Every rank builds all ranks' data from one seed and checks its own part; a row's payload is a function of its global
token index, so a row that went astray says who it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from exchange_reference import Row, exchange_exact, exchange_reduce, received_rows

from epmoe.moe.exchange import Exchange, ExchangeShape
from epmoe.moe.open_exchange import open_exchange
from placement.plan import MoEShape, Plan, make_plan

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """One MoE layer. ``tokens_W``: tokens of each home rank; ``only``: the experts that any token may choose.

    ``coarse``: values of few bits, whose products and sums are exact: GPUs multiply and add with one rounding, the
    loops with two.
    """

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
    exchange: str = "alltoall"
    capacity_factor: float = 0.0
    coarse: bool = False


@dataclass(frozen=True)
class Tokens:
    """One home rank's tokens: rows, global slots (-1: padding), weights, the shared experts' output."""

    x_TD: torch.Tensor
    slot_TK: torch.Tensor
    weight_TK: torch.Tensor
    add_TD: torch.Tensor

    def to(self, device: torch.device) -> Tokens:
        return Tokens(*(tensor.to(device) for tensor in vars(self).values()))


def layer_plan(case: Case, world: int) -> Plan:
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


def home_tokens(case: Case, plan: Plan, rank: int) -> Tokens:
    """What a home rank has, on the host."""
    T = case.tokens_W[rank]
    rng = np.random.default_rng([case.seed, rank])
    pool = np.arange(case.experts) if case.only is None else np.array(case.only)
    expert = np.array([rng.permutation(pool)[: case.top_k] for _ in range(T)], np.int32).reshape(T, case.top_k)
    expert[rng.random(expert.shape) < case.padding] = -1
    weight = rng.random(expert.shape, np.float32)
    weight[expert < 0] = NAN  # a choice that goes nowhere must not be multiplied
    slot = np.append(plan.serve_slot_LE(rank)[0], -1)[expert].astype(np.int32)
    x, add = rng.standard_normal((2, T, case.hidden), np.float32)
    if case.coarse:
        x, add, weight = np.round(4 * x) / 4, np.round(4 * add) / 4, np.round(16 * weight) / 16
    x, add = torch.from_numpy(x).to(case.dtype), torch.from_numpy(add).to(case.dtype)
    return Tokens(x, torch.from_numpy(slot), torch.from_numpy(weight), add)


def shape_of(case: Case, plan: Plan) -> ExchangeShape:
    most = max(*case.tokens_W, 1)
    sizes = (case.hidden, case.top_k, case.dtype, case.combine, case.capacity_factor)
    return ExchangeShape(plan.max_slots, most, *sizes)


def expert_row(case: Case, expert: int, row: torch.Tensor) -> torch.Tensor:
    """A stand-in for an expert's MLP that only that expert gives; elementwise, so any batch has the same bits."""
    if case.coarse:
        return row.float() * (1 + expert) + expert
    return row.float() * (1 + 0.37 * expert) + (expert - 2) / 3


def run_experts(case: Case, local: tuple[int, ...], received) -> torch.Tensor:
    """Outputs in pair order; the rows past the last pair are NaN, as real kernels leave garbage there."""
    index = received.index
    out = torch.full((len(index.row_M) + 3, case.hidden), NAN, dtype=case.dtype)
    offsets, row_M, rows = index.offset_L1.tolist(), index.row_M.tolist(), received.rows_RD.cpu()
    for slot, expert in enumerate(local):
        for m in range(offsets[slot], offsets[slot + 1]):
            out[m] = expert_row(case, expert, rows[row_M[m]]).to(case.dtype)
    return out.to(received.rows_RD.device)


def run_case(comm, case: Case, exchange: Exchange | None = None, pause=lambda: None) -> Exchange:
    """One layer on this rank, checked here; ``pause`` is called between the stages."""
    plan = layer_plan(case, comm.world)
    tokens = [home_tokens(case, plan, rank) for rank in range(comm.world)]
    mine = tokens[comm.rank].to(comm.device)
    exchange = exchange or open_exchange(comm, shape_of(case, plan), case.exchange)
    exchange.begin_step(max(case.tokens_W))
    pause()
    sending = exchange.dispatch_begin(mine.x_TD, mine.slot_TK, mine.weight_TK)
    pause()
    sending = exchange.dispatch_send(sending)
    pause()
    local = plan.slots[0][comm.rank]
    received, route = exchange.dispatch_end(sending, len(local))
    check_received(comm, case, plan, tokens, received)
    out = run_experts(case, local, received)
    pause()
    returning = exchange.combine_begin(out, route)
    pause()
    y = exchange.combine_end(returning, mine.add_TD)
    check_answer(comm, case, plan, tokens[comm.rank], y)
    return exchange


def check_received(comm, case: Case, plan: Plan, tokens: list[Tokens], received) -> None:
    """The rows that a slot points to are exactly those of the loops, in their order, each choice in its own slot."""
    want = received_rows([each.slot_TK for each in tokens], comm.rank, plan.max_slots)
    index = received.index
    pos_RK, offset_L1, row_M = index.pos_RK.cpu(), index.offset_L1.cpu(), index.row_M.cpu()
    rows = received.rows_RD.cpu()
    got = [r for r in range(len(pos_RK)) if (pos_RK[r] >= 0).any()]
    assert len(got) == len(want), f"{len(got)} rows with a local slot, {len(want)} were sent"
    assert len(pos_RK) == len(rows) == received.R_cap and rows.dtype == case.dtype
    for r, (home, token, local_K) in zip(got, want):
        assert torch.equal(rows[r], tokens[home].x_TD[token]), f"row of token {token} of rank {home} is another one"
        assert slots_of(pos_RK[r], offset_L1) == local_K, f"token {token} of rank {home} is in the wrong slots"
        assert all(row_M[m] == r for m in pos_RK[r].tolist() if m >= 0)
    check_sizes(comm, case, want, received)


def slots_of(pos_K: torch.Tensor, offset_L1: torch.Tensor) -> list[int]:
    """The slot that owns each pair number."""
    slot_K = torch.searchsorted(offset_L1, pos_K.contiguous(), right=True) - 1
    return slot_K.where(pos_K >= 0, -1).tolist()


def check_sizes(comm, case: Case, want: list[Row], received) -> None:
    pairs = sum(slot >= 0 for row in want for slot in row.local_K)
    assert received.index.offset_L1[0] == 0 and received.index.offset_L1[-1] == pairs <= received.M_cap
    homes = [row.home for row in want]
    counts = [homes.count(rank) for rank in range(comm.world)] if comm.world > 1 else [case.tokens_W[0]]
    assert received.count_W.tolist() == counts
    assert (received.weight_RK is None) == (case.combine == "exact" or comm.world == 1)


def check_answer(comm, case: Case, plan: Plan, mine: Tokens, y: torch.Tensor) -> None:
    """Bitwise the loops; reduce mode also agrees with exact mode to rounding."""
    y, expert_of, args = y.cpu(), plan.slot_expert_LS[0], (mine.x_TD, mine.slot_TK, mine.weight_TK)

    def expert(slot: int, row: torch.Tensor) -> torch.Tensor:
        return expert_row(case, int(expert_of[slot]), row)

    exact = exchange_exact(*args, expert, mine.add_TD)
    assert y.dtype == case.dtype and y.shape == mine.x_TD.shape
    if case.combine == "exact" or comm.world == 1:
        assert torch.equal(y, exact), "exact mode is not bitwise the loops"
        return
    assert torch.equal(y, exchange_reduce(*args, expert, plan.max_slots, mine.add_TD)), "reduce mode is not the loops"
    if len(y):
        bound = {torch.float32: 1e-6, torch.bfloat16: 3e-2}[case.dtype] * exact.float().abs().max()
        assert (y.float() - exact.float()).abs().max() <= bound


def run_cases(comm, cases: list[Case]) -> None:
    for case in cases:
        try:
            run_case(comm, case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def random_case(rng: np.random.Generator, world: int, most_tokens: int = 9, **fixed) -> Case:
    """Every ingredient at random: an idle rank or expert, padding, one choice, uneven slots, replicas, both dtypes."""
    fewest = fixed.get("top_k", 1)
    experts = int(rng.integers(max(world, 2, fewest), 12))
    only = tuple(rng.permutation(experts)[: rng.integers(fewest, experts + 1)].tolist()) if rng.random() < 0.4 else None
    drawn = {
        "seed": int(rng.integers(1 << 30)),
        "experts": experts,
        "top_k": int(rng.integers(1, min(4, experts if only is None else len(only)) + 1)),
        "hidden": int(rng.choice([4, 16, 40])),
        "dtype": [torch.float32, torch.bfloat16][rng.integers(2)],
        "combine": ["exact", "reduce"][rng.integers(2)],
        "tokens_W": tuple(rng.choice([0, 0, 1, 3, most_tokens], world).tolist()),
        "only": only,
        "padding": float(rng.choice([0, 0, 0.3, 1])),
        "copies": int(rng.choice([0, experts // 2, experts])),
        "served": ["own-copy", "table"][rng.integers(2)],
    }
    return Case(**{**drawn, **fixed})


# What kernels are compiled for: few, as every rank compiles each of them.
COMPILED = (
    {"hidden": 64, "dtype": torch.bfloat16, "top_k": 4, "combine": "exact"},
    {"hidden": 8, "dtype": torch.float32, "top_k": 3, "combine": "reduce"},
    {"hidden": 1024, "dtype": torch.bfloat16, "top_k": 2, "combine": "reduce"},
)


def compiled_cases(world: int, exchange: str, count: int) -> list[Case]:
    """For GPUs: a choice of corners, then cases at random, all of the first two of `COMPILED`."""
    rng = np.random.default_rng(world)
    fixed = {"exchange": exchange, "coarse": True}
    plan = layer_plan(Case(seed=3, experts=5 * world, top_k=4), world)
    fullest = max(plan.slots[0], key=len)  # holds five experts or more
    cases = []
    for sizes in COMPILED[:2]:
        both = {**fixed, **sizes, "experts": 5 * world}
        cases.append(Case(seed=1, **both, tokens_W=(0,) * world))
        cases.append(Case(seed=2, **both, tokens_W=(0,) * (world - 1) + (9,)))
        cases.append(Case(seed=3, **both, tokens_W=(5,) * world, only=tuple(fullest)))  # all to one rank
        cases.append(Case(seed=4, **both, tokens_W=(3,) * world, padding=1.0))
        cases.append(Case(seed=5, **both, tokens_W=(9,) * world, copies=5 * world, served="table"))
    return cases + [random_case(rng, world, **fixed, **COMPILED[n % 2]) for n in range(count)]


def soak(comm, exchange: str, seed: int, rounds: int, tokens: int = 64, limit_s: float = 1e9) -> int:
    """Many layers with sizes, routing and delays at random through few exchanges, with all buffers poisoned; how many.

    One exchange lives through eight rounds with other routing and other sizes up to its token budget.  ``limit_s``:
    begin no more of them later, counted from when all kinds of kernels have run.
    """
    on_gpu = comm.device.type == "cuda"
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills every new tensor with NaN
    try:
        rng, delays = np.random.default_rng(seed), np.random.default_rng([seed, comm.rank])
        base, opened = None, None
        for number in range(rounds):
            if number == 8 * len(COMPILED):
                started = time.monotonic()
            if number % 8 == 0 and number >= 8 * len(COMPILED):
                spent_W = comm.all_gather_headers(np.array([int(1e3 * (time.monotonic() - started))]))
                if spent_W.max() > 1e3 * limit_s:
                    return number
            if number % 8 == 0:
                sizes = COMPILED[number // 8 % len(COMPILED)] if on_gpu else {"hidden": int(rng.choice([8, 64, 1024]))}
                base = random_case(rng, comm.world, tokens, coarse=on_gpu, exchange=exchange, **sizes)
                opened = open_exchange(comm, replace_tokens(base, tokens), exchange)
            sizes = rng.choice([0, 1, 2, 5, tokens // 4, tokens], comm.world, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.1])
            case = replace(base, tokens_W=tuple(sizes.tolist()))
            poison(opened)
            run_case(comm, case, opened, lambda: time.sleep(float(delays.choice([0, 0, 0.0002, 0.002]))))
        return rounds
    finally:
        torch.use_deterministic_algorithms(False)


def replace_tokens(case: Case, tokens: int) -> ExchangeShape:
    return replace(shape_of(case, layer_plan(case, len(case.tokens_W))), max_tokens=tokens)


def poison(exchange: Exchange) -> None:
    """NaN into the buffers that only this rank writes."""
    for lane in getattr(exchange, "_buffers", []):
        for buffer in lane:
            buffer.fill_(NAN)
