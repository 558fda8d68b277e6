"""What is asked, and when: shapes of requests, and arrivals. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Picture:
    """A synthetic picture; the same size and identity are the same bytes."""

    width: int
    height: int
    identity: int


@dataclass(frozen=True, slots=True)
class Shape:
    """One request without its words."""

    text_tokens: int
    """Of the user's text: neither the chat template's tokens nor the pictures'."""
    output_tokens: int
    pictures: tuple[Picture, ...] = ()
    prefix: tuple[int, ...] = ()
    """Ids of blocks of text that the prompt starts with; the same id is the same text.
    They are part of `text_tokens`."""
    prefix_block_tokens: int = 0
    kind: str = ""
    """Class in a mixed workload; each is summed up apart."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A request of an open-loop workload."""

    at_s: float
    """After the start, whatever the server does."""
    shape: Shape


@dataclass(frozen=True, slots=True)
class Load:
    """How much at once: `value` requests in flight, or `value` a second, or a trace played
    `value` times as fast."""

    how: Literal["concurrency", "rate", "trace"]
    value: float

    def __str__(self) -> str:
        return f"{self.how} {self.value:g}"


UNLOADED = Load("concurrency", 1)


@dataclass(frozen=True, slots=True)
class Template:
    """Requests of one kind that a user describes with flags."""

    text_tokens: int
    output_tokens: int
    sizes: tuple[tuple[int, int], ...] = ()
    """Of the pictures in each request: (width, height)."""
    pool: int = 0
    """Pictures of each size that there are; 0: every picture is new."""
    zipf: float = 1.0
    """How unequally a pool's pictures are used; 0: equally."""
    prefix_tokens: int = 0
    """All requests start with the same text of this length."""

    def shapes(self, count: int, rng: random.Random) -> list[Shape]:
        draw = Zipf(self.pool, self.zipf) if self.pool else None
        prefix = ((0,), self.prefix_tokens) if self.prefix_tokens else ((), 0)
        shape = Shape(self.text_tokens, self.output_tokens, (), *prefix)
        return [replace(shape, pictures=self._pictures(draw, rng)) for _ in range(count)]

    def _pictures(self, draw: Zipf | None, rng: random.Random) -> tuple[Picture, ...]:
        return tuple(
            Picture(w, h, draw(rng) if draw else rng.getrandbits(62)) for w, h in self.sizes
        )


class Zipf:
    """Draws 0..n-1 with a probability that falls as rank ** -exponent."""

    def __init__(self, n: int, exponent: float) -> None:
        self._ranks = range(n)
        total, self._cumulative = 0.0, []
        for rank in range(1, n + 1):
            total += rank**-exponent
            self._cumulative.append(total)

    def __call__(self, rng: random.Random) -> int:
        return rng.choices(self._ranks, cum_weights=self._cumulative)[0]


def poisson(shapes: Sequence[Shape], rate: float, rng: random.Random) -> list[Timed]:
    """Independent arrivals, `rate` a second on average; the first at once."""
    at, timed = 0.0, []
    for shape in shapes:
        timed.append(Timed(at, shape))
        at += rng.expovariate(rate)
    return timed


def faster(trace: Sequence[Timed], speed: float) -> list[Timed]:
    """The same requests in 1/`speed` of the time."""
    return [replace(timed, at_s=timed.at_s / speed) for timed in trace]


def fresh(shapes: Sequence[Shape], salt: int) -> Iterator[Shape]:
    """The same with other pictures and prefixes, equal ones staying equal: a second round
    must not find in a cache what the first one put there."""
    for shape in shapes:
        pictures = tuple(replace(p, identity=p.identity + (salt << 64)) for p in shape.pictures)
        prefix = tuple(block + (salt << 64) for block in shape.prefix)
        yield replace(shape, pictures=pictures, prefix=prefix)
