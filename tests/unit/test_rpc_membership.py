"""A worker's registration, against a gateway of a few lines."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import psutil
import pytest

from epd.config import RpcConfig
from epd.errors import EpdError
from epd.rpc import membership_client, names
from epd.rpc.membership_client import MembershipClient
from epd.rpc.names import Target
from protos.epd.v1 import membership_pb2 as pb
from protos.epd.v1 import membership_pb2_grpc
from tests.waiting import a_moment, until

HELLO = pb.Hello(address="127.0.0.1:1", epoch=7)
WELCOME = pb.GatewayReply(welcome=pb.Welcome(heartbeat_ms=50, dead_ms=1000))


class Gateway(membership_pb2_grpc.MembershipServicer):
    """Welcomes, and answers heartbeats; `refuse`, `mute` and `hang_up` make it difficult."""

    def __init__(self) -> None:
        self.reports: list[pb.WorkerReport] = []
        self.joins = 0
        self.refuse = False
        self.mute = False
        self.hang_up = False

    async def Join(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.joins += 1
        self.reports.append(await context.read())
        if self.refuse:
            await context.write(pb.GatewayReply(refused=pb.Refused(reason="other weights")))
            return
        await context.write(WELCOME)
        while (report := await context.read()) is not grpc.aio.EOF:
            self.reports.append(report)
            if self.hang_up:
                return
            if not self.mute:
                await context.write(pb.GatewayReply(beat=pb.Beat()))

    def kinds(self) -> list[str | None]:
        return [report.WhichOneof("kind") for report in self.reports]


async def start_gateway(port: int = 0) -> tuple[Gateway, grpc.aio.Server, int]:
    gateway, server = Gateway(), grpc.aio.server()
    membership_pb2_grpc.add_MembershipServicer_to_server(gateway, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return gateway, server, bound


@asynccontextmanager
async def worker(*gateways: int | str) -> AsyncIterator[MembershipClient]:
    addresses = [name if isinstance(name, str) else f"127.0.0.1:{name}" for name in gateways]
    load = lambda: pb.Heartbeat(steps=3, serving=True)  # noqa: E731
    client = MembershipClient("decode", addresses, HELLO, load, RpcConfig())
    client.start()
    try:
        yield client
    finally:
        await client.close()


async def test_hello_first_then_heartbeats_with_the_load() -> None:
    gateway, server, port = await start_gateway()
    async with worker(port) as client:
        await until(lambda: len(gateway.reports) >= 4)
        assert client.joined == 1
    assert gateway.kinds()[0] == "hello"
    assert set(gateway.kinds()[1:]) == {"heartbeat"}
    assert gateway.reports[0].hello == HELLO
    assert gateway.reports[1].heartbeat.steps == 3
    await server.stop(0)


async def test_every_gateway_is_dialled_and_one_that_is_down_holds_up_no_other() -> None:
    first, server_1, port_1 = await start_gateway()
    second, server_2, port_2 = await start_gateway()
    async with worker(1, port_1, port_2) as client:
        await until(lambda: client.joined == 2)
    assert first.joins == second.joins == 1
    await server_1.stop(0)
    await server_2.stop(0)


async def test_a_gateway_that_restarts_finds_its_worker_back() -> None:
    _, server, port = await start_gateway()
    async with worker(port) as client:
        await until(lambda: client.joined == 1)
        await server.stop(0)
        await until(lambda: client.joined == 0)
        again, server, _ = await start_gateway(port)
        await until(lambda: client.joined == 1)
        assert again.joins == 1
    await server.stop(0)


class Names:
    """DNS, as far as one name goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        self.asked = 0
        self._real = names.resolve
        monkeypatch.setattr(membership_client, "resolve", self.resolve)
        monkeypatch.setattr(membership_client, "_RESOLVE_S", 0.05)

    async def resolve(self, name: str) -> set[Target]:
        if not name.startswith("gateways"):
            return await self._real(name)
        self.asked += 1
        if not self.addresses:
            raise OSError("no such name")
        return {Target(name, "gateways", address) for address in self.addresses}

    async def looked_at(self) -> None:
        """The answer as it is now has been asked for, and what it changes is begun."""
        asked = self.asked
        await until(lambda: self.asked > asked + 1)


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    dns = Names(monkeypatch)
    first, server_1, port_1 = await start_gateway()
    second, server_2, port_2 = await start_gateway()
    async with worker("gateways:8002") as client:
        await dns.looked_at()
        assert client.joined == 0  # not known yet is no reason to give up
        dns.addresses = [f"127.0.0.1:{port_1}"]
        await until(lambda: client.joined == 1)
        dns.addresses.append(f"127.0.0.1:{port_2}")
        await until(lambda: client.joined == 2)
        dns.addresses = []  # DNS is away: what is known stays
        await dns.looked_at()
        assert client.joined == 2
        dns.addresses = [f"127.0.0.1:{port_2}"]
        await dns.looked_at()
        assert client.joined == 2, "one that answers is kept"
        await server_1.stop(0)
        await until(lambda: client.joined == 1 and len(client._sessions) == 1)
    assert first.joins == second.joins == 1
    await server_2.stop(0)


