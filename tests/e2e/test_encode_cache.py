"""One picture, many requests: encoded once, whoever comes, leaves or fails meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from epd.errors import EpdError, ErrorKind
from tests.conftest import TinyCheckpoint
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import COLOUR, MakeCluster, grey_png, picture, user
from tests.e2e.http_client import Connection
from tests.e2e.stage_driver import Client, Planner, Request, next_event, png
from tests.e2e.stage_house import IMAGES, ONE, SETTINGS, drain, reference, typed
from tests.e2e.stage_processes import Stages

_numbers = itertools.count(1)


def another() -> bytes:
    """A digest that no cache has seen, in another try of a test, either."""
    return next(_numbers).to_bytes(32)


def counter(text: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(part in line for part in wanted)
    )


def encoded(text: str) -> float:
    return counter(text, "epd_images_total")


@pytest.fixture(scope="module")
def running_stages(
    tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stages]:
    checkpoint = tiny_checkpoint("qwen2_vl")
    with Stages(checkpoint, tmp_path_factory.mktemp("stages"), SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def planner(running_stages: Stages) -> Planner:
    return Planner(running_stages.checkpoint)


def same_picture(planner: Planner, count: int, digest: bytes) -> list[Request]:
    requests = [planner.request(ONE, IMAGES[:1]) for _ in range(count)]
    for request in requests:
        request.items = [replace(request.items[0], digest=digest)]
    return requests


async def sum_of_rows(client: Client, request: Request) -> int:
    """Checksum of the embedding of a request's picture, which nobody reads."""
    call = await client.start_encode(request, 0)
    await next_event(call, "accepted")
    ready = await next_event(call, "ready")
    await call.done_writing()
    await drain(call)
    return int(ready.handle.spans[0].checksum)


async def test_equal_pictures_in_flight_are_encoded_once_and_answered_alike(
    stages: Stages, planner: Planner
) -> None:
    client, encode = Client(stages), stages.processes["encode"]
    before = encode.get("/metrics").decode()
    requests = same_picture(planner, 6, another())
    answers = await asyncio.gather(*(client.run(request) for request in requests))
    after = encode.get("/metrics").decode()
    assert encoded(after) == encoded(before) + 1
    lookups = "epd_cache_lookups_total"
    assert counter(after, lookups, outcome="miss") == counter(before, lookups, outcome="miss") + 1
    shared = sum(counter(after, lookups, outcome=o) for o in ("hit", "joined"))
    assert shared == sum(counter(before, lookups, outcome=o) for o in ("hit", "joined")) + 5
    expected = reference(planner, ONE, IMAGES[:1])
    assert all(answer.ids == expected for answer in answers)
    await client.close()
    assert stages.idle() == {}


async def test_a_repeated_picture_skips_decoding_and_the_tower(
    stages: Stages, planner: Planner
) -> None:
    client = Client(stages)
    first, again = same_picture(planner, 2, another())
    for number, request in enumerate((first, again)):
        steps = stages.processes["encode"].state()["steps"]
        call = await client.start_encode(request, 0)
        await next_event(call, "accepted")
        ready = await next_event(call, "ready")
        await call.done_writing()
        await drain(call)
        assert (ready.timing.run_ms > 0) is (number == 0)
        assert (ready.timing.preprocess_ms > 0) is (number == 0)
        assert stages.processes["encode"].state()["steps"] == steps + (number == 0)
    await client.close()
    assert stages.idle() == {}


async def test_waiters_that_leave_harm_nobody(stages: Stages, planner: Planner) -> None:
    """Six want one picture; four go at different times, one of them after ItemReady."""
    client = Client(stages)
    requests = same_picture(planner, 6, another())
    calls = [await client.start_encode(request, 0) for request in requests]
    for call in calls[:3]:
        call.cancel()
    await next_event(calls[3], "accepted")
    await next_event(calls[3], "ready")
    calls[3].cancel()  # quarantines
    answer = await client.run(replace(requests[4], nonce=1))
    assert answer.ids == reference(planner, ONE, IMAGES[:1])
    for call in calls[4:]:
        await next_event(call, "accepted")
        await next_event(call, "ready")
        await call.done_writing()
        await drain(call)
    await client.close()
    assert stages.idle() == {}


async def test_a_lying_digest_gets_its_own_rows(stages: Stages, planner: Planner) -> None:
    """Whoever names another picture's digest neither gets nor spoils its embedding."""
    client = Client(stages)
    (honest,) = same_picture(planner, 1, another())
    liar = replace(honest, files=[png(Image.new("RGB", IMAGES[0].size, "red"))], nonce=9)
    assert await sum_of_rows(client, liar) != await sum_of_rows(client, honest)
    assert (await client.run(honest)).ids == reference(planner, ONE, IMAGES[:1])
    await client.close()


