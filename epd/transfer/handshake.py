"""Asking a Mooncake engine what it is, without Mooncake.

Mooncake's peer-to-peer handshake is one framed JSON message each way on the
engine's port: little-endian u64 length of what follows, one byte of message type
(1: segment descriptor), JSON. Speaking it from the event loop gives what the
library can't: a probe that a stopped peer can't hold for 60 s, on no thread and
under no lock; the transport that is *really* in use; and a digest by which a
restarted engine on the same address is told from the earlier one.

Format as of Mooncake 0.3.13 (mooncake-transfer-engine/include/common.h,
`writeString`, and `TransferMetadata::encodeSegmentDesc`).
"""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

_LENGTH = struct.Struct("<Q")
_DESCRIPTOR = b"\x01"
_MOST = 1 << 20  # Mooncake's own limit of a message
_QUERY = _LENGTH.pack(len(_DESCRIPTOR) + 2) + _DESCRIPTOR + b"{}"


@dataclass(frozen=True, slots=True)
class Description:
    """What an engine says about itself."""

    protocol: str
    """"tcp", "rdma", ...: the transport that it reads and writes with."""
    digest: bytes
    """Over everything but the time of the answer; another one is another engine."""


async def describe(session: str, timeout_s: float) -> Description:
    """Ask the engine at "host:port".

    Raises:
        OSError: it can't be reached (TimeoutError: it doesn't answer in time).
        ValueError: what answers there is no Mooncake engine.
    """
    host, port = split_session(session)
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(_QUERY)
            await writer.drain()
            return parse(await _message(reader))
        finally:
            writer.close()


def split_session(session: str) -> tuple[str, int]:
    """ "host:port" or "[v6]:port" in two.

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = session.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{session!r} is not host:port")
    return host.strip("[]"), int(port)


def parse(message: bytes) -> Description:
    """
    Raises:
        ValueError: not a segment descriptor.
    """
    if message[:1] != _DESCRIPTOR:
        raise ValueError(f"unexpected message type {message[:1]!r}")
    descriptor: Any = json.loads(message[1:])
    if not isinstance(descriptor, dict) or not isinstance(descriptor.get("protocol"), str):
        raise ValueError("answer is no segment descriptor")
    protocol = descriptor["protocol"]
    descriptor.pop("timestamp", None)
    canonical = json.dumps(descriptor, sort_keys=True).encode()
    return Description(protocol, blake3(canonical).digest())


async def _message(reader: asyncio.StreamReader) -> bytes:
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if not 0 < length <= _MOST:
            raise ValueError(f"message of {length} bytes")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("connection closed in the middle of the handshake") from error
