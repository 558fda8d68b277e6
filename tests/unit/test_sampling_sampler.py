"""Sampling: transformers' meanings, the right distribution, no dependence on the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from epd.errors import EpdError, ErrorKind
from epd.jobs import SampledToken, SamplingParams
from epd.sampling.sampler import LOGPROB_FLOOR, Sampler, candidates
from epd.sampling.state import SamplerState

V = 50


def logits(seed: int = 0, rows: int = 1, vocab: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample(row: torch.Tensor, prompt: Any = (), output: Any = (), **params: Any) -> SampledToken:
    state = SamplerState(SamplingParams(**params), prompt, output)
    (token,) = Sampler(row.shape[-1]).sample(row.view(1, -1), [state])
    assert isinstance(token, SampledToken)
    return token


def test_greedy_takes_the_best_and_the_lower_id_of_two() -> None:
    row = logits()
    assert sample(row).id == int(row.argmax())
    assert sample(row, temperature=1e-6).id == int(row.argmax())
    row[0, [7, 30]] = 100.0
    assert sample(row).id == 7


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, V + 5),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
)
def test_filters_keep_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = logits(seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, probabilities = candidates(row[0], params)
    scores = TemperatureLogitsWarper(temperature)(None, row)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    scores = TopPLogitsWarper(top_p)(None, scores)
    scores = MinPLogitsWarper(min_p)(None, scores)
    wanted = scores[0].softmax(-1).double()
    got = torch.zeros(V, dtype=torch.float64)
    got[torch.from_numpy(ids)] = torch.from_numpy(probabilities / probabilities.sum())
    borderline = 1e-6  # a cumulative sum within rounding of top_p may fall on either side
    differ = (got - wanted).abs() > 1e-5
    if differ.any():
        kept = row[0].div(temperature).softmax(-1).sort(descending=True).values.cumsum(0)
        assert (kept - top_p).abs().min() < borderline
    assert len(ids) >= 1


def test_top_k_keeps_ties_and_top_p_of_a_long_list_equals_the_full_sort() -> None:
    row = torch.zeros(5000)
    row[[3, 10, 20]] = 5.0
    ids, _ = candidates(row, SamplingParams(temperature=1.0, top_k=2))
    assert ids.tolist() == [3, 10, 20]
    peaked, flat = logits(1, vocab=5000)[0], logits(1, vocab=5000)[0] * 0.01
    for row in (peaked, flat):  # within the short list, and beyond it
        ids, _ = candidates(row, SamplingParams(temperature=1.0, top_p=0.9))
        values, order = row.double().softmax(-1).sort(descending=True)
        count = int((values.cumsum(0) < 0.9).sum()) + 1
        assert ids.tolist() == sorted(order[:count].tolist())


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_covers_prompt_and_output_as_in_transformers(penalty: float) -> None:
    row, prompt, output = logits(2), [3, 3, 9], [17, 4, 17]
    params = SamplingParams(repetition_penalty=penalty)
    got = SamplerState(params, prompt, output).adjust(row[0])
    ids = torch.tensor([prompt + output])
    assert torch.equal(got, RepetitionPenaltyLogitsProcessor(penalty)(ids, row)[0])


def test_presence_and_frequency_cover_the_output_only() -> None:
    row = logits(3)[0]
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    got = SamplerState(params, [1, 2, 2, 3], [5, 5, 5, 6]).adjust(row)
    wanted = row.clone()
    wanted[5] -= 0.5 + 3 * 0.25
    wanted[6] -= 0.5 + 0.25
    assert torch.allclose(got, wanted)
    assert torch.equal(got[:5], row[:5])


def test_order_of_penalties_and_bias() -> None:
    row = torch.full((4,), 2.0)
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.25, logit_bias={1: 10.0, 2: -1.0}
    )
    got = SamplerState(params, [], [1]).adjust(row)
    assert got.tolist() == [2.0, 2.0 / 2 - 0.25 + 10.0, 1.0, 2.0]
    assert row.tolist() == [2.0] * 4, "the caller's logits were changed"


def test_state_grows_as_if_replayed() -> None:
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=-0.2)
    grown = SamplerState(params, [1, 2])
    for token in [5, 5, 7, 2]:
        grown.append(token)
    row = logits(4)[0]
    assert torch.equal(grown.adjust(row), SamplerState(params, [1, 2], [5, 5, 7, 2]).adjust(row))


def test_min_tokens_suppresses_every_ending_id_until_then() -> None:
    row = torch.zeros(6)
    row[[1, 2]] = 9.0
    options: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (1,), "eos_token_ids": (2,)}
    assert sample(row, output=[3], **options).id not in (1, 2)
    assert sample(row, output=[3, 3], **options).id == 1
    assert sample(row, output=[3], **options, ignore_eos=True).id == 2


def test_suppressed_tokens_have_the_floor_as_logprob() -> None:
    row = torch.zeros(3)
    token = sample(row, min_tokens=1, stop_token_ids=(0,), logprobs=True, top_logprobs=3)
    assert dict(token.top)[0] == LOGPROB_FLOOR
    assert token.logprob == pytest.approx(math.log(0.5))


def test_logprobs_are_after_penalties_and_before_temperature() -> None:
    row = logits(5)
    bias = {7: 4.0}
    token = sample(row, temperature=0.3, logit_bias=bias, logprobs=True, top_logprobs=5, seed=3)
    biased = row[0].double().clone()
    biased[7] += 4.0
    wanted = biased.log_softmax(-1)
    assert token.logprob == pytest.approx(float(wanted[token.id]), abs=1e-6)
    assert [i for i, _ in token.top] == wanted.topk(5).indices.tolist()
    assert [p for _, p in token.top] == pytest.approx(wanted.topk(5).values.tolist(), abs=1e-6)
    assert sample(row).logprob is None


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_of_equally_likely_alternatives_the_lower_ids_are_reported(count: int) -> None:
    """As greedy chooses: bfloat16 logits are often equal, and topk takes any of them."""
    row = logits(9, vocab=4000).mul(2).round()
    row[0, [17, 40, 3999]] = row.max() + 1
    token = sample(row, logprobs=True, top_logprobs=count)
    wanted = sorted(range(4000), key=lambda i: (-float(row[0, i]), i))[:count]
    assert [i for i, _ in token.top] == wanted
    assert token.top[0] == (17, token.logprob)
    assert token.id == 17


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.8, "seed": 2, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.5, "top_k": 9, "min_p": 0.05, "seed": 3, "repetition_penalty": 1.2},
    {"logit_bias": {4: 3.0}, "presence_penalty": 1.0},
    {"temperature": 1.0, "seed": 1, "choice": 1},
]


def test_the_batch_does_not_matter() -> None:
    rows = logits(6, len(MIXED))
    states = [SamplerState(SamplingParams(**p), [1, 2], [3] * i) for i, p in enumerate(MIXED)]
    sampler = Sampler(V)
    together = sampler.sample(rows, states)
    order = [4, 0, 5, 2, 1, 3]
    shuffled = sampler.sample(rows[order], [states[i] for i in order])
    assert [together[i] for i in order] == shuffled
    for i, state in enumerate(states):
        assert sampler.sample(rows[i : i + 1], [state]) == [together[i]]


def test_broken_rows_concern_their_own_request_only() -> None:
    rows = logits(7, 4)
    rows[1, 5] = float("nan")
    rows[2, 5] = float("inf")
    tokens = Sampler(V).sample(rows, [SamplerState(SamplingParams(), [])] * 4)
    kinds = [token.kind if isinstance(token, EpdError) else None for token in tokens]
    assert kinds == [None, ErrorKind.INTERNAL, ErrorKind.INTERNAL, None]
    assert tokens[3] == SampledToken(int(rows[3].argmax()))


def test_nothing_left_to_sample_is_an_error() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=(0, 1, 2))
    (token,) = Sampler(3).sample(torch.zeros(1, 3), [SamplerState(params, [])])
    assert isinstance(token, EpdError)
    assert token.kind is ErrorKind.INVALID_REQUEST


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.3, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 2.0, "min_p": 0.2},
    ],
)
@pytest.mark.parametrize("along", ["seed", "index", "choice"])
def test_draws_follow_the_distribution(options: dict[str, Any], along: str) -> None:
    """Chi-square over 4000 draws that differ in one part of the noise's key."""
    n, row = 4000, logits(8, vocab=12) * 0.4
    sampler = Sampler(12)
    states = [
        SamplerState(
            SamplingParams(
                **options,
                seed=i if along == "seed" else 99,
                choice=i if along == "choice" else 0,
            ),
            [],
        )
        for i in range(n)
    ]
    if along == "index":
        for i, state in enumerate(states):
            state.num_output = i
    tokens = sampler.sample(row.expand(n, -1), states)
    counts = np.bincount([t.id for t in tokens if isinstance(t, SampledToken)], minlength=12)
    ids, weights = candidates(row[0], SamplingParams(**options))
    expected = np.zeros(12)
    expected[ids] = n * weights / weights.sum()
    assert counts.sum() == n
    assert not counts[expected == 0].any(), "a filtered token was drawn"
    inside = expected > 0
    chi_square = ((counts - expected)[inside] ** 2 / expected[inside]).sum()
    assert chi_square < CRITICAL[int(inside.sum()) - 1]


CRITICAL = [0.0, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3]
"""Chi-square's 99.9 % point by degrees of freedom."""
