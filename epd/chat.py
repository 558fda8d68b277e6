"""`epd chat`: a conversation with a running gateway from the terminal, pictures included."""

from __future__ import annotations

import base64
import http.client
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_TYPES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}
# An answer is shown as text, whatever it holds: a model, or who wrote to it, moves no cursor.
_SHOWN = {point: f"\\x{point:02x}" for point in (*range(32), *range(127, 160))}
_SHOWN |= {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}
_HELP = "Type a question. /image FILE adds a picture to it, /new forgets, /quit leaves."
_TIMEOUT_S = 600.0

Message = dict[str, Any]


class ChatFailure(Exception):
    """The gateway can't be reached or refused; the message is for the person at the terminal."""


@dataclass(slots=True)
class Client:
    """A client of the HTTP API with the standard library alone."""

    url: str
    model: str = ""
    temperature: float = 0.0
    max_tokens: int | None = None
    api_key: str = ""
    cut: bool = False
    """Whether the last answer ended because it had as many tokens as it may have."""

    def answer(self, messages: list[Message]) -> Iterator[str]:
        """Pieces of the answer as they arrive; `cut` is known after the last one.

        Raises:
            ChatFailure: no gateway there, or it answered with an error.
        """
        body: dict[str, Any] = {
            "model": self.model or self._served_model(),
            "messages": messages,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        response = self._request("POST", "/chat/completions", json.dumps(body))
        self.cut = False
        for event in _events(response):
            if piece := _piece(event):
                yield piece
            self.cut = self.cut or _is_cut(event)

    def _served_model(self) -> str:
        try:
            listed = json.loads(self._request("GET", "/models").read())["data"]
        except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
            raise ChatFailure(f"no gateway at {self.url}: its list of models is none") from error
        if not listed:
            raise ChatFailure(f"{self.url} serves no model yet")
        self.model = str(listed[0]["id"])
        return self.model

    def _request(self, method: str, path: str, body: str | None = None) -> http.client.HTTPResponse:
        try:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https"):
                raise ValueError("a URL begins with http:// or https://")
            secure = parts.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = kind(parts.netloc, timeout=_TIMEOUT_S)
            headers = {"Content-Type": "application/json"}
            if self.api_key:
                headers["Authorization"] = f"Bearer {self.api_key}"
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
        except (OSError, ValueError, http.client.InvalidURL) as error:
            raise ChatFailure(f"no gateway at {self.url}: {error}") from error
        except http.client.HTTPException as error:  # it quotes what came, whatever that is
            raise ChatFailure(f"no gateway at {self.url}: no HTTP there") from error
        if response.status != 200:
            raise ChatFailure(_reason(response))
        return response


def _piece(event: Any) -> str:
    """What one event adds to the answer.

    Raises:
        ChatFailure: it says what went wrong, or is no chat's.
    """
    try:
        if error := event.get("error"):
            raise ChatFailure(error.get("message", "unknown error"))
        deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
        return "".join(delta.get("content") or "" for delta in deltas)
    except (AttributeError, TypeError) as error:
        raise ChatFailure("the answer broke off: what came is no part of a chat") from error


def _is_cut(event: Any) -> bool:
    """Of an event that `_piece` has read."""
    return any(choice.get("finish_reason") == "length" for choice in event.get("choices") or ())


def _reason(response: http.client.HTTPResponse) -> str:
    text = response.read(65536).decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        where = f" ({error['param']})" if error.get("param") else ""
        return f"{response.status}: {error['message']}{where}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status}: {text[:200]}"


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """Server-sent events up to [DONE].

    Raises:
        ChatFailure: the connection ended before that.
    """
    try:
        for line in response:
            if line.startswith(b"data: "):
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ChatFailure(f"the answer broke off: {error}") from error
    raise ChatFailure("the answer broke off")


def user_message(question: str, images: list[Path]) -> Message:
    """A message with the pictures before the text, as data URLs.

    Raises:
        ChatFailure: a file can't be read.
    """
    parts: list[Message] = []
    for path in images:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ChatFailure(f"{path}: {error.strerror}") from error
        kind = next((t for magic, t in _TYPES.items() if data.startswith(magic)), "image/png")
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    parts.append({"type": "text", "text": question})
    return {"role": "user", "content": parts}


def _cut_at(max_tokens: int | None) -> str:
    if max_tokens is None:
        return "the answer was cut: there is no room for more tokens"
    return f"the answer was cut at {max_tokens} tokens (--max-tokens)"


@dataclass(slots=True)
class _Conversation:
    client: Client
    messages: list[Message] = field(default_factory=list)
    images: list[Path] = field(default_factory=list)

    def ask(self, question: str) -> None:
        """Print the answer while it comes; a failed question is not remembered."""
        message = user_message(question, self.images)
        pieces = []
        for piece in self.client.answer([*self.messages, message]):
            pieces.append(piece)
            print(piece.translate(_SHOWN), end="", flush=True)
        print()
        if self.client.cut:
            print(f"epd chat: {_cut_at(self.client.max_tokens)}", file=sys.stderr)
        self.messages += [message, {"role": "assistant", "content": "".join(pieces)}]
        self.images = []

    def take(self, line: str) -> None:
        """One line that the person typed: a command or a question."""
        command, _, rest = line.strip().partition(" ")
        if command == "/image":
            path = Path(rest.strip()).expanduser()
            if not path.is_file():
                raise ChatFailure(f"{path}: no such file")
            self.images.append(path)
        elif command == "/new":
            self.messages, self.images = [], []
        elif command.startswith("/"):
            print(_HELP)
        elif command:
            self.ask(line.strip())


def converse(client: Client, question: str | None, images: list[Path]) -> int:
    """Ask one question, or hold a conversation when there is none; returns the exit code."""
    conversation = _Conversation(client, images=list(images))
    try:
        if question is not None:
            conversation.ask(question)
            return 0
    except ChatFailure as failure:
        print(f"epd chat: {failure}".translate(_SHOWN), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(_HELP)
    while True:
        try:
            line = input("> ")
            if line.strip() == "/quit":
                return 0
            conversation.take(line)
        except ChatFailure as failure:
            print(f"epd chat: {failure}".translate(_SHOWN), file=sys.stderr)
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
