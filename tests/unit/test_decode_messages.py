"""Decode's events on their way to a client that lags."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from decode.service import DecodeService, messages
from decode.ticket import Admitted, Event, Finished, KvFetched, ReadsTerminal, TokenMade
from epd.config import RpcConfig
from epd.jobs import FinishReason, SampledToken, StageTiming
from epd.runtime.mailbox import Mailbox
from protos.epd.v1.common_pb2 import FINISH_REASON_STOP


def made(index: int) -> TokenMade:
    return TokenMade(index, SampledToken(100 + index))


def test_tokens_in_a_row_become_one_message_in_order() -> None:
    events: list[Event] = [
        Admitted(0),
        KvFetched(1.0, 2),
        *[made(i) for i in range(1, 5)],
        TokenMade(5, SampledToken(105), FinishReason.STOP),
        Finished(FinishReason.STOP, 6, StageTiming()),
    ]
    sent = list(messages(events))
    assert [m.WhichOneof("kind") for m in sent] == ["admitted", "kv_fetched", "tokens", "finished"]
    assert sent[2].tokens.first_index == 1
    assert [token.id for token in sent[2].tokens.tokens] == [101, 102, 103, 104, 105]
    assert sent[2].tokens.finish_reason == sent[3].finished.reason == FINISH_REASON_STOP
    assert sent[3].finished.output_tokens == 6


def test_what_gathered_for_long_is_no_message_too_large_to_send() -> None:
    """Ten thousand tokens with twenty alternatives each, for a client that reads slowly."""
    top = tuple((index, -float(index)) for index in range(20))
    events: list[Event] = [
        TokenMade(index, SampledToken(index, -1.0, top)) for index in range(3, 10_002)
    ]
    events.append(TokenMade(10_002, SampledToken(10_002, -1.0, top), FinishReason.LENGTH))
    sent = list(messages([*events, Finished(FinishReason.LENGTH, 10_003, StageTiming())]))
    assert max(message.ByteSize() for message in sent) < RpcConfig().control_bytes / 32
    *tokens, finished = sent
    assert finished.HasField("finished")
    at = 3
    for message in tokens:
        assert message.tokens.first_index == at
        at += len(message.tokens.tokens)
    assert at == 10_003
    assert [m for m in tokens if m.tokens.finish_reason] == tokens[-1:]
    assert [t.id for m in tokens for t in m.tokens.tokens] == list(range(3, 10_003))


def test_a_token_larger_than_a_message_should_be_is_sent_alone() -> None:
    top = tuple((index, -1.0) for index in range(5000))
    large = [TokenMade(index, SampledToken(index, -1.0, top)) for index in range(3)]
    sent = list(messages(large))
    assert [(m.tokens.first_index, len(m.tokens.tokens)) for m in sent] == [(0, 1), (1, 1), (2, 1)]


class Lagging:
    """A client that takes nothing until it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.taken: list[Any] = []
        self.writes = self.most_writes = 0

    async def write(self, message: Any) -> None:
        self.writes += 1
        self.most_writes = max(self.most_writes, self.writes)
        await self.may.wait()
        self.taken.append(message)
        self.writes -= 1

    async def read(self) -> None:
        await asyncio.Event().wait()


async def test_one_message_at_a_time_is_written_however_many_tokens_are_made() -> None:
    """Else gRPC would keep a message for each of them, for a client that takes none."""
    client: Any = Lagging()
    ticket: Any = SimpleNamespace(events=Mailbox[Event]())
    nobody: Any = None
    serving = asyncio.create_task(DecodeService(nobody, nobody, 1.0)._serve(ticket, client))
    for index in range(1, 501):
        ticket.events.put(made(index))
        await asyncio.sleep(0)
    client.may.set()
    ticket.events.close()
    await serving
    assert client.most_writes == 1
    assert [t.id for m in client.taken for t in m.tokens.tokens] == list(range(101, 601))
    assert len(client.taken) < 5, "what gathers is sent together"


def test_tokens_alone_and_a_last_word() -> None:
    assert [len(m.tokens.tokens) for m in messages([made(3)])] == [1]
    assert next(iter(messages([ReadsTerminal(False)]))).reads_terminal.clean is False


async def test_a_mailbox_gathers_while_nobody_takes_and_ends_after_its_last_event() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in range(3):
        mailbox.put(number)
    assert await mailbox.take() == [0, 1, 2]
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    mailbox.put(3)
    mailbox.close()
    mailbox.put(4)  # too late
    assert await taking == [3]
    assert await mailbox.take() == []


async def test_an_error_comes_after_the_events_before_it_and_the_first_counts() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    mailbox.close(ValueError("first"))
    mailbox.close(ValueError("second"))
    assert await mailbox.take() == [1]
    with pytest.raises(ValueError, match="first"):
        await mailbox.take()
