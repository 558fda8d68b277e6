"""The body of POST /v1/chat/completions: every field served, refused, or unknown.

OpenAI's names and meanings, plus extensions with the names that other servers
use (top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids) and
`timeline`. A field that would change the answer is never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from epd.config import LimitsConfig
from epd.errors import invalid, too_many
from epd.jobs import SamplingParams
from gateway.constraints import Constraint, read_constraint
from gateway.content import Conversation, read_messages
from gateway.fields import Fields
from gateway.naming import Names
from gateway.tools import ToolUse, read_tools, with_form

_GREEDY_BELOW = 1e-5
"""A temperature under this would overflow half precision: it means greedy."""
_INT64 = 1 << 63
MOST_IDS = _MOST_VALUES = 1_000_000
"""More than any prompt has tokens. A parser makes 60 bytes and more of each."""
_TOKEN_ID = re.compile(r"0|[1-9][0-9]*")
_MANY_TOKENS = (1 << 31) - 1
_NEW_NAMES = Names(((r"max_tokens", "max_completion_tokens"),))

# Known, not served: the values listed change nothing and pass.
NOT_SERVED: dict[str, Sequence[Any]] = {
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "structured_outputs": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "echo": (False,),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "bad_words": ([],),
    "priority": (0,),
}
# Identify the caller, or what is likely to begin alike; change no answer.
ACCEPTED = ("user", "metadata", "safety_identifier", "prompt_cache_key")


@dataclass(frozen=True, slots=True)
class Generation:
    """How to generate, as far as the client said it."""

    sampling: SamplingParams
    """`max_tokens`, `seed` and `eos_token_ids` are filled in later."""
    max_tokens: int | None
    seed: int | None
    stop: tuple[str, ...]
    constraint: Constraint | None = None
    """Where `sampling.grammar` comes from."""
    choices: int = 1


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked request."""

    model: str
    conversation: Conversation
    generation: Generation
    stream: bool = False
    include_usage: bool = False
    timeline: bool = False
    tools: ToolUse | None = None
    """The model may call these, and its output is searched for calls."""
    prompt: str | tuple[int, ...] | None = None
    """Instead of a conversation: a text or ids, as they are."""
    client_request_id: str = ""
    """What a gRPC message calls itself."""
    salt: bytes = b""
    """The tenant's: part of every cache key. Never the client's to choose."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """What a form of answer says again of its request, as it was checked."""
    names: Names = field(default_factory=Names)
    """The client's, for errors."""


