"""Two minutes of `make chaos`; the judge would notice."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import aiohttp.web
import pytest

from tests.chaos.outcomes import NEVER, Outcome, Outcomes
from tests.chaos.questions import Question
from tests.chaos.run import Report, hurt
from tests.chaos.service import Place
from tests.chaos.traffic import Traffic
from tests.e2e.member import Worker

MINUTES = float(os.environ.get("EPD_CHAOS_MINUTES", "2"))


@pytest.mark.timeout(60 * MINUTES + 400)
async def test_nothing_wrong_nothing_hung_nothing_left_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = await hurt(tmp_path, MINUTES, seed=5, clients=4, workers=2)
    with capsys.disabled():
        # (Of a process of pytest-xdist, only this stream is seen.)
        print(f"\n{report.text()}", file=sys.stderr)
    assert report.ok, report.text()
    counts = report.outcomes.counts
    assert counts["right"] > 15 * MINUTES
    assert len(report.injuries) >= 2 * MINUTES


# --- the judge ------------------------------------------------------------------------------

QUESTION = Question("one", ("what?",))


class Liar:
    """A gateway that answers what it is told to."""

    def __init__(self, status: int, body: str, stream: bool) -> None:
        self._answer = status, body, "text/event-stream" if stream else "application/json"

    async def __call__(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        status, body, kind = self._answer
        return aiohttp.web.Response(status=status, text=body, content_type=kind)


def whole(text: str, reason: str = "stop") -> str:
    choice = f'"index": 0, "message": {{"content": "{text}"}}, "finish_reason": "{reason}"'
    return f'{{"choices": [{{{choice}}}]}}'


def events(text: str, reason: str, *more: str) -> str:
    choice = f'"index": 0, "delta": {{"content": "{text}"}}, "finish_reason": "{reason}"'
    lines = [f'{{"choices": [{{{choice}}}]}}', *more]
    return "".join(f"data: {line}\n\n" for line in lines)


ERROR = '{"error": {"code": "stage_unavailable", "message": "x"}}'


@pytest.mark.parametrize(
    ("how", "status", "body", "kind"),
    [
        ("whole", 200, whole("red"), "right"),
        ("whole", 200, whole("blue"), "wrong"),
        ("whole", 200, whole("red", "length"), "wrong"),
        ("whole", 200, whole("re"), "wrong"),
        ("whole", 503, ERROR, "stage_unavailable"),
        ("whole", 503, "busy", "untyped"),
        ("whole", 400, ERROR, "untyped"),
        ("stream", 200, events("red", "stop", "[DONE]"), "right"),
        ("stream", 200, events("blue", "stop", "[DONE]"), "wrong"),
        ("stream", 200, events("red", "stop"), "untyped"),
        ("stream", 200, events("re", "", ERROR), "stage_unavailable"),
        ("stream", 200, events("bl", "", ERROR), "wrong"),
        ("stream", 200, events("bl", ""), "wrong"),
    ],
)
async def test_the_judge(how: str, status: int, body: str, kind: str, tmp_path: Path) -> None:
    app = aiohttp.web.Application()
    app.router.add_post("/v1/chat/completions", Liar(status, body, how == "stream"))
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        address = "{}:{}".format(*runner.addresses[0])
        worker = Worker("gateway", 0, {}, {}, tmp_path / "log", report={"http": address})
        traffic = Traffic([Place(worker, None)], [QUESTION], seed=0)
        traffic.expected[QUESTION.name] = (("red", "stop"),)
        async with aiohttp.ClientSession() as session:
            outcome = await traffic.ask(session, Place(worker, None), QUESTION, how)
    finally:
        await runner.cleanup()
    assert outcome.kind == kind, outcome


async def test_what_never_ends_is_hung(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.chaos.traffic.LIMIT_S", 0.2)
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(5), "127.0.0.1", 0)
    address = "{}:{}".format(*silent.sockets[0].getsockname())
    worker = Worker("gateway", 0, {}, {}, tmp_path / "log", report={"http": address})
    traffic = Traffic([Place(worker, None)], [QUESTION], seed=0)
    traffic.expected[QUESTION.name] = (("red", "stop"),)
    async with aiohttp.ClientSession() as session:
        for hurt_since, kind in ((None, "hung"), (0.0, "gateway lost")):
            place = Place(worker, None)
            if hurt_since is not None:
                place.hurt.append((hurt_since, float("inf")))
            assert (await traffic.ask(session, place, QUESTION, "whole")).kind == kind
    silent.close()


@pytest.mark.parametrize("kind", NEVER)
def test_a_run_with_a_fault_is_not_ok(kind: str) -> None:
    outcomes = Outcomes([Outcome("one", "whole", 0.0, 1.0, "right")])
    assert Report(1.0, outcomes, [], [], []).ok
    outcomes.add(Outcome("one", "whole", 0.0, 1.0, kind, "what it said"))
    report = Report(1.0, outcomes, [], [], [])
    assert not report.ok
    assert "what it said" in report.text()
    assert not Report(1.0, Outcomes(), [], [], ["a block"]).ok
    assert not Report(1.0, Outcomes(), [], outcomes.all[:1], []).ok
