"""Counting a step's choices: against plain counting, with padding, and the kernel against its twin."""

from __future__ import annotations

import pytest
import torch

from epmoe.ops.expert_counts import count_experts, count_experts_ref


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("T, K, E", [(0, 2, 5), (1, 8, 128), (7, 3, 10), (700, 2, 300)])
def test_counts(device, T, K, E):
    generator = torch.Generator().manual_seed(T)
    expert_LTK = torch.randint(-1, E, (3, T, K), generator=generator, dtype=torch.int32)
    load_LE, active_L = torch.ones(3, E, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    want = load_LE.clone()
    for layer, expert in zip(*torch.where(expert_LTK.flatten(1) >= 0)):
        want[layer, expert_LTK.flatten(1)[layer, expert]] += 1
    ours = [each.clone().to(device) for each in (load_LE, active_L)]
    count_experts(expert_LTK.to(device), *ours)
    count_experts_ref(expert_LTK, load_LE, active_L)
    assert torch.equal(load_LE, want) and torch.equal(ours[0].cpu(), want)
    assert (active_L - 1).tolist() == (want > 1).sum(1).tolist() == (ours[1].cpu() - 1).tolist()
