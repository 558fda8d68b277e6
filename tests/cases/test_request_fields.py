"""Cases REQ-*: what clients ask for is honoured, or refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.cases.pictures import body, file, quad, text
from tests.e2e.cluster import Cluster

PICTURE = file(quad())
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


def said(cluster: Cluster, **fields: Any) -> Any:
    reply = cluster.chat(body(PICTURE, text("What is it?"), **fields))
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_structured_output_through_all_stages(cluster: Cluster, temperature: float) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    choice = said(cluster, response_format=wanted, temperature=temperature, seed=1, max_tokens=99)
    value = json.loads(choice["message"]["content"])
    assert value["colour"] in ("red", "blue")
    assert isinstance(value["sure"], bool)
    assert choice["finish_reason"] == "stop"


def test_the_first_token_is_constrained_as_well(cluster: Cluster) -> None:
    """max_tokens 1 never reaches decode."""
    choice = said(cluster, guided_regex="[XQZ]{9}", max_tokens=1)
    assert re.fullmatch("[XQZ]+", choice["message"]["content"])
    assert choice["finish_reason"] == "length"


def test_one_of_the_choices(cluster: Cluster) -> None:
    choice = said(cluster, guided_choice=["zebra quux", "yak"], max_tokens=40)
    assert choice["message"]["content"] in ("zebra quux", "yak")
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(("}, "guided_regex"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_bad_grammar_is_400(cluster: Cluster, fields: dict[str, Any], param: str) -> None:
    reply = cluster.chat(body(text("hello"), **fields))
    assert reply.status == 400
    assert reply.error["param"] == param
