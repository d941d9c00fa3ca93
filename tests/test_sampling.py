"""Sampling: penalties and cuts against transformers' processors, how draws are spread, what noise depends on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from epmoe.engine.request import SamplingParams
from epmoe.ops.sampling import SampleRow, apply_penalties, gumbel_noise, keep_likely, noise_key, sample
from placement.errors import UserError

V = 50


def logits(rows: int, seed: int = 0, vocabulary: int = V) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_likeliest_token():
    logits_NV = logits(9)
    assert torch.equal(sample(logits_NV, [SampleRow()] * 9), logits_NV.argmax(-1))
    assert torch.equal(sample(logits_NV.bfloat16(), [SampleRow()] * 9), logits_NV.bfloat16().float().argmax(-1))
    assert sample(logits_NV[:0], []).shape == (0,)


def draw_counts(row: SampleRow, logits_V: torch.Tensor, draws: int) -> torch.Tensor:
    rows = [replace(row, key=noise_key(seed, 0, 3)) for seed in range(draws)]
    return torch.bincount(sample(logits_V.expand(draws, -1), rows), minlength=len(logits_V))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature):
    logits_V, draws = logits(1, vocabulary=12)[0], 20_000
    counts = draw_counts(SampleRow(temperature=temperature), logits_V, draws)
    expected = torch.softmax(logits_V.double() / temperature, -1).numpy() * draws
    big = expected >= 5
    seen, want = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
    keep = want > 0
    assert chisquare(seen[keep], want[keep]).pvalue > 1e-3
    wrong = torch.softmax(logits_V.double() / (temperature * 1.3), -1).numpy() * draws  # the test can tell
    assert chisquare(counts.numpy(), wrong).pvalue < 1e-6


@pytest.mark.parametrize("vary", ["seed", "sample", "position"])
def test_noise_is_uniform_over_each_part_of_its_key(vary):
    keys = [noise_key(*[n if part == vary else 5 for part in ("seed", "sample", "position")]) for n in range(4000)]
    assert len(set(keys)) == 4000
    noise = gumbel_noise(keys, torch.empty(1, 16)).double()
    share = torch.exp(-torch.exp(-noise))  # uniform on 0..1 if the noise is Gumbel
    for column in share.T:
        assert chisquare(torch.histc(column, 20, 0, 1).numpy()).pvalue > 1e-5
    neighbours = torch.corrcoef(share.T)
    assert (neighbours - torch.eye(16)).abs().max() < 0.1, "tokens of one draw share their noise"
    following = torch.corrcoef(torch.stack((share[:-1].flatten(), share[1:].flatten())))[0, 1]
    assert following.abs() < 0.02, "draws one after the other share their noise"


def test_noise_depends_on_the_key_alone():
    keys = [noise_key(seed, 1, 9) for seed in range(33)]
    together = gumbel_noise(keys, torch.empty(1, 1003))
    for n in (0, 7, 32):
        assert torch.equal(gumbel_noise([keys[n]], torch.empty(1, 1003))[0], together[n])
    assert torch.equal(gumbel_noise(keys[::-1], torch.empty(1, 1003)), together.flip(0))
    assert together.isfinite().all()


def test_draw_does_not_depend_on_place_in_the_batch():
    rows = [
        SampleRow(),
        SampleRow(temperature=1.0, key=1),
        SampleRow(temperature=0.7, top_k=5, key=2),
        SampleRow(temperature=1.3, top_p=0.8, repetition_penalty=1.4, prompt=[1, 2], output=[3], key=3),
        SampleRow(frequency_penalty=1.5, output=[4, 4, 5]),
        SampleRow(temperature=1.0, min_p=0.2, presence_penalty=-0.5, output=[7], key=4),
    ]
    logits_NV = logits(len(rows))
    alone = [int(sample(logits_NV[n : n + 1], [row])) for n, row in enumerate(rows)]
    kept = logits_NV.clone()
    for order in (range(6), [5, 3, 1, 0, 2, 4], [2, 2, 3, 3]):
        drawn = sample(logits_NV[list(order)], [rows[n] for n in order])
        assert drawn.tolist() == [alone[n] for n in order]
    assert torch.equal(logits_NV, kept), "the caller's logits were changed"


@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_repetition_penalty_is_that_of_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    prompt, output = [3, 9, 9, 20], [3, 41, 9]
    row = SampleRow(repetition_penalty=penalty, prompt=prompt, output=output)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits(1))
    assert torch.equal(apply_penalties(logits(1), [row]), theirs)


def test_presence_and_frequency_count_the_output_only():
    row = SampleRow(presence_penalty=0.5, frequency_penalty=0.25, prompt=[1, 2], output=[2, 5, 5, 5])
    change = apply_penalties(logits(1), [row]) - logits(1)
    expected = torch.zeros(V)
    expected[2], expected[5] = -0.75, -1.25
    torch.testing.assert_close(change[0], expected, atol=1e-6, rtol=0)


def test_a_token_still_on_the_device_counts_like_a_known_one():
    known = SampleRow(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, prompt=[1], output=[4, 6])
    late = SampleRow(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, prompt=[1], output=[4])
    both = apply_penalties(logits(2)[[0, 0]], [known, late], torch.tensor([-1, 6]))
    assert torch.equal(both[0], both[1])


WARPERS = [
    (SampleRow(temperature=1, top_k=7), "TopKLogitsWarper", {"top_k": 7}),
    (SampleRow(temperature=1, top_k=1), "TopKLogitsWarper", {"top_k": 1}),
    (SampleRow(temperature=1, top_k=1000), "TopKLogitsWarper", {"top_k": 1000}),
    (SampleRow(temperature=1, top_p=0.8), "TopPLogitsWarper", {"top_p": 0.8}),
    (SampleRow(temperature=1, top_p=0.01), "TopPLogitsWarper", {"top_p": 0.01}),
    (SampleRow(temperature=1, min_p=0.1), "MinPLogitsWarper", {"min_p": 0.1}),
    (SampleRow(temperature=1, min_p=1.0), "MinPLogitsWarper", {"min_p": 1.0}),
]


@pytest.mark.parametrize("row, name, settings", WARPERS, ids=lambda value: str(value) if type(value) is dict else "")
def test_cuts_are_those_of_transformers(row, name, settings):
    import transformers

    for seed in range(20):
        theirs = getattr(transformers, name)(**settings)(None, logits(1, seed))
        assert torch.equal(keep_likely(logits(1, seed), [row]), theirs)


def test_cuts_follow_one_another():
    """Top-p counts shares of what top-k left, min-p compares within it; a cut token is never drawn."""
    logits_V = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))
    row = SampleRow(temperature=1.0, top_k=3, top_p=0.8)
    assert draw_counts(row, logits_V, 500).gt(0).tolist() == [True, True, False, False, False]  # 0.4 + 0.3 of 0.85
    row = SampleRow(temperature=1.0, top_k=4, min_p=0.3)
    assert draw_counts(row, logits_V, 500).gt(0).tolist() == [True, True, True, False, False]


def test_an_end_of_range_seed_is_a_seed():
    for seed in (0, (1 << 63) - 1):
        assert 0 <= noise_key(seed, 0, 0) < 1 << 64
    assert noise_key(1, 2, 3) != noise_key(3, 2, 1) != noise_key(2, 1, 3)


@pytest.mark.parametrize(
    "key, value",
    [
        ("max_tokens", 2.5),
        ("max_tokens", "3"),
        ("max_tokens", None),
        ("max_tokens", 1 << 63),
        ("top_k", 1.5),
        ("n", True),
        ("n", 1 << 30),
        ("temperature", "hot"),
        ("temperature", None),
        ("logprobs", 1.5),
        ("seed", 1 << 63),
        ("stop", 5),
        ("stop", [1]),
        ("stop", b"x"),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", "no"),
    ],
)
def test_parameters_of_wrong_type_are_refused(key, value):
    """Before they are sent: on a rank they would end the run of everybody else's requests."""
    with pytest.raises(UserError, match=f"{key} is .*must be"):
        SamplingParams(**{key: value})


def test_parameters_become_plain_values():
    params = SamplingParams(max_tokens=np.int64(3), temperature=1, stop=None, stop_token_ids=np.array([4, 5]))
    assert params.to_dict() == SamplingParams(max_tokens=3, stop_token_ids=(4, 5)).to_dict()
    assert [type(params.max_tokens), type(params.temperature), type(params.stop_token_ids[0])] == [int, float, int]
    assert SamplingParams(stop="end").stop == ("end",) == SamplingParams(stop=["end"]).stop
