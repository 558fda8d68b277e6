"""Encode.Run: translates between protobuf and the worker, nothing else.

job -> Accepted -> ItemReady -> half-close (released) | loss (quarantined)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio

from encode.ticket import Ticket
from encode.worker import EncodeWorker
from epd.errors import EpdError, ErrorKind, invalid
from epd.rpc.convert import handle_to_proto, timing_to_proto
from epd.rpc.jobs import ModelFacts, encode_job_from_proto
from epd.runtime.streams import deadline, first_job, next_message
from protos.epd.v1 import encode_pb2 as pb
from protos.epd.v1 import encode_pb2_grpc

Context = grpc.aio.ServicerContext[pb.EncodeRequest, pb.EncodeEvent]


class EncodeService(encode_pb2_grpc.EncodeServicer):
    def __init__(self, worker: EncodeWorker, facts: ModelFacts, deadline_s: float) -> None:
        self._worker = worker
        self._facts = facts
        self._deadline_s = deadline_s

    async def Run(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.EncodeRequest], context: Context
    ) -> None:
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with deadline(context, self._deadline_s):
            message: pb.EncodeJob = await first_job(context)
            with self._worker.streams.open() as fail:
                fail.append(_failing(failed))
                ticket = self._worker.submit(encode_job_from_proto(message, self._facts))
                del message  # the file's bytes must not live as long as the lease
                clean = False
                try:
                    clean = await self._serve(ticket, failed, context)
                finally:
                    self._worker.close(ticket, clean=clean)

    async def _serve(self, ticket: Ticket, failed: asyncio.Future[None], context: Context) -> bool:
        """True when the reader has said that it is done with the rows."""
        await context.write(pb.EncodeEvent(accepted=pb.EncodeAccepted()))
        ended = asyncio.create_task(self._half_close(ticket, context))
        try:
            await _first_of(ticket.finished, ended, failed)
            if not ticket.finished.done():
                raise EpdError(ErrorKind.CANCELLED, "half-closed before ItemReady")
            handle = handle_to_proto(self._worker.announce(ticket))
            ready = pb.ItemReady(
                index=ticket.job.item.index, handle=handle, timing=timing_to_proto(ticket.timing)
            )
            await context.write(pb.EncodeEvent(ready=ready))
            await _first_of(ended, failed)
            return True
        finally:
            ended.cancel()

    async def _half_close(self, ticket: Ticket, context: Context) -> None:
        """Wait for the client's half-close, and give the image back if it asks before."""
        while (message := await next_message(context)) is not None:
            if not message.HasField("recall"):
                raise invalid("only recall can follow the job", "job")
            self._worker.recall(ticket)


def _failing(failed: asyncio.Future[None]) -> Callable[[EpdError], None]:
    def fail(error: EpdError) -> None:
        if not failed.done():
            failed.set_exception(error)

    return fail


async def _first_of(*futures: asyncio.Future[None]) -> None:
    """Wait until one is done; raise its error if it has one."""
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future in futures:
        if future in done:
            future.result()
