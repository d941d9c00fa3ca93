"""What `epmoe-placement report` says of a text is what the engine did with it: per expert, rank and link."""

from __future__ import annotations

import numpy as np
import pytest
from recorded import record
from tiny_checkpoints import save_tiny

from epmoe.model_config import ModelConfig
from placement.greedy import solve_lpt_swap
from placement.report import make_report
from placement.solution import make_problem
from placement.topology import uniform
from placement.trace import Trace

WORLD = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory, rank_pool):
    """(plan with replicas, trace with the recorded homes, each rank's report) of one deterministic float32 run."""
    model = save_tiny(tmp_path_factory.mktemp("model"), "qwen3_moe", num_experts=10, top_k=3)
    shape = ModelConfig.from_folder(model).moe_shape
    requests = [
        (i, list(range(3 + i, 40 + 5 * i)), {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True}) for i in range(5)
    ]
    config = {"model": str(model), "ranks": WORLD, "deterministic": True, "record_tokens": 4096, "max_model_len": 256}

    def play(plan_json: str | None) -> tuple[Trace, list[dict]]:
        results = rank_pool(WORLD).run(record, {**config, "plan": plan_json}, requests)
        found = {n: (rank, *s) for rank, result in enumerate(results) for n, s in result["sequences"].items()}
        homes, tokens, ids = zip(*(found[n] for n in sorted(found)))
        lens, homes = np.array([len(t) for t in tokens], np.int32), np.array(homes)
        trace = Trace(shape, np.concatenate(ids), lens, token_ids_T=np.concatenate(tokens), homes=homes)
        return trace, [result["report"] for result in results]

    first, _ = play(None)
    plan = solve_lpt_swap(make_problem(first, WORLD, redundant=1)).plan
    assert plan.copies_LE.max() > 1
    trace, reports = play(plan.to_json())
    assert np.array_equal(trace.expert_ids_TLK, first.expert_ids_TLK)  # placement never changes a token
    return plan, trace, reports


def test_loads_per_expert(run):
    plan, trace, reports = run
    report = make_report((plan, None), (plan, trace.homes), trace, uniform(WORLD))
    assert np.array_equal(report.load_LE, sum(np.array(r["load_LE"]) for r in reports))
    assert (report.load_LE.sum(1) == trace.num_tokens * trace.shape.top_k).all()


def test_loads_per_rank_and_rows_per_link(run):
    plan, trace, reports = run
    costs = make_report((plan, None), (plan, trace.homes), trace, uniform(WORLD)).costs_after
    served_LW = np.zeros((trace.shape.num_layers, WORLD))
    layer_LE = np.broadcast_to(np.arange(trace.shape.num_layers)[:, None], trace.load_LE().shape)
    for home, each in enumerate(reports):
        np.add.at(served_LW, (layer_LE, plan.serve_rank_WLE[home]), np.array(each["load_LE"]))
    assert np.array_equal(costs.load_LW, served_LW)
    assert np.array_equal(costs.traffic_WW, [each["sent_rows"] for each in reports])
