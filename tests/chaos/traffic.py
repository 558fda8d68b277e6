"""Checked traffic: every answer is compared with the one that was given before anything was
hurt. Clients of all kinds: patient, slow, leaving, in bursts; HTTP and gRPC, streams and not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from epd import client as grpc_client
from epd.errors import EpdError
from tests.chaos.outcomes import HUNG, NEVER, UNTYPED, WRONG, Outcome, Outcomes
from tests.chaos.questions import Answer, Question
from tests.chaos.service import Place

LIMIT_S = 45.0
"""The request's own deadline is 30 s: what takes longer than this hangs."""
BURST = 16
_TRIES, _TRY_AGAIN_S = 5, 1.0
WAYS = ("whole", "stream", "stream", "slow", "grpc", "leave", "leave early")
_PATH = "/v1/chat/completions"


class Refused(Exception):
    """A typed error; `partial` is what had come before it."""

    def __init__(self, code: str, detail: str, partial: Answer = ()) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.partial = partial


class Lost(Exception):
    """The connection broke, or ended in the middle."""

    def __init__(self, detail: str, partial: Answer = ()) -> None:
        super().__init__(detail)
        self.partial = partial


class Left(Exception):
    """We went away on purpose."""


class Traffic:
    """Clients of some gateways, until `stop`. `headers` go with every HTTP request."""

    def __init__(
        self,
        gateways: Sequence[Place],
        questions: Sequence[Question],
        seed: int,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._headers = headers
        self._gateways = gateways
        self._questions = questions
        self._random = random.Random(seed)
        self.expected: dict[str, Answer] = {}
        """By the question's name."""
        self._ways: Sequence[str] = WAYS
        self._stopping = asyncio.Event()
        self.outcomes = Outcomes()

    def session(self) -> aiohttp.ClientSession:
        """Without kept connections: each request begins as a new client's does."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(connector=connector, headers=self._headers)

    async def learn(self) -> None:
        """Ask everything once, while nothing is hurt.

        Raises:
            Refused, Lost: the service doesn't even work unhurt.
        """
        async with self.session() as session:
            for question in self._questions:
                self.expected[question.name] = await self._learned(session, question)

    async def _learned(self, session: aiohttp.ClientSession, question: Question) -> Answer:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(Refused):
                return await self._whole(session, self._gateways[0], question)
            await asyncio.sleep(_TRY_AGAIN_S)
        return await self._whole(session, self._gateways[0], question)

    async def run(self, clients: int, ways: Sequence[str] = WAYS, bursts: bool = True) -> None:
        """Until `stop`, and until every request that was begun has ended."""
        self._ways = ways
        async with self.session() as session, asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(self._client(session))
            if bursts:
                tasks.create_task(self._bursts(session))

    def stop(self) -> None:
        self._stopping.set()

    async def check_all(self) -> list[Outcome]:
        """Ask everything once of each gateway; returns what was not right. A typed error
        is asked again, as its Retry-After says: a crowded machine loses a heartbeat."""
        found = []
        async with self.session() as session:
            for gateway in self._gateways:
                for question in self._questions:
                    for _ in range(_TRIES):
                        outcome = await self.ask(session, gateway, question, "whole")
                        if outcome.kind == "right" or outcome.kind in NEVER:
                            break
                        await asyncio.sleep(_TRY_AGAIN_S)
                    if outcome.kind != "right":
                        found.append(outcome)
        return found

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self._stopping.is_set():
            await self._one(session)
            await asyncio.sleep(self._random.uniform(0, 0.3))

    async def _bursts(self, session: aiohttp.ClientSession) -> None:
        while not await self._stops_within(self._random.uniform(8, 20)):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(BURST):
                    tasks.create_task(self._one(session))

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stopping.wait()
        except TimeoutError:
            return False

    async def _one(self, session: aiohttp.ClientSession) -> None:
        question = self._random.choice(self._questions)
        gateway = self._random.choice(self._gateways)
        outcome = await self.ask(session, gateway, question, self._random.choice(self._ways))
        self.outcomes.add(outcome)

    async def ask(
        self, session: aiohttp.ClientSession, gateway: Place, question: Question, how: str
    ) -> Outcome:
        """One request in one of the ways of `_one`, judged."""
        started = time.monotonic()

        def ended(kind: str, detail: str = "") -> Outcome:
            return Outcome(question.name, how, started, time.monotonic(), kind, detail)

        expected = self.expected[question.name]
        try:
            async with asyncio.timeout(LIMIT_S):
                answer = await self._answer(session, gateway, question, how)
        except Left:
            return ended("aborted")
        except Refused as refusal:
            if not _begins(expected, refusal.partial):
                return ended(WRONG, f"{refusal.partial} before {refusal}")
            return ended(refusal.code, str(refusal))
        except (Lost, TimeoutError) as lost:
            if isinstance(lost, Lost) and not _begins(expected, lost.partial):
                return ended(WRONG, f"{lost.partial} and then nothing")
            # A request can't outlive its gateway, nor the cable to it.
            if gateway.was_hurt(started, time.monotonic()):
                return ended("gateway lost", repr(lost))
            return ended(HUNG if isinstance(lost, TimeoutError) else UNTYPED, repr(lost))
        if answer != expected:
            return ended(WRONG, f"{answer} is not {expected}")
        return ended("right")

    async def _answer(
        self, session: aiohttp.ClientSession, gateway: Place, question: Question, how: str
    ) -> Answer:
        if how == "whole":
            return await self._whole(session, gateway, question)
        if how == "grpc":
            return await _over_grpc(gateway, question)
        if how == "leave early":
            return await self._leave_early(session, gateway, question)
        pause_s = self._random.uniform(0.02, 0.2) if how == "slow" else 0.0
        leave_after = self._random.randrange(1, 20) if how == "leave" else None
        return await _streamed(session, gateway, question, pause_s, leave_after)

    async def _whole(
        self, session: aiohttp.ClientSession, gateway: Place, question: Question
    ) -> Answer:
        url = f"http://{gateway.worker.report['http']}{_PATH}"
        try:
            async with session.post(url, json=question.body(False)) as reply:
                body = await reply.read()
        except aiohttp.ClientError as error:
            raise Lost(repr(error)) from error
        _check(reply.status, body)
        choices = sorted(json.loads(body)["choices"], key=lambda choice: choice["index"])
        return tuple((c["message"]["content"], c["finish_reason"]) for c in choices)

    async def _leave_early(
        self, session: aiohttp.ClientSession, gateway: Place, question: Question
    ) -> Answer:
        """Before the first word, at a random moment of planning, encoding or prefill."""
        try:
            async with asyncio.timeout(self._random.uniform(0.0, 0.4)):
                return await self._whole(session, gateway, question)
        except TimeoutError:
            raise Left from None


async def _streamed(
    session: aiohttp.ClientSession,
    gateway: Place,
    question: Question,
    pause_s: float,
    leave_after: int | None,
) -> Answer:
    url = f"http://{gateway.worker.report['http']}{_PATH}"
    texts, reasons = [""] * question.choices, [""] * question.choices
    events, done = 0, False
    try:
        async with session.post(url, json=question.body(True)) as reply:
            if reply.status != 200:
                _check(reply.status, await reply.read())
            async for event in _events(reply):
                if event is None:
                    done = True
                    break
                if "error" in event:
                    partial = tuple(zip(texts, reasons, strict=True))
                    raise Refused(event["error"]["code"], event["error"]["message"], partial)
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
                    reasons[choice["index"]] = choice["finish_reason"] or ""
                events += 1
                if leave_after is not None and events > leave_after:
                    raise Left
                await asyncio.sleep(pause_s)
    except aiohttp.ClientError as error:
        raise Lost(repr(error), tuple(zip(texts, reasons, strict=True))) from error
    answer = tuple(zip(texts, reasons, strict=True))
    if not done:
        raise Lost("the stream ended in the middle", answer)
    return answer


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Server-sent events; None is [DONE]."""
    async for line in reply.content:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            yield None if data == b"[DONE]" else json.loads(data)


async def _over_grpc(gateway: Place, question: Question) -> Answer:
    options = {"temperature": 0} | question.options
    address = str(gateway.worker.report["grpc"])
    started = time.monotonic()
    try:
        async with grpc_client.AsyncClient(address, timeout_s=LIMIT_S - 1) as client:
            answer = await client.chat([grpc_client.user(*question.parts)], **options)
    except EpdError as error:
        if gateway.was_hurt(started, time.monotonic()):
            raise Lost(error.message) from error
        raise Refused(str(error.kind), error.message) from error
    return tuple(zip(answer.texts, map(str, answer.reasons), strict=True))


def _check(status: int, body: bytes) -> None:
    if status == 200:
        return
    try:
        error = json.loads(body)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        raise Lost(f"{status} without a typed error: {body[:200]!r}") from None
    if 400 <= status < 500 and status != 429:
        raise Lost(f"{status}, though nothing is wrong with the request: {message}")
    raise Refused(code, message)


def _begins(expected: Answer, partial: Answer) -> bool:
    """Whether what has come so far is how the right answer begins."""
    return all(
        whole.startswith(text) for (whole, _), (text, _) in zip(expected, partial, strict=False)
    )
