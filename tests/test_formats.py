"""A plan survives the trip through every engine's file, or the refusal says why it cannot."""

import json

import pytest

from placement import formats
from placement.errors import UserError
from placement.model_shape import shape_from_config, shape_like
from placement.plan import MoEShape, linear_plan, make_plan

SHAPE = MoEShape((1, 2, 4), 6, 2, "toy")  # dense layers 0 and 3


def replicated_plan():
    """3 layers, 4 ranks, 2 slots each: every layer another arrangement, experts 0 and 1 (or others) twice."""
    return make_plan(
        SHAPE, 4, [[[0, 4], [1, 5], [2, 0], [3, 1]], [[5, 0], [0, 1], [1, 2], [4, 3]], [[2, 3], [3, 2], [0, 5], [1, 4]]]
    )


@pytest.mark.parametrize("kind", formats.PLAN_FORMATS)
def test_round_trip(tmp_path, kind):
    plan = replicated_plan()
    path = tmp_path / "plan.json"
    path.write_text(formats.write_plan(plan, kind))
    assert formats.sniff_plan(json.loads(path.read_text()), "plan") == kind
    back = formats.read_plan(path, SHAPE, 4)
    assert back.slots == plan.slots
    assert formats.write_plan(back, "vllm") == formats.write_plan(plan, "vllm")


def test_sglang_file_has_one_key_and_a_row_per_model_layer():
    plan = replicated_plan()
    raw = json.loads(formats.write_plan(plan, "sglang", model_layers=7))
    assert set(raw) == {"physical_to_logical_map"}
    table = raw["physical_to_logical_map"]
    assert len(table) == 7 and all(len(row) == 8 for row in table)
    assert table[0] == table[3] == table[6] == [0, 1, 2, 3, 4, 5, 0, 1]  # dense: the trivial map
    assert table[2] == [e for held in plan.slots[1] for e in held]
    with pytest.raises(UserError, match="model-layers"):
        formats.write_plan(plan, "sglang", model_layers=4)


def test_vllm_row_for_all_layers_and_named_map(tmp_path):
    path = tmp_path / "map.json"
    path.write_text("[0, 1, 2, 3, 4, 5]")
    assert formats.read_plan(path, SHAPE, 3).slots == linear_plan(SHAPE, 3).slots
    path.write_text(json.dumps({"phy2log": [[0, 1, 2, 3, 4, 5]] * 3}))
    assert formats.read_plan(path, SHAPE, 3).slots == linear_plan(SHAPE, 3).slots


def test_ascend_layout():
    raw = json.loads(formats.write_plan(replicated_plan(), "vllm-ascend"))
    assert raw["moe_layer_count"] == 3 and [x["layer_id"] for x in raw["layer_list"]] == [0, 1, 2]
    layer = raw["layer_list"][1]
    assert layer["device_count"] == 4 and [d["device_id"] for d in layer["device_list"]] == [0, 1, 2, 3]


def test_ragged_plan_is_refused_by_engines_that_cannot_hold_it():
    ragged = linear_plan(SHAPE, 4)  # 2, 2, 1, 1
    for kind in ("sglang", "vllm", "vllm-ascend"):
        with pytest.raises(UserError, match="layer 0, rank 2 holds 1, layer 0, rank 0 holds 2"):
            formats.write_plan(ragged, kind)
    assert json.loads(formats.write_plan(ragged, "epmoe"))["ranks"] == 4


@pytest.mark.parametrize(
    "text, match",
    [
        ("", "not JSON"),
        ('{"a": 1}', "no plan of a known format"),
        ('{"physical_to_logical_map": [[0,1,2,3,4,5]], "extra": 1}', "SGLang takes only"),
        ("[[0, 1, 2, 3, 4, 5], [0, 1]]", "no vllm plan"),
        ("[[0, 1, 2, 3, 4, 9], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]", "expert 9 is not in"),
        ("[[0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]", "twice"),
        ('{"moe_layer_count": 3, "layer_list": [{"layer_id": 0, "device_count": 1, "device_list": []}]}', "disagree"),
        ('{"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 1, "device_list": []}]}', "0 of 1 dev"),
        ('{"layer_list": 5}', "no vllm-ascend plan"),
    ],
)
def test_bad_files_are_named(tmp_path, text, match):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UserError, match=match) as error:
        formats.read_plan(path, SHAPE, 3)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_what_is_missing_is_asked_for(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(formats.write_plan(replicated_plan(), "vllm"))
    with pytest.raises(UserError, match="--like"):
        formats.read_plan(path)
    with pytest.raises(UserError, match="--gpus"):
        formats.read_plan(path, SHAPE)
    with pytest.raises(UserError, match="shared equally by 3"):
        formats.read_plan(path, SHAPE, 3)


def test_what_a_format_loses_is_said():
    plan = replicated_plan()
    served = make_plan(SHAPE, 4, plan.slots, serve=plan.serve_rank_WLE, affinity="a.npz")
    assert formats.lost_in(served, "epmoe") == []
    assert len(formats.lost_in(served, "sglang")) == 2


@pytest.mark.parametrize(
    "config, layers, experts, top_k",
    [
        ({"num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 2}, (0, 1, 2), 8, 2),
        (
            {"num_hidden_layers": 4, "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
            (1, 2, 3),
            64,
            6,
        ),
        (
            {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4, "decoder_sparse_step": 2},
            (1, 3),
            16,
            4,
        ),
        (
            {"num_hidden_layers": 3, "num_experts": 16, "num_experts_per_tok": 4, "mlp_only_layers": [1]},
            (0, 2),
            16,
            4,
        ),
        (
            {
                "text_config": {
                    "num_hidden_layers": 3,
                    "num_experts": 4,
                    "num_experts_per_tok": 1,
                    "mlp_layer_types": ["dense", "sparse", "sparse"],
                }
            },
            (1, 2),
            4,
            1,
        ),
    ],
)
def test_shape_from_config(config, layers, experts, top_k):
    shape = shape_from_config(config, "config.json")
    assert (shape.moe_layers, shape.num_experts, shape.top_k) == (layers, experts, top_k)


def test_dense_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3, "hidden_size": 8}')
    with pytest.raises(UserError, match="no mixture-of-experts model"):
        shape_like(tmp_path)


def test_shape_like_reads_models_plans_and_traces(tmp_path, shared_dir):
    model = shape_like(shared_dir / "models" / "small32x4")
    trace = shape_like(shared_dir / "traces" / "small32x4_de_man.npz")
    model.require_same(trace, "the model", "the trace")
    linear_plan(model, 4).save(tmp_path / "plan.json")
    assert shape_like(tmp_path / "plan.json").num_experts == 32
