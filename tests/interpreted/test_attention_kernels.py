"""Attention and its neighbours under Triton's interpreter (needs TRITON_INTERPRET=1 before triton is imported)."""

import attention_cases
import pytest
import torch
from triton import knobs

from epmoe.ops.attention_kernels import paged_attention_triton

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="run by scripts/test with TRITON_INTERPRET=1")
DTYPES = [torch.float32, torch.float16]  # the interpreter cannot multiply bfloat16
SHORT = [1, 15, 17, 66, 130]


@pytest.mark.parametrize("tiled", [False, True], ids=["ordinary", "tiled"])
@pytest.mark.parametrize(("heads", "dtype"), [((4, 2, 24), DTYPES[0]), ((8, 1, 32), DTYPES[1])], ids=str)
def test_mixed_batch(heads, dtype, tiled):
    attention_cases.check_mixed(heads, dtype, "cpu", tiled, SHORT)


@pytest.mark.parametrize("tiled", [False, True], ids=["ordinary", "tiled"])
def test_blocks_as_long_as_tiles(tiled):
    """Keys by tensor descriptor."""
    attention_cases.check_mixed((8, 1, 32), torch.float16, "cpu", tiled, SHORT, block_size=128)
    attention_cases.check_decode_batch((4, 2, 16), torch.float32, "cpu", tiled, SHORT, block_size=64)
    attention_cases.check_latent(attention_cases.LATENT[0], torch.float32, "cpu", tiled, SHORT, block_size=64)


@pytest.mark.parametrize("fixed", [False, True], ids=["ordinary", "tiled"])
@pytest.mark.parametrize("heads", [(4, 2, 24), (20, 1, 16)], ids=str)
def test_decode_buffers_refilled(heads, fixed):
    attention_cases.check_decode_batch(heads, torch.float32, "cpu", fixed, SHORT)


@pytest.mark.parametrize("tiled", [False, True], ids=["ordinary", "tiled"])
@pytest.mark.parametrize(("shape", "dtype"), list(zip(attention_cases.LATENT, DTYPES)), ids=str)
def test_latent(shape, dtype, tiled):
    attention_cases.check_latent(shape, dtype, "cpu", tiled, SHORT)


@pytest.mark.parametrize("block_size", [16, 64])
def test_latent_decode_of_many_heads(block_size):
    """As two products; the last sequence in parts."""
    cache = attention_cases.latent_cache((70, 32, 16), DTYPES[1], "cpu", [1, 17, 600], block_size)
    attention_cases.check_latent_decode(cache, 32, False)


def test_no_tokens():
    batch = attention_cases.Cache([3], (4, 2, 16), torch.float32, "cpu").batch([])
    q = torch.empty(0, 4, 16)
    assert paged_attention_triton(q, torch.empty(2, 2, 4, 16, 16), batch, 1.0, False).shape == q.shape
