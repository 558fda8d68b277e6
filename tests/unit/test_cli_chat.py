"""`epd chat` against a stand-in of the HTTP API."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from epd.chat import ChatFailure, Client, converse, user_message

PNG = b"\x89PNG\r\n\x1a\n rest"


class StandIn(BaseHTTPRequestHandler):
    """Answers with the pieces that the server holds; remembers what was asked."""

    server: StandInServer

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "the-model"}]}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
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
    ],
)
def test_an_answer_that_breaks_off_is_not_taken_for_whole(
    server: StandInServer, answer: bytes, says: str
) -> None:
    server.answer = answer
    with pytest.raises(ChatFailure, match=says):
        list(Client(server.url).answer([user_message("?", [])]))


def test_nobody_there(server: StandInServer, capsys: pytest.CaptureFixture[str]) -> None:
    unused = "http://127.0.0.1:9/v1"
    assert converse(Client(unused), "?", []) == 1
    assert f"no gateway at {unused}" in capsys.readouterr().err


def test_a_missing_picture_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert converse(Client("http://127.0.0.1:9/v1"), "?", [Path("/nowhere.png")]) == 1
    assert "/nowhere.png" in capsys.readouterr().err
