"""A bare HTTP client: raw enough to leave in the middle, to lag, or to send nonsense."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_refuse)

    def events(self) -> list[Any]:
        """Server-sent events; "[DONE]" as that string."""
        return [parse_event(line) for line in self.body.split(b"\n\n") if line]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def parse_event(line: bytes) -> Any:
    assert line.startswith(b"data: ")
    data = line.removeprefix(b"data: ")
    return "[DONE]" if data == b"[DONE]" else json.loads(data, parse_constant=_refuse)


class Connection:
    """One request on its own connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def send(
        cls,
        address: str,
        method: str,
        path: str,
        body: bytes = b"",
        buffer: int = 1 << 20,
        **headers: str,
    ) -> Connection:
        """`buffer`: bytes that this client reads ahead."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=buffer)
        lines = [f"{method} {path} HTTP/1.1", f"host: {address}", "connection: close"]
        lines.append(f"content-length: {len(body)}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        return cls(reader, writer)

    async def head(self) -> None:
        first = await self._reader.readline()
        self.status = int(first.split()[1])
        while line := (await self._reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            self.headers[name.lower()] = value.strip()

    async def reply(self) -> Reply:
        await self.head()
        body = b"".join([chunk async for chunk in self._chunks()])
        self.close()
        return Reply(self.status, self.headers, body)

    async def events(self) -> AsyncIterator[Any]:
        """Events as they come, after `head`."""
        rest = b""
        async for chunk in self._chunks():
            *whole, rest = (rest + chunk).split(b"\n\n")
            for event in whole:
                yield parse_event(event)
        assert not rest

    async def _chunks(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self._reader.read()
            return
        while size := int(await self._reader.readline(), 16):
            yield await self._reader.readexactly(size)
            await self._reader.readline()

    def close(self) -> None:
        self._writer.close()


async def post(address: str, path: str, body: Any, **headers: str) -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = await Connection.send(address, "POST", path, raw, 1 << 20, **headers)
    return await connection.reply()


async def get(address: str, path: str) -> Reply:
    return await (await Connection.send(address, "GET", path)).reply()
