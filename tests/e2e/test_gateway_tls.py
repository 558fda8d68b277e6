"""TLS and mTLS of the public ports, over HTTP and gRPC."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import trustme

from epd.errors import EpdError
from gateway.checkpoint import Loaded
from tests.e2e.gateway_house import CHAT, House, body, config, opened
from tests.e2e.test_gateway_access import over_grpc


class Certificates:
    def __init__(self, folder: Path) -> None:
        self.authority, self.folder = trustme.CA(), folder
        self.renew(self.authority)

    def renew(self, authority: trustme.CA) -> None:
        """Write the server's files anew; `client` and `context` follow."""
        self.authority = authority
        self.client = authority.issue_cert("client@example.org")
        server = authority.issue_cert("127.0.0.1", "localhost")
        server.private_key_pem.write_to_path(str(self.folder / "key"))
        chain = b"".join(blob.bytes() for blob in server.cert_chain_pems)
        (self.folder / "cert").write_bytes(chain)
        authority.cert_pem.write_to_path(str(self.folder / "ca"))

    def settings(self, mutual: bool) -> dict[str, Any]:
        names = {"tls_cert": "cert", "tls_key": "key"} | ({"tls_client_ca": "ca"} if mutual else {})
        return {name: str(self.folder / file) for name, file in names.items()}

    def context(self, with_client: bool) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if with_client:
            self.client.configure_cert(context)
        return context

    def credentials(self, with_client: bool) -> grpc.ChannelCredentials:
        root = self.authority.cert_pem.bytes()
        if not with_client:
            return grpc.ssl_channel_credentials(root)
        chain = b"".join(blob.bytes() for blob in self.client.cert_chain_pems)
        return grpc.ssl_channel_credentials(root, self.client.private_key_pem.bytes(), chain)


async def https(house: House, context: ssl.SSLContext) -> int:
    connector = aiohttp.TCPConnector(ssl=context)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"https://{house.http}{CHAT}", json=body()) as reply,
    ):
        await reply.read()
        return reply.status


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_of_both_ports(loaded: Loaded, tmp_path: Path, mutual: bool) -> None:
    certificates = Certificates(tmp_path)
    async with opened(loaded, **certificates.settings(mutual)) as house:
        assert await https(house, certificates.context(mutual)) == 200
        async with grpc.aio.secure_channel(house.grpc, certificates.credentials(mutual)) as channel:
            assert (await over_grpc(channel, None))[-1].WhichOneof("kind") == "finished"
        if mutual:
            with pytest.raises((aiohttp.ClientError, ssl.SSLError, OSError)):
                await https(house, certificates.context(False))
            async with grpc.aio.secure_channel(
                house.grpc, certificates.credentials(False)
            ) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await over_grpc(channel, None)


async def test_renewed_certificates_are_used_without_a_restart(
    loaded: Loaded, tmp_path: Path
) -> None:
    certificates = Certificates(tmp_path)
    async with opened(loaded, **certificates.settings(mutual=True)) as house:
        former, channel_former = certificates.context(True), certificates.credentials(True)
        assert await https(house, former) == 200
        certificates.renew(trustme.CA())
        assert await https(house, certificates.context(True)) == 200
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, OSError)):
            await https(house, former)
        # A client that trusts the new server, but was signed by the former authority.
        certificates.authority.configure_trust(former)
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, OSError)):
            await https(house, former)
        async with grpc.aio.secure_channel(house.grpc, certificates.credentials(True)) as channel:
            assert (await over_grpc(channel, None))[-1].WhichOneof("kind") == "finished"
        async with grpc.aio.secure_channel(house.grpc, channel_former) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await over_grpc(channel, None)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"tls_cert": "x"}, "gateway.tls_key"),
        ({"tls_key": "x"}, "gateway.tls_cert"),
        ({"tls_client_ca": "x"}, "gateway.tls_client_ca"),
    ],
)
async def test_half_of_tls_is_refused(loaded: Loaded, settings: dict[str, str], param: str) -> None:
    house = House(loaded, config(**settings))
    with pytest.raises(EpdError) as caught:
        await house.start()
    assert caught.value.param == param
    await house.close()
