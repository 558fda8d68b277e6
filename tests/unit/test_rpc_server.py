"""The server's edges, over a real gRPC connection in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from epd.config import RpcConfig
from epd.errors import EpdError, ErrorKind
from epd.obs import metrics
from epd.rpc.channels import dial
from epd.rpc.server import Server, TypedErrors
from epd.rpc.status import from_rpc_error
from epd.runtime.mailbox import Mailbox
from epd.runtime.streams import Streams, deadline, first_job, next_message, receiving
from protos.epd.v1 import decode_pb2, decode_pb2_grpc
from tests.readings import reading
from tests.uncollected import uncollected
from tests.waiting import LIMIT_S, until

Behaviour = Callable[[Any], Awaitable[None]]
SERVICE = "epd.v1.Decode"


class Servicer(decode_pb2_grpc.DecodeServicer):
    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour

    async def Run(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await self._behaviour(context)


@asynccontextmanager
async def serving(
    behaviour: Behaviour, limit: int = 1 << 20
) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    server = Server("decode", [SERVICE], RpcConfig(), limit)
    decode_pb2_grpc.add_DecodeServicer_to_server(Servicer(behaviour), server.grpc)
    address = await server.start("127.0.0.1", 0)
    try:
        async with dial(address, RpcConfig()) as channel:
            yield server, channel
    finally:
        await server.stop(0)


def count(outcome: str) -> float:
    return reading(metrics.REQUESTS.labels("decode", outcome))


async def nothing(context: Any) -> None:
    pass


async def failed(channel: grpc.aio.Channel, size: int = 0) -> EpdError:
    call = decode_pb2_grpc.DecodeStub(channel).Run(timeout=LIMIT_S)
    job = decode_pb2.DecodeJob(salt=b"x" * size)
    with contextlib.suppress(grpc.aio.AioRpcError):  # the call may have ended before it
        await call.write(decode_pb2.DecodeRequest(job=job))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return from_rpc_error(caught.value)


async def test_a_typed_error_arrives_as_it_was_raised_and_is_counted() -> None:
    async def refuse(context: Any) -> None:
        raise EpdError(ErrorKind.OVERLOADED, "full", param="x", retry_after_s=2)

    before = count("overloaded")
    async with serving(refuse) as (_, channel):
        error = await failed(channel)
    assert (error.kind, error.message, error.param, error.retry_after_s) == (
        ErrorKind.OVERLOADED,
        "full",
        "x",
        2,
    )
    assert count("overloaded") == before + 1


@pytest.mark.parametrize(
    ("kind", "by_client", "level"),
    [
        (ErrorKind.INVALID_IMAGE, False, "INFO"),
        (ErrorKind.DEADLINE_EXCEEDED, True, "INFO"),
        (ErrorKind.DEADLINE_EXCEEDED, False, "WARNING"),
        (ErrorKind.OVERLOADED, False, "WARNING"),
    ],
)
async def test_what_clients_bring_about_is_no_warning(
    caplog: pytest.LogCaptureFixture, kind: ErrorKind, by_client: bool, level: str
) -> None:
    async def refuse(context: Any) -> None:
        raise EpdError(kind, "so it ends", by_client=by_client)

    caplog.set_level("INFO")
    async with serving(refuse) as (_, channel):
        await failed(channel)
    (line,) = [record for record in caplog.records if getattr(record, "kind", "") == str(kind)]
    assert line.levelname == level


async def test_an_unknown_exception_is_internal_and_keeps_its_text() -> None:
    async def broken(context: Any) -> None:
        raise ZeroDivisionError("the prompt was: secret")

    async with serving(broken) as (_, channel):
        error = await failed(channel)
    assert error.kind is ErrorKind.INTERNAL
    assert "secret" not in error.message


class Held:
    """What a stream holds: by its frame, and so by an error that passed it."""

    error: BaseException | None = None


async def test_an_error_keeps_nothing_of_its_stream() -> None:
    async def refuse(context: Any) -> None:
        held = Held()
        held.error = EpdError(ErrorKind.OVERLOADED, "full")  # as a mailbox or a future does
        raise held.error

    with uncollected(Held) as alive:
        async with serving(refuse) as (_, channel):
            await failed(channel)
            await until(lambda: not alive(), limit_s=10)


async def test_a_message_over_the_limit_is_refused_not_answered() -> None:
    async def read(context: Any) -> None:
        if await next_message(context) is None:
            raise EpdError(ErrorKind.INVALID_REQUEST, "no job")

    async with serving(read, limit=1 << 16) as (_, channel):
        assert (await failed(channel, size=1 << 17)).kind is ErrorKind.OVERLOADED


async def test_a_call_that_grpc_has_ended_itself_gets_no_second_status() -> None:
    """As for a compressed message that unfolds to too much: the read ends, and the status is
    gRPC's."""

    class Ended:
        async def abort(self, *status: Any) -> None:
            raise grpc.aio.InternalError("Failed grpc_call_start_batch: 8")

    async def refuse(_: Any, context: Any) -> None:
        raise EpdError(ErrorKind.INVALID_REQUEST, "there is no message")

    made: Any = grpc.stream_stream_rpc_method_handler(refuse)
    handler = TypedErrors("decode").around(f"/{SERVICE}/Run", made)
    with pytest.raises(asyncio.CancelledError):
        await handler.stream_stream(None, Ended())


