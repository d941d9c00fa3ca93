"""Drawing tokens on the device: greedy, or Gumbel-max with top-k, top-p and min-p cuts, without a sort and without
the host.  What it computes is `ops.sampling.sample`; cuts agree with it to the rounding of sums of probabilities.

A cut keeps the tokens down to some place in the order (larger logit first, then lower id).  That place is found by
bisection over the bits of the logits: floats, seen as integers with the sign folded, compare as they do as numbers, so
16 passes of two bits over a row that stays in the L2 cache find the k-th logit, and 16 more the one at which p is
reached.

A row whose logits are not all finite numbers has no distribution: it gets `UNDRAWN` in place of a token, which travels
to the host with the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from epmoe.ops.launch import pdl_options, wait_for_inputs

BLOCK = 16384
SPAN = 8192  # tokens of the vocabulary that one program draws from
UNDRAWN = -1


@dataclass(frozen=True)
class Draws:
    """Parameters of N draws, on the device.

    Args:
        temperature_N: float32, 0 is greedy.
        top_k_N: int32, 0 keeps all.
        top_p_N, min_p_N: float32; 1 and 0 keep all.
        key_N: int64, the bits of the 64-bit keys of the noise (`ops.sampling.noise_key`).
    """

    temperature_N: torch.Tensor
    top_k_N: torch.Tensor
    top_p_N: torch.Tensor
    min_p_N: torch.Tensor
    key_N: torch.Tensor


@triton.jit
def _ordered(x):
    """uint32 that compares as the float32 does; both zeros are one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def _tokens(logits_ptr, start, V, BLOCK: tl.constexpr):
    """Ids from ``start`` on, their logits, and these in order as integers."""
    v = start + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + v, mask=v < V, other=float("-inf")).to(tl.float32)
    return v, x, _ordered(x)


@triton.jit
def _weight(x, peak, temperature, BY_MASS: tl.constexpr):
    """What a token counts: its probability relative to the likeliest one's, or 1."""
    return tl.exp((x - peak) / temperature) if BY_MASS else tl.zeros_like(x) + 1.0


