"""The gRPC server of a stage (or gateway): health, reflection, limits, typed errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from epd.addresses import joined
from epd.config import RpcConfig
from epd.errors import EpdError, ErrorKind, invalid, without_frames
from epd.obs import metrics
from epd.obs.logs import request_id
from epd.rpc.channels import Options, server_options
from epd.rpc.cut import cut_off
from epd.rpc.handlers import HandlerInterceptor, behaviour_of, finish, is_ours, with_behaviour
from epd.rpc.status import internal, to_status

logger = logging.getLogger(__name__)
TAKEN_WITHIN_S = 5.0
"""A status that waits so long behind messages that nobody reads is not waited for."""


class Server:
    """A grpc.aio server with what every one of ours has.

    Starts NOT_SERVING; `set_serving` answers for the whole server ("") and for
    each service by name. With `count_streams` each stream is a request of this stage;
    the gateway counts answers instead, whichever API they came by.
    """

    def __init__(
        self,
        stage: str,
        services: Sequence[str],
        config: RpcConfig,
        max_message_bytes: int,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        options: Options = (),
        count_streams: bool = True,
    ) -> None:
        self._stage = stage
        self._services = tuple(services)
        self.grpc = grpc.aio.server(
            interceptors=[TypedErrors(stage, count_streams), *interceptors],
            options=[*server_options(config, max_message_bytes), *options],
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        self._serving: bool | None = None

    @property
    def serving(self) -> bool:
        return bool(self._serving)

    async def start(
        self,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials | None = None,
        key: str = "worker.port",
    ) -> str:
        """Bind and listen; returns "host:port" with the real port. TLS with `credentials`.
        `key` of the configuration has the port.

        Raises:
            EpdError: the address is in use or not ours.
        """
        wanted = joined(host, port)
        try:
            if credentials is None:
                bound = self.grpc.add_insecure_port(wanted)
            else:
                bound = self.grpc.add_secure_port(wanted, credentials)
        except RuntimeError as error:
            raise invalid(f"{key}: can't listen on {wanted}", key) from error
        await self.set_serving(False)
        await self.grpc.start()
        return joined(host, bound)

    async def set_serving(self, serving: bool) -> None:
        """Set health; cheap when nothing changes."""
        if serving == self._serving:
            return
        self._serving = serving
        metrics.SERVING.labels(self._stage).set(serving)
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if serving else status.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, value)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give open ones `grace_s`, then cancel them."""
        await self.grpc.stop(grace_s)


class TypedErrors(HandlerInterceptor):
    """Turns whatever a servicer of ours raises into a status, counts and logs it.

    The one place where exceptions become statuses. A cancelled stream stays
    cancelled; one that never had a job is nobody's request and isn't counted. A
    status that the peer doesn't take ends the stream without one.
    """

    def __init__(self, stage: str, count_streams: bool = True) -> None:
        self._stage = stage
        self._count_streams = count_streams

    def around(self, path: str, handler: Any) -> Any:
        if handler is None or not is_ours(path):
            return handler
        behaviour = behaviour_of(handler)

        async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            return await self._typed(finish(behaviour(request, context), context), context)

        return with_behaviour(handler, handle)

    async def _typed(
        self, work: Awaitable[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        start = time.monotonic()
        outcome = "cancelled"
        try:
            result = await work
            outcome = "ok"
            return result
        except EpdError as error:
            outcome = str(error.kind)
            await self._abort(without_frames(error), context)
        except grpc.aio.AbortError:
            outcome = "aborted"
            raise
        except Exception as error:
            if isinstance(error, grpc.aio.InternalError) and context.done():
                return None  # the client left while it was written to: nobody's fault
            outcome = str(ErrorKind.INTERNAL)
            logger.exception("a servicer raised")
            without_frames(error)
            await self._abort(internal(request_id()), context)
        finally:
            # A gateway may open a call ahead of a job, and then have none for it.
            asked = outcome != "cancelled" or bool(request_id())
            if self._count_streams and asked:
                metrics.REQUESTS.labels(self._stage, outcome).inc()
            logger.info(
                "stream ended",
                extra={"outcome": outcome, "ms": round((time.monotonic() - start) * 1e3, 1)},
            )

    async def _abort(self, error: EpdError, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        metrics.ERRORS.labels(self._stage, str(error.kind)).inc()
        extra = {"kind": str(error.kind), "param": error.param}
        logger.log(error.log_level, error.for_log, extra=extra)
        code, message, metadata = to_status(error)
        # Again: Python's own client may see the status first, and no first metadata then.
        named = (("x-request-id", found),) if (found := request_id()) else ()
        try:
            async with asyncio.timeout(TAKEN_WITHIN_S):
                await context.abort(code, message, (*metadata, *named))
        except TimeoutError:
            cut = {"cut_off": cut_off()}
            logger.log(error.log_level, "the peer takes no status", extra=cut)
            raise asyncio.CancelledError from None
        except grpc.aio.InternalError:
            # gRPC itself has ended the call, with its own status (a message too large).
            raise asyncio.CancelledError from None
