"""Decode.Run: translates between protobuf and the worker, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import grpc.aio

from decode.ticket import Admitted, Event, Finished, KvFetched, Ticket, TokenMade
from decode.worker import DecodeWorker
from epd.errors import invalid
from epd.rpc.convert import (
    finish_to_proto,
    handle_from_proto,
    timing_to_proto,
    token_from_proto,
    token_to_proto,
)
from epd.rpc.jobs import ModelFacts, decode_job_from_proto
from epd.runtime.streams import deadline, first_job, receiving
from protos.epd.v1 import common_pb2, decode_pb2_grpc
from protos.epd.v1 import decode_pb2 as pb

Context = grpc.aio.ServicerContext[pb.DecodeRequest, pb.DecodeEvent]
_MOST_BYTES = 16 << 10
"""Of tokens in one message, about; a single one is always sent."""


class DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(self, worker: DecodeWorker, facts: ModelFacts, deadline_s: float) -> None:
        self._worker = worker
        self._facts = facts
        self._deadline_s = deadline_s

    async def Run(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.DecodeRequest], context: Context
    ) -> None:
        async with deadline(context, self._deadline_s):
            message: pb.DecodeJob = await first_job(context)
            with self._worker.streams.open() as fail:
                job = decode_job_from_proto(message, self._facts)
                ticket = await self._worker.submit(job)
                fail.append(ticket.events.close)
                try:
                    await self._serve(ticket, context)
                finally:
                    self._worker.close(ticket)

    async def _serve(self, ticket: Ticket, context: Context) -> None:
        with receiving(
            ticket.events,
            context,
            lambda message: self._receive(ticket, message),
            lambda: self._worker.half_close(ticket),
        ):
            # A slow client holds up this loop only: what gathers meanwhile is
            # coalesced into few messages.
            while events := await ticket.events.take():
                for message in messages(events):
                    await context.write(message)

    def _receive(self, ticket: Ticket, message: pb.DecodeRequest) -> None:
        kind = message.WhichOneof("kind")
        if kind == "kv_ready":
            ready = message.kv_ready
            handle = handle_from_proto(ready.handle, "kv_ready.handle")
            self._worker.kv_ready(ticket, ready.first_block, handle, ready.tokens)
        elif kind == "start":
            start = message.start
            first = token_from_proto(start.first_token)
            self._worker.begin(ticket, first, start.kv_tokens)
        elif kind == "cancel":
            self._worker.cancel(ticket)
        elif kind == "recall":
            self._worker.recall(ticket)
        else:
            raise invalid("only kv_ready, start, cancel or recall can follow the job", kind)


def messages(events: Sequence[Event]) -> Iterator[pb.DecodeEvent]:
    """Events as messages; tokens in a row become few messages, each of a bounded size."""
    made: list[TokenMade] = []
    for event in events:
        if isinstance(event, TokenMade):
            made.append(event)
            continue
        yield from _tokens(made)
        made = []
        yield _message(event)
    yield from _tokens(made)


def _tokens(made: Sequence[TokenMade]) -> Iterator[pb.DecodeEvent]:
    """With logprobs, tokens that gathered for long would be larger together than any message
    may be (`rpc.control_bytes`)."""
    tokens: list[common_pb2.Token] = []
    first = size = 0
    for event in made:
        token = token_to_proto(event.token)
        size += token.ByteSize()
        if tokens and size > _MOST_BYTES:
            yield pb.DecodeEvent(tokens=pb.Tokens(first_index=first, tokens=tokens))
            tokens, size = [], token.ByteSize()
        if not tokens:
            first = event.index
        tokens.append(token)
    if tokens:
        reason = finish_to_proto(made[-1].reason)
        last = pb.Tokens(first_index=first, tokens=tokens, finish_reason=reason)
        yield pb.DecodeEvent(tokens=last)


def _message(event: Event) -> pb.DecodeEvent:
    if isinstance(event, Admitted):
        return pb.DecodeEvent(admitted=pb.DecodeAdmitted(cached_tokens=event.cached_tokens))
    if isinstance(event, KvFetched):
        fetched = pb.KvFetched(transfer_ms=event.transfer_ms, transfer_bytes=event.transfer_bytes)
        return pb.DecodeEvent(kv_fetched=fetched)
    if isinstance(event, Finished):
        finished = pb.Finished(
            reason=finish_to_proto(event.reason),
            output_tokens=event.output_tokens,
            timing=timing_to_proto(event.timing),
        )
        return pb.DecodeEvent(finished=finished)
    assert not isinstance(event, TokenMade)
    return pb.DecodeEvent(reads_terminal=common_pb2.ReadsTerminal(clean=event.clean))