async def test_a_bad_picture_leaves_no_entry(stages: Stages, planner: Planner) -> None:
    client, digest = Client(stages), another()
    for _ in range(3):
        (good,) = same_picture(planner, 1, digest)
        bad = replace(good, files=[b"\x89PNG\r\n\x1a\n no picture"])
        errors = await asyncio.gather(*[typed(await client.start_encode(bad, 0)) for _ in range(2)])
        assert all(isinstance(error, EpdError) for error in errors)
        assert {error.kind for error in errors} == {ErrorKind.INVALID_IMAGE}
        assert (await client.run(good)).ids == reference(planner, ONE, IMAGES[:1])
    await client.close()
    assert stages.idle() == {}


async def test_more_pictures_than_fit_give_way_and_come_again(
    stages: Stages, planner: Planner
) -> None:
    """The arena of 1 MiB holds 64 of these 68: asked for one after the other, each has given
    way when it is asked for again. Its rows are the same, and all answers are right."""
    client, encode = Client(stages), stages.processes["encode"]
    random = np.random.default_rng(next(_numbers))
    shape = (128, 128, 3)  # the largest that this processor takes: 64 rows of 256 bytes
    pictures = [Image.fromarray(random.integers(0, 255, shape, np.uint8)) for _ in range(68)]
    requests = [planner.request(ONE, [one]) for one in pictures]
    before = encode.get("/metrics").decode()
    first, again = [[await sum_of_rows(client, one) for one in requests] for _ in range(2)]
    after = encode.get("/metrics").decode()
    assert first == again
    assert len(set(first)) == len(pictures)
    assert encoded(after) - encoded(before) == 2 * len(pictures)
    evictions = "epd_cache_evictions_total"
    given_way = counter(after, evictions, cache="embedding")
    assert given_way - counter(before, evictions, cache="embedding") >= len(pictures)
    answers = await asyncio.gather(*map(client.run, requests))
    assert [one.ids for one in answers] == [reference(planner, ONE, [one]) for one in pictures]
    await client.close()
    assert stages.idle() == {}


# -- through the gateway --------------------------------------------------------


def test_one_new_picture_in_eight_requests_is_encoded_once(cluster: Cluster) -> None:
    data = grey_png(97, 96, next(_numbers))  # nobody else's: no cache holds it
    before = encoded(cluster.worker("encode").metrics())
    body = {"messages": [user(data, "Describe the image.")], "temperature": 0, "max_tokens": 8}
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: cluster.chat(body), range(8)))
    texts = {reply.json["choices"][0]["message"]["content"] for reply in replies}
    assert len(texts) == 1
    assert encoded(cluster.worker("encode").metrics()) == before + 1


async def test_clients_that_go_away_leave_nothing_and_spoil_nothing(cluster: Cluster) -> None:
    data = picture("two_stars.png") + b"0"  # other bytes: nobody has it yet
    body: dict[str, Any] = {"model": cluster.model, "temperature": 0, "stream": True}
    body["messages"] = [user(data, "Describe the image.")]
    raw = json.dumps(body).encode()
    for delay in (0.0, 0.01, 0.03, 0.06):
        connections = [
            await Connection.send(cluster.address, "POST", "/v1/chat/completions", raw)
            for _ in range(3)
        ]
        await asyncio.sleep(delay)
        for connection in connections[1:]:
            connection.close()
        reply = await connections[0].reply()
        assert reply.status == 200
    await asyncio.to_thread(cluster.assert_clean)


def test_damaged_rows_are_given_to_nobody_else(make_cluster: MakeCluster) -> None:
    """The first announced lease is damaged: its request fails typed, all others are right."""
    cluster = make_cluster(
        environ={"encode": {"EPD_FAULTS": "lease.stale:1/1000"}},
        settings={"transfer.read_deadline_s": 1, "transfer.quarantine_margin_s": 0.2},
    )
    body = {"messages": [user(picture("red_circle.png"), COLOUR)], "temperature": 0}
    first, *others = [cluster.chat(body) for _ in range(3)]
    assert first.status == 500
    assert first.json["error"]["code"] == "checksum_mismatch"
    assert [reply.status for reply in others] == [200, 200]
    assert "red" in others[0].json["choices"][0]["message"]["content"]
    cluster.assert_clean()
