"""Users' text beside a template's: what they typed that looks like a control token is marked.

Templates trim and inspect texts, so they stay in place; two characters that the request has
nowhere fence what must not become a control token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epd.errors import invalid

_PRIVATE = range(0xF0000, 0xFFFFE)
"""Characters that nobody writes: plane 15's private ones."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Two characters that occur nowhere in a request's text; they fence users' tokens."""

    start: str
    end: str

    @classmethod
    def unused_in(cls, texts: Sequence[str], param: str) -> Marks:
        """
        Raises:
            EpdError: no two characters are free; `param` holds the texts.
        """
        first, second = map(chr, _PRIVATE[:2])
        if not any(first in text or second in text for text in texts):
            return cls(first, second)
        used = set().union(*texts)
        free = [mark for mark in map(chr, _PRIVATE) if mark not in used][:2]
        if len(free) < 2:
            raise invalid(f"{param}: the text has every private character of plane 15", param)
        return cls(*free)

    def wrap(self, text: str) -> str:
        return f"{self.start}{text}{self.end}"

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Pieces of text; True for what stood between marks.

        A template's own string functions may part a pair of marks: a lone mark
        disappears, but what stood beside it can't join into a token.
        """
        pattern = f"{self.start}([^{self.start}{self.end}]*){self.end}|[{self.start}{self.end}]"
        parts = re.split(pattern, rendered)
        pieces = [(text, at % 2 == 1) for at, text in enumerate(parts) if text]
        return pieces or [("", False)]


class ControlTokens:
    """What a checkpoint's tokenizer and chat template treat as more than text."""

    def __init__(self, tokenizer: Any, template: str, image_token: str) -> None:
        self._normalizer = tokenizer.backend_tokenizer.normalizer
        found = _control_tokens(tokenizer, template, image_token)
        self._controls = re.compile("|".join(map(re.escape, found)))

    def mark(self, text: str, marks: Marks) -> str:
        """The text with every control token in it marked."""
        if self._normalizer is not None and not text.isascii():
            # What only normalisation turns into a control token is marked as well.
            normal = self._normalizer.normalize_str(text)
            if len(self._controls.findall(normal)) > len(self._controls.findall(text)):
                text = normal
        return self._controls.sub(lambda found: marks.wrap(found[0]), text)

    def mark_json(self, value: Any, marks: Marks) -> Any:
        """The same for all strings of a JSON value, names included."""
        if isinstance(value, str):
            return self.mark(value, marks)
        if isinstance(value, list):
            return [self.mark_json(item, marks) for item in value]
        if isinstance(value, dict):
            return {self.mark(k, marks): self.mark_json(v, marks) for k, v in value.items()}
        return value


def _control_tokens(tokenizer: Any, template: str, image_token: str) -> list[str]:
    """Special tokens, and added tokens that the template itself writes; longest first."""
    found = {
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or (token.content in template and not token.content.isspace())
    }
    return sorted(found | {image_token}, key=lambda token: (-len(token), token))
