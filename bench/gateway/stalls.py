"""What one request can hold up everybody by.

    python -m bench.gateway.stalls [--only PATTERN]

Bodies as large and as odd as may be are sent to a real gateway process over a scripted engine.
Meanwhile /health is asked every two milliseconds: its longest answer is about the longest time
that the event loop was not there for anybody. The least of some tries, as other processes of
the machine only ever add to it. Beside it: the answer's status, and how long it took.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import grpc
import orjson

from bench.gateway.processes import engine, gateway
from bench.loopback import GRPC_OPTIONS
from epd.client import user
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import gateway_pb2_grpc

_TRIES = 3
_EVERY_S = 0.002
_MOST = 64 << 20
CHAT = "/v1/chat/completions"
Ask = tuple[str, bytes]


def chat(content: Any, **more: Any) -> Ask:
    said = [{"role": "user", "content": content}]
    return CHAT, orjson.dumps({"messages": said, "max_tokens": 1, "model": "checkpoint", **more})


def picture(nbytes: int, blanks: int = 0) -> Ask:
    data = base64.b64encode(b"\x89PNG\r\n\x1a\n" + random.Random(0).randbytes(nbytes)).decode()
    if blanks:
        data = "\n".join(data[at : at + blanks] for at in range(0, len(data), blanks))
    return chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}])


def nested(size: int) -> Ask:
    one = b"[" * 900 + b"]" * 900
    return CHAT, b'{"messages":[' + b",".join([one] * (size // len(one))) + b"]}"


def tools(nbytes: int) -> Ask:
    schema = {f"p{at}": {"type": "string", "enum": [str(at)]} for at in range(nbytes // 40)}
    function = {"description": "", "parameters": {"type": "object", "properties": schema}}
    made = [{"type": "function", "function": {"name": f"f{at}", **function}} for at in range(128)]
    return chat("Hello", tools=made)


BODIES: dict[str, Callable[[], Ask]] = {
    "nothing": lambda: ("/detokenize", b"{}"),
    "a text of 1 MB": lambda: chat("Is it so? " * 100_000),
    "a text of 60 MB": lambda: chat("Is it so? " * 6_000_000),
    "a text of 60 MB of escapes": lambda: chat("\x01" * 10_000_000),
    "10,000 messages": lambda: (
        CHAT,
        orjson.dumps({"messages": [{"role": "user", "content": "a"}] * 10_000}),
    ),
    "400,000 content parts": lambda: chat([{"type": "text", "text": "a"}] * 400_000),
    "300,000 content parts": lambda: chat([{"type": "text", "text": "a"}] * 300_000),
    "a million values": lambda: chat("a", stop=[0] * 990_000),
    "lists in lists, 60 MB": lambda: nested(60 << 20),
    "128 tools of 100 KB each": lambda: tools(100_000),
    "128 tools of 75 KB each": lambda: tools(75_000),
    "128 tools of 8 KB each": lambda: tools(8_000),
    "a prompt of 900,000 ids": lambda: (
        "/v1/completions",
        orjson.dumps({"model": "checkpoint", "prompt": [7] * 900_000}),
    ),
    "900,000 ids to detokenize": lambda: ("/detokenize", orjson.dumps({"tokens": [7] * 900_000})),
    "a text of 60 MB to tokenize": lambda: (
        "/tokenize",
        orjson.dumps({"prompt": "Is it so? " * 6_000_000}),
    ),
    "a file of 19 MB": lambda: picture(19_000_000),
    "a file of 19 MB, in lines of 76": lambda: picture(19_000_000, 76),
    "a file of 14 MB, a blank after each": lambda: picture(14_000_000, 1),
}


def texts(size: int) -> pb.ChatRequest:
    return pb.ChatRequest(messages=[user("Is it so? " * (size // 10))])


CALLS: dict[str, Callable[[], pb.ChatRequest]] = {
    "gRPC, a text of 60 MB": lambda: texts(60 << 20),
    "gRPC, 60,000 messages": lambda: pb.ChatRequest(messages=[user("a")] * 15_000),
    "gRPC, a file of 19 MB": lambda: pb.ChatRequest(
        messages=[user(b"\x89PNG\r\n\x1a\n" + random.Random(0).randbytes(19_000_000))]
    ),
}


class Watch(threading.Thread):
    """Asks /health until `over`; `longest` is its longest answer, in seconds."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection(address, timeout=60)
        self.longest = 0.0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(_EVERY_S):
            started = time.perf_counter()
            self._connection.request("GET", "/health")
            self._connection.getresponse().read()
            self.longest = max(self.longest, time.perf_counter() - started)

    def stop(self) -> float:
        self._over.set()
        self.join()
        self._connection.close()
        return self.longest


def post(address: str, ask: Ask) -> str:
    connection = http.client.HTTPConnection(address, timeout=120)
    path, body = ask
    connection.request("POST", path, body, {"content-type": "application/json"})
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return str(reply.status)


def call(address: str, request: pb.ChatRequest) -> str:
    options = [("grpc.max_send_message_length", -1), *GRPC_OPTIONS]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            list(gateway_pb2_grpc.GatewayStub(channel).Chat(request, timeout=120))
        except grpc.RpcError as error:
            return str(cast(grpc.Call, error).code().name)
    return "OK"


def measure(address: str, send: Callable[[], str]) -> tuple[float, float, str]:
    """(longest answer of /health, the request's own time, its status); least of the tries."""
    longest, took, status = [], [], ""
    for _ in range(_TRIES):
        watch = Watch(address)
        watch.start()
        time.sleep(0.1)
        started = time.perf_counter()
        status = send()
        took.append(time.perf_counter() - started)
        time.sleep(0.1)
        longest.append(watch.stop())
    return min(longest), min(took), status


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.gateway.stalls")
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    with gateway() as (server, found), engine(found, 1, 1000):
        print("held up ms | took ms | status | MiB | request")
        cases: list[tuple[str, Callable[[], Callable[[], str]]]] = [
            *((name, lambda m=made: _posting(found["http"], m())) for name, made in BODIES.items()),
            *((name, lambda m=made: _calling(found["grpc"], m())) for name, made in CALLS.items()),
        ]
        for name, prepare in cases:
            if re.search(only, name):
                longest, took, status = measure(found["http"], prepare())
                most = server.memory_info().rss >> 20
                said = f"{longest * 1e3:7.1f} | {took * 1e3:7.1f} | {status:>6} | {most} | {name}"
                print(said, flush=True)


def _posting(address: str, ask: Ask) -> Callable[[], str]:
    return lambda: post(address, ask)


def _calling(address: str, request: pb.ChatRequest) -> Callable[[], str]:
    return lambda: call(address, request)


if __name__ == "__main__":
    main()
