"""`epd chat` against a stand-in of the HTTP API."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from epd.chat import ChatFailure, Client, converse, user_message
from epd.cli import app

PNG = b"\x89PNG\r\n\x1a\n rest"


class StandIn(BaseHTTPRequestHandler):
    """Answers with the pieces that the server holds; remembers what was asked."""

    server: StandInServer

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self._send(200, json.dumps({"data": [{"id": "the-model"}]}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.append(self.headers["Authorization"])
        self.server.asked.append(json.loads(body))
        self._send(self.server.status, self.server.answer)

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


class StandInServer(ThreadingHTTPServer):
    status = 200
    answer = b""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StandIn)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@pytest.fixture
def server() -> Iterator[StandInServer]:
    server = StandInServer()
    server.answer = events("It ", "is ", "red.")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def events(*pieces: str, done: bool = True) -> bytes:
    lines = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in pieces]
    if done:
        lines.append("[DONE]")
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def test_one_question_with_a_picture(
    server: StandInServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    assert converse(Client(server.url, max_tokens=5), "Which colour?", [file]) == 0
    assert capsys.readouterr().out == "It is red.\n"
    (asked,) = server.asked
    assert asked["model"] == "the-model"
    assert (asked["stream"], asked["max_tokens"]) == (True, 5)
    image, text = asked["messages"][0]["content"]
    assert text == {"type": "text", "text": "Which colour?"}
    head, _, data = image["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == PNG


@pytest.mark.parametrize(
    ("reason", "most", "said"),
    [
        ("length", 5, "epd chat: the answer was cut at 5 tokens (--max-tokens)\n"),
        ("length", None, "epd chat: the answer was cut: there is no room for more tokens\n"),
        ("stop", 5, ""),
    ],
)
def test_an_answer_that_was_cut_is_called_so(
    server: StandInServer,
    capsys: pytest.CaptureFixture[str],
    reason: str,
    most: int | None,
    said: str,
) -> None:
    """Beside the answer, which may go on to another program."""
    end = json.dumps({"choices": [{"delta": {}, "finish_reason": reason}]})
    server.answer = events("It is", done=False) + f"data: {end}\n\ndata: [DONE]\n\n".encode()
    client = Client(server.url, max_tokens=most)
    assert converse(client, "?", []) == 0
    assert capsys.readouterr() == ("It is\n", said)
    server.answer = events("It is red.")
    assert converse(client, "?", []) == 0
    assert capsys.readouterr().err == "", "what was before is forgotten"


def test_a_conversation_remembers_and_forgets(
    server: StandInServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    lines = iter([f"/image {file}", "one", "/image /nowhere.png", "two", "/new", "three", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert converse(Client(server.url), None, []) == 0
    assert [len(asked["messages"]) for asked in server.asked] == [1, 3, 1]
    assert len(server.asked[0]["messages"][0]["content"]) == 2
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "It is red."}
    assert len(server.asked[1]["messages"][2]["content"]) == 1
    assert "/nowhere.png: no such file" in capsys.readouterr().err


def test_an_error_is_one_line_with_the_field(
    server: StandInServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 400
    server.answer = json.dumps(
        {"error": {"message": "no picture", "param": "messages[0]"}}
    ).encode()
    assert converse(Client(server.url), "?", []) == 1
    assert capsys.readouterr().err == "epd chat: 400: no picture (messages[0])\n"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (events("half", done=False), "broke off"),
        (b'data: {"error": {"message": "decode is gone"}}\n\n', "decode is gone"),
        (b'data: {"error": "decode is gone"}\n\n', "no part of a chat"),
        (b"data: 5\n\n", "no part of a chat"),
        (b'data: {"choices": [null]}\n\n', "no part of a chat"),
    ],
)
def test_an_answer_that_breaks_off_is_not_taken_for_whole(
    server: StandInServer, answer: bytes, says: str
) -> None:
    server.answer = answer
    with pytest.raises(ChatFailure, match=says):
        list(Client(server.url).answer([user_message("?", [])]))


def test_what_is_said_moves_no_cursor(
    server: StandInServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = events("red\x1b[2J\x9b1m\x07\tor\r\nblue ☃")
    assert converse(Client(server.url), "?", []) == 0
    assert capsys.readouterr().out == "red\\x1b[2J\\x9b1m\\x07\tor\nblue ☃\n"
    server.status, server.answer = 400, json.dumps({"error": {"message": "\x1b[31mno"}}).encode()
    assert converse(Client(server.url), "?", []) == 1
    assert capsys.readouterr().err == "epd chat: 400: \\x1b[31mno\n"


def test_nobody_there(server: StandInServer, capsys: pytest.CaptureFixture[str]) -> None:
    unused = "http://127.0.0.1:9/v1"
    assert converse(Client(unused), "?", []) == 1
    assert f"no gateway at {unused}" in capsys.readouterr().err


def test_the_key_is_sent_where_there_is_one(
    server: StandInServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_API_KEY", "sk-1")
    for arguments in ([], ["--api-key", "sk-2"]):
        result = CliRunner().invoke(app, ["chat", "--url", server.url, "?", *arguments])
        assert result.exit_code == 0, result.output
    converse(Client(server.url), "?", [])
    assert server.keys == ["Bearer sk-1"] * 2 + ["Bearer sk-2"] * 2 + [None] * 2


@pytest.mark.parametrize("url", ["http://127.0.0.1:x/v1", "127.0.0.1:8000", "http://[::1/v1"])
def test_what_is_no_url_is_said_in_a_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert converse(Client(url), "?", []) == 1
    assert capsys.readouterr().err.startswith(f"epd chat: no gateway at {url}: ")


def test_what_speaks_no_http_is_not_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"\x00\x1b[31m\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        assert converse(Client(url), "?", []) == 1
        thread.join()
    assert capsys.readouterr().err == f"epd chat: no gateway at {url}: no HTTP there\n"


def test_something_else_answers(
    server: StandInServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StandIn, "do_GET", lambda self: self._send(200, b"<html>"))
    assert converse(Client(server.url), "?", []) == 1
    assert "no gateway" in capsys.readouterr().err
    server.answer = b"data: <html>\n\n"
    with pytest.raises(ChatFailure, match="broke off"):
        list(Client(server.url, "m").answer([user_message("?", [])]))


def test_a_missing_picture_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert converse(Client("http://127.0.0.1:9/v1"), "?", [Path("/nowhere.png")]) == 1
    assert "/nowhere.png" in capsys.readouterr().err
