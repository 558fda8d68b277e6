"""Messages of an OpenAI chat body: roles, parts, and where the images are.

Only typed content parts are images; strings are strings. Parts keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from epd.config import LimitsConfig
from epd.errors import invalid, too_many
from epd.text.messages import ChatMessage, ImagePart, TextPart, ToolCall
from gateway.fields import Fields, as_json, kind_of

# "developer" is OpenAI's newer name of the system role; checkpoints know "system".
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_NOT_SERVED: dict[str, Sequence[Any]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning_content": (),
    "reasoning": (),
}
_PART_NOT_SERVED: dict[str, Sequence[Any]] = {"cache_control": (), "prompt_cache_breakpoint": ()}
_UNSERVED_PARTS = frozenset(
    {
        *("input_audio", "audio_url", "video", "video_url", "input_video"),
        *("file", "input_file", "refusal", "input_image"),
    }
)
_MOST_CALLS = 128
_NAME = re.compile(r"[^\s<|\\/>]{1,64}")
"""OpenAI's pattern for who speaks."""
_DETAILS = ("auto", "low", "high", "original")
"""All but "low" leave a picture as it is."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as the client sent it: a URL, base64 text, or the file's bytes."""

    value: str | bytes
    param: str
    bare_base64: bool = False
    """Whether text without a scheme is base64; where a URL belongs it is a mistake."""
    low_detail: bool = False
    """The client is content with a reduced picture (`limits.low_detail_pixels`)."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[ChatMessage, ...]
    images: tuple[ImageSource, ...]


@dataclass(slots=True)
class Reading:
    """What was read of a request's messages so far."""

    limits: LimitsConfig
    images: list[ImageSource] = field(default_factory=list)
    calls: dict[str, str] = field(default_factory=dict)
    """Of the calls in the messages before: id -> the function's name."""
    parts: int = 0

    def count(self, more: int, param: str) -> None:
        """Before so many parts or calls are looked at.

        Raises:
            EpdError: there are too many by now.
        """
        self.parts += more
        if self.parts > (most := self.limits.max_parts):
            raise too_many(param, self.parts, most, "parts and calls of all messages")


def read_messages(value: Any, limits: LimitsConfig) -> Conversation:
    """Check and translate ``messages``.

    Raises:
        EpdError: naming the message and the part at fault.
    """
    if not isinstance(value, list):
        what = "is missing" if value is None else f"must be an array, not {kind_of(value)}"
        raise invalid(f"messages: {what}", "messages")
    if len(value) > limits.max_messages:
        raise too_many("messages", len(value), limits.max_messages, "messages")
    so_far = Reading(limits)
    messages = [_message(item, f"messages[{i}]", so_far) for i, item in enumerate(value)]
    return conversation(messages, so_far.images, limits)


def conversation(
    messages: Sequence[ChatMessage], images: Sequence[ImageSource], limits: LimitsConfig
) -> Conversation:
    """What must hold for a conversation, however it came (HTTP or gRPC)."""
    if not messages:
        raise invalid("messages: must not be empty", "messages")
    if len(images) > limits.max_images:
        raise too_many(images[limits.max_images].param, len(images), limits.max_images, "images")
    if not any(_says_something(message) for message in messages if message.role == "user"):
        raise invalid("messages: no user message holds text or an image", "messages")
    return Conversation(tuple(messages), tuple(images))


def _says_something(message: ChatMessage) -> bool:
    return any(isinstance(part, ImagePart) or part.text.strip() for part in message.parts)


def _message(value: Any, path: str, so_far: Reading) -> ChatMessage:
    fields = Fields(value, path)
    role = fields.required_string("role")
    if role not in _ROLES:
        raise fields.wrong("role", f"{role!r} is not supported; one of {', '.join(_ROLES)}")
    content = fields.take("content")
    calls = _tool_calls(fields, so_far) if role == "assistant" else ()
    name = _result_name(fields, so_far.calls) if role == "tool" else _speaker(fields)
    fields.refuse(_NOT_SERVED)
    fields.done()
    parts = _content(content, f"{path}.content", so_far, optional=bool(calls))
    return ChatMessage(_ROLES[role], parts, calls, name)


