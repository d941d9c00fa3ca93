"""Cases that the interpreter's and the GPU's attention tests share: caches whose every unwritten place is NaN."""

from __future__ import annotations

import torch

from epmoe.ops.attention import AttentionBatch, paged_attention_ref, write_kv
from epmoe.ops.attention_kernels import paged_attention_triton
from epmoe.ops.decode_batch import DecodeShape, decode_batch
from epmoe.ops.latent import latent_attention_ref
from epmoe.ops.latent_kernels import latent_attention_triton

NAN = float("nan")
HEADS = [(32, 4, 128), (4, 4, 16), (4, 2, 24), (8, 1, 32), (20, 1, 16)]  # query heads, key heads, head size
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def reference(q_QHd, k_SHd, v_SHd, scale: float) -> torch.Tensor:
    """Causal attention in float64, one query after another; the last one sees all S keys."""
    k_HSd, v_HSd = (
        x.double().repeat_interleave(q_QHd.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k_SHd, v_SHd)
    )
    out = []
    for i, q_Hd in enumerate(q_QHd.double()):
        seen = len(k_SHd) - len(q_QHd) + i + 1
        score_H1S = q_Hd[:, None] @ k_HSd[:, :seen].transpose(1, 2) * scale
        out.append((score_H1S.softmax(-1) @ v_HSd[:, :seen])[:, 0])
    return torch.stack(out)


