"""Bad input is a 400 that names the field; clients that leave leave nothing behind."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import COLOUR, answer, grey_png, picture, user
from tests.e2e.member import request


def _bad_bodies() -> dict[str, tuple[dict[str, Any], str, str]]:
    """Name -> (body, the field that the error names, its code)."""
    whole = picture("three_shapes.png")
    not_base64 = {"type": "image_url", "image_url": {"url": "data:image/png;base64,!!!"}}
    return {
        "not an image": (
            {"messages": [user(b"This is no picture at all.", COLOUR)]},
            "messages[0].content[0]",
            "invalid_image",
        ),
        "truncated image": (
            {"messages": [user(COLOUR, whole[: len(whole) // 2])]},
            "messages[0].content[1]",
            "invalid_image",
        ),
        "too many pixels": (
            {"messages": [user("Look.", grey_png(30000, 30000), COLOUR)]},
            "messages[0].content[1]",
            "image_too_large",
        ),
        "not base64": (
            {"messages": [{"role": "user", "content": [not_base64]}]},
            "messages[0].content[0]",
            "invalid_image",
        ),
        "unknown model": (
            {"model": "gpt-9000", "messages": [user(COLOUR)]},
            "model",
            "model_not_found",
        ),
        "context too long": (
            {"messages": [user("word " * 30000)]},
            "messages",
            "context_length_exceeded",
        ),
        "empty messages": ({"messages": []}, "messages", "invalid_request"),
        "no messages": ({}, "messages", "invalid_request"),
        "unknown role": (
            {"messages": [{"role": "wizard", "content": "hi"}]},
            "messages[0].role",
            "invalid_request",
        ),
        "temperature out of range": (
            {"messages": [user(COLOUR)], "temperature": -1},
            "temperature",
            "invalid_request",
        ),
        "max_tokens of nothing": (
            {"messages": [user(COLOUR)], "max_tokens": 0},
            "max_tokens",
            "invalid_request",
        ),
    }


BAD_BODIES = _bad_bodies()


@pytest.mark.parametrize("name", BAD_BODIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_input_is_400_and_names_the_field(cluster: Cluster, name: str, stream: bool) -> None:
    body, param, code = BAD_BODIES[name]
    pids = cluster.pids
    reply = cluster.chat(body | {"stream": stream})
    assert reply.status == 400, reply
    error = reply.error
    assert str(error["param"]).startswith(param), error
    assert error["code"] == code, error
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) > 10
    assert all(member.alive for member in cluster.members)
    assert cluster.pids == pids


def test_a_body_that_is_not_json(cluster: Cluster) -> None:
    reply = request(cluster.address, "/v1/chat/completions", raw=b"{nope")
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


def test_bad_input_does_not_hurt_those_beside_it(client: OpenAI, cluster: Cluster) -> None:
    bodies = [body for body, _, _ in BAD_BODIES.values()]
    with ThreadPoolExecutor(6) as pool:
        good = [pool.submit(answer, client, picture("red_circle.png"), COLOUR) for _ in range(4)]
        bad = list(pool.map(cluster.chat, bodies))
        assert {reply.status for reply in bad} == {400}
        assert {future.result() for future in good} == {"The circle is red."}


MOST, TRIES = 512, 5


def test_a_client_that_goes_away_frees_everything(cluster: Cluster) -> None:
    """Where the machine lets an answer end before its client could leave, it is tried again."""
    tries = (tokens_made_for_one_that_leaves(cluster) for _ in range(TRIES))
    assert any(made < MOST - 12 for made in tries), "it was always made to its end"


def tokens_made_for_one_that_leaves(cluster: Cluster) -> int:
    body = {
        "model": cluster.model,
        "messages": [user(picture("three_shapes.png"), "Describe the image.")],
        "max_tokens": MOST,
        "ignore_eos": True,
        "stream": True,
    }
    before = cluster.worker("decode").debug_state()["steps"]
    connection = http.client.HTTPConnection(cluster.address, timeout=30)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200
    assert response.read(200)
    response.close()
    connection.close()
    cluster.assert_clean()
    return int(cluster.worker("decode").debug_state()["steps"] - before)
