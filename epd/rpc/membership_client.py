"""The worker's side of membership: one stream to every gateway that it knows.

    dial -> Hello -> Welcome -> (Heartbeat, Beat)* -> end -> back off -> dial ...
                 \\-> Refused: logged; tried again, slowly

For ever: a gateway that restarts finds its workers back within a second or two. A name
stands for all addresses that DNS has for it, asked again every few seconds: gateways behind
one name come and go while workers run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import grpc.aio

from epd.config import RpcConfig
from epd.obs import metrics
from epd.rpc.channels import Dialer
from epd.rpc.names import Target, resolve, split
from protos.epd.v1 import membership_pb2 as pb
from protos.epd.v1 import membership_pb2_grpc

logger = logging.getLogger(__name__)
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0)
_REFUSED_S = 10.0
_FIRST_REPLY_S = 5.0
_RESOLVE_S = 5.0

Load = Callable[[], pb.Heartbeat]
_LOST = (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, EOFError)
"""How a session ends. Invalid state: a write found the call ended before the reader did."""


class _Refused(Exception):
    """This gateway doesn't want this worker; the text says why."""


class MembershipClient:
    """Keeps the worker registered at `gateways`; `load` is asked at every heartbeat."""

    def __init__(
        self,
        stage: str,
        gateways: Sequence[str],
        hello: pb.Hello,
        load: Load,
        config: RpcConfig,
    ) -> None:
        """
        Raises:
            EpdError: an address is not host:port, or the certificates can't be used.
        """
        for name in gateways:
            split(name)
        self._stage = stage
        self._gateways = gateways
        self._hello = hello
        self._load = load
        self._dialer = Dialer(config)
        self._follower: asyncio.Task[None] | None = None
        self._sessions: dict[str, tuple[Target, asyncio.Task[None]]] = {}
        """By address."""
        self._grace_ms: int | None = None
        self._wake: dict[str, asyncio.Event] = {}
        self._joined: set[str] = set()
        self._unknown: set[str] = set()
        """Names that DNS didn't know, said once."""

    @property
    def joined(self) -> int:
        """Gateways that this worker is registered at now."""
        return len(self._joined)

    def start(self) -> asyncio.Task[None]:
        """The task ends only by `close`, or by a bug of ours, which it raises."""
        self._follower = asyncio.create_task(self._follow(), name="membership names")
        return self._follower

    def leave(self, grace_s: float) -> None:
        """Tell every gateway at once to route nothing new here."""
        self._grace_ms = int(grace_s * 1000)
        for event in self._wake.values():
            event.set()

    async def close(self) -> None:
        tasks = [task for _, task in self._sessions.values()]
        tasks += [self._follower] if self._follower else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        """A session with each gateway that the names stand for now."""
        while True:
            found = await asyncio.gather(*map(self._resolve, self._gateways))
            # By address: two names of one gateway are one gateway.
            wanted = {target.address: target for targets in found for target in targets}
            for address in wanted.keys() - self._sessions.keys():
                self._begin(wanted[address])
            for address in self._sessions.keys() - wanted.keys() - self._joined:
                # A name that has moved on; a gateway that still answers is kept.
                logger.info("no gateway is at %s any more", address)
                self._sessions.pop(address)[1].cancel()
            await asyncio.sleep(_RESOLVE_S)

    def _begin(self, target: Target) -> None:
        self._wake[target.address] = asyncio.Event()
        task = asyncio.create_task(self._forever(target), name=f"membership {target.address}")
        self._sessions[target.address] = target, task

    async def _resolve(self, name: str) -> set[Target]:
        try:
            return await resolve(name)
        except (OSError, UnicodeError) as error:  # no name of a host can look like that
            # What was known of it stays.
            known = {target for target, _ in self._sessions.values() if target.name == name}
            if not known and name not in self._unknown:
                logger.warning("gateway %s has no address yet: %s", name, error)
                self._unknown.add(name)
            return known

    async def _forever(self, target: Target) -> None:
        address = target.address
        failures = 0
        while True:
            try:
                await self._session(target)
                failures = 0
            except _Refused as refusal:
                logger.error("gateway %s refuses this worker: %s", address, refusal)
                await asyncio.sleep(_REFUSED_S)
                continue
            except _LOST as error:
                if address in self._joined:
                    failures = 0
                    logger.warning("gateway %s lost: %s", address, _brief(error))
            except Exception:  # a fault of ours; a worker that nobody knows would be a worse one
                logger.exception("the registration at gateway %s broke", address)
            finally:
                self._set_joined(address, False)
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1

    async def _session(self, target: Target) -> None:
        """One registration, until it ends. Raises what ended it."""
        address = target.address
        async with self._dialer.dial(address, target.host) as channel:
            stub = membership_pb2_grpc.MembershipStub(channel)
            call = stub.Join()
            try:
                await call.write(pb.WorkerReport(hello=self._hello))
                welcome = await self._welcome(call)
                self._set_joined(address, True)
                logger.info("registered at gateway %s", address)
                await self._heartbeats(call, address, welcome)
            finally:
                call.cancel()

    async def _welcome(
        self, call: grpc.aio.StreamStreamCall[pb.WorkerReport, pb.GatewayReply]
    ) -> pb.Welcome:
        async with asyncio.timeout(_FIRST_REPLY_S):
            reply = await _read(call)
        if reply.HasField("refused"):
            raise _Refused(reply.refused.reason)
        if not reply.HasField("welcome"):
            raise EOFError("the gateway's first word is no welcome")
        return reply.welcome

    async def _heartbeats(
        self,
        call: grpc.aio.StreamStreamCall[pb.WorkerReport, pb.GatewayReply],
        address: str,
        welcome: pb.Welcome,
    ) -> None:
        period = max(welcome.heartbeat_ms, 50) / 1000
        dead = max(welcome.dead_ms / 1000, 2 * period)
        reader = asyncio.create_task(_read_beats(call, dead))
        try:
            async for report in self._reports(address, period, reader):
                await call.write(report)
            await reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            # It has the error that is raised here, which has this frame: a circle that would
            # keep the connection open until Python looks for circles.
            del reader

    async def _reports(
        self, address: str, period: float, reader: asyncio.Task[None]
    ) -> AsyncIterator[pb.WorkerReport]:
        """Heartbeats, and Leaving as soon as the worker drains; ends with the reader."""
        told, wake = False, self._wake[address]
        while not reader.done():
            if self._grace_ms is not None and not told:
                told = True
                yield pb.WorkerReport(leaving=pb.Leaving(grace_ms=self._grace_ms))
            yield pb.WorkerReport(heartbeat=self._load())
            waiter = asyncio.create_task(wake.wait())
            await asyncio.wait(
                {reader, waiter}, timeout=period, return_when=asyncio.FIRST_COMPLETED
            )
            waiter.cancel()
            wake.clear()

    def _set_joined(self, address: str, joined: bool) -> None:
        (self._joined.add if joined else self._joined.discard)(address)
        metrics.MEMBERSHIPS.labels(self._stage).set(len(self._joined))


