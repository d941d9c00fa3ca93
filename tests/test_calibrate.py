"""Stage times measured at start-up: what they hold, that ranks agree on them, and a run that decides by them."""

from __future__ import annotations

import pytest
from drive import Script, all_blocks_free, drive, merge
from tiny_checkpoints import save_tiny

from epmoe.comm import Comm
from epmoe.config import EngineConfig
from epmoe.engine.engine import Engine
from epmoe.moe.calibrate import stage_us
from epmoe.moe.lane_cost import LaneTimes
from epmoe.moe.makespan import LAYER
from epmoe.moe.timeline import COMPUTE, TRAVEL, Span


def test_stage_times_leave_out_waiting():
    spans = []
    for layer in (0, 1):
        t = 100.0 * layer
        stages = {"attention": (0, 10), "router": (10, 12), "dispatch": (12, 20), "send": (20, 25), "arrive": (13, 26)}
        stages |= {"experts": (26, 40), "combine": (40, 60), "sum": (41, 63)}
        for stage, (begin, end) in stages.items():
            row = TRAVEL if stage in ("dispatch", "send", "combine") else COMPUTE
            spans.append(Span(0, row, 0, layer, stage, t + begin, t + end))
    want = {"attention": 10, "router": 2, "dispatch": 13, "shared": 0, "experts": 15, "combine": 20, "sum": 3}
    assert stage_us(spans) == want


def measured(comm: Comm, config: dict) -> tuple[LaneTimes | None, dict]:
    engine = Engine(EngineConfig.from_dict(config), comm)
    return engine.stage_times, engine.report()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    model = save_tiny(tmp_path_factory.mktemp("calibrate"), "qwen2_moe", num_experts=6, top_k=2)
    return {"model": str(model), "ranks": 2, "max_model_len": 64, "num_blocks": 16, "overlap": "auto"}


@pytest.mark.parametrize("budget, sizes", [(300, (1, 16, 64, 256)), (70, (1, 16, 64, 70)), (1, None)])
def test_all_ranks_measure_the_same_table(rank_pool, config, budget, sizes):
    """``num_blocks`` holds 256 tokens. What travelled meanwhile is in no report."""
    settings = config | {"max_batch_tokens": budget, "max_requests": 1, "exchange": "auto"}
    found = rank_pool(2).run(measured, settings)
    (times, report), (other, _) = found
    assert times == other and report["sent_rows"] == [0, 0] and report["traffic"]["tokens"] == 0
    assert set(report["exchange_steps"].values()) == {0}
    if sizes is None:
        assert times is None
        return
    for table in (times.one, times.two):
        assert table.tokens == sizes and [stage for stage, _ in table.us] == sorted(LAYER)
        assert all(us > 0 for stage, row in table.us for us in row)


def test_a_run_that_decides_draws_the_same_tokens(rank_pool, config):
    requests = [(n, list(range(5, 5 + 20 * n + 1)), {"temperature": 0.0, "max_tokens": 4}) for n in range(3)]
    runs = [
        rank_pool(2).run(drive, config | {"overlap": overlap, "deterministic": True}, Script(requests))
        for overlap in ("auto", "off")
    ]
    assert merge(runs[0]).tokens == merge(runs[1]).tokens and all_blocks_free(runs[0])
