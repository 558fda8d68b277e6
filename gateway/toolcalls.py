"""Tool calls in a model's output, in the Hermes form that Qwen writes as well:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>

The parser turns text that comes in any pieces into content and calls. Arguments are
passed on as they come. What turns out to be no call is content: nothing is lost. White
space around calls belongs to neither.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_TAG = re.compile(f"{OPEN}|{CLOSE}")
_AGAIN = re.compile(rf"{OPEN}(?=\s*\{{)")
_LONGEST_HEAD = 4096
"""A name that is longer is none: wait for the whole call and look at it then."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of one call. The first of a call has its id and name."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


Delta = str | CallDelta


class CallParser:
    """One output. Feed text, then `finish` once. A `single` call is the last thing: what
    follows it is dropped."""

    def __init__(self, single: bool = False) -> None:
        self.single = single
        self._buffer = ""
        self._inside = False
        self._object: _JsonObject | None = None
        """The arguments that are being passed on."""
        self._after_call = False
        """No content came since the last call."""
        self._space = ""
        """Stood before the tag: content where that turns out to begin no call."""
        self._started = 0
        self._ended = 0

    @property
    def called(self) -> bool:
        """There were calls, and the last one is whole."""
        return self._ended > 0 and self._started == self._ended

    @property
    def done(self) -> bool:
        """The only call that is wanted is whole."""
        return self.single and self._ended > 0

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        return list(self._scan(final=False))

    def finish(self) -> list[Delta]:
        """The output is over: what was held back is let out."""
        found = list(self._scan(final=True))
        while self._inside and self._object is None and not self.done:
            body, self._buffer, self._inside = self._buffer, "", False
            found += self._whole(body, closed=False)
            found += self._scan(final=True)
        if self._inside and self._object is not None and self.called and not self.done:
            self._leave(_beyond(self._buffer))
            found += self._scan(final=True)
        return found

    def _scan(self, final: bool) -> Iterator[Delta]:
        before = None
        while not self.done and before != (len(self._buffer), self._inside, self._object is None):
            before = (len(self._buffer), self._inside, self._object is None)
            if not self._inside:
                yield from self._outside(final)
            elif self._object is None:
                yield from self._head()
            else:
                yield from self._arguments(self._object)

    def _outside(self, final: bool) -> Iterator[Delta]:
        text, found, rest = self._buffer.partition(OPEN)
        if found:
            self._inside, self._buffer = True, rest
            bare = text.rstrip()
            text, self._space = bare, text[len(bare) :]
        elif final:
            self._buffer = ""
        else:
            stop = len(text[: len(text) - _open_suffix(text)].rstrip())
            text, self._buffer = text[:stop], text[stop:]
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            yield text
        elif self._after_call:
            self._space = ""

    def _head(self) -> Iterator[Delta]:
        if head := _HEAD.match(self._buffer):
            try:
                name = orjson.loads(head[1])
            except orjson.JSONDecodeError:
                name = None
            if name and len(head[0]) <= _LONGEST_HEAD:
                self._buffer = self._buffer[head.end() :]
                self._object = _JsonObject()
                yield self._start(name)
                return
        body, closed, rest = self._buffer.partition(CLOSE)
        if closed:
            self._inside, self._buffer = False, rest
            yield from self._whole(body, closed=True)

    def _arguments(self, value: _JsonObject) -> Iterator[Delta]:
        taken, whole = value.take(self._buffer)
        if taken:
            yield CallDelta(self._started - 1, self._buffer[:taken])
        self._buffer = self._buffer[taken:]
        if whole:
            self._ended = self._started
            if tag := _TAG.search(self._buffer):
                rest = self._buffer[tag.end() :]
                if tag[0] == OPEN:  # it was never closed, and the next one begins
                    rest = f"{_beyond(self._buffer[: tag.start()])}{OPEN}{rest}"
                self._leave(rest)

    def _leave(self, rest: str) -> None:
        """The call is over; `rest` comes after it."""
        self._inside, self._object, self._buffer = False, None, rest

    def _start(self, name: str, arguments: str = "") -> CallDelta:
        self._started += 1
        self._after_call = True
        return CallDelta(self._started - 1, arguments, f"call_{secrets.token_hex(12)}", name)

    def _whole(self, body: str, closed: bool) -> Iterator[Delta]:
        """A call whose fields stand in another order; else it is content."""
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            value = None
        if isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"]:
            arguments = value.get("arguments", value.get("parameters", {}))
            if isinstance(arguments, dict):
                yield self._start(value["name"], orjson.dumps(arguments).decode())
                self._ended += 1
                return
        yield self._content(body, CLOSE if closed else "")

    def _content(self, body: str, close: str) -> str:
        """What stood behind a tag and is no call. At another tag in it one may begin: a model
        may speak of calls before it makes one, or write the tag twice."""
        self._after_call = False
        if not (again := _AGAIN.search(body)):
            return f"{self._space}{OPEN}{body}{close}"
        before = body[: again.start()]
        bare = before.rstrip()
        text = f"{self._space}{OPEN}{bare}"
        self._space = before[len(bare) :]
        self._inside, self._buffer = True, f"{body[again.end() :]}{close}{self._buffer}"
        return text


class _JsonObject:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._done = False
        self._depth = 0
        self._string = False
        self._escaped = False

    def take(self, text: str) -> tuple[int, bool]:
        """How many characters of `text` belong to it, and whether it is whole."""
        if self._done:
            return 0, True
        for at, char in enumerate(text):
            if self._string:
                self._in_string(char)
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._done = True
                    return at + 1, True
        return len(text), False

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._string = False


def _beyond(text: str) -> str:
    """What was written behind a call that wasn't closed; `text` begins behind its arguments."""
    return text.lstrip().removeprefix("}").strip()


def _open_suffix(text: str) -> int:
    """Length of the longest suffix of `text` that may become the opening tag."""
    for length in range(min(len(text), len(OPEN) - 1), 0, -1):
        if text.endswith(OPEN[:length]):
            return length
    return 0
