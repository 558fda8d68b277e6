"""Certificates between the parts: who gets in, and renewal while calls run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from epd.config import RpcConfig
from epd.errors import EpdError
from epd.rpc import tls
from epd.rpc.channels import Dialer
from epd.rpc.server import Server
from epd.rpc.tls import is_loopback, server_credentials
from protos.epd.v1 import decode_pb2, decode_pb2_grpc
from tests.certificates import Identity
from tests.waiting import LIMIT_S

REFUSED = grpc.StatusCode.UNAVAILABLE


class Echo(decode_pb2_grpc.DecodeServicer):
    async def Run(self, request_iterator: Any, context: Any) -> Any:
        async for _ in request_iterator:
            yield decode_pb2.DecodeEvent(kv_fetched=decode_pb2.KvFetched())


@asynccontextmanager
async def serving(config: RpcConfig) -> AsyncIterator[str]:
    server = Server("decode", ["epd.v1.Decode"], config, 1 << 20)
    decode_pb2_grpc.add_DecodeServicer_to_server(Echo(), server.grpc)
    credentials = server_credentials(config, "127.0.0.1", "worker.host")
    address = await server.start("127.0.0.1", 0, credentials)
    try:
        yield address
    finally:
        await server.stop(0)


async def say(call: Any) -> None:
    await call.write(decode_pb2.DecodeRequest(start=decode_pb2.Start()))
    assert (await call.read()).HasField("kv_fetched")


async def ask(address: str, config: RpcConfig) -> grpc.StatusCode:
    """Dial, one message each way; OK or what refused it."""
    async with Dialer(config).dial(address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Run(timeout=LIMIT_S)
        try:
            await say(call)
            await call.done_writing()
            return await call.code()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return await call.code()


async def test_parts_of_one_authority_talk_and_nobody_else(tmp_path: Path) -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    server = Identity(tmp_path / "server", ours)
    client = Identity(tmp_path / "client", ours, "worker")
    stranger = Identity(tmp_path / "stranger", theirs)
    # A stranger who knows whom we trust, and trusts our server.
    forger = Identity(tmp_path / "forger", theirs)
    forger.put("ca", ours.cert_pem.bytes())
    async with serving(server.config()) as address:
        assert await ask(address, client.config()) is grpc.StatusCode.OK
        assert await ask(address, stranger.config()) is REFUSED
        assert await ask(address, forger.config()) is REFUSED
        assert await ask(address, RpcConfig()) is REFUSED
        root = grpc.ssl_channel_credentials(ours.cert_pem.bytes())
        async with grpc.aio.secure_channel(address, root) as channel:
            call = decode_pb2_grpc.DecodeStub(channel).Run(timeout=LIMIT_S)
            assert await call.code() is REFUSED, "no certificate is no entry"
    async with serving(RpcConfig()) as address:
        assert await ask(address, client.config()) is REFUSED, "never falls back to plain"
    async with serving(stranger.config()) as address:
        assert await ask(address, client.config()) is REFUSED, "an impostor is not obeyed"


async def test_the_name_in_the_certificate_counts(tmp_path: Path) -> None:
    authority = trustme.CA()
    server = Identity(tmp_path / "server", authority, "epd.internal")
    async with serving(server.config()) as address:
        assert await ask(address, server.config()) is REFUSED
        named = server.config(tls_name="epd.internal")
        assert await ask(address, named) is grpc.StatusCode.OK


async def test_renewal_while_calls_run(tmp_path: Path) -> None:
    first, second = trustme.CA(), trustme.CA()
    server = Identity(tmp_path / "server", first)
    client = Identity(tmp_path / "client", first)
    late = Identity(tmp_path / "late", first)
    dialer = Dialer(client.config())
    async with serving(server.config()) as address, dialer.dial(address) as channel:
        running = decode_pb2_grpc.DecodeStub(channel).Run(timeout=LIMIT_S)
        await say(running)
        server.renew(second)
        client.renew(second)
        assert dialer.generation() == 1
        assert await ask(address, client.config()) is grpc.StatusCode.OK
        assert await ask(address, late.config()) is REFUSED, "the former authority is out"
        await say(running)  # an open connection stays open
        async with dialer.dial(address) as fresh:
            await say(decode_pb2_grpc.DecodeStub(fresh).Run(timeout=LIMIT_S))


async def test_short_lived_certificates_are_renewed_in_time(tmp_path: Path) -> None:
    authority = trustme.CA()
    part = Identity(tmp_path / "part", authority)
    part.renew(authority, lives_s=5)
    async with serving(part.config()) as address:
        assert await ask(address, part.config()) is grpc.StatusCode.OK
        await asyncio.sleep(5.1)  # the life of the certificate
        assert await ask(address, part.config()) is REFUSED
        part.renew(authority)
        assert await ask(address, part.config()) is grpc.StatusCode.OK


async def test_half_a_renewal_changes_nothing(tmp_path: Path) -> None:
    authority = trustme.CA()
    part = Identity(tmp_path / "part", authority)
    old = {name: (part.folder / name).read_bytes() for name in ("cert", "key")}
    client = Identity(tmp_path / "client", authority)
    dialer = Dialer(part.config())
    async with serving(part.config()) as address:
        part.renew(authority)
        part.put("key", old["key"])  # the new certificate is there, its key not yet
        assert await ask(address, client.config()) is grpc.StatusCode.OK
        assert dialer.generation() == 0
        part.put("cert", b"not a certificate")
        assert await ask(address, client.config()) is grpc.StatusCode.OK
        (part.folder / "cert").unlink()
        assert await ask(address, client.config()) is grpc.StatusCode.OK
        part.put("cert", old["cert"])
        assert await ask(address, client.config()) is grpc.StatusCode.OK
        assert dialer.generation() == 1


def test_a_file_that_changes_under_the_reader_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    part = Identity(tmp_path / "part", authority)
    cert, key, ca = (str(part.folder / name) for name in ("cert", "key", "ca"))
    check = tls._check
    calls: list[Any] = []

    def slow_check(*arguments: str) -> None:
        if not calls:
            part.renew(authority)
        calls.append(arguments)
        check(*arguments)

    monkeypatch.setattr(tls, "_check", slow_check)
    pem = tls.Pem.read(cert, key, ca, "rpc.tls")
    assert len(calls) == 2
    assert pem.cert == (part.folder / "cert").read_bytes()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("node1", False),
        ("", False),
    ],
)
def test_plain_ports_are_loopback_only(host: str, loopback: bool, tmp_path: Path) -> None:
    assert is_loopback(host) is loopback
    assert server_credentials(RpcConfig(insecure=True), host, "worker.host") is None
    secure = Identity(tmp_path / "part", trustme.CA()).config()
    assert server_credentials(secure, host, "worker.host") is not None
    if loopback:
        assert server_credentials(RpcConfig(), host, "worker.host") is None
        return
    with pytest.raises(EpdError) as caught:
        server_credentials(RpcConfig(), host, "worker.host")
    assert caught.value.param == "worker.host"
    assert "rpc.tls_cert" in caught.value.message


@pytest.mark.parametrize("left_out", ["tls_cert", "tls_key", "tls_ca"])
def test_a_part_of_the_files_is_an_error_at_start(left_out: str, tmp_path: Path) -> None:
    config = Identity(tmp_path / "part", trustme.CA()).config(**{left_out: ""})
    for build in (lambda: server_credentials(config, "::1", "x"), lambda: Dialer(config)):
        with pytest.raises(EpdError) as caught:
            build()
        assert caught.value.param == f"rpc.{left_out}"


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_broken_file_is_an_error_at_start(name: str, tmp_path: Path) -> None:
    part = Identity(tmp_path / "part", trustme.CA())
    part.put(name, b"garbage")
    with pytest.raises(EpdError) as caught:
        Dialer(part.config())
    assert caught.value.param in (f"rpc.tls_{name}", "rpc.tls_cert")
    os.unlink(part.folder / name)
    with pytest.raises(EpdError) as caught:
        Dialer(part.config())
    assert caught.value.param == f"rpc.tls_{name}"
