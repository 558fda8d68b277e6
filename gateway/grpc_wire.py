"""How much there is in a protobuf message, before it is parsed.

Two bytes on the wire are an empty message, and many more in memory: 64 MiB of them would be
gigabytes, made while nothing else runs. So the parts of a message are counted first, by
reading its tags (protobuf's encoding: https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from epd.errors import too_many
from gateway.schema import count_values

_SMALL = 64 << 10
"""Bytes of a message that can't hold too many."""
MOST_VALUES = 65_536
"""Fields, elements and messages inside of one request; what the API allows has 20,000."""
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class _Fields:
    """What the lengths of a message's fields mean, by the fields' numbers."""

    nested: Mapping[int, Any]
    """Messages: their descriptors."""
    texts: frozenset[int]
    packed: frozenset[int]


@lru_cache(maxsize=64)
def _fields_of(descriptor: Any) -> _Fields:
    fields = descriptor.fields
    return _Fields(
        {f.number: f.message_type for f in fields if f.message_type is not None},
        frozenset(f.number for f in fields if f.type == f.TYPE_STRING),
        frozenset(f.number for f in fields if f.is_packed),
    )


def bounded(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The same parser (a message's `FromString`) for what anybody may send.

    Raises:
        EpdError: from the parser made, for a message of too many values.
    """
    descriptor = descriptor_of(parse)

    def read(data: bytes) -> Any:
        if len(data) > _SMALL:
            check(data, descriptor)
        return parse(data)

    return read


def descriptor_of(parse: Callable[[bytes], Any]) -> Any:
    """Of the message whose `FromString` this is."""
    return parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]


def check(data: bytes, descriptor: Any) -> None:
    """Return if there are not too many values; what is no message is the parser's to refuse.

    Raises:
        EpdError: INVALID_REQUEST.
    """
    count = _count(data, descriptor, MOST_VALUES, deep=False)
    if count > MOST_VALUES:
        raise too_many("request", count, MOST_VALUES, "values")


def is_light(data: bytes, descriptor: Any, most: int) -> bool:
    """Whether it holds at most so many values, packed numbers and what looks like JSON in its
    texts included. Takes two microseconds a value."""
    return _count(data, descriptor, most, deep=True) <= most


def _count(data: bytes, descriptor: Any, most: int, deep: bool) -> int:
    """Values; more than `most` where it was not counted to the end."""
    todo = [(0, len(data), descriptor)]
    count = 0
    while todo:
        at, end, kind = todo.pop()
        fields = _fields_of(kind)
        while at < end:
            count += 1
            if count > most:
                return count
            tag, at = _varint(data, at, end)
            wire, number, size = tag & 7, tag >> 3, 0
            if wire == _VARINT:
                _, at = _varint(data, at, end)
            elif wire == _BYTES:
                size, at = _varint(data, at, end)
                if (nested := fields.nested.get(number)) is not None:
                    todo.append((at, min(at + size, end), nested))
                elif deep and number in fields.texts:
                    count += count_values(data[at : at + size])
                elif deep and number in fields.packed:
                    count += size
            elif wire in (_FIXED_64, _FIXED_32):
                size = 8 if wire == _FIXED_64 else 4
            else:
                return count  # a group: no message of ours has one
            at += size
    return count


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
