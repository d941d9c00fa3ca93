"""The overlap benchmark's emulated exchange is an exchange: one lane and two give the sum of the experts' outputs."""

from __future__ import annotations

import pytest
import torch

from epmoe.moe.overlap import run_lanes
from epmoe.ops.router import RouterRule
from scripts import overlap_bench_lib as lib

RULES = {
    "flat": RouterRule(renormalize=True),
    "groups": RouterRule("sigmoid", groups=4, top_groups=2, group_score="top2", renormalize=True),
}


@pytest.fixture
def rank(monkeypatch, request):
    monkeypatch.setattr(lib, "DEVICE", "cpu")
    monkeypatch.setattr(lib, "DTYPE", torch.float32)
    shape = lib.Shape("tiny", 32, 4, 2, 8, 16, 3, 16, RULES[request.param], shared=16, qk_norm="head")
    rank = lib.Rank(shape, 4, layers=2, distinct=2)
    rank.connect(lib.EmulatedExchange(4, lib.Link(100.0, 16), shape.hidden))
    return rank


@pytest.mark.parametrize("rank", RULES, indirect=True)
def test_a_layer_is_the_weighted_sum_of_its_experts(rank):
    (lane,) = rank.inputs(5, 1)
    rank.fix_traffic([lane])
    moe = rank.moe[0]
    routing = moe.route(lane.x_TD)
    stages = moe.stages(lane.x_TD, None, 0, 0, [])
    with pytest.raises(StopIteration) as done:
        while True:
            next(stages)
    y_TD, _ = done.value.value
    experts = moe.weights.experts
    for t, x_D in enumerate(lane.x_TD):
        want = moe.shared(x_D[None])[0]
        for weight, expert in zip(routing.weight_TK[t], routing.expert_TK[t].tolist()):
            gate, up = (experts.gate_up[expert % 4] @ x_D).chunk(2)
            want = want + weight * (experts.down[expert % 4] @ (torch.nn.functional.silu(gate) * up))
        assert torch.allclose(y_TD[t], want, atol=1e-5)


@pytest.mark.parametrize("rank", ["flat"], indirect=True)
@pytest.mark.parametrize("tokens", [2, 7, 300, 1500])
def test_two_lanes_compute_what_one_does(rank, tokens):
    outputs = []
    for lanes in (1, 2):
        inputs = rank.inputs(tokens, lanes)
        rank.fix_traffic(inputs)
        rank.cache.zero_()
        stages = [rank.lane(n, lane, 0) for n, lane in enumerate(inputs)]
        outputs.append(torch.cat(run_lanes(stages, rank.exchange.comm.at)))
    assert torch.allclose(*outputs, atol=1e-4)