def parse_body(body: bytes, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    """Check a JSON body.

    Raises:
        EpdError: INVALID_REQUEST naming the field (`param`) as the client wrote it.
    """
    return parse_chat(load_json(body), limits, vocab_size)


def parse_chat(value: Any, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    """See `parse_body`."""
    fields = Fields(value, "")
    model = fields.required_string("model")
    names = limit_names(fields)
    conversation = read_messages(fields.take("messages"), limits)
    generation = read_generation(fields, limits, vocab_size)
    tools = read_tools(fields, limits)
    if tools is not None:
        generation = with_tools(generation, tools, limits)
    stream, include_usage = read_streaming(fields)
    timeline = fields.boolean("timeline")
    fields.refuse(NOT_SERVED)
    for name in ACCEPTED:
        fields.take(name)
    fields.done()
    return ChatCall(
        model, conversation, generation, stream, include_usage, timeline, tools, names=names
    )


def with_tools(generation: Generation, tools: ToolUse, limits: LimitsConfig) -> Generation:
    """Raises EpdError where all of the output is constrained already, calls included."""
    constraint, asked = tools.constraint, generation.constraint
    if asked is not None:
        if not asked.form:
            raise invalid(f"{asked.param}: can't be used together with tools", asked.param)
        constraint = with_form(tools, asked, limits)
    if constraint is None:
        return generation
    sampling = replace(generation.sampling, grammar=constraint.grammar)
    return replace(generation, sampling=sampling, constraint=constraint)


def load_json(body: bytes) -> Any:
    """Raises EpdError for what is no JSON (NaN and Infinity are none), or would become very
    much more in memory than it is as text."""
    if count_values(body) > _MOST_VALUES:
        raise invalid(f"the body has more than {_MOST_VALUES} values")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is no JSON: {error}") from error


def count_values(body: bytes) -> int:
    """At least as many values as there are in some JSON, but for one. Each stands behind the
    beginning of a list or an object, or behind a comma: commas alone would miss lists in lists,
    of which two bytes make ninety."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def limit_names(fields: Fields) -> Names:
    """The output's limit has two names; before it is read."""
    return _NEW_NAMES if fields.has("max_completion_tokens") else Names()


def read_streaming(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether to end the stream with the usage."""
    stream = fields.boolean("stream")
    return stream, _stream_options(fields, stream)


def read_generation(fields: Fields, limits: LimitsConfig, vocab_size: int) -> Generation:
    """The fields that decide how tokens are chosen and when the output ends."""
    max_tokens = _max_tokens(fields)
    min_tokens = fields.integer("min_tokens", 0, _MANY_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise fields.wrong("min_tokens", f"{min_tokens} is more than max_tokens, {max_tokens}")
    temperature = fields.number("temperature", 0.0, 2.0, default=1.0)
    top_p = fields.number("top_p", 0.0, 1.0, default=1.0)
    if top_p == 0:
        raise fields.wrong("top_p", "must be more than 0")
    repetition = fields.number("repetition_penalty", 0.0, 10.0, default=1.0)
    if repetition == 0:
        raise fields.wrong("repetition_penalty", "must be more than 0")
    logprobs, top_logprobs = _logprobs(fields, limits)
    constraint = read_constraint(fields, limits)
    sampling = SamplingParams(
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_k=max(fields.integer("top_k", -1, _MANY_TOKENS) or 0, 0),
        top_p=top_p,
        min_p=fields.number("min_p", 0.0, 1.0, default=0.0),
        repetition_penalty=repetition,
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0, default=0.0),
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0, default=0.0),
        logit_bias=_logit_bias(fields, vocab_size, limits.max_logit_biases),
        stop_token_ids=_stop_token_ids(fields, vocab_size, limits.max_stop_token_ids),
        min_tokens=min_tokens,
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        grammar=constraint.grammar if constraint else None,
    )
    seed = fields.integer("seed", -_INT64, 2 * _INT64 - 1)
    return Generation(
        sampling,
        max_tokens,
        seed,
        _stop(fields, limits),
        constraint,
        fields.integer("n", 1, limits.max_choices) or 1,
    )


def _max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", 1, _MANY_TOKENS)
    new = fields.integer("max_completion_tokens", 1, _MANY_TOKENS)
    if old is not None and new is not None and old != new:
        raise fields.wrong("max_tokens", "differs from max_completion_tokens; send one of them")
    return new if new is not None else old


def _logprobs(fields: Fields, limits: LimitsConfig) -> tuple[bool, int]:
    logprobs = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, limits.max_top_logprobs)
    if top and not logprobs:
        raise fields.wrong("top_logprobs", "needs logprobs: true")
    return logprobs, top or 0


def _logit_bias(fields: Fields, vocab_size: int, most: int) -> Mapping[int, float]:
    value = fields.take("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise fields.wrong("logit_bias", "must be an object of token ids")
    if len(value) > most:
        raise too_many(fields.param("logit_bias"), len(value), most, "token ids")
    bias: dict[int, float] = {}
    for key, number in value.items():
        name = f"logit_bias.{key}"
        if not _TOKEN_ID.fullmatch(key):  # "05" beside "5" would be two wishes for one id
            raise fields.wrong(name, "is no token id")
        if len(key) > 10 or int(key) >= vocab_size:
            raise fields.wrong(name, f"must be an id from 0 to {vocab_size - 1}")
        bias[int(key)] = fields.check_number(name, number, -100.0, 100.0)
    return bias


def _stop_token_ids(fields: Fields, vocab_size: int, most: int) -> tuple[int, ...]:
    ids = fields.array("stop_token_ids") or ()
    if len(ids) > most:
        raise too_many(fields.param("stop_token_ids"), len(ids), most, "token ids")
    for at, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            reason = f"must be an id from 0 to {vocab_size - 1}"
            raise fields.wrong(f"stop_token_ids[{at}]", reason)
    return tuple(ids)


def _stop(fields: Fields, limits: LimitsConfig) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fields.wrong("stop", "must be a string or an array of strings")
    if len(stops) > limits.max_stop_strings:
        raise too_many(fields.param("stop"), len(stops), limits.max_stop_strings, "strings")
    for stop in stops:
        if not 1 <= len(stop) <= limits.max_stop_length:
            reason = f"strings have 1 to {limits.max_stop_length} characters, not {len(stop)}"
            raise fields.wrong("stop", reason)
    return tuple(dict.fromkeys(stops))


def _stream_options(fields: Fields, stream: bool) -> bool:
    value = fields.take("stream_options")
    if value is None:
        return False
    if not stream:
        raise fields.wrong("stream_options", "needs stream: true")
    options = Fields(value, "stream_options")
    include_usage = options.boolean("include_usage")
    options.refuse({"include_obfuscation": (False,)})
    options.done()
    return include_usage
