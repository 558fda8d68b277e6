"""The gateway over scripted stages: clients that leave, readers before owners."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from epd.errors import EpdError, ErrorKind
from gateway.attempt import Attempt
from gateway.checkpoint import Loaded
from gateway.outcomes import outcome_of
from gateway.schema import parse_body
from tests.e2e.fake_stages import Call, hang
from tests.e2e.gateway_house import CHAT, House, before, opened, raw
from tests.e2e.http_client import Connection
from tests.waiting import LIMIT_S, soon, until

# --- cancelling --------------------------------------------------------------------------


async def leave_at(house: House, point: str, after: str = "", **fields: Any) -> None:
    """Send a request, go away once a fake is at `point` (and `after` has happened), and
    wait for the end."""
    reached = asyncio.Event()

    async def wait(call: Call) -> None:
        await until(lambda: not after or after in house.journal)
        reached.set()
        await hang(call)

    house.script.hooks[point] = wait
    connection = await Connection.send(house.http, "POST", CHAT, raw(**fields))
    await asyncio.wait_for(reached.wait(), LIMIT_S)
    connection.close()
    await house.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_readers_are_cancelled_before_owners_are_closed(house: House, stream: bool) -> None:
    await leave_at(house, "decode.fetch", stream=stream)
    journal = house.journal
    assert journal[journal.index("decode: Cancel") :] == [
        "decode: Cancel",
        "decode: ReadsTerminal",
        "prefill: half-close",
    ]


async def test_readers_are_cancelled_while_prefill_computes(house: House) -> None:
    house.script.hooks["decode.fetch"] = hang
    await leave_at(house, "prefill.first", after="decode: job")
    journal = house.journal
    assert journal[journal.index("decode: Cancel") :] == [
        "decode: Cancel",
        "decode: ReadsTerminal",
        "prefill: Cancel",
        "prefill: ReadsTerminal",
        "prefill: half-close",
    ]


async def test_encoders_are_released_after_prefill_said_so(house: House) -> None:
    await leave_at(house, "prefill.fetch", images=1)
    journal = house.journal
    assert journal[journal.index("prefill: Cancel") :][:2] == [
        "prefill: Cancel",
        "prefill: ReadsTerminal",
    ]
    assert before(journal, "prefill: ReadsTerminal", "encode: half-close")


@pytest.mark.parametrize("point", ["prefill.job", "encode.job", "prefill.first", "decode.token"])
async def test_a_client_may_leave_at_any_point(house: House, point: str) -> None:
    await leave_at(house, point, images=1, stream=True)


async def test_an_owner_is_cut_when_its_reader_is_not_clean(house: House) -> None:
    house.script.clean = False
    await leave_at(house, "decode.fetch")
    assert "prefill: cut" in house.journal
    assert "prefill: half-close" not in house.journal


async def test_a_reader_that_stays_silent_is_given_up(loaded: Loaded) -> None:
    async with opened(loaded, cancel_bound_s=1.0) as house:
        house.script.hooks["decode.terminal"] = hang
        start = time.monotonic()
        with soon(20, instead_of="the reader, for ever"):
            await leave_at(house, "decode.fetch")
        assert time.monotonic() - start >= 1.0
        assert "prefill: cut" in house.journal


async def test_a_stop_string_cancels_decode(house: House) -> None:
    text = (await house.chat()).json()["choices"][0]["message"]["content"]
    stop = text[6:8]
    house.journal.clear()

    async def slowly(call: Call) -> None:
        await asyncio.sleep(0.02)

    house.script.output = house.script.output * 20
    house.script.hooks["decode.token"] = slowly
    reply = (await house.chat(stop=stop)).json()
    await house.settled()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert stop not in reply["choices"][0]["message"]["content"]
    assert text.startswith(reply["choices"][0]["message"]["content"])
    assert reply["usage"]["completion_tokens"] < 20
    assert "decode: Cancel" in house.journal
    assert "decode: Finished" not in house.journal


@pytest.mark.parametrize("where", ["door", "plan", "decode.job", "decode.token"])
@pytest.mark.parametrize("own", [True, False])
async def test_whose_deadline_it_was(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, where: str, own: bool
) -> None:
    """A client that gives itself little time gives up; the gateway that does has failed."""
    longest, asked_s = (60.0, 0.3) if own else (0.3, 60.0)

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async with opened(loaded, {"request_deadline_s": longest}) as house:
        service = house.gateway.service
        if where == "door":
            monkeypatch.setattr(service.door, "enter", never)
        elif where == "plan":
            monkeypatch.setattr(service.preparer, "plan", never)
        else:
            house.script.hooks[where] = hang

        async def ask() -> None:
            call = parse_body(raw(), service.config.limits, 1024)
            answer = await service.open(call, "id", service.budget.hold(), asked_s)
            try:
                with answer.served():
                    async for _ in answer.parts():
                        pass
            finally:
                answer.cancel()

        with pytest.raises(EpdError) as caught, soon(30, instead_of="the longer one"):
            await ask()
        assert caught.value.kind is ErrorKind.DEADLINE_EXCEEDED
        assert caught.value.by_client is own
        assert outcome_of(caught.value) == ("cancelled" if own else "failed")
        await house.settled()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["door", "plan", "run"])
async def test_what_times_out_inside_is_no_deadline(
    house: House, monkeypatch: pytest.MonkeyPatch, where: str, stream: bool
) -> None:
    """A fault of ours, which nobody's patience has to do with, and no client is told more."""
    service = house.gateway.service

    async def late(*_: Any) -> None:
        raise TimeoutError("of a socket")

    if where == "door":
        monkeypatch.setattr(service.door, "enter", late)
    elif where == "plan":
        monkeypatch.setattr(service.preparer, "plan", late)
    else:
        monkeypatch.setattr(Attempt, "run", late)
    reply = await house.chat(stream=stream)
    assert (reply.status, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "socket" not in reply.body.decode()
