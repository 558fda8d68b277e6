"""What sampling parameters are accepted, and what ends an output."""

from __future__ import annotations

import math
from typing import Final

from epd.config import LimitsConfig
from epd.errors import invalid, too_many
from epd.jobs import FinishReason, SamplingParams

_DEFAULT_LIMITS: Final = LimitsConfig()

# Field -> (lowest, highest, lowest is allowed). The penalties' ranges are OpenAI's.
_RANGES: Final[dict[str, tuple[float, float, bool]]] = {
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 100.0, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}


def validate(
    params: SamplingParams, vocab_size: int, limits: LimitsConfig = _DEFAULT_LIMITS
) -> None:
    """Check every field before anything is computed with it.

    Raises:
        EpdError: a value is not a number, out of range, or names an id outside the
            vocabulary; `param` is the field.
    """
    for name, (low, high, closed) in _RANGES.items():
        _check_range(name, getattr(params, name), low, high, closed)
    _check_count("top_k", params.top_k, 0, 1 << 31)
    _check_count("seed", params.seed, 0, (1 << 64) - 1)
    _check_count("choice", params.choice, 0, (1 << 32) - 1)
    _check_count("max_tokens", params.max_tokens, 1, 1 << 31)
    _check_count("min_tokens", params.min_tokens, 0, params.max_tokens)
    _check_count("top_logprobs", params.top_logprobs, 0, min(limits.max_top_logprobs, vocab_size))
    if params.top_logprobs and not params.logprobs:
        raise invalid("top_logprobs needs logprobs", "top_logprobs")
    _check_bias(params, vocab_size, limits.max_logit_biases)
    if (count := len(params.stop_token_ids)) > limits.max_stop_token_ids:
        raise too_many("stop_token_ids", count, limits.max_stop_token_ids, "ids")
    for token in params.stop_token_ids:
        _check_id("stop_token_ids", token, vocab_size)
    if params.min_tokens and len(params.ending_ids) >= vocab_size:
        raise invalid("every token is a stop token, so min_tokens leaves none", "min_tokens")


def finish_reason(
    params: SamplingParams, token_id: int, num_output: int, *, context_full: bool = False
) -> FinishReason | None:
    """Whether the output ends with `token_id`, its `num_output`-th token (from 1).

    `context_full`: there is no place for one more token.
    """
    if token_id in params.ending_ids:
        return FinishReason.STOP
    if num_output >= params.max_tokens or context_full:
        return FinishReason.LENGTH
    return None


def _check_range(name: str, value: float, low: float, high: float, closed: bool) -> None:
    if not math.isfinite(value):
        raise invalid(f"{name} must be a finite number, not {value}", name)
    if not (low <= value <= high if closed else low < value <= high):
        start = "[" if closed else "("
        raise invalid(f"{name} must be in {start}{low:g}, {high:g}], not {value:g}", name)


def _check_count(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise invalid(f"{name} must be in [{low}, {high}], not {value}", name)


def _check_bias(params: SamplingParams, vocab_size: int, most: int) -> None:
    if len(params.logit_bias) > most:
        raise too_many("logit_bias", len(params.logit_bias), most, "biases")
    for token, bias in params.logit_bias.items():
        _check_id("logit_bias", token, vocab_size)
        _check_range("logit_bias", bias, -100.0, 100.0, True)


def _check_id(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise invalid(f"{name}: the vocabulary has ids 0 to {vocab_size - 1}, not {token}", name)
