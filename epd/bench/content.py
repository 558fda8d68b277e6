"""Makes the words and pictures of a request, and its body."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import orjson
from PIL import Image, ImageDraw

from epd.bench.workload import Picture, Shape

# One token each in the vocabularies of the Qwen, Llama and Mistral families; `Words` learns
# the true figure from the server, so other vocabularies come out right too.
_TEXT = (
    "time year people way day man thing woman life child world school state family student "
    "group country problem hand part place case week company system program question work "
    "night point home water room mother area money story fact month lot right study book eye "
    "job word business issue side kind head house service friend father power hour game line "
    "end member law car city name team minute idea body back parent face others level office "
    "door health person art war history party result change morning reason research girl"
)
_WORDS = tuple(_TEXT.split())


class Words:
    """Texts of about so many tokens, by the server's own count.

    `calibrate` takes two prompts' `usage.prompt_tokens`; the difference is what words cost,
    the rest is the chat template's.
    """

    def __init__(self, tokens_per_word: float = 1.0) -> None:
        self._tokens_per_word = tokens_per_word

    @classmethod
    def calibrate(cls, few: int, few_tokens: int, many: int, many_tokens: int) -> Words:
        if many_tokens <= few_tokens:  # the server doesn't count
            return cls()
        return cls((many_tokens - few_tokens) / (many - few))

    @property
    def tokens_per_word(self) -> float:
        return self._tokens_per_word

    def text(self, shape: Shape, rng: random.Random) -> str:
        """Its prefix blocks by id, then words of its own."""
        blocks = [
            self._words(shape.prefix_block_tokens, random.Random(block)) for block in shape.prefix
        ]
        own = shape.text_tokens - len(blocks) * shape.prefix_block_tokens
        return " ".join([*blocks, self._words(max(1, own), rng)])

    def _words(self, tokens: int, rng: random.Random) -> str:
        count = max(1, round(tokens / self._tokens_per_word))
        return " ".join(rng.choices(_WORDS, k=count))


@lru_cache(maxsize=256)
def data_url(picture: Picture) -> str:
    """A PNG of coloured rectangles: small, and unlike any other identity's."""
    rng = random.Random(f"{picture.identity} {picture.width} {picture.height}")
    size = (picture.width, picture.height)
    image = Image.new("RGB", size, _colour(rng))
    draw = ImageDraw.Draw(image)
    for _ in range(24):
        x, y = rng.randrange(picture.width), rng.randrange(picture.height)
        w, h = rng.randrange(1, 1 + picture.width // 3), rng.randrange(1, 1 + picture.height // 3)
        draw.rectangle((x, y, x + w, y + h), fill=_colour(rng))
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def _colour(rng: random.Random) -> tuple[int, int, int]:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def body(
    shape: Shape, model: str, words: Words, rng: random.Random, extra: Mapping[str, Any]
) -> bytes:
    """A streamed, greedy chat request. `extra` goes in over it; None takes a field out."""
    text = words.text(shape, rng)
    content: Any = text
    if shape.pictures:
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": data_url(picture)}}
            for picture in shape.pictures
        ]
        content = [*parts, {"type": "text", "text": text}]
    request = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": shape.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    whole = {**request, **extra}
    return orjson.dumps({key: value for key, value in whole.items() if value is not None})
