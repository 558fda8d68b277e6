"""Server-sent events from a stream of bytes that is cut anywhere.

Source: the WHATWG HTML standard, "Parsing an event stream". Only `data` is kept.
"""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
MAX_EVENT_BYTES = 16 << 20


class EventParser:
    """Feed it the bytes as they come; it gives the data of each event that they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._held = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that ends in `chunk`, in order.

        Raises:
            ValueError: one event is longer than `MAX_EVENT_BYTES`.
        """
        lines = self._lines(self._rest + chunk)
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data, self._held = [], 0
        if self._held + len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    @property
    def pending(self) -> bool:
        """Whether an event was begun and not ended."""
        return bool(self._data or self._rest.strip(b"\r"))

    def _lines(self, text: bytes) -> list[bytes]:
        """The whole lines; what may go on in the next chunk stays in `_rest`."""
        if b"\r" not in text:
            *lines, self._rest = text.split(b"\n")
            return lines
        # A final CR may be half of a CRLF: it waits for what follows.
        held = b"\r" if text.endswith(b"\r") else b""
        *lines, rest = _LINE_END.split(text[: len(text) - len(held)])
        self._rest = rest + held
        return lines

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._held += len(value)
