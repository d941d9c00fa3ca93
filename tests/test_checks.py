"""A capture of the right shape and the wrong content is refused or flagged, with its place; real traces are not."""

import numpy as np
import pytest

from placement.checks import check_trace, require_sound
from placement.errors import UserError
from placement.plan import MoEShape
from placement.trace import Trace, load_trace

E, K, L = 16, 2, 4


def linked_trace(tokens=600, seed=0, **extra):
    """Layers that depend on each other: a hidden topic per token prefers a quarter of the experts in every layer."""
    rng = np.random.default_rng(seed)
    topic = rng.integers(0, 4, tokens)
    score = rng.random((tokens, L, E))
    score += 0.7 * (np.arange(E) // 4 == topic[:, None, None])
    return trace_of(np.argsort(-score, axis=-1)[..., :K], **extra)


def trace_of(ids, layers=None):
    shape = MoEShape(layers or tuple(range(1, ids.shape[1] + 1)), E, ids.shape[2], "toy")
    return Trace(shape, ids.astype(np.uint8), np.array([len(ids)]), source="capture")


def only(findings, check):
    assert findings and {f.check for f in findings} == {check}, findings
    return findings


def test_sound_traces_have_no_findings(shared_dir):
    assert check_trace(linked_trace()) == []
    for name in ("dsv2lite_law", "small32x4_de_man", "small8x2_zh_book"):
        assert check_trace(load_trace(shared_dir / "traces" / f"{name}.npz")) == []


def test_constant_capture_is_refused():
    ids = np.tile(np.array([3, 7]), (50, L, 1))
    (finding,) = only(check_trace(trace_of(ids)), "constant")
    assert finding.severity == "error" and "all 50 tokens" in finding.message and "[3, 7]" in finding.message
    with pytest.raises(UserError, match="capture did not run"):
        require_sound(trace_of(ids), print)


def test_all_zero_top_1_capture_is_refused():
    (finding,) = check_trace(trace_of(np.zeros((50, L, 1), np.int64)))
    assert finding.check == "constant" and finding.severity == "error"


def test_one_constant_layer_is_named_by_its_model_index():
    trace = linked_trace()
    ids = trace.expert_ids_TLK.copy()
    ids[:, 2] = [5, 9]
    findings = check_trace(trace_of(ids, (1, 2, 7, 8)))
    assert findings[0].severity == "error" and "layer 7 (row 2) chose [5, 9]" in findings[0].message


def test_order_of_choices_does_not_hide_a_constant_layer():
    trace = linked_trace()
    ids = trace.expert_ids_TLK.copy()
    ids[::2, 2], ids[1::2, 2] = [5, 9], [9, 5]
    assert any(f.check == "constant" for f in check_trace(trace_of(ids)))


def test_no_tokens():
    empty = Trace(MoEShape((0,), E, K), np.zeros((0, 1, K), np.uint8), np.zeros(0, np.int64), source="capture")
    assert check_trace(empty)[0].check == "empty"


def test_warm_up_rows_are_flagged_with_their_place():
    ids = linked_trace().expert_ids_TLK.copy()
    ids[:40] = ids[0]
    (finding,) = only(check_trace(trace_of(ids)), "warm-up")
    assert finding.severity == "warning" and "tokens 0 to 39" in finding.message


def test_padding_rows_are_flagged_with_their_place():
    ids = linked_trace().expert_ids_TLK.copy()
    ids[100:130] = ids[100]
    (finding,) = only(check_trace(trace_of(ids)), "padding")
    assert "tokens 100 to 129" in finding.message
    notes = []
    require_sound(trace_of(ids), notes.append)  # a warning does not refuse
    assert len(notes) == 1


def test_layers_of_other_tokens_are_flagged():
    trace = linked_trace(tokens=2000)
    ids = trace.expert_ids_TLK.copy()
    ids[:, 2:] = ids[np.random.default_rng(1).permutation(len(ids)), 2:]
    (finding,) = only(check_trace(trace_of(ids)), "not-aligned")
    assert "layers 2 and 3" in finding.message


def test_half_a_capture_is_flagged():
    ids = linked_trace().expert_ids_TLK.copy()
    ids[:, 1] = np.where(np.arange(len(ids))[:, None] % 2, [0, 1], [1, 2])
    messages = [f.message for f in check_trace(trace_of(ids)) if f.check == "unused-experts"]
    assert len(messages) == 1 and "layer 2 (row 1) uses 3 of 16" in messages[0]


def test_one_token_and_every_expert_chosen_are_fine():
    assert check_trace(trace_of(linked_trace().expert_ids_TLK[:1])) == []
    every = np.tile(np.arange(E), (100, L, 1))
    assert check_trace(trace_of(every)) == []
