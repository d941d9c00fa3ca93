"""Linear, norm and rotary against their formulas, and that the tiled forms do not see the batch."""

from __future__ import annotations

import pytest
import torch

from epmoe.model.weights import DenseMLP
from epmoe.moe.layer import gated_mlp
from epmoe.ops.activation import sigmoid, silu
from epmoe.ops.linear import linear, row_tiles
from epmoe.ops.norm import add_rms_norm, rms_norm
from epmoe.ops.rotary import rotary_table, rotate

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def require_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    assert ours.shape == exact.shape
    assert (ours.double() - exact).abs().max() <= BOUND[ours.dtype] * exact.abs().max()


def require_row_invariant(function, x: torch.Tensor) -> None:
    """Each row alone, rows in reverse and rows from the middle have the bits that they have in the whole."""
    whole = function(x)
    for rows in (len(x) // 2, len(x) - 1, 0):
        assert torch.equal(function(x[rows : rows + 1])[0], whole[rows]), f"row {rows} of {len(x)} alone"
    assert torch.equal(function(x.flip(0)), whole.flip(0)), "in reverse"
    assert torch.equal(function(x[3:-2]), whole[3:-2]), "from the middle"


@DTYPES
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 50])
@pytest.mark.parametrize("width", [1, 10, 80])
def test_linear(rows, width, tiled, dtype):
    x, weight, bias = random(rows, 48, dtype=dtype), random(width, 48, dtype=dtype, seed=1), random(width, dtype=dtype)
    for b in (None, bias):
        out = linear(x, weight, b, tiled=tiled)
        assert out.shape == (rows, width) and out.dtype == dtype
        if rows:
            require_close(out, x.double() @ weight.double().T + (0 if b is None else b.double()))


@DTYPES
@pytest.mark.parametrize("width, hidden", [(1, 64), (10, 72), (320, 64), (512, 256)])
def test_tiled_linear_does_not_see_the_batch(width, hidden, dtype, threads):
    weight, bias = random(width, hidden, dtype=dtype), random(width, dtype=dtype)
    require_row_invariant(lambda x: linear(x, weight, bias, tiled=True), random(75, hidden, dtype=dtype, seed=2))


def test_row_tiles_pad_the_last_one_with_zeros():
    tiles = row_tiles(torch.ones(18, 4))
    assert [len(tile) for tile in tiles] == [16, 16]
    assert tiles[1].sum() == 8 and (tiles[1][2:] == 0).all()


@DTYPES
@pytest.mark.parametrize("rows", [21, 331])
def test_gated_mlp(rows, dtype, threads):
    """331 x 224 elements is enough for threads to share them, and the border falls inside a row."""
    weights = DenseMLP(random(448, 64, dtype=dtype), random(64, 224, dtype=dtype, seed=1))
    x = random(rows, 64, dtype=dtype, seed=2)
    require_row_invariant(lambda x: gated_mlp(x, weights, True), x)
    if dtype == torch.float32:
        gate, up = (x.double() @ weights.gate_up.double().T).chunk(2, -1)
        exact = (gate * torch.sigmoid(gate) * up) @ weights.down.double().T
        for tiled in (False, True):
            require_close(gated_mlp(x, weights, tiled), exact)


@DTYPES
@pytest.mark.parametrize("function", [silu, sigmoid])
def test_activations(function, dtype, threads):
    x = random(331, 224, dtype=dtype) * 4
    exact = x.double() * torch.sigmoid(x.double()) if function is silu else torch.sigmoid(x.double())
    for tiled in (False, True):
        require_close(function(x, tiled=tiled), exact)
    require_row_invariant(lambda x: function(x, tiled=True), x.chunk(2, -1)[0])
    require_row_invariant(lambda x: function(x, tiled=True), x[:, :1].contiguous())
    assert function(torch.tensor([-1e4, 1e4]), tiled=True).isfinite().all()


@DTYPES
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (75, 72), (331, 256), (75, 4, 24)], ids=str)
def test_rms_norm(shape, dtype, threads):
    x, weight = random(*shape, dtype=dtype) * 3, random(shape[-1], dtype=dtype, seed=1)
    out = rms_norm(x, weight, 1e-5)
    assert out.shape == x.shape and out.dtype == dtype
    if len(x):
        wide = x.double()
        require_close(out, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    if len(x) > 5:
        require_row_invariant(lambda x: rms_norm(x, weight, 1e-5), x)


def test_rms_norm_of_zeros_is_zero():
    assert (rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6) == 0).all()


@DTYPES
def test_norm_rounds_as_transformers_does(dtype):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    theirs = Qwen3MoeRMSNorm(64, eps=1e-6).to(dtype)
    theirs.weight.data = random(64, dtype=dtype, seed=3)
    x = random(40, 64, dtype=dtype)
    assert torch.equal(rms_norm(x, theirs.weight.data, 1e-6), theirs(x).detach())


@DTYPES
def test_add_rms_norm_leaves_its_inputs_alone(dtype):
    x, residual, weight = random(9, 16, dtype=dtype), random(9, 16, dtype=dtype, seed=1), random(16, dtype=dtype)
    kept = x.clone(), residual.clone()
    out, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual) and torch.equal(out, rms_norm(x + residual, weight, 1e-6))
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


@pytest.mark.parametrize("head, rotated", [(32, 32), (24, 24), (32, 8)])
def test_rotary_turns_pairs_by_their_angle(head, rotated):
    """Elements i and i + rotated / 2 are a complex number turned by position * theta^(-2 i / rotated)."""
    positions = torch.tensor([0, 1, 7, 130, 511])
    x = random(5, 3, head)
    out = rotate(x, rotary_table(512, rotated, 10_000.0, torch.float32)[positions])
    half = rotated // 2
    angle = positions.double()[:, None] * 10_000.0 ** (-torch.arange(half).double() * 2 / rotated)
    turned = torch.complex(x[..., :half].double(), x[..., half:rotated].double()) * torch.polar(
        torch.ones_like(angle), angle
    ).unsqueeze(1)
    exact = torch.cat((turned.real, turned.imag, x[..., rotated:].double()), -1)
    assert (out.double() - exact).abs().max() <= 1e-4  # the float32 angle of position 511 is off by 3e-5
    assert torch.equal(out[0], x[0]), "position 0 does not turn"
    assert torch.equal(out[..., rotated:], x[..., rotated:])


@DTYPES
def test_rotary_is_that_of_transformers(dtype):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding, apply_rotary_pos_emb

    config = Qwen3MoeConfig(head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    q, k = random(40, 4, 32, dtype=dtype), random(40, 2, 32, dtype=dtype, seed=1)
    cos, sin = Qwen3MoeRotaryEmbedding(config)(q, torch.arange(40)[None])
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    table = rotary_table(64, 32, 5e5, dtype)[:40]
    for ours, their in zip((rotate(q, table), rotate(k, table)), theirs):
        assert torch.equal(ours, their[0].transpose(0, 1))


def test_rotary_of_no_tokens():
    assert rotate(torch.empty(0, 4, 16), rotary_table(8, 16, 1e4, torch.float32)[:0]).shape == (0, 4, 16)
