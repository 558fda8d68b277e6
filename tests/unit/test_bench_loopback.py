"""Scripts ask the servers that they start, not the http_proxy of the environment."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import psutil
import pytest

from bench import footprint
from bench.asking import counted
from bench.gateway import engine, processes, soak, stalls
from bench.peers import servers
from bench.service import Service
from epd.bench.campaign import connect
from epd.bench.client import open_session
from epd.errors import EpdError
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import membership_pb2

ROOT = Path(__file__).parents[2]
PAGES = {
    "/metrics": "asked 3\n",
    "/debug/state": json.dumps({"weights_bytes": 7}),
    "/v1/models": json.dumps({"data": [{"id": "m", "fingerprint": "f"}]}),
    "/ready": "",
    "/health": "",
}


@pytest.fixture(autouse=True)
def behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there: who asked it would get nothing."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = PAGES[self.path].encode()
        self.send_response(200)
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_over_http(port: int) -> None:
    address = f"127.0.0.1:{port}"
    service = Service("", "", 0, metrics={"encode-0": address})
    assert counted(service, "encode-0", "asked") == 3
    assert footprint._own(address) == footprint.Own(weights=7)
    assert processes.served(address) == ("m", "f")
    processes._until_ready(address)
    assert servers._healthy(servers.Rival("r", (), port))


async def test_with_the_client_of_the_benchmark(port: int) -> None:
    async with open_session(10.0) as http:
        with pytest.raises(EpdError, match="http_501"):  # the server takes no POST
            await connect("one", f"http://127.0.0.1:{port}/v1", http)


async def joined(address: str) -> None:
    await engine.join(address, membership_pb2.Hello())


async def soaked(address: str) -> None:
    await soak.cancelled(address, psutil.Process(), 1)


@pytest.mark.parametrize("ask", [joined, soaked])
async def test_over_grpc(ask: Callable[[str], Awaitable[None]]) -> None:
    """The server has no method at all; it says so where it is reached."""
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(address)
    finally:
        await server.stop(None)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_over_grpc_without_a_loop() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        status = await asyncio.to_thread(stalls.call, address, pb.ChatRequest())
    finally:
        await server.stop(None)
    assert status == "UNIMPLEMENTED"


def test_nothing_else_in_the_scripts_asks_by_the_environment() -> None:
    for folder in ("bench", "epd/bench"):
        for file in (ROOT / folder).rglob("*.py"):
            source = file.read_text()
            assert "urlopen(" not in source, file
            assert "insecure_channel(" not in source or "GRPC_OPTIONS" in source, file