async def test_health_follows_set_serving_for_server_and_service() -> None:
    async with serving(nothing) as (server, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        for serving_now, expected in ((True, 1), (False, 2)):
            await server.set_serving(serving_now)
            for name in ("", SERVICE):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == expected


async def test_reflection_names_the_service() -> None:
    async with serving(nothing) as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        answer = await call.read()
        names = [service.name for service in answer.list_services_response.service]
        call.cancel()
    assert SERVICE in names


async def test_two_servers_never_share_a_port() -> None:
    async with serving(nothing):
        first = Server("decode", [SERVICE], RpcConfig(), 1 << 20)
        address = await first.start("127.0.0.1", 0)
        second = Server("decode", [SERVICE], RpcConfig(), 1 << 20)
        with pytest.raises(EpdError, match="can't listen"):
            await second.start("127.0.0.1", int(address.rpartition(":")[2]))
        await first.stop(0)


async def test_half_close_and_cancel_are_told_apart() -> None:
    ends: asyncio.Queue[str] = asyncio.Queue()

    async def note(context: Any) -> None:
        try:
            while await next_message(context) is not None:
                await context.write(decode_pb2.DecodeEvent())
            ends.put_nowait("half-close")
        except asyncio.CancelledError:
            ends.put_nowait("lost")
            raise

    async with serving(note) as (_, channel):
        for how in ("half-close", "lost") * 5 + ("deadline",) * 2:
            call = decode_pb2_grpc.DecodeStub(channel).Run(
                timeout=3 if how == "deadline" else LIMIT_S
            )
            await call.write(decode_pb2.DecodeRequest())
            await call.read()
            if how == "half-close":
                await call.done_writing()
            elif how == "lost":
                call.cancel()
            expected = "half-close" if how == "half-close" else "lost"
            assert await asyncio.wait_for(ends.get(), LIMIT_S) == expected


async def test_a_call_without_a_deadline_gets_the_servers() -> None:
    async def wait(context: Any) -> None:
        async with deadline(context, 0.1):
            await asyncio.sleep(10)

    async with serving(wait) as (_, channel):
        call = decode_pb2_grpc.DecodeStub(channel).Run()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), LIMIT_S)
        assert from_rpc_error(caught.value).kind is ErrorKind.DEADLINE_EXCEEDED
        patient = decode_pb2_grpc.DecodeStub(channel).Run(timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await patient.read()
        assert "the server's limit" not in str(caught.value.details())


async def test_a_fault_while_reading_ends_the_stream_through_its_mailbox() -> None:
    async def serve(context: Any) -> None:
        mailbox: Mailbox[int] = Mailbox()

        def on_message(message: decode_pb2.DecodeRequest) -> None:
            raise EpdError(ErrorKind.INVALID_REQUEST, "no", param="kv_ready")

        with receiving(mailbox, context, on_message, mailbox.close):
            while await mailbox.take():
                pass

    async with serving(serve) as (_, channel):
        assert (await failed(channel)).param == "kv_ready"


async def test_a_leaving_worker_refuses_new_streams_and_ends_old_ones() -> None:
    streams = Streams("decode")
    errors: list[EpdError] = []
    with streams.open() as fail:
        fail.append(errors.append)
        streams.refuse_new()
        with pytest.raises(EpdError) as caught, streams.open():
            pass
        assert caught.value.kind is ErrorKind.NOT_STARTED
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(streams.finished(), 0.01)
        streams.fail_all(EpdError(ErrorKind.STAGE_UNAVAILABLE, "stopped"))
    assert [error.kind for error in errors] == [ErrorKind.STAGE_UNAVAILABLE]
    await asyncio.wait_for(streams.finished(), LIMIT_S)
    assert len(streams) == 0


@pytest.mark.parametrize("job", [False, True])
async def test_a_call_that_is_given_up_before_its_job_is_no_request(job: bool) -> None:
    begun = asyncio.Event()

    async def behave(context: Any) -> None:
        if not job:
            begun.set()
        await first_job(context)
        begun.set()
        await asyncio.Event().wait()

    before = count("cancelled")
    async with serving(behave) as (_, channel):
        call = decode_pb2_grpc.DecodeStub(channel).Run(timeout=LIMIT_S)
        if job:
            asked = decode_pb2.DecodeRequest(job=decode_pb2.DecodeJob(request_id="r"))
            await call.write(asked)
        await begun.wait()
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call.code()
        if job:  # the server hears of it later than the client, and its end would be another's
            await until(lambda: count("cancelled") > before)
    assert count("cancelled") - before == job
