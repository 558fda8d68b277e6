"""A worker's /ready, which rolling updates go by: a gateway has to have it registered."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from epd.config_sources import load_config
from epd.jobs import Stage
from epd.rpc import membership_client
from epd.runtime.stage import Part, serve_parts
from tests.unit.idle_worker import IdleWorker
from tests.unit.test_rpc_membership import start_gateway
from tests.waiting import LIMIT_S, until


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_a_worker_that_every_gateway_refuses_is_alive_and_not_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another release: a rolling update must not take it for a replacement."""
    monkeypatch.setattr(membership_client, "_REFUSED_S", 0.05)
    gateway, server, port = await start_gateway()
    gateway.refuse = True
    config = load_config(None, {"worker.gateways": f"127.0.0.1:{port}", "worker.wedged_s": 0}, {})
    part = Part(IdleWorker(Stage.DECODE), "epd.v1.Decode", lambda server: None, 1 << 20)
    serving = asyncio.create_task(serve_parts(config, [part]))
    out: list[str] = []

    def said() -> bool:
        out.append(capsys.readouterr().out)
        return "READY" in "".join(out)

    await until(said)
    address = json.loads("".join(out).removeprefix("READY "))["metrics"]
    await until(lambda: gateway.joins > 1)
    refused = await asyncio.to_thread(get, address, "/ready")
    assert refused == (503, "no gateway has it registered\n")
    assert await asyncio.to_thread(get, address, "/health") == (200, "alive\n")
    gateway.refuse = False
    async with asyncio.timeout(LIMIT_S):
        while (await asyncio.to_thread(get, address, "/ready"))[0] != 200:
            await asyncio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, LIMIT_S)
    await server.stop(0)
