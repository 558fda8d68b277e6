"""The client's own floor: a server without HTTP, which answers a whole request with a whole
answer that is ready.

    python -m bench.gateway.bare
"""

from __future__ import annotations

import asyncio
import json
import re

from bench.gateway.ceiling import EVENT
from epd.lifetime import die_with_expected_parent

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_END = (
    b'data: {"id":"chatcmpl-0","created":1700000000,"model":"checkpoint",'
    b'"object":"chat.completion.chunk","choices":[{"index":0,"delta":{},'
    b'"logprobs":null,"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":1,"total_tokens":31}}'
    b"\n\ndata: [DONE]\n\n"
)
_BODY = EVENT + _END
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%s" % (
    len(_BODY),
    _BODY,
)


class Bare(asyncio.Protocol):
    """One request after another; of its head only the length of the body is read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = 0
        self._wanted = 0

    def data_received(self, data: bytes) -> None:
        if not self._wanted:  # the client sends a head in one piece
            length = _LENGTH.search(data)
            self._wanted = data.index(b"\r\n\r\n") + 4 + int(length[1] if length else 0)
        self._received += len(data)
        if self._received >= self._wanted:
            self._received = self._wanted = 0
            self._transport.write(_ANSWER)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(f"READY {json.dumps({'http': f'127.0.0.1:{port}'})}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    die_with_expected_parent()
    asyncio.run(main())
