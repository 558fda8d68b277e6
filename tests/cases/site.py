"""A web server that answers each path with raw bytes, and says who came; a gateway that may
fetch from it."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from pathlib import Path
from types import TracebackType

from tests.e2e.cluster import Cluster
from tests.e2e.member import Worker

_HOLD_S = 30.0


class Site:
    """``answers[path]``: raw bytes; a path in `hold` is never ended, one in `drip` trickles."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.answers: dict[str, bytes] = {}
        self.hold: set[str] = set()
        self.drip: set[str] = set()
        self.paths: list[str] = []
        self.connections = 0
        self._end = threading.Event()
        site = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    site._serve(self)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 128

        self._server = Server((host, port), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def reset(self) -> None:
        self.answers.clear()
        self.hold.clear()
        self.drip.clear()
        self.paths.clear()
        self.connections = 0

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def _serve(self, handler: socketserver.BaseRequestHandler) -> None:
        self.connections += 1
        head = b""
        while b"\r\n\r\n" not in head:
            more = handler.request.recv(4096)
            if not more:
                return
            head += more
        path = head.split()[1].decode()
        self.paths.append(path)
        handler.request.sendall(self.answers.get(path, status("404 Not Found")))
        if path in self.hold:
            self._end.wait(_HOLD_S)
        while path in self.drip and not self._end.wait(0.5):
            handler.request.sendall(b"x")

    def __enter__(self) -> Site:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._server.shutdown()
        self._server.server_close()


def ok(body: bytes, **headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if not {"content_length", "transfer_encoding"} & set(headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode() + body


def status(line: str, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {line}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def redirect(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()


def fetching_gateway(folder: Path, port: int) -> Worker:
    """A gateway alone (a refused picture needs no stage) that fetches from the public web, from
    this port too."""
    settings = {
        "fetch.mode": "public",
        "fetch.ports": f"80,443,{port}",
        "fetch.total_s": 4,
        "gateway.http_port": 0,
        "gateway.preprocess_workers": 0,
    }
    gateway = Cluster(folder, settings=settings).gateway
    gateway.settings["gateway.membership_port"] = "0"
    gateway.launch()
    gateway.until_ready()
    return gateway
