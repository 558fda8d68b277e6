"""Several stages in one process: the same answers, nothing through Mooncake, nothing left."""

from __future__ import annotations

import asyncio
import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import COLOUR, MakeCluster, grey_png, picture, user
from tests.e2e.http_client import Connection
from tests.e2e.test_encode_cache import counter

GROUPS = {
    "monolithic": ["encode+prefill+decode"],
    "prefill and decode": ["encode", "prefill+decode"],
    "mixed": ["encode", "prefill+decode", "decode"],
}


@pytest.fixture(scope="module", params=list(GROUPS.values()), ids=list(GROUPS))
def together(request: pytest.FixtureRequest, make_cluster: MakeCluster) -> Cluster:
    return make_cluster(groups=request.param, settings={"kv.block_tokens": 16})


def ask(cluster: Cluster, data: bytes, question: str, **options: object) -> dict[str, object]:
    body = {"messages": [user(data, question)], "temperature": 0, **options}
    reply = cluster.chat(body)
    assert reply.status == 200, reply
    answer: dict[str, object] = reply.json["choices"][0]["message"]
    return answer


def test_the_picture_decides_the_answer(together: Cluster) -> None:
    for colour in ("red", "blue", "red"):
        data = picture(f"{colour}_circle.png")
        assert colour in str(ask(together, data, COLOUR)["content"])
    together.assert_clean()


def test_many_at_once_are_as_if_alone(together: Cluster, cluster: Cluster) -> None:
    """And as in a service of separate processes."""
    asked = [
        (picture(name), question)
        for name in ("red_circle.png", "blue_circle.png", "three_shapes.png", "two_stars.png")
        for question in ("Describe the image.", "How many shapes are there?")
    ]
    apart = [ask(cluster, *one) for one in asked]
    with ThreadPoolExecutor(8) as pool:
        at_once = list(pool.map(lambda one: ask(together, *one), asked))
    assert at_once == apart
    together.assert_clean()


def test_several_answers_share_a_prompt(together: Cluster, cluster: Cluster) -> None:
    body = {
        "messages": [user(picture("three_shapes.png"), "Describe the image.")],
        "temperature": 1.5, "seed": 3, "n": 3, "max_tokens": 12,
    }  # fmt: skip
    here, apart = together.chat(body).json["choices"], cluster.chat(body).json["choices"]
    texts = [[choice["message"]["content"] for choice in choices] for choices in (here, apart)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    together.assert_clean()


def test_nothing_goes_through_mooncake_inside_the_process(together: Cluster) -> None:
    member = together.worker("prefill")
    if "decode" not in member.hosted or len(together.workers) > 2:
        pytest.skip("some requests go to another process")
    ask(together, grey_png(64, 64, 201), "Describe the image.")
    text = member.metrics()
    assert counter(text, "epd_transfer_bytes_total", kind="kv") == 0
    assert counter(text, "epd_transfer_local_bytes_total", kind="kv") == 0
    assert counter(text, "epd_kv_adopted_blocks_total") > 0
    if "encode" in member.hosted:
        assert counter(text, "epd_transfer_bytes_total", kind="embedding") == 0
        assert counter(text, "epd_transfer_local_bytes_total", kind="embedding") > 0
    else:
        assert counter(text, "epd_transfer_bytes_total", kind="embedding") > 0
    together.assert_clean()


async def test_clients_that_go_away_leave_nothing(together: Cluster) -> None:
    body = {"model": together.model, "temperature": 0, "stream": True, "max_tokens": 200}
    for number in range(4):
        body["messages"] = [user(grey_png(100, 90, 30 + number), "Describe the image.")]
        raw = json.dumps(body).encode()
        connections = [
            await Connection.send(together.address, "POST", "/v1/chat/completions", raw)
            for _ in range(3)
        ]
        await asyncio.sleep(0.03 * number)
        for connection in connections:
            connection.close()
    await asyncio.to_thread(together.assert_clean)


@pytest.mark.long
def test_a_killed_process_is_503_and_works_when_it_is_back(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(groups=GROUPS["monolithic"])
    ask(cluster, picture("red_circle.png"), COLOUR)
    with ThreadPoolExecutor(4) as pool:
        body = {"messages": [user(picture("red_circle.png"), "Describe the image.")]}
        replies = [pool.submit(cluster.chat, body | {"temperature": 0}) for _ in range(4)]
        cluster.worker("decode").end(signal.SIGKILL)
        done = [reply.result() for reply in replies]
    assert {reply.status for reply in done} <= {200, 503}
    assert cluster.chat(body | {"model": done[0].json.get("model", "checkpoint")}).status == 503
    cluster.restart("decode")
    assert "red" in str(ask(cluster, picture("red_circle.png"), COLOUR)["content"])
    cluster.assert_clean()


@pytest.mark.long
async def test_a_process_that_is_told_to_stop_ends_what_it_began(make_cluster: MakeCluster) -> None:
    """Admitted or not when the signal comes: each request is answered, or told why not."""
    cluster = make_cluster(groups=GROUPS["monolithic"])
    member = cluster.worker("decode")
    body = {"model": cluster.model, "temperature": 0, "stream": True, "max_tokens": 40}
    connections = []
    for shade in range(4):
        body["messages"] = [user(grey_png(120, 100, 60 + shade), "Describe the image.")]
        raw = json.dumps(body).encode()
        connections.append(
            await Connection.send(cluster.address, "POST", "/v1/chat/completions", raw)
        )
    await connections[0].head()  # the first has its first token
    member.send(signal.SIGTERM)
    statuses = await asyncio.gather(*map(reply, connections[1:]))
    events = [event async for event in connections[0].events()]
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert all(status in (200, 503) for status in statuses)
    assert member.process is not None
    assert await asyncio.to_thread(member.process.wait, 20) == 0
    cluster.restart("decode")
    cluster.assert_clean()


async def reply(connection: Connection) -> int:
    return (await connection.reply()).status


def test_another_process_takes_over_when_decode_dies(make_cluster: MakeCluster) -> None:
    """prefill+decode beside a decode: whichever dies, requests end whole or typed, and the
    other goes on."""
    cluster = make_cluster(groups=GROUPS["mixed"])
    data = picture("three_shapes.png")
    expected = ask(cluster, data, "Describe the image.")
    body = {"messages": [user(data, "Describe the image.")], "temperature": 0}
    body["model"] = cluster.model
    lone = next(member for member in cluster.workers if member.role == "decode")
    with ThreadPoolExecutor(6) as pool:
        replies = [pool.submit(cluster.chat, body) for _ in range(6)]
        lone.end(signal.SIGKILL)
        done = [one.result() for one in replies]
    for one in done:
        assert one.status in (200, 503)
        if one.status == 200:
            assert one.json["choices"][0]["message"] == expected
    assert ask(cluster, data, "Describe the image.") == expected
    cluster.assert_clean()
