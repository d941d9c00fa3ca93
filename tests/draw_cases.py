"""Draws on the device against `ops.sampling.sample` on the CPU: the same token from the same logits."""

from __future__ import annotations

import itertools

import torch

from epmoe.ops.draw import UNDRAWN, draw
from epmoe.ops.sampling import SampleRow, noise_key, pack_draws, sample


def rows_of_all_kinds() -> list[SampleRow]:
    """Every combination of cuts, each with its own noise; greedy ones among them."""
    cuts = itertools.product((0.0, 0.7, 1.3), (0, 1, 5, 40, 10**6), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.05, 1.0))
    return [
        SampleRow(temperature=t, top_k=k, top_p=p, min_p=m, key=noise_key(n, 1, 7))
        for n, (t, k, p, m) in enumerate(cuts)
    ]


def check(vocabulary: int, dtype: torch.dtype, device: str, every: int = 1) -> None:
    rows = rows_of_all_kinds()[::every]
    generator = torch.Generator().manual_seed(vocabulary)
    logits_NV = (torch.randn(len(rows), vocabulary, generator=generator) * 3).to(dtype)  # many equal ones in bfloat16
    want = sample(logits_NV, rows)
    ours = draw(logits_NV.to(device), pack_draws(rows, device)).cpu()
    differing = [rows[n] for n in torch.where(ours != want)[0].tolist()]
    assert not differing, f"{len(differing)} of {len(rows)} draws differ, first {differing[0]}"


def check_ties(device: str, draws: int = 64) -> None:
    """Equal logits are cut in order of their ids."""
    logits_NV = torch.zeros(draws, 300).index_fill_(1, torch.tensor([5]), 1.0)
    for cut in ({"top_k": 4}, {"top_p": 0.5}, {"top_k": 10, "top_p": 0.5}, {"top_p": 0.009}):
        rows = [SampleRow(temperature=1.0, key=noise_key(n, 0, 0), **cut) for n in range(draws)]
        assert torch.equal(draw(logits_NV.to(device), pack_draws(rows, device)).cpu(), sample(logits_NV, rows)), cut


def check_broken(device: str) -> None:
    """No token where any logit is not finite, wherever it lies; the rows beside it draw what they always do."""
    values, places = (float("nan"), float("inf"), float("-inf")), (0, 8191, 8192, 9000)
    broken = list(itertools.product(values, places))
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}]
    rows = [SampleRow(key=noise_key(n, 0, 0), **kinds[n % 2]) for n in range(len(broken) + 2)]
    rows[1] = SampleRow(temperature=1.0, top_k=40, top_p=0.9, key=1)
    logits_NV = torch.randn(len(rows), 9001, generator=torch.Generator().manual_seed(3))
    want = sample(logits_NV, rows)
    assert (want >= 0).all()
    for n, (value, at) in enumerate(broken):
        logits_NV[n, at] = value
        want[n] = UNDRAWN
    assert torch.equal(sample(logits_NV, rows), want)
    assert torch.equal(draw(logits_NV.to(device), pack_draws(rows, device)).cpu(), want)
    nothing_NV = torch.full((2, 300), float("nan"))
    assert draw(nothing_NV.to(device), pack_draws(rows[:2], device)).tolist() == [UNDRAWN] * 2
