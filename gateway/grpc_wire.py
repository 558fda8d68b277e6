"""How many values a protobuf message holds, before it is parsed.

Two bytes on the wire are an empty message, and many more in memory: 64 MiB of them would be
gigabytes, made while nothing else runs. So the parts of a large message are counted first, by
reading its tags (protobuf's encoding: https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epd.errors import too_many

_SMALL = 64 << 10
"""Bytes of a message that can't hold too many."""
MOST_VALUES = 65_536
"""Fields, elements and messages inside of one request; what the API allows has 20,000."""
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5


def bounded(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The same parser (a message's `FromString`) for what anybody may send.

    Raises:
        EpdError: from the parser made, for a message of too many values.
    """
    descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]

    def read(data: bytes) -> Any:
        if len(data) > _SMALL:
            check(data, descriptor)
        return parse(data)

    return read


def check(data: bytes, descriptor: Any) -> None:
    """Return if there are not too many values; what is no message is the parser's to refuse.

    Raises:
        EpdError: INVALID_REQUEST.
    """
    todo = [(0, len(data), descriptor)]
    count = 0
    while todo:
        at, end, kind = todo.pop()
        inner = {f.number: f.message_type for f in kind.fields if f.message_type is not None}
        while at < end:
            count += 1
            if count > MOST_VALUES:
                raise too_many("request", count, MOST_VALUES, "values")
            tag, at = _varint(data, at, end)
            wire, size = tag & 7, 0
            if wire == _VARINT:
                _, at = _varint(data, at, end)
            elif wire == _BYTES:
                size, at = _varint(data, at, end)
                if (nested := inner.get(tag >> 3)) is not None:
                    todo.append((at, min(at + size, end), nested))
            elif wire in (_FIXED_64, _FIXED_32):
                size = 8 if wire == _FIXED_64 else 4
            else:
                return  # a group: no message of ours has one
            at += size


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Its value and where it ends; at `end` for one that is cut off."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, end
