"""TLS of the public ports, by configuration: one certificate for HTTP and gRPC.

Its files are looked at at every handshake: a certificate is renewed by replacing them.
"""

from __future__ import annotations

import ssl
from typing import Any

import grpc

from epd.config import GatewayConfig
from epd.errors import invalid
from epd.rpc import expiry
from epd.rpc.tls import Pem, Rotating, rotating_credentials


def http_options(config: GatewayConfig) -> dict[str, Any]:
    """uvicorn's options; none without a certificate.

    Raises:
        EpdError: a file can't be used, or half of what is needed is named.
    """
    if not _wanted(config):
        return {}
    context = _rotating_context(config)
    return {"ssl_context_factory": lambda *_: context}


def grpc_credentials(config: GatewayConfig) -> grpc.ServerCredentials | None:
    """None without a certificate.

    Raises:
        EpdError: a file can't be used, or half of what is needed is named.
    """
    if not _wanted(config):
        return None
    expiry.watch("public", config.tls_cert)
    return rotating_credentials(Rotating(_paths(config), lambda: _read(config)))


def _rotating_context(config: GatewayConfig) -> ssl.SSLContext:
    """A context that hands each handshake to the newest one."""
    newest = Rotating(_paths(config), lambda: _context(config))
    first = newest.value

    def on_hello(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        newest.refresh()
        if newest.value is not context:
            connection.context = newest.value

    # Called at every client's hello, also for one that names no server.
    first.sni_callback = on_hello
    return first


def _context(config: GatewayConfig) -> ssl.SSLContext:
    _read(config)  # says which file is at fault
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.tls_cert, config.tls_key)
    if config.tls_client_ca:
        context.load_verify_locations(config.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _wanted(config: GatewayConfig) -> bool:
    if bool(config.tls_cert) != bool(config.tls_key):
        missing = "gateway.tls_key" if config.tls_cert else "gateway.tls_cert"
        raise invalid(f"{missing}: is missing; a certificate needs its key", missing)
    if config.tls_client_ca and not config.tls_cert:
        reason = "gateway.tls_client_ca: clients' certificates need one of the server, too"
        raise invalid(reason, "gateway.tls_client_ca")
    return bool(config.tls_cert)


def _paths(config: GatewayConfig) -> list[str]:
    return [config.tls_cert, config.tls_key, config.tls_client_ca]


def _read(config: GatewayConfig) -> Pem:
    return Pem.read(config.tls_cert, config.tls_key, config.tls_client_ca, "gateway.tls")
