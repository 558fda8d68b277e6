"""The conversations of the parity tests: text only, one image, several between texts."""

from __future__ import annotations

from typing import Any

from PIL import Image

from tests.parity.split import pictures

Conversation = tuple[list[dict[str, Any]], list[Image.Image]]


def conversation(*parts: str | None, seed: int = 0) -> Conversation:
    """One user message; None is a picture."""
    content = [{"type": "image"} if p is None else {"type": "text", "text": p} for p in parts]
    return [{"role": "user", "content": content}], pictures(parts.count(None), seed)


TEXT = conversation("hello world describe the image please what is this assistant user")
ONE_IMAGE = conversation("hello", None, "describe the image")
THREE_IMAGES = conversation(
    "hello", None, "describe the image", None, "what", None, "is this", seed=2
)
CASES = {"text": TEXT, "one image": ONE_IMAGE, "three images": THREE_IMAGES}

ALONE = [
    conversation("what is this assistant please describe hello user world"),
    conversation("describe", None, "hello", seed=5),
    conversation(None, "what", None, "is this", None, "please", seed=7),
]
"""The same kinds, but none of them begins like one of the others."""

CONCURRENT = [
    TEXT,
    ONE_IMAGE,
    THREE_IMAGES,
    conversation("what"),
    conversation(None, "what is this", seed=3),
    conversation("please " * 43),
    conversation(None, None, "describe", seed=1),
    conversation("user assistant " * 9, None, seed=4),
]
