"""Which parameters are refused, with which field, and what ends an output."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from epd.config import LimitsConfig
from epd.errors import EpdError
from epd.jobs import FinishReason, SamplingParams
from epd.sampling.params import finish_reason, validate

V = 100
LIMITS = LimitsConfig()
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, NAN, INF, 101.0)],
        *[("top_p", v) for v in (0.0, 1.1, -1.0, NAN)],
        *[("min_p", v) for v in (-0.1, 1.5, NAN)],
        *[("repetition_penalty", v) for v in (0.0, -1.0, INF, NAN)],
        *[("presence_penalty", v) for v in (-2.1, 2.1, NAN)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, INF)],
        ("top_k", -1),
        ("seed", -1),
        ("seed", 1 << 64),
        ("choice", -1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("top_logprobs", 21),
        ("logit_bias", {V: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: NAN}),
        ("logit_bias", {3: -INF}),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", dict.fromkeys(range(LIMITS.max_logit_biases + 1), 0.0)),
        ("stop_token_ids", (V,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1,) * (LIMITS.max_stop_token_ids + 1)),
    ],
)
def test_refused_values_name_their_field(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value, "logprobs": True, "max_tokens": 16} | {field: value})
    with pytest.raises(EpdError) as raised:
        validate(params, V)
    assert raised.value.param == field
    assert raised.value.mapping.http_status == 400


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(EpdError) as raised:
        validate(SamplingParams(top_logprobs=1), V)
    assert raised.value.param == "top_logprobs"


def test_min_tokens_with_every_id_ending_is_refused() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(3)))
    with pytest.raises(EpdError) as raised:
        validate(params, 3)
    assert raised.value.param == "min_tokens"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            temperature=2.0,
            top_k=1,
            top_p=0.01,
            min_p=1.0,
            repetition_penalty=0.1,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            seed=(1 << 64) - 1,
            logit_bias={0: -100.0, V - 1: 100.0},
            stop_token_ids=(0, V - 1),
            min_tokens=16,
            logprobs=True,
            top_logprobs=20,
        ),
    ],
)
def test_values_at_the_limits_are_accepted(params: SamplingParams) -> None:
    validate(params, V)


def test_what_ends_an_output() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=(1,), eos_token_ids=(2,))
    assert finish_reason(params, 5, 1) is None
    assert finish_reason(params, 1, 1) is FinishReason.STOP
    assert finish_reason(params, 2, 1) is FinishReason.STOP
    assert finish_reason(params, 5, 3) is FinishReason.LENGTH
    assert finish_reason(params, 2, 3) is FinishReason.STOP
    assert finish_reason(params, 5, 1, context_full=True) is FinishReason.LENGTH
    ignoring = SamplingParams(stop_token_ids=(1,), eos_token_ids=(2,), ignore_eos=True)
    assert finish_reason(ignoring, 2, 1) is None
    assert finish_reason(ignoring, 1, 1) is FinishReason.STOP


def test_checking_parameters_does_not_load_torch() -> None:
    code = "import sys, epd.sampling.params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