class Cache:
    """Sequences with random queries, keys and values, in blocks of random order."""

    def __init__(self, lens: list[int], heads, dtype, device, block_size: int = 16, seed: int = 0) -> None:
        H, KVH, d = heads
        make = torch.Generator().manual_seed(seed)
        self.lens, self.device, self.block_size, self.scale = lens, device, block_size, d**-0.5
        counts = [-(-length // block_size) for length in lens]
        order = torch.randperm(sum(counts) + 3, generator=make).tolist()
        self.blocks = [[order.pop() for _ in range(count)] for count in counts]
        self.cache = torch.full((2, KVH, sum(counts) + 3, block_size, d), NAN, dtype=dtype, device=device)
        self.written = [0] * len(lens)  # tokens whose keys and values are there
        self.q, self.k, self.v = (
            [torch.randn(length, n, d, generator=make).to(device, dtype) for length in lens] for n in (H, KVH, KVH)
        )

    def write(self, n: int, stop: int) -> None:
        """Keys and values of the first ``stop`` tokens of sequence n."""
        start, self.written[n] = self.written[n], max(stop, self.written[n])
        if start < stop:
            write_kv(self.cache, self.k[n][start:stop], self.v[n][start:stop], self.slots(n, start, stop))

    def slots(self, n: int, start: int, stop: int) -> torch.Tensor:
        size = self.block_size
        slots = [self.blocks[n][p // size] * size + p % size for p in range(start, stop)]
        return torch.tensor(slots, device=self.device)

    def batch(self, spans: list[tuple[int, int, int]]) -> AttentionBatch:
        """Tokens ``a .. b`` of sequence n for each span; keys up to b are written."""
        for n, _, stop in spans:
            self.write(n, stop)
        width = max((len(self.blocks[n]) for n, _, _ in spans), default=0)
        table = [self.blocks[n] + [0] * (width - len(self.blocks[n])) for n, _, _ in spans]
        return AttentionBatch(
            query_lens=[b - a for _, a, b in spans],
            kv_lens=[b for _, _, b in spans],
            block_table_NP=torch.tensor(table, dtype=torch.int32, device=self.device).view(len(spans), width),
            position_T=torch.tensor([p for _, a, b in spans for p in range(a, b)], device=self.device),
            slot_T=torch.zeros(0, dtype=torch.int64, device=self.device),
            block_size=self.block_size,
        )

    def queries(self, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        return torch.cat([self.q[n][a:b] for n, a, b in spans])

    def require_right(self, out_THd: torch.Tensor, spans: list[tuple[int, int, int]]) -> None:
        for out, (n, a, b) in zip(out_THd.split([b - a for _, a, b in spans]), spans):
            want = reference(self.q[n][a:b], self.k[n][:b], self.v[n][:b], self.scale)
            error = float((out.double() - want).abs().max() / want.abs().max())
            assert error <= BOUND[out.dtype], f"sequence {n}, tokens {a}..{b}: {error}"


LENS = [1, 2, 15, 16, 17, 33, 64, 65, 130, 300]


def check_mixed(heads, dtype, device, tiled: bool, lens=LENS, block_size: int = 16) -> None:
    """A prompt step, then decodes and chunks together, against float64 loops."""
    cache = Cache(lens, heads, dtype, device, block_size)
    spans = [(n, 0, max(1, length - 3)) for n, length in enumerate(lens)]
    rest = [(n, stop, lens[n]) for n, _, stop in spans if stop < lens[n]]
    mixed = [(n, b - 1, b) if n % 2 else (n, a, b) for n, a, b in rest]
    for step in (spans, mixed, mixed[::-1]):
        batch = cache.batch(step)
        out = paged_attention_triton(cache.queries(step), cache.cache, batch, cache.scale, tiled)
        cache.require_right(out, step)


def check_decode_batch(heads, dtype, device, fixed: bool, lens=LENS, block_size: int = 16) -> None:
    """One set of buffers through fillings of other sizes and lengths, the last padded and one empty."""
    H, KVH, _ = heads
    cache = Cache(lens, heads, dtype, device, block_size)
    shape = DecodeShape(len(lens) + 2, max(lens), cache.block_size, KVH, H // KVH, fixed)
    batch = decode_batch(shape, torch.device(device))
    for n, length in enumerate(lens):
        cache.write(n, length)
    addresses = [x.data_ptr() for x in (batch.position_T, batch.slot_T, batch.block_table_NP)]
    for chosen in ([3], list(range(len(lens))), [4, 0], []):
        spans = [(n, lens[n] - 1, lens[n]) for n in chosen]
        batch.fill([lens[n] for n in chosen], [cache.blocks[n] for n in chosen])
        q = torch.zeros(shape.sequences, *cache.q[0].shape[1:], dtype=dtype, device=device)
        if chosen:
            q[: len(chosen)] = cache.queries(spans)
        out = paged_attention_triton(q, cache.cache, batch, cache.scale, fixed)
        cache.require_right(out[: len(chosen)], spans)
        assert (out[len(chosen) :] == 0).all()
        assert batch.position_T.tolist() == [lens[n] - 1 for n in chosen] + [0] * (shape.sequences - len(chosen))
        slots = [cache.blocks[n][-1] * cache.block_size + (lens[n] - 1) % cache.block_size for n in chosen]
        assert batch.slot_T.tolist() == slots + [-1] * (shape.sequences - len(chosen))
    assert addresses == [x.data_ptr() for x in (batch.position_T, batch.slot_T, batch.block_table_NP)]


def check_bitwise(heads, dtype, device, lens, sizes) -> None:
    """Tiled outputs of every position are the same bits for prompts alone or together, in chunks of any size."""
    cache = Cache(lens, heads, dtype, device)
    yardstick = None
    for size in (10**6, *sizes):
        for together in (False, True):
            outs = [[] for _ in lens]
            for group in [list(range(len(lens)))] if together else [[n] for n in range(len(lens))]:
                for start in range(0, max(lens[n] for n in group), size):
                    spans = [(n, start, min(start + size, lens[n])) for n in group if start < lens[n]]
                    out = paged_attention_triton(
                        cache.queries(spans), cache.cache, cache.batch(spans), cache.scale, True
                    )
                    for (n, _, _), rows in zip(spans, out.split([b - a for _, a, b in spans])):
                        outs[n].append(rows)
            result = torch.cat([torch.cat(rows) for rows in outs])
            yardstick = result if yardstick is None else yardstick
            assert torch.equal(result, yardstick), f"chunks of {size}, together {together}"


def check_twin(heads, dtype, device, tiled: bool) -> None:
    """Kernel and torch twin on the same inputs."""
    cache = Cache(LENS, heads, dtype, "cpu")
    spans = [(n, max(0, length - 2), length) for n, length in enumerate(LENS)]
    twin = paged_attention_ref(cache.queries(spans), cache.cache, cache.batch(spans), cache.scale, tiled)
    cache = Cache(LENS, heads, dtype, device)
    ours = paged_attention_triton(cache.queries(spans), cache.cache, cache.batch(spans), cache.scale, tiled)
    torch.testing.assert_close(ours.cpu(), twin, rtol=0, atol=2 * BOUND[dtype] * float(twin.abs().max()))


LATENT = [(3, 32, 16), (16, 64, 16), (128, 512, 64)]  # heads, value columns, rotary columns


def check_latent(shape, dtype, device, tiled: bool, lens=LENS, block_size: int = 16) -> None:
    """The latent kernel and its twin against float64 loops: prompts, mixed steps, and a refilled decode batch."""
    value_dim = shape[1]
    cache = latent_cache(shape, dtype, device, lens, block_size)
    spans = [(n, 0, max(1, length - 3)) for n, length in enumerate(lens)]
    rest = [(n, stop, lens[n]) for n, _, stop in spans if stop < lens[n]]
    mixed = [(n, b - 1, b) if n % 2 else (n, a, b) for n, a, b in rest]
    for step in (spans, mixed):
        batch = cache.batch(step)
        out = latent_attention_triton(cache.queries(step), cache.cache, batch, cache.scale, value_dim, tiled)
        cache.require_right(out, step)
    if device == "cpu":
        out = latent_attention_ref(cache.queries(mixed), cache.cache, batch, cache.scale, value_dim, tiled)
        cache.require_right(out, mixed)
    check_latent_decode(cache, value_dim, tiled)


def latent_cache(shape, dtype, device, lens, block_size: int) -> Cache:
    H, value_dim, rope = shape
    d = value_dim + rope
    cache = Cache(lens, (H, 1, d), dtype, device, block_size)
    cache.v = [k[..., :value_dim] for k in cache.k]
    cache.scale = 0.7 * d**-0.5
    cache.cache = cache.cache[:1].clone()

    def write(n: int, stop: int) -> None:
        cache.cache[0, 0].view(-1, d).index_copy_(0, cache.slots(n, 0, stop), cache.k[n][:stop, 0])

    cache.write = write
    return cache


def check_latent_decode(cache: Cache, value_dim: int, tiled: bool) -> None:
    """Buffers refilled, with padding."""
    lens, device = cache.lens, cache.device
    H, d = cache.q[0].shape[1:]
    for n, length in enumerate(lens):
        cache.write(n, length)
    batch = decode_batch(
        DecodeShape(len(lens) + 1, max(lens), cache.block_size, 1, H, tiled, latent=True), torch.device(device)
    )
    for chosen in ([1], list(range(len(lens)))):
        spans = [(n, lens[n] - 1, lens[n]) for n in chosen]
        batch.fill([lens[n] for n in chosen], [cache.blocks[n] for n in chosen])
        q = torch.zeros(len(lens) + 1, H, d, dtype=cache.q[0].dtype, device=device)
        q[: len(chosen)] = cache.queries(spans)
        out = latent_attention_triton(q, cache.cache, batch, cache.scale, value_dim, tiled)
        cache.require_right(out[: len(chosen)], spans)
        assert (out[len(chosen) :] == 0).all()