async def _read(
    call: grpc.aio.StreamStreamCall[pb.WorkerReport, pb.GatewayReply],
) -> pb.GatewayReply:
    reply = await call.read()
    if not isinstance(reply, pb.GatewayReply):
        raise EOFError("the gateway ended the stream")
    return reply


async def _read_beats(
    call: grpc.aio.StreamStreamCall[pb.WorkerReport, pb.GatewayReply], dead_s: float
) -> None:
    """Read answers; a gateway that is silent for `dead_s` counts as gone."""
    while True:
        reply = await _heard(call, dead_s)
        if reply.HasField("refused"):
            raise _Refused(reply.refused.reason)


async def _heard(
    call: grpc.aio.StreamStreamCall[pb.WorkerReport, pb.GatewayReply], dead_s: float
) -> pb.GatewayReply:
    """The next answer. Time that this process itself lost (it was stopped, or found no
    core) is nobody's silence: the answer may be there, unread.

    Raises:
        TimeoutError: there was silence for `dead_s`.
    """
    clock = asyncio.get_running_loop().time
    reading = asyncio.create_task(_read(call))
    look_s, silent_s = dead_s / 8, 0.0
    try:
        while silent_s < dead_s:
            since = clock()
            await asyncio.wait({reading}, timeout=look_s)
            if reading.done():
                return reading.result()
            silent_s += min(clock() - since, 2 * look_s)
    finally:
        reading.cancel()
        del reading  # as `reader` in `_heartbeats`
    raise TimeoutError(f"silent for {dead_s:g} s")


def _brief(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error) or type(error).__name__
