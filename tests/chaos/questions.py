"""What is asked: greedy or seeded, so that each question has one right answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.conftest import COLOUR, grey_png, picture, user

LONG = "Once there was a red circle and a blue star. " * 12


@dataclass(frozen=True, slots=True)
class Question:
    """One request without its form; `parts` are texts and image files."""

    name: str
    parts: tuple[str | bytes, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        return int(self.options.get("n", 1))

    @property
    def images(self) -> int:
        return sum(isinstance(part, bytes) for part in self.parts)

    def body(self, stream: bool) -> dict[str, Any]:
        """OpenAI's form."""
        body = {"model": "checkpoint", "messages": [user(*self.parts)], "stream": stream}
        return body | {"temperature": 0} | self.options


Answer = tuple[tuple[str, str], ...]
"""(text, finish reason) of each choice"""

# Longer than the model would go on by itself: most of an answer's life is decoding.
_LONG = {"max_tokens": 40, "ignore_eos": True}
_SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 24, "ignore_eos": True}


def questions() -> list[Question]:
    """Texts, one picture, three, several choices; enough of them that caches also miss."""
    names = ("red_circle", "blue_circle", "three_shapes", "two_stars", "number_42")
    pictures = [picture(f"{name}.png") for name in names]
    found = [
        Question("text, short", ("What colour is the sky?",)),
        Question("text, long output", ("Count the shapes.",), _LONG),
        Question("text, one token", ("Is it red?",), {"max_tokens": 1}),
        Question("text, sampled", ("Tell me more.",), _SAMPLED),
        Question("text, two choices", ("What else?",), _SAMPLED | {"n": 2}),
        Question("three pictures", (*pictures[:3], "How many shapes are there?"), _LONG),
        Question("pictures between texts", ("First:", pictures[3], "then:", pictures[4], "?")),
        Question("picture, three choices", (pictures[0], COLOUR), _SAMPLED | {"n": 3}),
    ]
    found += [
        Question(f"long prompt {n}", (f"Story {n}. {LONG}", "What was there?"), _LONG)
        for n in range(4)
    ]
    found += [Question(f"picture {n}", (one, COLOUR), _LONG) for n, one in enumerate(pictures)]
    found += [
        Question(f"grey {shade}", (grey_png(160, 128, shade), "Describe it."), _LONG)
        for shade in range(0, 250, 25)
    ]
    return found


def unseen(draw: random.Random) -> Question:
    """A picture that no cache knows."""
    side, shade = draw.randrange(64, 200), draw.randrange(256)
    return Question("new", (grey_png(side, 96, shade), "Describe it."), {"max_tokens": 20})
