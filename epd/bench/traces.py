"""Reads request traces: who asked when, for how much. No trace has prompts or pictures in it.

| format | known by | source |
|---|---|---|
| our own JSON lines | `at_s` | below |
| Mooncake JSON lines | `hash_ids` | kvcache-ai/Mooncake, FAST25-release/traces (Apache-2.0) |
| ServeGen, drawn, JSON lines | `t_ms` | alibaba/ServeGen (Apache-2.0) |
| Azure LLM and LMM, CSV | `TIMESTAMP` in the head | Azure/AzurePublicDataset (CC BY 4.0) |

Our own: `{"at_s": 0.5, "text_tokens": 80, "output_tokens": 32, "kind": "burst",
"images": [{"width": 448, "height": 448, "id": 3}]}`; `kind`, `images` and an image's `id` may
be missing (a picture without id is new).
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from epd.bench.workload import Picture, Shape, Timed, Zipf
from epd.errors import invalid

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """What is taken from a trace, and how pictures are made up where it names none."""

    requests: int = 0
    """The first so many; 0: all."""
    text_tokens: int = 0
    """Longer prompts are cut to this; 0: never."""
    output_tokens: int = 0
    pixels_per_token: int = 28
    """Side of the square of pixels that becomes one token (Qwen2-VL: 28)."""
    pool: int = 8
    """Different pictures of one client and size; 0: every picture is new."""
    zipf: float = 1.0
    image_tokens: int = 256
    """Of a picture whose trace doesn't say (Azure LMM)."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What was read of a file."""

    requests: list[Timed]
    """In order of time, the first at 0."""
    left_out: int = 0
    """So many more are in the file, behind `Limits.requests`."""

    def __str__(self) -> str:
        count = len(self.requests)
        asked = f"the first {count} of {count + self.left_out}" if self.left_out else f"all {count}"
        pictures = [picture for one in self.requests for picture in one.shape.pictures]
        different = len(set(pictures))
        return f"{asked} requests; {len(pictures)} pictures, {different} of them different"


def read_trace(path: Path, limits: Limits, rng: random.Random) -> Trace:
    """What the file asks for.

    Raises:
        EpdError: the file can't be read, or its format is none of the above.
    """
    try:
        with path.open(newline="") as file:
            timed = _first(map(_checked, _parse(file, limits, rng)), limits.requests)
            left_out = sum(1 for line in file if line.strip())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise invalid(f"trace {path}: {type(error).__name__}: {error}", "trace") from error
    if not timed:
        raise invalid(f"trace {path}: no request in it", "trace")
    timed.sort(key=lambda t: t.at_s)
    start = timed[0].at_s
    return Trace([Timed(t.at_s - start, _cut(t.shape, limits)) for t in timed], left_out)


def _checked(timed: Timed) -> Timed:
    """Raises ValueError for what no request can have, which would end the measurement later."""
    if not math.isfinite(timed.at_s):
        raise ValueError(f"a request at {timed.at_s} s")
    for picture in timed.shape.pictures:
        if min(picture.width, picture.height) < 1:
            raise ValueError(f"a picture of {picture.width} x {picture.height} pixels")
    return timed


def _first(timed: Iterator[Timed], count: int) -> list[Timed]:
    taken = []
    for one in timed:
        taken.append(one)
        if count and len(taken) >= count:
            break
    return taken


def _parse(lines: Iterable[str], limits: Limits, rng: random.Random) -> Iterator[Timed]:
    lines = iter(lines)
    head = next(lines, "")
    if head.startswith("TIMESTAMP"):
        names = head.strip().split(",")
        yield from (_azure(row, limits, rng) for row in csv.DictReader(lines, names))
        return
    rows = (json.loads(line) for line in itertools.chain([head], lines) if line.strip())
    pools: dict[tuple[int, int], int] = {}
    for row in rows:
        yield _json_reader(row)(row, limits, rng, pools)


Pools = dict[tuple[int, int], int]
Reader = Callable[[dict[str, Any], Limits, random.Random, Pools], Timed]


def _json_reader(row: dict[str, Any]) -> Reader:
    for mark, reader in (("at_s", _own), ("hash_ids", _mooncake), ("t_ms", _servegen)):
        if mark in row:
            return reader
    raise ValueError(f"unknown format: a row with {', '.join(sorted(row)) or 'nothing'}")


def _own(row: dict[str, Any], limits: Limits, rng: random.Random, pools: Pools) -> Timed:
    pictures = tuple(
        Picture(int(p["width"]), int(p["height"]), int(p.get("id", rng.getrandbits(62))))
        for p in row.get("images", ())
    )
    shape = Shape(
        int(row["text_tokens"]), int(row["output_tokens"]), pictures, kind=row.get("kind", "")
    )
    return Timed(float(row["at_s"]), shape)


def _mooncake(row: dict[str, Any], limits: Limits, rng: random.Random, pools: Pools) -> Timed:
    length = int(row["input_length"])
    # The last block is seldom full and belongs to this request alone.
    prefix = tuple(int(h) for h in row["hash_ids"])[: length // MOONCAKE_BLOCK_TOKENS]
    shape = Shape(length, int(row["output_length"]), (), prefix, MOONCAKE_BLOCK_TOKENS)
    return Timed(float(row["timestamp"]) / 1e3, shape)


def _servegen(row: dict[str, Any], limits: Limits, rng: random.Random, pools: Pools) -> Timed:
    pictures = tuple(
        _picture(int(row["client"]), int(tokens), limits, rng, pools)
        for tokens in row["image_tokens"]
    )
    shape = Shape(int(row["text_tokens"]), int(row["output_tokens"]), pictures)
    return Timed(float(row["t_ms"]) / 1e3, shape)


def _azure(row: dict[str, str], limits: Limits, rng: random.Random) -> Timed:
    count = int(row.get("NumImages", 0))
    pictures = tuple(_picture(0, limits.image_tokens, limits, rng, {}) for _ in range(count))
    stamp = row["TIMESTAMP"].replace("Z", "")
    whole, _, fraction = stamp.partition(".")
    at = datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
    text = int(row["ContextTokens"]) - count * limits.image_tokens
    return Timed(at, Shape(max(1, text), int(row["GeneratedTokens"]), pictures))


def _picture(client: int, tokens: int, limits: Limits, rng: random.Random, pools: Pools) -> Picture:
    """Of so many tokens, nearly square; its identity from the pool of (client, size)."""
    side = limits.pixels_per_token
    across = max(1, math.isqrt(tokens))
    down = max(1, round(tokens / across))
    if not limits.pool:
        return Picture(across * side, down * side, rng.getrandbits(62))
    pool = pools.setdefault((client, tokens), len(pools))
    identity = pool * limits.pool + Zipf(limits.pool, limits.zipf)(rng)
    return Picture(across * side, down * side, identity)


def _cut(shape: Shape, limits: Limits) -> Shape:
    text = min(shape.text_tokens, limits.text_tokens or shape.text_tokens)
    output = min(shape.output_tokens, limits.output_tokens or shape.output_tokens)
    prefix = shape.prefix
    if shape.prefix_block_tokens:
        prefix = prefix[: text // shape.prefix_block_tokens]
    return Shape(
        text, max(1, output), shape.pictures, prefix, shape.prefix_block_tokens, shape.kind
    )
