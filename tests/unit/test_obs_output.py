"""What operators see: log lines, metrics, the debug page."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from epd.config import LogConfig
from epd.obs import logs
from epd.obs.http import ObservationServer
from tests.waiting import LIMIT_S


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_carry_request_fields_and_exception(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogConfig(format="json"), "decode")
    with logs.bind("req-1"):
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("x").exception("it %s", "broke", extra={"tokens": 3})
    out = capsys.readouterr()
    assert out.out == "", "stdout is for READY lines"
    line = json.loads(out.err)
    assert line["request"] == "req-1"
    assert line["stage"] == "decode"
    assert line["message"] == "it broke"
    assert line["tokens"] == 3
    assert "ValueError: why" in line["exception"]


def test_text_lines_carry_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogConfig(), "encode")
    with logs.bind("req-2"):
        logging.getLogger("x").info("hello", extra={"n": 1})
    logging.getLogger("x").debug("not shown")
    line = capsys.readouterr().err
    assert "[req-2] hello n=1" in line
    assert "not shown" not in line


def test_what_clients_wrote_begins_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogConfig(), "gateway")
    forged = "/v1/models/x\n12:00:00.000 I gateway access status=200\r\x1b[2J\u2028\u202e\x85é世"
    logging.getLogger("x").info("refused: %s", forged, extra={"path": forged})
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert (
        err.count(r"x\x0a12:00:00.000 I gateway access status=200\x0d\x1b[2J\u2028\u202e\x85é世")
        == 2
    )


def test_an_explicit_request_wins(capsys: pytest.CaptureFixture[str]) -> None:
    """Engine work of several requests is logged outside of any."""
    logs.setup(LogConfig(format="json"), "encode")
    logging.getLogger("x").info("hello", extra={"request": "req-3"})
    assert json.loads(capsys.readouterr().err)["request"] == "req-3"


async def test_the_request_follows_into_tasks_and_does_not_leak() -> None:
    async def child() -> str:
        return logs.request_id()

    async def call(name: str) -> str:
        logs.set_request(name)
        await asyncio.sleep(0)
        return await asyncio.create_task(child())

    names = await asyncio.gather(*(asyncio.create_task(call(f"r{i}")) for i in range(5)))
    assert names == [f"r{i}" for i in range(5)]
    assert logs.request_id() == ""


async def test_metrics_and_state_are_served() -> None:
    reason = [""]
    server = ObservationServer("decode", lambda: {"streams": 3, "name": "x"}, lambda: reason[0])
    address = await server.start("127.0.0.1", 0)

    def get(path: str) -> bytes:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=LIMIT_S) as answer:
            return bytes(answer.read())

    state = await asyncio.to_thread(get, "/debug/state")
    assert json.loads(state) == {"streams": 3, "name": "x"}
    page = (await asyncio.to_thread(get, "/metrics")).decode()
    assert 'epd_state{stage="decode",what="streams"} 3.0' in page
    assert await asyncio.to_thread(get, "/ready") == b"ready\n"
    head = urllib.request.Request(f"http://{address}/ready", method="HEAD")
    with await asyncio.to_thread(urllib.request.urlopen, head, timeout=LIMIT_S) as answer:
        assert (answer.status, answer.headers["content-length"], answer.read()) == (200, "6", b"")
    reason[0] = "no decode"
    assert await asyncio.to_thread(get, "/health") == b"alive\n", "whatever it is ready for"
    with pytest.raises(urllib.error.HTTPError) as caught:
        await asyncio.to_thread(get, "/ready")
    assert (caught.value.code, caught.value.read()) == (503, b"no decode\n")
    with pytest.raises(urllib.error.HTTPError) as caught:
        await asyncio.to_thread(get, "/other")
    assert caught.value.code == 404
    await server.close()


async def test_a_state_that_can_not_be_told_keeps_no_connection() -> None:
    def broken() -> dict[str, object]:
        raise ZeroDivisionError

    server = ObservationServer("decode", broken, str)
    address = await server.start("127.0.0.1", 0)
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /debug/state HTTP/1.0\r\n\r\n")
    assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
    writer.close()
    await server.close()


async def test_a_client_that_sends_nonsense_gets_an_answer_or_is_dropped() -> None:
    server = ObservationServer("decode", dict, str)
    address = await server.start("127.0.0.1", 0)
    host, port = address.split(":")
    for garbage in (
        b"\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\n\r\n",
        b"x" * 10000 + b"\r\n\r\n",
        b"",
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        if writer.can_write_eof():
            writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), LIMIT_S)
        assert answer == b"" or answer.startswith(b"HTTP/1.0 404")
        writer.close()
    await server.close()
