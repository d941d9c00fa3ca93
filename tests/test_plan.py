"""The plan's own checks: every expert somewhere, copies on distinct ranks, files that say what is wrong with them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from placement.errors import UserError
from placement.plan import MoEShape, Plan, linear_plan, make_plan, round_robin_plan

SHAPE = MoEShape((1, 2), 5, 2, "toy")
SLOTS = [[[0, 1, 4], [2, 3]], [[0, 4], [4, 3, 2, 1]]]


@pytest.mark.parametrize("serve", [False, True])
def test_a_file_gives_the_plan_back(tmp_path, serve):
    plan = make_plan(SHAPE, 2, SLOTS, made_by="hand", affinity="a.npz")
    if serve:
        table = plan.serve_rank_WLE.copy()
        table[0, 1, 4] = 1  # the other copy than the rule would take
        plan = replace(plan, serve=table)
    plan.save(tmp_path / "p.json")
    back = Plan.load(tmp_path / "p.json")
    assert (back.shape, back.ranks, back.slots, back.affinity) == (plan.shape, 2, plan.slots, "a.npz")
    np.testing.assert_array_equal(back.serve_rank_WLE, plan.serve_rank_WLE)
    assert back.serve_rank_WLE[0, 1, 4] == serve and back.serve_rank_WLE[1, 1, 4] == 1


def test_copies_and_slots_are_counted():
    plan = make_plan(SHAPE, 2, SLOTS)
    assert plan.copies_LE.tolist() == [[1] * 5, [1, 1, 1, 1, 2]]
    assert plan.slot_expert_LS.tolist() == [[0, 1, 4, -1, 2, 3, -1, -1], [0, 4, -1, -1, 4, 3, 2, 1]]


@pytest.mark.parametrize("make", [linear_plan, round_robin_plan])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_plans_without_a_solver_hold_each_expert_once(make, ranks):
    plan = make(SHAPE, ranks)
    assert (plan.copies_LE == 1).all()
    assert np.ptp([len(held) for held in plan.slots[0]]) <= 1


def damaged(change) -> str:
    content = json.loads(make_plan(SHAPE, 2, SLOTS).to_json())
    change(content)
    return json.dumps(content)


DAMAGE = {
    "expert 2 is on no rank (1 missing)": lambda p: p["slots"][0].__setitem__(1, [3]),
    "rank 0 holds expert 1 twice": lambda p: p["slots"][0][0].append(1),
    "expert 5 is not in 0..4": lambda p: p["slots"][1][1].append(5),
    "layer 1: rank 0 holds no expert": lambda p: p["slots"][1].__setitem__(0, []),
    "slots has 1 layers, the model has 2": lambda p: p["slots"].pop(),
    "layer 0 lists 2 ranks, the plan says 3": lambda p: p.update(ranks=3),
    "expert 5 is on no rank (999999999995 missing)": lambda p: p["model"].update(num_experts=10**12),
    "must satisfy 1 <= top_k": lambda p: p["model"].update(top_k=6),
    "replica_rule has shape (1,)": lambda p: p.update(replica_rule=[0]),
    "names a rank outside 0..1": lambda p: p.update(replica_rule=[[[2] * 5] * 2] * 2),
    "served by rank 1, which holds no copy": lambda p: p.update(replica_rule=[[[1] * 5] * 2] * 2),
    "unknown keys ['extra']": lambda p: p.update(extra=1),
    "lacks ['ranks']": lambda p: p.pop("ranks"),
    "expected 'epmoe-plan/1'": lambda p: p.update(format="epmoe-plan/2"),
    "a field has the wrong type": lambda p: p["slots"][0].__setitem__(0, ["a"]),
    "a field has the wrong type ('float'": lambda p: p["slots"][0].__setitem__(0, [0.5]),
    "name of a file beside the plan, got '../x.npz'": lambda p: p.update(affinity="../x.npz"),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named(message):
    with pytest.raises(UserError) as error:
        Plan.from_json(damaged(DAMAGE[message]), "p.json")
    assert message in str(error.value) and str(error.value).count("p.json") == 1
