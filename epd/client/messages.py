"""What a client sends: messages, tools, options."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from epd.errors import EpdError, ErrorKind
from protos.epd.v1 import gateway_pb2 as pb

Content = str | bytes
"""A text, or an image file."""


def user(*content: Content) -> pb.Message:
    """A user's message: texts and image files, in order."""
    return _message(pb.ROLE_USER, content)


def system(text: str) -> pb.Message:
    return _message(pb.ROLE_SYSTEM, [text])


def assistant(text: str, calls: Iterable[pb.ToolCall] = ()) -> pb.Message:
    """An answer of the model, with the tool calls that it made."""
    message = _message(pb.ROLE_ASSISTANT, [text] if text else [])
    message.tool_calls.extend(calls)
    return message


def tool_result(call_id: str, *content: Content) -> pb.Message:
    """What a tool gave back to the call of this id."""
    message = _message(pb.ROLE_TOOL, content)
    message.tool_call_id = call_id
    return message


def image_url(url: str, *, low_detail: bool = False) -> pb.ContentPart:
    """A picture by its data: URL or, where the server allows it, web address; for
    `pb.Message.parts`."""
    detail = pb.IMAGE_DETAIL_LOW if low_detail else pb.IMAGE_DETAIL_UNSPECIFIED
    return pb.ContentPart(image_url=url, detail=detail)


def tool(
    name: str,
    description: str = "",
    parameters: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
) -> pb.Tool:
    """A function that the model may call; `parameters` is the JSON Schema of its arguments,
    which all calls of a `strict` one fit."""
    text = json.dumps(parameters) if parameters is not None else ""
    return pb.Tool(name=name, description=description, parameters=text, strict=strict)


def chat_request(
    messages: Sequence[pb.Message],
    model: str,
    tools: Sequence[pb.Tool],
    tool_choice: str,
    parallel_tool_calls: bool | None,
    options: dict[str, Any],
) -> pb.ChatRequest:
    """Raises EpdError for options that there are none of."""
    request = pb.ChatRequest(
        model=model, messages=messages, tools=tools, options=generation(options)
    )
    modes = {"auto": pb.TOOL_CHOICE_MODE_AUTO, "none": pb.TOOL_CHOICE_MODE_NONE}
    modes["required"] = pb.TOOL_CHOICE_MODE_REQUIRED
    if tool_choice in modes:
        request.tool_choice.mode = modes[tool_choice]
    elif tool_choice:
        request.tool_choice.function = tool_choice
    if parallel_tool_calls is not None:
        request.parallel_tool_calls = parallel_tool_calls
    return request


def completion_request(
    prompt: str | Sequence[int], model: str, options: dict[str, Any]
) -> pb.CompletionRequest:
    """Raises EpdError for options that there are none of."""
    request = pb.CompletionRequest(model=model, options=generation(options))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.ids.ids.extend(prompt)
    return request


def generation(options: dict[str, Any]) -> pb.GenerationOptions:
    """Raises EpdError for options that there are none of."""
    if isinstance(stop := options.get("stop"), str):
        options = {**options, "stop": [stop]}  # as over HTTP; protobuf would take its letters
    if isinstance(options.get("guided_choice"), str):
        reason = "options: guided_choice is a list of texts"
        raise EpdError(ErrorKind.INVALID_REQUEST, reason, param="options.guided_choice")
    try:
        return pb.GenerationOptions(**options)
    except (ValueError, TypeError) as error:
        raise EpdError(ErrorKind.INVALID_REQUEST, f"options: {error}", param="options") from None


def _message(role: pb.Role.ValueType, content: Sequence[Content]) -> pb.Message:
    parts = [
        pb.ContentPart(text=item) if isinstance(item, str) else pb.ContentPart(image=item)
        for item in content
    ]
    return pb.Message(role=role, parts=parts)
