"""Pieces of bench_overlap.py: layers of real weights, and an exchange whose link is emulated on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from epmoe.comm import Comm
from epmoe.model.attention import attend
from epmoe.model.weights import AttentionWeights, DenseMLP, ExpertWeights, LayerWeights, MoEWeights
from epmoe.moe.exchange import Received
from epmoe.moe.layer import MoELayer
from epmoe.moe.overlap import ATTENTION, HEAD, Lane, Step
from epmoe.ops.attention import AttentionBatch
from epmoe.ops.combine import weighted_sum
from epmoe.ops.moe_index import build_index
from epmoe.ops.norm import add_rms_norm
from epmoe.ops.rotary import rotary_table
from epmoe.ops.router import RouterRule

BLOCK = 64  # of the cache, as engines are started on GPUs
PROMPT = 1024  # tokens of a prompt in a prefill step, cached tokens of a request in a decode step
DECODE = 256  # up to so many tokens a step is decoding, one token of each request
DTYPE = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on CPU nothing is timed: it serves the tests


@dataclass(frozen=True)
class Shape:
    """One layer of a model, as a rank of an expert-parallel group has it."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    features: int
    rule: RouterRule
    shared: int = 0  # features of the shared experts
    qk_norm: str | None = None


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 2048, 32, 4, 128, 128, 8, 768, RouterRule(renormalize=True), qk_norm="head"),
        Shape(
            "dsv3-like", 7168, 128, 8, 128, 256, 8, 2048,
            RouterRule("sigmoid", groups=8, top_groups=4, group_score="top2", renormalize=True, scale=2.5),
            shared=2048,
        ),
    )
}  # fmt: skip


def random_weight(*size: int) -> torch.Tensor:
    weight = torch.empty(size, device=DEVICE, dtype=DTYPE)
    for part in weight if len(size) > 2 else [weight]:
        part.copy_(torch.randn(part.shape, device=DEVICE) * size[-1] ** -0.5)
    return weight


def make_layer(shape: Shape, ranks: int) -> LayerWeights:
    """One rank's weights: attention, router, shared experts, and its share of the experts."""
    D, heads, slots = shape.hidden, shape.heads, shape.experts // ranks
    norm = torch.ones(shape.head_dim, device=DEVICE, dtype=DTYPE) if shape.qk_norm else None
    qkv = random_weight((heads + 2 * shape.kv_heads) * shape.head_dim, D)
    attention = AttentionWeights(qkv, None, random_weight(D, heads * shape.head_dim), None, norm, norm)
    experts = ExpertWeights(random_weight(slots, 2 * shape.features, D), random_weight(slots, D, shape.features))
    shared = DenseMLP(random_weight(2 * shape.shared, D), random_weight(D, shape.shared)) if shape.shared else None
    ones = torch.ones(D, device=DEVICE, dtype=DTYPE)
    moe = MoEWeights(random_weight(shape.experts, D), None, None, experts, shared, None)
    return LayerWeights(ones, attention, ones, moe)


