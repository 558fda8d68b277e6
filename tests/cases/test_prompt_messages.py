"""Cases PRM-*: what messages of every role may hold, and what is no input."""

from __future__ import annotations

from typing import Any

import pytest

from epd.config import LimitsConfig
from epd.errors import EpdError
from gateway.content import read_messages
from tests.cases.pictures import (
    data_url,
    image_tokens,
    part,
    prompt_tokens,
    refused,
    text,
)
from tests.cases.test_prompt_build import PICTURE, said, special_ids
from tests.e2e.cluster import Cluster
from tests.e2e.member import request
from tests.waiting import promised


def test_prm_07_images_in_a_system_message(cluster: Cluster) -> None:
    user = {"role": "user", "content": "What is in the picture?"}
    system = {"role": "system", "content": [part(data_url(PICTURE))]}
    with_image = cluster.chat({"messages": [system, user], "max_tokens": 1})
    assert image_tokens(with_image) == image_tokens(said(cluster, PICTURE))
    asked = {"model": cluster.model, "messages": [system, user]}
    ids, special = request(cluster.address, "/tokenize", asked).json["tokens"], special_ids()
    turns = [at for at, token in enumerate(ids) if token == special["<|im_start|>"]]
    assert turns[0] < ids.index(special["<|image_pad|>"]) < turns[1], "it left its message"
    bad = {"role": "system", "content": [part(data_url(b"none"))]}
    refused(cluster.chat({"messages": [bad, user]}), "no picture")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_prm_08_role_and_content_matrix(cluster: Cluster, role: str, stream: bool) -> None:
    """Each pair is served with the image counted, or refused by name; never dropped."""
    contents: list[Any] = ["text", None, [], [text("a"), text("b")], [part(data_url(PICTURE))]]
    for content in contents:
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "tool":
            message["tool_call_id"] = "call_1"
        user = {"role": "user", "content": "Hi"}
        asked = {"messages": [user, message, user], "max_tokens": 1, "stream": stream}
        reply = cluster.chat(asked)
        assert reply.status in (200, 400), reply.body
        if reply.status == 400:
            assert reply.error["param"].startswith("messages[1]")
        elif not stream and content == contents[-1]:
            assert image_tokens(reply) > 0


def test_prm_10_image_bytes_never_become_text(cluster: Cluster) -> None:
    url = data_url(PICTURE)
    assert prompt_tokens(said(cluster, part(url))) < 60
    untyped = {"image_url": {"url": url}}
    refused(said(cluster, untyped), "type", "messages[0].content[0].type", "invalid_request")
    as_text = said(cluster, text(url))
    assert as_text.status == 200
    assert image_tokens(as_text) == 0
    for content in ("data:image/png;base64," + "A" * 200_000, [text("B" * 200_000)]):
        asked = {"messages": [{"role": "user", "content": content}]}
        replies = [cluster.chat(asked) for _ in range(3)]
        for reply in replies:
            refused(reply, "context", "messages", "context_length_exceeded")
        # The quickest: what else this machine does is no fault of the text.
        assert min(reply.seconds for reply in replies) < promised(1)


@pytest.mark.parametrize("stream", [False, True])
def test_prm_11_no_input_at_all(cluster: Cluster, stream: bool) -> None:
    for content in ("", "  ", "\n\t", [], [text("")], [text("  ")]):
        asked = {"messages": [{"role": "user", "content": content}], "stream": stream}
        refused(cluster.chat(asked), "text or an image", "messages", "invalid_request")
    empty = cluster.chat({"messages": [], "stream": stream})
    refused(empty, "empty", "messages", "invalid_request")
    assert said(cluster, PICTURE).status == 200, "an image alone is input"


def test_prm_13_empty_turns_of_others(cluster: Cluster) -> None:
    a, b = {"role": "user", "content": "A"}, {"role": "user", "content": "B"}

    def status(*messages: dict[str, Any]) -> int:
        return cluster.chat({"messages": list(messages), "max_tokens": 1}).status

    assert status(a, {"role": "assistant", "content": ""}, b) == 200
    assert status({"role": "system", "content": ""}, a) == 200
    assert status(a, {"role": "assistant", "content": []}, b) == 200
    assert status(a, {"role": "assistant", "content": None}, b) == 400
    assert status(a, {"role": "assistant"}, b) == 400


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_prm_13_calls_without_content(cluster: Cluster) -> None:
    """Read for models whose template takes tools; the demo's is named as the reason."""
    user = {"role": "user", "content": "A"}
    calls = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    assert len(read_messages([user, *calls, result, user], LimitsConfig()).messages) == 4
    with pytest.raises(EpdError, match="content"):
        read_messages([user, {"role": "assistant", "content": None}, user], LimitsConfig())
    reply = cluster.chat({"messages": [user, *calls, result, user], "max_tokens": 1})
    refused(reply, "takes no tools", "messages[1].tool_calls", "invalid_request")


def test_prm_08_content_of_tool_results() -> None:
    """Text, as a string or in parts; what is refused is named, an image never dropped."""
    user = {"role": "user", "content": "A"}
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}

    def read(content: Any) -> int | str:
        result = {"role": "tool", "tool_call_id": "c1", "content": content}
        try:
            return len(read_messages([user, calls, result], LimitsConfig()).images)
        except EpdError as error:
            return str(error.param)

    assert read("done") == 0
    assert read([text("a"), text("b")]) == 0
    assert read([part(data_url(PICTURE))]) == 1
    assert read(None) == "messages[2].content"
