"""Pictures that a careless key takes for each other, asked by two keys, all at once: each
answer is its own picture's, and nobody is served what another key's request made.

The pairs are made here. With `make images MANIFEST=FOLDER` those of the folder's group `twin`
are asked, too.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cases.pictures import body, encodes, file, noise, solid, text
from tests.cases.test_cache_keys import TWINS, jpeg
from tests.e2e.cluster import Cluster
from tests.e2e.http_client import post

ALICE, BOB = "sk-alice", "sk-bob"
ROUNDS = 2


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two keys, exact numbers, caches that keep all."""
    settings = {"model.exact": "true", "gateway.api_keys": f"{ALICE},{BOB}"}
    cluster = Cluster(tmp_path_factory.mktemp("twins"), settings=settings).start()
    yield cluster
    cluster.assert_clean()
    cluster.close()


def of_one_thumbnail() -> list[bytes]:
    """Same size, same metadata, and the same picture once they are made small."""
    bars = np.repeat(np.tile([60, 60, 200, 200], 8), 3)
    pictures = [np.tile(row, (96, 1)).astype(np.uint8) for row in (bars, bars[::-1])]
    small = [Image.fromarray(one).resize((8, 8), Image.Resampling.BOX) for one in pictures]
    assert small[0].tobytes() == small[1].tobytes()
    return [jpeg(Image.fromarray(one).convert("RGB"), b"camera", "f" * 32) for one in pictures]


def from_manifest() -> dict[str, bytes]:
    if not (folder := os.environ.get("EPD_MANIFEST")):
        return {}
    entries = json.loads((Path(folder) / "manifest.json").read_text())
    names = [entry["file"] for entry in entries if entry["group"] == "twin"]
    assert names
    return {name: (Path(folder) / name).read_bytes() for name in names}


def pictures() -> dict[str, bytes]:
    pairs = {kind: made(4) for kind, made in TWINS.items()} | {"thumbnail": of_one_thumbnail()}
    pairs["colour"] = [file(solid(colour, (448, 448))) for colour in ("red", "green", "blue")]
    pairs["late pixel"] = [file(_with_a_corner(shade)) for shade in (0, 255)]
    named = {f"{kind} {n}": data for kind, pair in pairs.items() for n, data in enumerate(pair)}
    files = {data: name for name, data in (named | from_manifest()).items()}
    return {name: data for data, name in files.items()}  # each once


def _with_a_corner(shade: int) -> Image.Image:
    """Alike but for their last rows."""
    picture = noise(96, 96, 9)
    picture.paste((shade, shade, shade), (64, 80, 96, 96))
    return picture


def pixels(data: bytes) -> tuple[tuple[int, int], bytes]:
    with Image.open(io.BytesIO(data)) as picture:
        return picture.size, picture.convert("RGB").tobytes()


async def ask(cluster: Cluster, key: str, data: bytes) -> tuple[Any, int]:
    """The same words around every picture. Text with every likelihood; cached tokens."""
    scores = {"model": "checkpoint", "logprobs": True, "top_logprobs": 10, "max_tokens": 4}
    asked = body(text("Here is one picture."), data, text("What is it?"), **scores)
    bearer = {"authorization": f"Bearer {key}"}
    reply = await post(cluster.address, "/v1/chat/completions", asked, **bearer)
    assert reply.status == 200, reply.body
    answer = reply.json()
    choice, usage = answer["choices"][0], answer["usage"]
    said = choice["message"]["content"], choice["logprobs"]
    return said, usage["prompt_tokens_details"]["cached_tokens"]


async def test_twins_never_meet_and_tenants_never_share(shared: Cluster) -> None:
    asked = pictures()
    before = encodes(shared)
    alone = {name: (await ask(shared, ALICE, data))[0] for name, data in asked.items()}
    assert encodes(shared) - before == len(asked)
    seen = {pixels(data) for data in asked.values()}
    assert len({str(words) for words in alone.values()}) == len(seen), "too alike to tell"

    async def crowd(key: str) -> list[int]:
        names = [*asked] * ROUNDS
        random.Random(key).shuffle(names)
        replies = await asyncio.gather(*(ask(shared, key, asked[name]) for name in names))
        wrong = [n for n, (words, _) in zip(names, replies, strict=True) if words != alone[n]]
        assert not wrong
        return [cached for _, cached in replies]

    _, cached = await ask(shared, BOB, next(iter(asked.values())))
    assert cached == 0, "even the words are Alice's"
    await asyncio.gather(crowd(ALICE), crowd(BOB))
    assert encodes(shared) - before == 2 * len(asked), "one encode for each key, and no more"
    assert all(await crowd(BOB))
