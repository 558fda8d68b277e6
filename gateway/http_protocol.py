"""What one HTTP connection may hold, and for how long.

uvicorn bounds neither the time nor the size of a request's head, keeps a connection whose
peer never reads until the peer goes away, and lets the body of a refused request drip in
for ever. Each is a state here, with a bound; `sweep` ends connections that outstay theirs.

    state      entered when                                          ends with
    head       the connection is open, or a request's first byte     408, close
               is there; its head is not whole
    refused    the answer is complete, the request's body is not     cut
    stalled    the peer doesn't read what was written                cut
    closing    we closed; the peer doesn't read the rest             cut

Bodies of requests that are being read have their deadline in `responses.read_body`.

Offers to change the protocol (`Upgrade: h2c`, from Java's client with every first request)
are ignored, as HTTP wants it. The parser stops behind such a head and takes the body for that
other protocol; so another one reads the head once more, without the offer. Answers to HTTP/1.0
are not sent in chunks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from epd.errors import EpdError, ErrorKind, invalid
from epd.obs import logs
from gateway.access_log import write_line
from gateway.ids import new_request_id

_log = logging.getLogger(__name__)
_LINGER_S = 5.0
"""For these states there is nothing to wait for but good manners."""
_RETRY_S = 1
_HEAD = b"HTTP/1.1 "
_CONTINUE = b"HTTP/1.1 100 "
_NO_HTTP = "this is no HTTP request that can be understood"
_CODED = (
    "this transfer-encoding is not supported; send the body as it is, with a content-length, "
    "or with transfer-encoding: chunked"
)
_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """See `GatewayConfig` for what they mean."""

    connections: int
    head_s: float
    head_bytes: int
    slow_reader_s: float

    def of(self, state: str) -> float:
        """Seconds that a connection may be in a state."""
        return {"head": self.head_s, "stalled": self.slow_reader_s}.get(state, _LINGER_S)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Use `bounded`, which gives it its bounds."""

    bounds: ClassVar[Bounds]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._head = 0
        """Bytes of the head that is being read, its names and values."""
        self._silent = 0
        """Bytes since the last one that belonged to a body: heads, trailers, padding."""
        self._messages = 0
        self._resumed = 0
        self._in_body = False
        self._seen: tuple[Any, ...] = ()
        self._since = 0.0
        self._began = time.monotonic()
        """This connection, or the request that is being read."""
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            kind = ErrorKind.OVERLOADED
            reason = f"{self.bounds.connections} connections are open, the most at once"
            self._refuse(503, EpdError(kind, reason, retry_after_s=_RETRY_S))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._silent += len(data)
        self._unset_keepalive_if_required()
        left = memoryview(data)
        try:
            while taken := self._parse(left):
                left = left[taken:]
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))
        if self._silent > self.bounds.head_bytes and not self.transport.is_closing():
            self._refuse_head()

    def _parse(self, data: memoryview) -> int:
        """How many bytes the parser took, if there may be more for it to take."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            (taken,) = stopped.args
            if self._offers and not self.transport.is_closing():
                head = self._plain_head()
                # One that has read `Connection: close` reads no more.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)
            return int(taken)
        return 0

    @property
    def _offers(self) -> bool:
        """Whether the head that was read last offers another protocol. (CONNECT stops the
        parser, too, and is refused.)"""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _plain_head(self) -> bytes:
        """The head that was read last, without its offer."""
        start = self.parser.get_method(), self.url, self.parser.get_http_version().encode()
        fields = (b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        return b"%b %b HTTP/%b\r\n" % start + b"".join(fields) + b"\r\n"

    def on_message_begin(self) -> None:
        self._head, self._began = 0, time.monotonic()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        if self._head > self.bounds.head_bytes:  # came in one piece, with more behind it
            self._refuse_head()
            return
        if self._offers:
            return
        self._silent = 0
        self._in_body = True
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":  # whose answer has no body that a head could wait for
            self.cycle.transport = _Joined(self.transport, self.loop)  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            _unframed(self.cycle)

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        self._silent = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.transport.is_closing() or self._offers:
            return
        self._silent = 0
        self._in_body = False
        self._messages += 1
        super().on_message_complete()

    def resume_writing(self) -> None:
        self._resumed += 1
        super().resume_writing()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _state(self) -> tuple[Any, ...]:
        """Its name, and what changes when it is entered anew; () where nothing is bounded."""
        if self.transport.is_closing():
            return ("closing",)
        if self.flow.write_paused:
            return "stalled", self._resumed
        if self._answering:
            return ()
        if self._in_body:
            return "refused", self._messages
        if self._silent or not self._messages:
            return "head", self._messages, self._silent > 0
        return ()  # between requests: uvicorn's own keep-alive timer

    def sweep(self, now: float) -> None:
        """End the connection if it is in one state for too long. `now` as of the loop."""
        state = self._state()
        if state != self._seen:
            self._seen, self._since = state, now
        elif state and now - self._since >= self.bounds.of(state[0]):
            self._end(state[0])

    def _end(self, state: str) -> None:
        _log.info("connection ends: %s for %g s", state, self.bounds.of(state))
        if state != "head":
            # Closing would wait for a peer that doesn't read.
            self.transport.abort()
        elif self._silent:
            reason = f"the request's head took more than {self.bounds.head_s:g} s"
            self._refuse(408, EpdError(ErrorKind.REQUEST_TIMEOUT, reason))
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        reason = f"the request's head has more than {self.bounds.head_bytes} bytes"
        self._refuse(431, EpdError(ErrorKind.REQUEST_TOO_LARGE, reason))

    def send_400_response(self, msg: str) -> None:
        """uvicorn's, for what is no HTTP. `msg` is the parser's."""
        # By such a coding nobody knows where the body ends (RFC 9112, 6.3). Where "chunked" is
        # the last of several this is known, and `responses.read_body` refuses the others.
        coded = "`Transfer-Encoding`" in msg
        self._refuse(400, invalid(_CODED if coded else _NO_HTTP))

    def _refuse(self, status: int, error: EpdError) -> None:
        if self._answering and (
            not self._in_body or self.pipeline or self.cycle.response_started
        ):  # another request's answer, or the begun one to this, would be cut in two
            self.transport.abort()
            return
        request_id = new_request_id()
        with logs.bind(request_id):
            scope = vars(self).get("scope") or {}  # None before a request's first byte
            said = scope.get("method", "?"), scope.get("path", "?")
            write_line(*said, status, self._began, "?")
        body = orjson.dumps(error.openai_body())
        lines = [f"HTTP/1.1 {status} {_REASONS[status]}", f"x-request-id: {request_id}"]
        if error.retry_after_s is not None:
            lines.append(f"retry-after: {error.retry_after_s:g}")
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
        head = "\r\n".join([*lines, "connection: close", "", ""])
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Joined:
    """What an answer is written to: its head goes out with the beginning of its body, if that
    follows in the same turn of the event loop. A client that is woken by a head alone may be
    given this core, and its first token waits meanwhile."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif data.startswith(_HEAD) and not data.startswith(_CONTINUE):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self.write(b"")

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        """All else is the transport's own and comes behind the head, whatever uvicorn may
        come to use: to close is to send first what was written before."""
        self._flush()
        return getattr(self._transport, name)


def _unframed(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks, which uvicorn sends anyway where a body has no length: it ends
    with its connection."""
    framed = cycle.send

    async def send(message: Any) -> None:
        cycle.chunked_encoding = False
        # As much as there is: uvicorn counts what was promised.
        cycle.expected_content_length = len(message.get("body", b""))
        await framed(message)

    cycle.send = send  # type: ignore[method-assign]


def bounded(bounds: Bounds) -> type[BoundedProtocol]:
    """The protocol for uvicorn, which makes one for each connection."""
    return type("Protocol", (BoundedProtocol,), {"bounds": bounds})
