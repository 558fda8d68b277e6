"""A conversation as the prompt builder takes it: roles and parts, no bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    index: int
    """Place among the request's images, from 0."""


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Upright size in pixels, from the file's header."""

    width: int
    height: int
    param: str = ""
    """Where the client wrote the image, e.g. ``messages[0].content[1]``."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: str
    """JSON Schema, as JSON."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made."""

    name: str
    arguments: str
    """A JSON object, as JSON."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    """"system", "user", "assistant", or "tool" (a call's result)."""
    parts: tuple[TextPart | ImagePart, ...]
    calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    name: str = ""
    """Who speaks, or whose result it is, where the client said so; for templates that look."""
