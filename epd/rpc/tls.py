"""Certificates of the service's own connections, read again when their files change.

Between gateway and stages both sides show a certificate of one authority (`rpc.tls_*`):
whoever holds one is a part of the service, so this authority signs for nobody else. Servers
look at the files at every handshake, clients whenever they open a channel: a certificate is
renewed by replacing its files. Connections that are open stay open.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from epd.config import RpcConfig
from epd.errors import EpdError, invalid
from epd.rpc import expiry

logger = logging.getLogger(__name__)
T = TypeVar("T")
Version = tuple[tuple[int, int, int], ...]
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Pem:
    """The files of one identity, as bytes: they belong together."""

    cert: bytes
    key: bytes
    ca: bytes | None

    @classmethod
    def read(cls, cert: str, key: str, ca: str, section: str) -> Pem:
        """
        Raises:
            EpdError: a file can't be read, is no PEM, or the key is another certificate's.
        """
        for _ in range(_LOOKS):
            before = version_of([cert, key, ca])
            pair = _bytes(cert, f"{section}_cert"), _bytes(key, f"{section}_key")
            authority = _bytes(ca, f"{section}_ca") if ca else None
            _check(cert, key, ca, section)
            if version_of([cert, key, ca]) == before:
                return cls(*pair, authority)
        raise invalid(f"{section}_cert: {cert} changes while it is read", f"{section}_cert")


class Rotating(Generic[T]):
    """What was built from some files; built again when one of them changes.

    A change that can't be used (half of it is written) is logged, and what was there
    before stays in use until the next change.
    """

    def __init__(self, paths: Sequence[str], build: Callable[[], T]) -> None:
        """
        Raises:
            EpdError: from `build`.
        """
        self._paths = [path for path in paths if path]
        self._build = build
        self._version = version_of(self._paths)
        self.generation = 0
        """Counts the values that there were."""
        self.value = build()

    def refresh(self) -> bool:
        """Look at the files; true if `value` is a new one. Any thread may call this."""
        seen = version_of(self._paths)
        if seen == self._version:
            return False
        self._version = seen
        try:
            self.value = self._build()
        except EpdError as error:
            logger.warning("the certificates in use stay: %s", error.message)
            return False
        self.generation += 1
        logger.info("certificates read again", extra={"files": ", ".join(self._paths)})
        return True


def wanted(config: RpcConfig) -> bool:
    """Whether the service's own connections are to be encrypted.

    Raises:
        EpdError: only a part of what is needed is named.
    """
    named = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    missing = [name for name, path in named.items() if not path]
    if missing and len(missing) < len(named):
        param = f"rpc.{missing[0]}"
        raise invalid(f"{param}: is missing; certificate, key and authority go together", param)
    return not missing


def check(config: RpcConfig, host: str, param: str) -> bool:
    """Whether a port of the service's own at `host` is encrypted.

    Raises:
        EpdError: the files can't be used, or a plain port would be open to the network
            (`param` names the key that says so).
    """
    if wanted(config):
        _read(config)
        return True
    if not is_loopback(host) and not config.insecure:
        raise invalid(
            f"{param}: {host} is reachable from other machines, and without certificates "
            "(rpc.tls_cert, rpc.tls_key, rpc.tls_ca) whoever reaches it is obeyed. Set them, "
            "or rpc.insecure=true where the network is closed to all others",
            param,
        )
    return False


def server_credentials(config: RpcConfig, host: str, param: str) -> grpc.ServerCredentials | None:
    """For a port of the service's own at `host`; None: plain.

    Raises:
        EpdError: see `check`.
    """
    if check(config, host, param):
        expiry.watch("inner", config.tls_cert)
        expiry.watch("authority", config.tls_ca)
        return rotating_credentials(Rotating(_paths(config), lambda: _read(config)))
    if not is_loopback(host):
        logger.warning("%s: plain and open to whoever reaches %s (rpc.insecure)", param, host)
    return None


def rotating_credentials(pem: Rotating[Pem]) -> grpc.ServerCredentials:
    """Looks at the files at every handshake; with an authority, clients need a certificate."""

    def changed() -> grpc.ServerCertificateConfiguration | None:
        return _configuration(pem.value) if pem.refresh() else None

    return grpc.dynamic_ssl_server_credentials(
        _configuration(pem.value),
        changed,  # type: ignore[arg-type]  # the stubs forget that None is "as before"
        require_client_authentication=pem.value.ca is not None,
    )


def client_credentials(config: RpcConfig) -> Rotating[grpc.ChannelCredentials | None]:
    """For channels to other parts; holds None where connections are plain.

    Raises:
        EpdError: the files can't be used.
    """

    def build() -> grpc.ChannelCredentials | None:
        if not wanted(config):
            return None
        pem = _read(config)
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    return Rotating(_paths(config), build)


def version_of(paths: Sequence[str]) -> Version:
    """Another one whenever a file is written or replaced; a missing file counts, too."""
    return tuple(_stat(path) for path in paths if path)


def is_loopback(host: str) -> bool:
    """False for names other than localhost: what they lead to isn't known here."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _read(config: RpcConfig) -> Pem:
    return Pem.read(config.tls_cert, config.tls_key, config.tls_ca, "rpc.tls")


def _paths(config: RpcConfig) -> list[str]:
    return [path for path in (config.tls_cert, config.tls_key, config.tls_ca) if path]


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


def _stat(path: str) -> tuple[int, int, int]:
    try:
        found = Path(path).stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _bytes(path: str, param: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid(f"{param}: {error}", param) from error


def _check(cert: str, key: str, ca: str, section: str) -> None:
    """What gRPC doesn't say: it takes any bytes, and then fails every handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    param = f"{section}_cert"
    try:
        context.load_cert_chain(cert, key)
        if ca:
            param = f"{section}_ca"
            context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise invalid(f"{param}: can't be used: {error}", param) from error
