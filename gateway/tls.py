"""TLS of the public ports, by configuration: one certificate for HTTP and gRPC."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from epd.config import GatewayConfig
from epd.errors import invalid


def http_options(config: GatewayConfig) -> dict[str, Any]:
    """uvicorn's options; none without a certificate.

    Raises:
        EpdError: the configuration names half of what is needed.
    """
    if not _wanted(config):
        return {}
    options: dict[str, Any] = {"ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}
    if config.tls_client_ca:
        options |= {"ssl_ca_certs": config.tls_client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def grpc_credentials(config: GatewayConfig) -> grpc.ServerCredentials | None:
    """None without a certificate.

    Raises:
        EpdError: a file can't be read, or half of what is needed is named.
    """
    if not _wanted(config):
        return None
    pair = (_read(config.tls_key, "gateway.tls_key"), _read(config.tls_cert, "gateway.tls_cert"))
    authority = (
        _read(config.tls_client_ca, "gateway.tls_client_ca") if config.tls_client_ca else None
    )
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=bool(authority))


def _wanted(config: GatewayConfig) -> bool:
    if bool(config.tls_cert) != bool(config.tls_key):
        missing = "gateway.tls_key" if config.tls_cert else "gateway.tls_cert"
        raise invalid(f"{missing}: is missing; a certificate needs its key", missing)
    if config.tls_client_ca and not config.tls_cert:
        reason = "gateway.tls_client_ca: clients' certificates need one of the server, too"
        raise invalid(reason, "gateway.tls_client_ca")
    return bool(config.tls_cert)


def _read(path: str, param: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid(f"{param}: {error}", param) from error
