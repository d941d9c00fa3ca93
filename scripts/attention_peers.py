"""torch's own kernels on the keys of an attention benchmark's case, gathered to contiguous memory beforehand."""

from __future__ import annotations

import inspect

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right


def peers(problem, flex: bool = False) -> dict:
    """torch's own kernels by name: varlen attention, scaled_dot_product_attention where all sequences are alike;
    matrix products for latents; flex attention, which compiles for a while, for prompts on request."""
    s, (queries, kv_len) = problem.case.shape, problem.case.lens[0]
    keys = [problem.gathered(n) for n in range(len(problem.case.lens))]
    alike = all(lens == (queries, kv_len) for lens in problem.case.lens)
    if s.latent:
        return products(problem, keys) if alike and problem.case.decode else {}
    found = {"varlen": varlen(problem, keys)}
    if alike:
        q = problem.q.view(len(keys), queries, s.heads, s.key_dim).transpose(1, 2).contiguous()
        kv = [torch.stack(x) for x in zip(*keys)]
        found |= {"flash": sdpa(problem.scale, q, *kv, SDPBackend.FLASH_ATTENTION)}
        found |= {"cudnn": sdpa(problem.scale, q, *kv, SDPBackend.CUDNN_ATTENTION)}
        if flex and queries > 1:
            found["flex"] = flexible(problem.scale, q, *kv)
    return found


def products(problem, keys: list) -> dict:
    """A latent decode by torch's matrix products: on contiguous rows, and gathered from the cache each time."""
    rows = torch.stack([k for k, _ in keys])[:, 0]
    width, q, table = problem.case.shape.value_dim, problem.q, problem.table.long()

    def attend(rows_NSd: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ rows_NSd.transpose(1, 2) * problem.scale, -1) @ rows_NSd[..., :width]

    values = rows[..., :width].contiguous()
    weights = lambda: torch.softmax(q @ rows.transpose(1, 2) * problem.scale, -1)  # noqa: E731
    gathered = lambda: attend(problem.cache[0, 0][table].flatten(1, 2)[:, : rows.shape[1]])  # noqa: E731
    return {"matmul": lambda: weights() @ values, "gather + matmul": gathered}


def varlen(problem, keys: list):
    """Flash attention of any lengths, as one batch of rows."""
    from torch.nn.attention.varlen import varlen_attn

    k, v = (torch.cat([each[side].transpose(0, 1) for each in keys]).contiguous() for side in (0, 1))
    lens = torch.tensor([(0, 0), *problem.case.lens], device="cuda")
    ends_q, ends_k = lens.cumsum(0).int().T.contiguous()
    most_q, most_k = lens.max(0).values.tolist()
    options = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    return lambda: varlen_attn(problem.q, k, v, ends_q, ends_k, most_q, most_k, scale=problem.scale, **options)


def sdpa(scale: float, q, k, v, backend):
    queries, kv_len = q.shape[2], k.shape[2]
    causal = {"is_causal": True} if queries == kv_len else {"attn_mask": causal_lower_right(queries, kv_len)}
    causal = {} if queries == 1 else causal

    def run():
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **causal)

    return run


def flexible(scale: float, q, k, v):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    behind = k.shape[2] - q.shape[2]
    visible = lambda b, h, query, key: query + behind >= key  # noqa: E731
    mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
