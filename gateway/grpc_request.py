"""Requests of the public gRPC API, as the checks of the HTTP API take them.

Fields are named in errors as the proto names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import orjson

from epd.config import LimitsConfig
from epd.errors import invalid, too_many
from epd.jobs import SamplingParams
from epd.text.messages import ChatMessage, ImagePart, TextPart, ToolCall
from gateway.completions import DEFAULT_MAX_TOKENS, read_ids, read_prompt
from gateway.content import Conversation, ImageSource, Reading, check_arguments, conversation
from gateway.fields import Fields
from gateway.naming import Names
from gateway.schema import MOST_IDS, ChatCall, Generation, read_generation, with_tools
from gateway.tools import ToolUse, read_tools
from protos.epd.v1 import gateway_pb2 as pb

_Option = Literal[
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "n",
    "guided_json",
    "guided_regex",
]
_OPTIONAL: tuple[_Option, ...] = get_args(_Option)
_ROLES = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}
_FORMS = ("json_object", "guided_json", "guided_regex", "guided_choice")
"""Of the output; one at most."""
_MODES = {
    pb.TOOL_CHOICE_MODE_UNSPECIFIED: "auto",
    pb.TOOL_CHOICE_MODE_AUTO: "auto",
    pb.TOOL_CHOICE_MODE_NONE: "none",
    pb.TOOL_CHOICE_MODE_REQUIRED: "required",
}
_NAMES = Names(
    (
        (rf"({'|'.join(pb.GenerationOptions.DESCRIPTOR.fields_by_name)})\b", r"options.\1"),
        (r"(options\.)?response_format\b.*", "options.json_object"),
        (r"tool_choice\.function\.name", "tool_choice.function"),
        (r"(tools\[\d+\])\.function", r"\1"),
        (r"(messages\[\d+\])\.content", r"\1.parts"),
    )
)
"""What the HTTP API's fields are called in the proto."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Stands for a message that another process has read (`gateway.bodies`)."""

    call: ChatCall
    nbytes: int

    @property
    def client_request_id(self) -> str:
        return self.call.client_request_id

    def ByteSize(self) -> int:
        return self.nbytes


