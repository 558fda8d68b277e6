"""grpcurl, a client in Go that knows the API by reflection alone: the calls of docs/api.md.

Put the program into the path or name it in GRPCURL; where it is not there, this is skipped.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from typing import Any

import pytest

from tests.cases.pictures import file, solid
from tests.e2e.gateway_house import House

PROGRAM = os.environ.get("GRPCURL") or shutil.which("grpcurl")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="grpcurl is not here (docs/api.md)")


async def grpcurl(*arguments: str, message: Any = None) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; `message` goes in by stdin."""
    given = () if message is None else ("-d", "@")
    process = await asyncio.create_subprocess_exec(
        str(PROGRAM),
        "-plaintext",
        *given,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(json.dumps(message or {}).encode())
    return process.returncode or 0, out.decode(), err.decode()


def objects(text: str) -> list[Any]:
    """JSON objects, one after another."""
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


async def test_it_finds_and_describes_the_service(house: House) -> None:
    code, out, _ = await grpcurl(house.grpc, "list")
    assert code == 0
    assert {"epd.v1.Gateway", "grpc.health.v1.Health"} <= set(out.split())
    code, out, _ = await grpcurl(house.grpc, "describe", "epd.v1.Gateway")
    assert code == 0
    assert "rpc Chat ( .epd.v1.ChatRequest ) returns ( stream .epd.v1.ChatEvent );" in out


async def test_it_chats_about_a_picture(house: House) -> None:
    parts = [{"image": base64.b64encode(file(solid("red"))).decode()}, {"text": "What is it?"}]
    message = {
        "messages": [{"role": "ROLE_USER", "parts": parts}],
        "options": {"temperature": 0, "max_tokens": 8},
    }
    code, out, err = await grpcurl(house.grpc, "epd.v1.Gateway/Chat", message=message)
    assert code == 0, err
    first, *deltas, last = objects(out)
    assert "accepted" in first
    assert all("delta" in event for event in deltas)
    assert "finished" in last


async def test_it_shows_what_is_wrong(house: House) -> None:
    message = {
        "messages": [{"role": "ROLE_USER", "parts": [{"text": "Hello"}]}],
        "options": {"temperature": 9},
    }
    code, _, err = await grpcurl(house.grpc, "epd.v1.Gateway/Chat", message=message)
    assert code == 64 + 3  # INVALID_ARGUMENT, as grpcurl has it
    assert "google.rpc.BadRequest" in err
    assert "options.temperature" in err