@triton.jit
def _reached(logits_ptr, V, temperature, peak, bound, floor, last, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many, or the mass of those, that lie at or above ``bound`` and are kept by the cut (floor, last)."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        v, x, order = _tokens(logits_ptr, start, V, BLOCK)
        inside = (v < V) & (order >= bound) & ((order > floor) | ((order == floor) & (v <= last)))
        total += tl.where(inside, _weight(x, peak, temperature, BY_MASS), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _nth_tie(logits_ptr, V, bound, count, BLOCK: tl.constexpr):
    """Id of the ``count``-th token (from 1) whose logit is exactly ``bound``; V if there are fewer."""
    seen = V * 0
    found = V + 0
    for start in range(0, V, BLOCK):
        v, _, order = _tokens(logits_ptr, start, V, BLOCK)
        tie = ((v < V) & (order == bound)).to(tl.int32)
        rank = seen + tl.cumsum(tie, 0)
        found = tl.minimum(found, tl.min(tl.where((tie == 1) & (rank == count), v, V), 0))
        seen += tl.sum(tie, 0)
    return found


@triton.jit
def _bound(logits_ptr, V, temperature, peak, wanted, floor, last, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit (ordered) such that ``wanted`` tokens, or that mass, lie at or above it."""
    bound = tl.zeros([], tl.uint32)
    bit = tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        one, two, three = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            v, x, order = _tokens(logits_ptr, start, V, BLOCK)
            inside = (v < V) & ((order > floor) | ((order == floor) & (v <= last)))
            weight = tl.where(inside, _weight(x, peak, temperature, BY_MASS), 0.0)
            one += tl.where(order >= bound + bit, weight, 0.0)
            two += tl.where(order >= bound + 2 * bit, weight, 0.0)
            three += tl.where(order >= bound + 3 * bit, weight, 0.0)
        steps = (tl.sum(one, 0) >= wanted).to(tl.uint32) + (tl.sum(two, 0) >= wanted).to(tl.uint32)
        bound += bit * (steps + (tl.sum(three, 0) >= wanted).to(tl.uint32))
        bit = bit >> 2
    return bound


@triton.jit(do_not_specialize=["V"])
def _cut_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    floor_ptr,
    last_ptr,
    peak_ptr,
    V,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program n: where row n is cut (ordered logit, and the last id of those equal to it), and its largest logit."""
    wait_for_inputs(PDL)
    n = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + n)
    top_k, top_p, min_p = tl.load(top_k_ptr + n), tl.load(top_p_ptr + n), tl.load(min_p_ptr + n)
    floor = tl.zeros([], tl.uint32)
    last = V + 0
    peak = tl.zeros([], tl.float32)
    by_k = (top_k > 0) & (top_k < V)
    if (temperature > 0) & (by_k | (top_p < 1) | (min_p > 0)):
        logits_ptr += n * V
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, V, BLOCK):
            _, x, _ = _tokens(logits_ptr, start, V, BLOCK)
            best = tl.maximum(best, x)
        peak = tl.max(best, 0)
        if by_k:
            bound = _bound(logits_ptr, V, temperature, peak, top_k.to(tl.float32), floor, last, False, BLOCK)
            above = _reached(logits_ptr, V, temperature, peak, bound + 1, floor, last, False, BLOCK)
            last = _nth_tie(logits_ptr, V, bound, top_k - above.to(tl.int32), BLOCK)
            floor = bound
        if top_p < 1:
            wanted = top_p * _reached(
                logits_ptr, V, temperature, peak, tl.zeros([], tl.uint32), floor, last, True, BLOCK
            )
            bound = _bound(logits_ptr, V, temperature, peak, wanted, floor, last, True, BLOCK)
            if bound > 0:
                above = _reached(logits_ptr, V, temperature, peak, bound + 1, floor, last, True, BLOCK)
                both = _reached(logits_ptr, V, temperature, peak, bound, floor, last, True, BLOCK)
                ties = _reached(logits_ptr, V, temperature, peak, bound, floor, last, False, BLOCK)
                ties -= _reached(logits_ptr, V, temperature, peak, bound + 1, floor, last, False, BLOCK)
                each = (both - above) / tl.maximum(ties, 1.0)
                count = tl.maximum(tl.ceil((wanted - above) / each), 1.0)
                id = _nth_tie(logits_ptr, V, bound, tl.minimum(count, ties).to(tl.int32), BLOCK)
                last = tl.where(bound == floor, tl.minimum(last, id), id)
                floor = bound
    tl.store(floor_ptr + n, floor.to(tl.int32, bitcast=True))
    tl.store(last_ptr + n, last)
    tl.store(peak_ptr + n, peak)


@triton.jit
def _mix32(word):
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def _gumbel(key, v):
    """float32 Gumbel noise of a draw's key and token ids, as `ops.sampling.gumbel_noise`."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    word = _mix32(_mix32(v.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
    uniform = (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(uniform)).to(tl.float32)


@triton.jit(do_not_specialize=["V"])
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    key_ptr,
    floor_ptr,
    last_ptr,
    peak_ptr,
    best_ptr,
    id_ptr,
    V,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, i): the best of tokens i * SPAN.. of row n; an id of -1 if any of these logits is not finite."""
    wait_for_inputs(PDL)
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    v = part * SPAN + tl.arange(0, SPAN)
    temperature = tl.load(temperature_ptr + n)
    score = tl.load(logits_ptr + n * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    broken = tl.max(((v < V) & ~(tl.abs(score) < float("inf"))).to(tl.int32), 0)
    if temperature > 0:
        order, floor = _ordered(score), tl.load(floor_ptr + n).to(tl.uint32, bitcast=True)
        kept = (order > floor) | ((order == floor) & (v <= tl.load(last_ptr + n)))
        kept = kept & (_weight(score, tl.load(peak_ptr + n), temperature, True) >= tl.load(min_p_ptr + n))
        scaled = tl.div_rn(score, tl.zeros_like(score) + temperature)
        score = tl.where(kept & (v < V), scaled + _gumbel(tl.load(key_ptr + n), v), float("-inf"))
    best, at = tl.max(score, 0, return_indices=True)
    spot = n * tl.num_programs(1) + part
    tl.store(best_ptr + spot, best)
    tl.store(id_ptr + spot, tl.where(broken != 0, -1, part * SPAN + at))


@triton.jit
def _pick_kernel(best_ptr, id_ptr, token_ptr, PARTS: tl.constexpr, PARTS2: tl.constexpr, PDL: tl.constexpr):
    """Program n: the best of row n's parts, the first of equals; -1 if any part's id is."""
    wait_for_inputs(PDL)
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PARTS2)
    score = tl.load(best_ptr + n * PARTS + i, mask=i < PARTS, other=float("-inf"))
    id = tl.load(id_ptr + n * PARTS + i, mask=i < PARTS, other=0)
    _, at = tl.max(score, 0, return_indices=True)
    token = tl.sum(tl.where(i == at, id, 0), 0)
    tl.store(token_ptr + n, tl.where(tl.min(id, 0) < 0, -1, token).to(tl.int64))


def draw(logits_NV: torch.Tensor, draws: Draws) -> torch.Tensor:
    """One token per row, or `UNDRAWN`, int64 ``[N]``, on CUDA; any float logits, in float32; rows without a cut cost
    little."""
    N, V = logits_NV.shape
    device = logits_NV.device
    logits_NV = logits_NV.contiguous()
    token_N = torch.empty(N, dtype=torch.int64, device=device)
    if not N:
        return token_N
    parts, options = triton.cdiv(V, SPAN), pdl_options(logits_NV)
    floor_N, last_N = torch.empty((2, N), dtype=torch.int32, device=device)
    peak_N = torch.empty(N, dtype=torch.float32, device=device)
    best_NX = torch.empty((N, parts), dtype=torch.float32, device=device)
    id_NX = torch.empty((N, parts), dtype=torch.int32, device=device)
    cuts = (draws.temperature_N, draws.top_k_N, draws.top_p_N, draws.min_p_N)
    _cut_kernel[N,](logits_NV, *cuts, floor_N, last_N, peak_N, V, BLOCK=BLOCK, num_warps=16, **options)
    noise = (draws.temperature_N, draws.min_p_N, draws.key_N)
    found = (floor_N, last_N, peak_N, best_NX, id_NX)
    _draw_kernel[N, parts](logits_NV, *noise, *found, V, SPAN=SPAN, num_warps=8, **options)
    _pick_kernel[N,](best_NX, id_NX, token_N, PARTS=parts, PARTS2=triton.next_power_of_2(parts), num_warps=1, **options)
    return token_N