def chat_call(request: pb.ChatRequest, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    """Raises EpdError naming the field as the proto calls it."""
    with _NAMES.used():
        generation = _generation(request.options, limits, vocab_size)
        tools = _tools(request.tools, limits, _choice(request))
        if tools is not None:
            generation = with_tools(generation, tools, limits)
    said = read_conversation(request.messages, limits)
    return ChatCall(
        request.model,
        said,
        generation,
        stream=True,
        tools=tools,
        client_request_id=request.client_request_id,
        names=_NAMES,
    )


def completion_call(
    request: pb.CompletionRequest, limits: LimitsConfig, vocab_size: int
) -> ChatCall:
    """Raises EpdError naming the field as the proto calls it."""
    with _NAMES.used():
        generation = _generation(request.options, limits, vocab_size)
    if generation.max_tokens is None:
        generation = replace(generation, max_tokens=DEFAULT_MAX_TOKENS)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise invalid("text: is missing, and so are ids", "text")
    name = "text" if kind == "text" else "ids.ids"
    if len(request.ids.ids) > MOST_IDS:
        raise too_many(name, len(request.ids.ids), MOST_IDS, "ids")
    value: Any = request.text if kind == "text" else list(request.ids.ids)
    prompt = read_prompt(Fields({name: value}, ""), name, vocab_size)
    return ChatCall(
        request.model,
        Conversation((), ()),
        generation,
        stream=True,
        prompt=prompt,
        client_request_id=request.client_request_id,
        names=_prompt_names(name),
    )


def _prompt_names(prompt: str) -> Names:
    return Names((*_NAMES.pairs, (r"prompt\b", prompt)))


def tokenize_call(request: pb.TokenizeRequest, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    """Raises EpdError naming the field as the proto calls it."""
    generation = Generation(SamplingParams(), 1, None, ())
    if not request.HasField("text"):
        with _NAMES.used():
            tools = _tools(request.tools, limits, {})
        said = read_conversation(request.messages, limits)
        return ChatCall(request.model, said, generation, tools=tools, names=_NAMES)
    if request.messages or request.tools:
        raise invalid("text: can't be used together with messages or tools", "text")
    prompt = read_prompt(Fields({"text": request.text}, ""), "text", vocab_size)
    said, names = Conversation((), ()), _prompt_names("text")
    return ChatCall(request.model, said, generation, prompt=prompt, names=names)


def detokenize_call(
    request: pb.DetokenizeRequest, limits: LimitsConfig, vocab_size: int
) -> ChatCall:
    """Raises EpdError naming the field as the proto calls it."""
    if len(request.ids) > MOST_IDS:
        raise too_many("ids", len(request.ids), MOST_IDS, "ids")
    if not request.ids:
        raise invalid("ids: at least one", "ids")
    ids = read_ids(Fields({}, ""), "ids", list(request.ids), vocab_size)
    generation = Generation(SamplingParams(), 1, None, ())
    return ChatCall("", Conversation((), ()), generation, prompt=ids)


def _generation(options: pb.GenerationOptions, limits: LimitsConfig, vocab_size: int) -> Generation:
    # Before they are made lists of.
    most = {"logit_bias": limits.max_logit_biases, "stop_token_ids": limits.max_stop_token_ids}
    for name, limit in most.items():
        if (found := len(getattr(options, name))) > limit:
            raise too_many(f"options.{name}", found, limit, "token ids")
    _check_one_form(options)
    fields = Fields(_options(options), "options")
    generation = read_generation(fields, limits, vocab_size)
    fields.done()
    return generation


def _check_one_form(options: pb.GenerationOptions) -> None:
    """Said here, in the proto's words for both fields."""
    given = {field.name for field, _ in options.ListFields()}
    found = [name for name in _FORMS if name in given]
    if len(found) > 1:
        first, second = (f"options.{name}" for name in found[:2])
        raise invalid(f"{second}: can't be used together with {first}", second)


def _options(options: pb.GenerationOptions) -> dict[str, Any]:
    """As JSON would hold them, so that one set of checks serves both."""
    found: dict[str, Any] = {
        name: getattr(options, name) for name in _OPTIONAL if options.HasField(name)
    }
    return {
        **found,
        "logit_bias": {str(key): value for key, value in options.logit_bias.items()},
        "stop_token_ids": list(options.stop_token_ids),
        "stop": list(options.stop),
        "ignore_eos": options.ignore_eos,
        "logprobs": options.logprobs,
        "top_logprobs": options.top_logprobs,
        "response_format": {"type": "json_object"} if options.json_object else None,
        "guided_choice": list(options.guided_choice) or None,
    }


# --- tools -------------------------------------------------------------------------------


def _choice(request: pb.ChatRequest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    choice = request.tool_choice
    if choice.HasField("function"):
        found["tool_choice"] = {"type": "function", "function": {"name": choice.function}}
    elif choice.HasField("mode"):
        if choice.mode not in _MODES:
            raise invalid(f"tool_choice.mode: {choice.mode} is unknown", "tool_choice.mode")
        found["tool_choice"] = _MODES[choice.mode]
    if request.HasField("parallel_tool_calls"):
        found["parallel_tool_calls"] = request.parallel_tool_calls
    return found


def _tools(
    tools: Sequence[pb.Tool], limits: LimitsConfig, choice: dict[str, Any]
) -> ToolUse | None:
    if len(tools) > limits.max_tools:
        raise too_many("tools", len(tools), limits.max_tools, "tools")
    shown = [_tool(tool, f"tools[{i}].parameters") for i, tool in enumerate(tools)]
    return read_tools(Fields({"tools": shown, **choice}, ""), limits)


def _tool(tool: pb.Tool, param: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    function["strict"] = tool.strict
    if tool.parameters:
        try:
            function["parameters"] = orjson.loads(tool.parameters)
        except orjson.JSONDecodeError as error:
            raise invalid(f"{param}: is no JSON: {error}", param) from error
    return {"type": "function", "function": function}


# --- messages ----------------------------------------------------------------------------


def read_conversation(messages: Sequence[pb.Message], limits: LimitsConfig) -> Conversation:
    """Raises EpdError naming the message and the part at fault."""
    if len(messages) > limits.max_messages:
        raise too_many("messages", len(messages), limits.max_messages, "messages")
    so_far = Reading(limits)
    found = [_message(item, f"messages[{i}]", so_far) for i, item in enumerate(messages)]
    return conversation(found, so_far.images, limits)


def _message(message: pb.Message, path: str, so_far: Reading) -> ChatMessage:
    so_far.count(len(message.parts) + len(message.tool_calls), f"{path}.parts")
    known = so_far.calls
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid(f"{path}.role: is missing or unknown", f"{path}.role")
    if message.tool_calls and role != "assistant":
        raise invalid(f"{path}.tool_calls: belong to an assistant", f"{path}.tool_calls")
    if bool(message.tool_call_id) != (role == "tool"):
        reason = "is missing" if role == "tool" else "belongs to a tool's message"
        raise invalid(f"{path}.tool_call_id: {reason}", f"{path}.tool_call_id")
    if role == "tool" and message.tool_call_id not in known:
        reason = "no message before has a call of this id"
        raise invalid(f"{path}.tool_call_id: {reason}", f"{path}.tool_call_id")
    calls = tuple(
        _call(call, f"{path}.tool_calls[{j}]", known) for j, call in enumerate(message.tool_calls)
    )
    images = so_far.images
    parts = (_part(part, f"{path}.parts[{j}]", images) for j, part in enumerate(message.parts))
    return ChatMessage(role, tuple(parts), calls)


def _call(call: pb.ToolCall, path: str, known: dict[str, str]) -> ToolCall:
    for name in ("id", "name"):
        if not getattr(call, name):
            raise invalid(f"{path}.{name}: is missing", f"{path}.{name}")
    known[call.id] = call.name
    arguments = call.arguments or "{}"
    check_arguments(arguments, f"{path}.arguments")
    return ToolCall(call.name, arguments)


def _part(part: pb.ContentPart, path: str, images: list[ImageSource]) -> TextPart | ImagePart:
    kind = part.WhichOneof("kind")
    if kind is None:
        raise invalid(f"{path}: neither text nor image", path)
    if kind == "text":
        return TextPart(part.text)
    if part.detail not in pb.ImageDetail.values():
        raise invalid(f"{path}.detail: {part.detail} is unknown", f"{path}.detail")
    low = part.detail == pb.IMAGE_DETAIL_LOW
    value = part.image if kind == "image" else part.image_url
    images.append(ImageSource(value, f"{path}.{kind}", low_detail=low))
    return ImagePart(len(images) - 1)
