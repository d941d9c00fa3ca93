"""The router's twin against transformers' modules, and what the rule promises where no module shows it."""

import moe_cases
import pytest
import torch
from torch.nn import functional

from epmoe.ops.router import RouterRule, route, route_ref

HIDDEN, EXPERTS, TOP_K, TOKENS = 48, 16, 4, 65
V3 = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
COUNTS = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS}
SIZES = COUNTS | {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"num_experts_per_tok": TOP_K, "moe_intermediate_size": 8, "norm_topk_prob": True}
V3_RULE = moe_cases.RULES["groups by top2, biased"]
GROUPS_BY_MAX = RouterRule(groups=4, top_groups=2, group_score="max", scale=16.0)
CASES = [  # family, module, class, settings of the config, rule
    ("mixtral", "MixtralTopKRouter", {}, RouterRule(renormalize=True)),
    ("qwen2_moe", "Qwen2MoeTopKRouter", {"norm_topk_prob": False}, RouterRule()),
    ("qwen3_moe", "Qwen3MoeTopKRouter", {}, RouterRule(renormalize=True)),
    ("olmoe", "OlmoeTopKRouter", {"norm_topk_prob": False}, RouterRule()),
    (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
        GROUPS_BY_MAX,
    ),
    ("deepseek_v3", "DeepseekV3TopkRouter", V3, V3_RULE),
    ("glm4_moe", "Glm4MoeTopkRouter", V3, V3_RULE),
    ("dots1", "Dots1TopkRouter", V3, V3_RULE),
    ("gpt_oss", "GptOssTopKRouter", {}, RouterRule(score="topk_softmax")),
    ("phimoe", "PhimoeTopKRouter", {"num_experts_per_tok": 2}, RouterRule(score="sparsemixer")),
    ("granitemoe", "GraniteMoeTopKRouter", {}, RouterRule(score="topk_softmax")),
    ("jamba", "JambaTopKRouter", {}, RouterRule()),
    ("minimax_m2", "MiniMaxM2TopKRouter", {}, RouterRule(score="sigmoid", renormalize=True)),
    ("hunyuan_v1_moe", "HunYuanMoEV1Gate", {"moe_topk": TOP_K}, RouterRule(renormalize=True)),
    (
        "ernie4_5_moe",
        "Ernie4_5_MoeTopKRouter",
        {"moe_num_experts": EXPERTS, "moe_k": TOP_K, "moe_norm_min": 1e-12},
        RouterRule(renormalize=True, norm_min=1e-12),
    ),
    (
        "lfm2_moe",
        "Lfm2MoeTopKRouter",
        {"use_expert_bias": True, "routed_scaling_factor": 1.5},
        RouterRule(score="sigmoid", renormalize=True, norm_eps=1e-6, scale=1.5),
    ),
]


def oracle(family: str, name: str, settings: dict):
    """The family's router with weights 15 times the usual size, its correction bias, and the config."""
    transformers = pytest.importorskip("transformers")
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name])
    if not hasattr(module, name):
        pytest.skip(f"left out: this transformers ({transformers.__version__}) has no {name}")
    config = transformers.AutoConfig.for_model(family, **(SIZES | settings))
    router = getattr(module, name)(config).eval()
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn_like(parameter) * (15 * 0.02 if parameter.dim() == 2 else 0.1))
    bias_E = next((b for n, b in [*router.named_buffers(), *router.named_parameters()] if "correction_bias" in n), None)
    if family in ("minimax_m2", "lfm2_moe"):
        bias_E = torch.empty(EXPERTS)
    if bias_E is not None:
        bias_E.data.copy_(torch.randn(bias_E.shape) * 0.1)
    return router, bias_E


@pytest.mark.parametrize(("family", "name", "settings", "rule"), CASES, ids=[case[0] for case in CASES])
def test_twin_equals_transformers(family, name, settings, rule):
    torch.manual_seed(0)
    router, bias_E = oracle(family, name, settings)
    x_TD = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        extra = (bias_E,) if family in ("minimax_m2", "lfm2_moe") else ()
        logits_TE, want_TK, expert_TK = router(x_TD, *extra)
    top_k = settings.get("num_experts_per_tok", TOP_K)
    got_TK, got_expert_TK = route_ref(logits_TE, rule, top_k, None if bias_E is None else bias_E.flatten())
    want_TE = torch.zeros(TOKENS, EXPERTS).scatter_(1, expert_TK, want_TK.float())
    got_TE = torch.zeros(TOKENS, EXPERTS).scatter_(1, got_expert_TK.long(), got_TK)
    assert got_TK.shape == (TOKENS, top_k)
    torch.testing.assert_close(got_TE, want_TE, rtol=1e-6, atol=1e-7)


def test_llama4_is_sigmoid_of_the_best_logits():
    logits_TE = torch.randn(9, EXPERTS) * 10
    weight_TK, expert_TK = route(logits_TE, RouterRule(score="topk_sigmoid"), 1)
    assert torch.equal(expert_TK[:, 0].long(), logits_TE.argmax(-1))
    torch.testing.assert_close(weight_TK[:, 0], logits_TE.amax(-1).sigmoid())


def test_dbrx_divides_by_the_p_norm_in_the_dtype_of_the_logits():
    logits_TE = (torch.randn(9, EXPERTS) * 3).bfloat16()
    rule = RouterRule(renormalize=True, norm_p=2.0, round_scores=True)
    weight_TK, _ = route(logits_TE, rule, 4)
    want_TK = functional.softmax(logits_TE, -1).topk(4).values
    want_TK = want_TK / torch.norm(want_TK, p=2.0, dim=-1, keepdim=True)
    assert want_TK.dtype == torch.bfloat16
    torch.testing.assert_close(weight_TK, want_TK.float(), rtol=0, atol=0)


def test_the_bias_moves_the_selection_and_not_the_weights():
    logits_TE = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    weight_TK, expert_TK = route(logits_TE, RouterRule(score="sigmoid"), 2, torch.tensor([9.0, 0.0, 0.0, 0.0]))
    assert expert_TK.tolist() == [[0, 3]]
    torch.testing.assert_close(weight_TK, torch.tensor([[0.0, 3.0]]).sigmoid())


def test_groups_are_masked_with_minus_infinity():
    """Biased scores of the kept group are all negative: a mask of 0 would select from the other group."""
    bias_E = torch.tensor([-2.0, -3.0, -9.0, -9.0])
    rule = RouterRule(score="sigmoid", groups=2, top_groups=1, group_score="top2")
    assert sorted(route(torch.zeros(1, 4), rule, 2, bias_E)[1][0].tolist()) == [0, 1]


def test_weights_round_to_the_named_dtype():
    logits_TE = torch.randn(5, EXPERTS)
    exact, _ = route(logits_TE, RouterRule(), 3)
    rounded, _ = route(logits_TE, RouterRule(weight_dtype="bfloat16"), 3)
    assert torch.equal(rounded, exact.bfloat16().float()) and not torch.equal(rounded, exact)


@pytest.mark.parametrize("wrong", [{"score": "tanh"}, {"group_score": "mean"}, {"groups": 2, "top_groups": 3}])
def test_a_rule_that_means_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values()))) if "groups" not in wrong else "3 of 2"):
        RouterRule(**wrong)


def test_no_tokens():
    weight_TK, expert_TK = route(torch.zeros(0, EXPERTS), V3_RULE, 4, torch.zeros(EXPERTS))
    assert weight_TK.shape == expert_TK.shape == (0, 4)
