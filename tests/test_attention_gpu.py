"""Attention kernels on a GPU, against float64 loops; every unwritten place of a cache is NaN (``pytest -m gpu``)."""

from __future__ import annotations

import attention_cases
import layer_cases
import pytest
import torch

from epmoe.ops.attention_kernels import paged_attention_triton
from epmoe.ops.decode_batch import DecodeShape, decode_batch

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16]  # what compiles longest comes first, for runs by several workers
MODES = pytest.mark.parametrize("tiled", [False, True], ids=["ordinary", "tiled"])


@MODES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [64, 128])
def test_blocks_as_long_as_tiles(block_size, dtype, tiled):
    """Keys by tensor descriptor."""
    attention_cases.check_mixed((32, 4, 128), dtype, "cuda", tiled, block_size=block_size)
    attention_cases.check_decode_batch((32, 4, 128), dtype, "cuda", tiled, block_size=block_size)


@MODES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", attention_cases.HEADS, ids=str)
def test_mixed_batch(heads, dtype, tiled):
    attention_cases.check_mixed(heads, dtype, "cuda", tiled)
    attention_cases.check_twin(heads, dtype, "cuda", tiled)


@MODES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", attention_cases.HEADS, ids=str)
def test_decode_buffers_refilled(heads, dtype, tiled):
    attention_cases.check_decode_batch(heads, dtype, "cuda", tiled)


@MODES
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("shape", attention_cases.LATENT, ids=str)
def test_latent(shape, block_size, tiled):
    attention_cases.check_latent(shape, torch.bfloat16, "cuda", tiled, [1, 15, 17, 66, 130, 300], block_size)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("shape", "dtype"), [((70, 64, 16), DTYPES[0]), ((128, 512, 64), DTYPES[1])], ids=str)
def test_latent_decode_of_many_heads(shape, dtype, block_size):
    """As two products, in parts; lengths around a tile of keys; parts of few and of many sequences are added."""
    for lens in ([1, 255, 256, 257, 1500, 3000], [1, 40, 255, 256, 257, 513, 600, 900, 1500, 3000]):
        cache = attention_cases.latent_cache(shape, dtype, "cuda", lens, block_size)
        attention_cases.check_latent_decode(cache, shape[1], False)


@MODES
def test_latent_in_float32(tiled):
    attention_cases.check_latent(attention_cases.LATENT[0], torch.float32, "cuda", tiled, [1, 15, 17, 66, 130])


@pytest.mark.parametrize("heads", [(32, 4, 128), (4, 2, 24)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiled_bits_do_not_depend_on_batch_or_chunks(heads, dtype):
    """Also beyond one run of keys."""
    attention_cases.check_bitwise(heads, dtype, "cuda", [1, 17, 70, 600, 1100], (7, 64, 200))


def test_a_captured_decode_is_right_for_every_filling():
    heads, lens = (32, 4, 128), [1, 40, 700, 3000, 16, 17]
    cache = attention_cases.Cache(lens, heads, torch.bfloat16, "cuda")
    for n, length in enumerate(lens):
        cache.write(n, length)
    batch = decode_batch(DecodeShape(8, 3000, 16, 4, 8), torch.device("cuda"))
    q = torch.zeros(8, 32, 128, dtype=torch.bfloat16, device="cuda")
    paged_attention_triton(q, cache.cache, batch, cache.scale, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention_triton(q, cache.cache, batch, cache.scale, False)
    for chosen in ([0], [3, 2], [5, 4, 3, 2, 1, 0], []):
        spans = [(n, lens[n] - 1, lens[n]) for n in chosen]
        batch.fill([lens[n] for n in chosen], [cache.blocks[n] for n in chosen])
        if chosen:
            q[: len(chosen)] = cache.queries(spans)
        for _ in range(2):  # the second replay finds the counters as the first left them
            graph.replay()
        cache.require_right(out[: len(chosen)], spans)
        assert (out[len(chosen) :] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_kernels_equal_their_twins(dtype):
    layer_cases.check_norms(dtype, "cuda")
    layer_cases.check_qkv(dtype, "cuda")
    layer_cases.check_vector(dtype, "cuda")