def _speaker(fields: Fields) -> str:
    """Raises EpdError: no name that OpenAI would take."""
    name = fields.string("name")
    if name is None:
        return ""
    if not _NAME.fullmatch(name):
        raise fields.wrong("name", "must be 1 to 64 characters, no white space and none of <|\\/>")
    return name


def _result_name(fields: Fields, known: Mapping[str, str]) -> str:
    """Raises EpdError: it answers no call, or one of another function."""
    called = known.get(fields.required_string("tool_call_id"))
    if called is None:
        raise fields.wrong("tool_call_id", "no message before has a call of this id")
    if (name := fields.string("name")) not in (None, called):
        raise fields.wrong("name", f"{name!r} is not the function called, {called!r}")
    return name or ""


def _content(
    content: Any, where: str, so_far: Reading, optional: bool
) -> tuple[TextPart | ImagePart, ...]:
    if content is None and optional:
        return ()
    if isinstance(content, str):
        check_text(content, where)
        return (TextPart(content),)
    if not isinstance(content, list):
        what = "is missing" if content is None else f"is {kind_of(content)}"
        raise invalid(f"{where}: must be a string or an array of parts, {what}", where)
    so_far.count(len(content), where)
    return tuple(_part(item, f"{where}[{j}]", so_far.images) for j, item in enumerate(content))


def _tool_calls(fields: Fields, so_far: Reading) -> tuple[ToolCall, ...]:
    calls, known = fields.array("tool_calls") or (), so_far.calls
    so_far.count(len(calls), fields.param("tool_calls"))
    return tuple(
        _tool_call(item, fields.param(f"tool_calls[{i}]"), known) for i, item in enumerate(calls)
    )


def _tool_call(value: Any, path: str, known: dict[str, str]) -> ToolCall:
    outer = Fields(value, path)
    identity = outer.required_string("id")
    if (kind := outer.required_string("type")) != "function":
        raise outer.wrong("type", f"{kind!r} is not supported; function")
    outer.integer("index", 0, _MOST_CALLS - 1)  # streamed calls have it; they stand in order
    inner = Fields(outer.take("function") or {}, outer.param("function"))
    outer.done()
    name = inner.required_string("name")
    arguments = inner.required_string("arguments") or "{}"
    inner.done()
    check_text(name, inner.param("name"))
    check_arguments(arguments, inner.param("arguments"))
    known[identity] = name
    return ToolCall(name, arguments)


def check_arguments(arguments: str, where: str) -> None:
    """Raises EpdError unless they are a JSON object, and one that templates can write again."""
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError as error:
        raise invalid(f"{where}: is no JSON: {error}", where) from error
    if not isinstance(parsed, dict):
        raise invalid(f"{where}: must be a JSON object", where)
    as_json(parsed, where)


def _part(value: Any, path: str, images: list[ImageSource]) -> TextPart | ImagePart:
    fields = Fields(value, path)
    kind = fields.required_string("type")
    fields.refuse(_PART_NOT_SERVED)
    if kind == "text":
        text = fields.required_string("text")
        check_text(text, f"{path}.text")
        fields.done()
        return TextPart(text)
    if kind == "image_url":
        source = _image_url(fields, path)
    elif kind == "image":
        source = ImageSource(fields.required_string("image"), f"{path}.image", bare_base64=True)
    else:
        known = "is not supported" if kind in _UNSERVED_PARTS else "is unknown"
        raise invalid(f"{path}.type: {kind!r} {known}", f"{path}.type")
    fields.done()
    images.append(source)
    return ImagePart(len(images) - 1)


def _image_url(fields: Fields, path: str) -> ImageSource:
    value = fields.take("image_url")
    if value is None:
        raise fields.wrong("image_url", "is missing")
    if isinstance(value, str):
        return ImageSource(value, f"{path}.image_url")
    inner = Fields(value, f"{path}.image_url")
    url = inner.required_string("url")
    if (detail := inner.string("detail")) not in (None, *_DETAILS):
        raise inner.wrong("detail", f"{detail!r} is not supported; {', '.join(_DETAILS)}")
    inner.done()
    return ImageSource(url, f"{path}.image_url.url", low_detail=detail == "low")


def check_text(text: str, where: str) -> None:
    """A lone surrogate can't be encoded, so it can't be tokenised."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"{where}: holds an unpaired surrogate", where) from error