async def test_two_names_of_one_gateway_are_one_registration() -> None:
    gateway, server, port = await start_gateway()
    async with worker(f"localhost:{port}", port) as client:
        await until(lambda: client.joined == 1)
        await a_moment(0.1)
    assert gateway.joins == 1
    await server.stop(0)


@pytest.mark.parametrize("name", ["", "gateway", "gateway:", ":8002", "gateway:http", "a:70000"])
def test_what_is_no_address_is_an_error_at_start(name: str) -> None:
    with pytest.raises(EpdError) as caught:
        MembershipClient("decode", [name], HELLO, pb.Heartbeat, RpcConfig())
    assert caught.value.param == "worker.gateways"


async def test_names_are_resolved() -> None:
    assert await names.resolve("127.0.0.1:80") == {
        Target("127.0.0.1:80", "127.0.0.1", "127.0.0.1:80")
    }
    assert await names.resolve("[::1]:80") == {Target("[::1]:80", "::1", "[::1]:80")}
    (local,) = await names.resolve("localhost:80")
    assert (local.host, local.address) == ("localhost", "127.0.0.1:80")
    with pytest.raises(OSError, match="not known"):
        await names.resolve("no.such.host.invalid:80")


async def test_a_silent_gateway_is_left_and_dialled_again() -> None:
    gateway, server, port = await start_gateway()
    gateway.mute = True
    async with worker(port):
        await until(lambda: gateway.joins >= 2)
    await server.stop(0)


@pytest.mark.parametrize("how", ["mute", "hang_up"])
async def test_a_session_that_is_lost_leaves_no_connection(how: str) -> None:
    """Not even until Python collects circles of objects."""

    def connections() -> int:
        ends = psutil.Process().net_connections("tcp")
        return sum(e.status == psutil.CONN_ESTABLISHED and e.laddr.port == port for e in ends)

    gateway, server, port = await start_gateway()
    setattr(gateway, how, True)
    gc.disable()
    try:
        async with worker(port):
            await until(lambda: gateway.joins >= 4)
            setattr(gateway, how, False)
            # This server tells those off that ping it, and that ends them, too, later.
            await until(lambda: connections() == 1, limit_s=20)
    finally:
        gc.enable()
    await server.stop(0)


async def test_a_heartbeat_that_finds_its_stream_ended_is_no_end_of_the_registration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The write may know it before the reader does."""
    gateway, server, port = await start_gateway()
    gateway.hang_up = True

    async def late(call: Any, dead_s: float) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(membership_client, "_read_beats", late)
    async with worker(port):
        await until(lambda: gateway.joins >= 3)
    await server.stop(0)


async def test_a_fault_of_ours_is_no_end_of_the_registration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway, server, port = await start_gateway()
    faults = [ZeroDivisionError("load")]

    def load() -> pb.Heartbeat:
        if faults:
            raise faults.pop()
        return pb.Heartbeat()

    client = MembershipClient("decode", [f"127.0.0.1:{port}"], HELLO, load, RpcConfig())
    client.start()
    await until(lambda: "heartbeat" in gateway.kinds())
    assert gateway.joins == 2
    assert "ZeroDivisionError" in caplog.text
    await client.close()
    await server.stop(0)


async def test_a_name_that_no_host_can_have_holds_up_no_other() -> None:
    _, server, port = await start_gateway()
    async with worker(f"{'x' * 70}.example:8002", port) as client:
        await until(lambda: client.joined == 1)
    await server.stop(0)


async def test_a_worker_that_lost_time_itself_keeps_its_gateway() -> None:
    gateway, server, port = await start_gateway()
    async with worker(port) as client:
        await until(lambda: len(gateway.reports) >= 3)
        for _ in range(2):
            time.sleep(2.5)
            await asyncio.sleep(0.2)
            assert client.joined == 1
    assert gateway.joins == 1
    await server.stop(0)


async def test_a_refusal_is_tried_again_slowly(monkeypatch: Any) -> None:
    monkeypatch.setattr(membership_client, "_REFUSED_S", 3)
    gateway, server, port = await start_gateway()
    gateway.refuse = True
    async with worker(port) as client:
        await until(lambda: gateway.joins == 1)
        await asyncio.sleep(0.5)  # longer than a gateway that is lost is left alone
        assert gateway.joins == 1
        assert client.joined == 0
        gateway.refuse = False
        await until(lambda: client.joined == 1)
    await server.stop(0)


async def test_leaving_is_told_at_once() -> None:
    gateway, server, port = await start_gateway()
    async with worker(port) as client:
        await until(lambda: client.joined == 1)
        client.leave(2.5)
        await until(lambda: "leaving" in gateway.kinds())
    told = [report for report in gateway.reports if report.HasField("leaving")]
    assert [report.leaving.grace_ms for report in told] == [2500]
    await server.stop(0)
