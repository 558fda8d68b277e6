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
class ChatMessage:
    role: str
    """"system", "user" or "assistant"."""
    parts: tuple[TextPart | ImagePart, ...]