@triton.jit
def _later():
    """The time after a short sleep: sixteen SMs that do nothing but read the clock disturb the others."""
    return tl.inline_asm_elementwise(
        "nanosleep.u32 400; mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _move_kernel(rows_ptr, index_ptr, out_ptr, R, D, due_ns, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``out[r] = rows[index[r]]``, no sooner than ``due_ns`` after the start; progress is paced step by step."""
    start = globaltimer()
    ctas = tl.num_programs(0)
    steps = tl.cdiv(tl.cdiv(R, ROWS), ctas)
    for step in range(steps):
        row = (step * ctas + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        source = tl.load(index_ptr + row, mask=row < R, other=0).to(tl.int64)
        for first in range(0, D, COLS):
            col = first + tl.arange(0, COLS)
            mask = (row < R)[:, None] & (col < D)[None, :]
            part = tl.load(rows_ptr + source[:, None] * D + col[None, :], mask=mask)
            tl.store(out_ptr + row.to(tl.int64)[:, None] * D + col[None, :], part, mask=mask)
        due = start + due_ns * (step + 1) // steps
        now = globaltimer()
        while now < due:
            now = _later()


@dataclass(frozen=True)
class Link:
    """The emulated link: GB/s of what leaves the rank, and the CTAs that move it, in clusters of ``cluster``, each with
    ``rows`` parts of 2 KB in flight."""

    gbps: float
    ctas: int
    cluster: int = 1
    rows: int = 16


@dataclass(frozen=True)
class Traffic:
    """What one lane sends and receives in a layer, fixed before capture from the router's own choices.

    Every rank is taken to route as this one does: the rows that this rank sends to the ranks 0 .. W-1 stand for those
    that it receives from them.
    """

    token_R: torch.Tensor  # int32: token of each row
    local_RK: torch.Tensor  # int32 local slots, -1: on another rank
    row_R: torch.Tensor  # int32: 0 .. R - 1
    weight_RK: torch.Tensor
    index_TW: torch.Tensor  # int32: row of (token, rank), or -1
    remote: int  # rows that leave the rank

    @staticmethod
    def of(expert_TK: torch.Tensor, weight_TK: torch.Tensor, ranks: int, slots: int) -> Traffic:
        T, K = expert_TK.shape
        rank_TK = expert_TK.long() // slots
        hit_TW = torch.zeros(T, ranks, dtype=torch.bool, device=DEVICE).scatter_(1, rank_TK, True)
        token_R, dest_R = hit_TW.nonzero(as_tuple=True)
        here_RK = rank_TK[token_R] == dest_R[:, None]
        local_RK = torch.where(here_RK, expert_TK[token_R] % slots, -1)
        index_TW = torch.full((T, ranks), -1, dtype=torch.int32, device=DEVICE)
        index_TW[token_R, dest_R] = torch.arange(len(token_R), dtype=torch.int32, device=DEVICE)
        row_R = torch.arange(len(token_R), dtype=torch.int32, device=DEVICE)
        remote = int((dest_R != 0).sum())
        return Traffic(token_R.int(), local_RK.int(), row_R, weight_TK[token_R], index_TW, remote)


class EmulatedExchange:
    """The contract of ``epmoe.moe.exchange`` in reduce mode, the experts forming each row's weighted sum: C CTAs move
    the real bytes within this GPU's memory, paced to the link.  ``traffic``: by lane."""

    name = "emulated"
    capturable = True
    waits_for_counts = may_overflow = False

    def __init__(self, ranks: int, link: Link, hidden: int) -> None:
        self.comm = Comm(0, ranks, torch.device(DEVICE))
        self.link, self.ctas, self.hidden = link, link.ctas, hidden
        self.traffic: dict[int, Traffic] = {}  # by lane

    def _move(self, rows_ND: torch.Tensor, index_R: torch.Tensor, traffic: Traffic) -> torch.Tensor:
        if DEVICE == "cpu":
            return rows_ND[index_R.long()]
        R = len(index_R)
        out_RD = torch.empty(R, self.hidden, dtype=DTYPE, device=DEVICE)
        if R:
            due_ns = round(traffic.remote * self.hidden * DTYPE.itemsize / self.link.gbps)
            each = self.link.cluster  # CTAs of a program
            _move_kernel[(self.link.ctas // each,)](
                rows_ND, index_R, out_RD, R, self.hidden, due_ns,
                ROWS=self.link.rows * each, COLS=1024, num_warps=16, num_ctas=each,
            )  # fmt: skip
        return out_RD

    def dispatch_begin(self, x_TD, slot_TK, weight_TK, lane: int = 0):
        traffic = self.traffic[lane]
        return traffic, self._move(x_TD, traffic.token_R, traffic), lane

    def dispatch_send(self, sending):
        return sending

    def dispatch_end(self, sending, num_slots: int):
        traffic, rows_RD, lane = sending
        R, K = traffic.local_RK.shape
        index = build_index(traffic.local_RK, num_slots)
        pairs = int(traffic.index_TW.shape[0] * K)
        received = Received(rows_RD, R, R * K, pairs, traffic.row_R[:0], index, traffic.weight_RK)
        return received, (traffic, received, lane)

    def combine_begin(self, out_RD, route):
        traffic, received, lane = route
        return traffic, self._move(out_RD, traffic.row_R, traffic)

    def combine_end(self, returning, add_TD=None):
        traffic, rows_RD = returning
        return weighted_sum(rows_RD, traffic.index_TW, None, add_TD)


@dataclass(frozen=True)
class SummingLayer(MoELayer):
    """A layer whose experts form each received row's weighted sum, so that what returns are plain rows."""

    def experts(self, received: Received, num_sms: int = 0) -> torch.Tensor:
        return weighted_sum(super().experts(received, num_sms), received.index.pos_RK, received.weight_RK)


@dataclass(frozen=True)
class LaneInput:
    """Hidden rows of one lane and where its tokens stand."""

    x_TD: torch.Tensor
    attention: AttentionBatch
    cos_sin: torch.Tensor


def cut(query_lens: list[int], kv_lens: list[int], tokens: int) -> list[tuple[list[int], list[int]]]:
    """Two lanes of about equal tokens; a prompt in the middle is cut."""
    first: tuple[list[int], list[int]] = ([], [])
    rest: tuple[list[int], list[int]] = ([], [])
    left = tokens - tokens // 2
    for count, kv in zip(query_lens, kv_lens):
        early = min(count, left)
        left -= early
        if early:
            first[0].append(early)
            first[1].append(kv - (count - early))
        if count > early:
            rest[0].append(count - early)
            rest[1].append(kv)
    return [first, rest]


def step_lengths(tokens: int) -> tuple[list[int], list[int]]:
    """Queries and cached tokens of each sequence of a step: decoding up to DECODE tokens, whole prompts beyond."""
    if tokens <= DECODE:
        return [1] * tokens, [PROMPT] * tokens
    lengths = [PROMPT] * (tokens // PROMPT) + ([tokens % PROMPT] if tokens % PROMPT else [])
    return lengths, list(lengths)


def lane_input(x_TD: torch.Tensor, lens: tuple[list[int], list[int]], first_block: list[int], table) -> LaneInput:
    """A lane of sequences with ``lens`` = (queries, cached tokens); ``first_block`` of each in the cache."""
    query_lens, kv_lens = lens
    positions = [p for q, kv in zip(query_lens, kv_lens) for p in range(kv - q, kv)]
    slots = [b * BLOCK + p for b, q, kv in zip(first_block, query_lens, kv_lens) for p in range(kv - q, kv)]
    width = max((-(-kv // BLOCK) for kv in kv_lens), default=1)
    blocks = [[b + i for i in range(width)] for b in first_block]
    batch = AttentionBatch(
        query_lens=query_lens,
        kv_lens=kv_lens,
        block_table_NP=torch.tensor(blocks, dtype=torch.int32, device=DEVICE).view(len(blocks), width),
        position_T=torch.tensor(positions, dtype=torch.int64, device=DEVICE),
        slot_T=torch.tensor(slots, dtype=torch.int64, device=DEVICE),
        block_size=BLOCK,
    )
    return LaneInput(x_TD, batch, table[batch.position_T])


class Rank:
    """One rank of ``ranks``: layers of real weights (fewer distinct ones than layers, to fit), a cache, the link."""

    def __init__(self, shape: Shape, ranks: int, layers: int, distinct: int) -> None:
        self.shape, self.ranks, self.layers = shape, ranks, layers
        self.slots = shape.experts // ranks
        weights = [make_layer(shape, ranks) for _ in range(distinct)]
        self.weights = [weights[n % distinct] for n in range(layers)]
        self.blocks = 8192 // BLOCK + 1024
        self.blocks = max(self.blocks, DECODE * (PROMPT // BLOCK) + 64)
        size = (2, 2, shape.kv_heads, self.blocks, BLOCK, shape.head_dim)
        self.cache = torch.zeros(size, device=DEVICE, dtype=DTYPE)
        self.table = rotary_table(4096, shape.head_dim, 1e6, DTYPE).to(DEVICE)
        self.config = SimpleNamespace(
            rms_norm_eps=1e-6, head_dim=shape.head_dim, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
            qk_norm=shape.qk_norm, clip_qkv=None,
        )  # fmt: skip
        self.serve_E = torch.arange(shape.experts, dtype=torch.int32, device=DEVICE)
        self.moe: list[MoELayer] = []
        self.held: list[list] = [[], []]  # by lane, see moe.overlap

    def connect(self, exchange: EmulatedExchange) -> None:
        self.exchange = exchange
        layer = SummingLayer if isinstance(exchange, EmulatedExchange) else MoELayer
        self.moe = [
            layer(n, w.mlp, self.shape.rule, self.shape.top_k, self.serve_E, exchange, False)
            for n, w in enumerate(self.weights)
        ]

    def inputs(self, tokens: int, lanes: int) -> list[LaneInput]:
        """The same rows in one lane or two."""
        query_lens, kv_lens = step_lengths(tokens)
        parts = cut(query_lens, kv_lens, tokens) if lanes == 2 else [(query_lens, kv_lens)]
        per = -(-max(kv_lens) // BLOCK)
        firsts = [n * per for n in range(len(query_lens))]
        torch.manual_seed(tokens)
        x_TD = torch.randn(tokens, self.shape.hidden, device=DEVICE).to(DTYPE)
        out, at = [], 0
        for part, rows in zip(parts, x_TD.split([sum(part[0]) for part in parts])):
            starts = firsts[at : at + len(part[0])]
            whole = part is not parts[0] or lanes == 1
            if not whole:
                at += sum(kv == full for kv, full in zip(part[1], kv_lens))
            out.append(lane_input(rows, part, starts, self.table))
        return out

    def fix_traffic(self, lanes: list[LaneInput]) -> None:
        for number, lane in enumerate(lanes):
            routing = self.moe[0].route(lane.x_TD)
            self.exchange.traffic[number] = Traffic.of(routing.expert_TK, routing.weight_TK, self.ranks, self.slots)

    def attention(self, layer: int, x, residual, lane: LaneInput):
        weights, eps = self.weights[layer], 1e-6
        x, residual = add_rms_norm(x, residual, weights.input_norm, eps)
        x = attend(x, weights.attention, self.cache[layer % 2], lane.attention, lane.cos_sin, (self.config, False))
        return add_rms_norm(x, residual, weights.post_norm, eps)

    def lane(self, number: int, lane: LaneInput, num_sms: int) -> Lane[torch.Tensor]:
        """The decoder's lane without embedding and head."""
        x, residual, held = lane.x_TD, torch.zeros_like(lane.x_TD), self.held[number]
        for index in range(self.layers):
            yield Step(ATTENTION, index)
            x, residual = self.attention(index, x, residual, lane)
            x, _ = yield from self.moe[index].stages(x, None, number, num_sms, held)
        yield Step(HEAD, -1)
        return x + residual
