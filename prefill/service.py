"""Prefill.Run: translates between protobuf and the worker, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from epd.errors import invalid
from epd.rpc.convert import (
    finish_to_proto,
    handle_from_proto,
    handle_to_proto,
    timing_to_proto,
    token_to_proto,
)
from epd.rpc.jobs import ModelFacts, prefill_job_from_proto
from epd.runtime.streams import deadline, first_job, receiving
from prefill.ticket import (
    Admitted,
    EmbeddingFetched,
    Event,
    FirstToken,
    KvReady,
    ReadsTerminal,
    Ticket,
)
from prefill.worker import PrefillWorker
from protos.epd.v1 import common_pb2, prefill_pb2_grpc
from protos.epd.v1 import prefill_pb2 as pb

Context = grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillEvent]


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, worker: PrefillWorker, facts: ModelFacts, deadline_s: float) -> None:
        self._worker = worker
        self._facts = facts
        self._deadline_s = deadline_s

    async def Run(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.PrefillRequest], context: Context
    ) -> None:
        async with deadline(context, self._deadline_s):
            message: pb.PrefillJob = await first_job(context)
            with self._worker.streams.open() as fail:
                job = prefill_job_from_proto(message, self._facts)
                ticket = await self._worker.submit(job)
                fail.append(ticket.events.close)
                clean = False
                try:
                    clean = await self._serve(ticket, context)
                finally:
                    self._worker.close(ticket, clean=clean)

    async def _serve(self, ticket: Ticket, context: Context) -> bool:
        """True when the client has released the blocks by half-closing."""
        with receiving(
            ticket.events,
            context,
            lambda message: self._receive(ticket, message),
            lambda: self._worker.half_close(ticket),
        ):
            while events := await ticket.events.take():
                for event in events:
                    await context.write(_TO_PROTO[type(event)](event))
        return True

    def _receive(self, ticket: Ticket, message: pb.PrefillRequest) -> None:
        kind = message.WhichOneof("kind")
        if kind == "embedding_ready":
            ready = message.embedding_ready
            handle = handle_from_proto(ready.handle, "embedding_ready.handle")
            self._worker.embedding_ready(ticket, ready.index, handle)
        elif kind == "cancel":
            self._worker.cancel(ticket, damaged=message.cancel.damaged)
        elif kind == "recall":
            self._worker.recall(ticket)
        else:
            raise invalid("only embedding_ready, cancel or recall can follow the job", kind)


def _admitted(event: Admitted) -> pb.PrefillEvent:
    return pb.PrefillEvent(
        admitted=pb.Admitted(
            cached_tokens=event.cached_tokens,
            missing_items=event.missing_items,
            position_delta=event.position_delta,
        )
    )


def _fetched(event: EmbeddingFetched) -> pb.PrefillEvent:
    return pb.PrefillEvent(
        embedding_fetched=pb.EmbeddingFetched(
            index=event.index,
            transfer_ms=event.transfer_ms,
            transfer_bytes=event.transfer_bytes,
        )
    )


def _kv_ready(event: KvReady) -> pb.PrefillEvent:
    return pb.PrefillEvent(
        kv_ready=pb.KvReady(
            first_block=event.first_block,
            handle=handle_to_proto(event.handle),
            tokens=event.tokens,
        )
    )


def _first_token(event: FirstToken) -> pb.PrefillEvent:
    return pb.PrefillEvent(
        first_token=pb.FirstToken(
            token=token_to_proto(event.token),
            finish_reason=finish_to_proto(event.finish),
            kv_tokens=event.kv_tokens,
            timing=timing_to_proto(event.timing),
            others=[
                pb.ChoiceToken(
                    token=token_to_proto(other.token),
                    finish_reason=finish_to_proto(other.finish),
                    kv_tokens=event.kv_tokens,
                )
                for other in event.others
            ],
        )
    )


def _terminal(event: ReadsTerminal) -> pb.PrefillEvent:
    return pb.PrefillEvent(reads_terminal=common_pb2.ReadsTerminal(clean=event.clean))


_TO_PROTO: dict[type[Event], Callable[[Any], pb.PrefillEvent]] = {
    Admitted: _admitted,
    EmbeddingFetched: _fetched,
    KvReady: _kv_ready,
    FirstToken: _first_token,
    ReadsTerminal: _terminal,
}
