"""When certificates end, against a library that knows."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from prometheus_client import generate_latest

from epd.rpc import expiry
from tests.certificates import Identity


def real_end(pem: bytes) -> float:
    return min(c.not_valid_after_utc.timestamp() for c in x509.load_pem_x509_certificates(pem))


def ending_in(year: int) -> bytes:
    until = datetime.datetime(year, 5, 6, 7, 8, 9, tzinfo=datetime.UTC)
    return trustme.CA().issue_cert("epd.internal", not_after=until).cert_chain_pems[0].bytes()


@pytest.mark.parametrize("year", [2031, 2049, 2050, 2222], ids=str)
def test_both_ways_to_write_a_date(year: int, tmp_path: Path) -> None:
    """UTCTime up to 2049, GeneralizedTime from then on."""
    pem = ending_in(year)
    (tmp_path / "cert").write_bytes(pem)
    assert expiry.ends_at(str(tmp_path / "cert")) == real_end(pem)


def test_of_a_chain_the_first_to_end(tmp_path: Path) -> None:
    identity = Identity(tmp_path / "identity", trustme.CA(), "epd.internal")
    leaf = (identity.folder / "cert").read_bytes()
    soon = ending_in(2027)
    (tmp_path / "chain").write_bytes(ending_in(2222) + leaf + soon)
    assert expiry.ends_at(str(tmp_path / "chain")) == min(real_end(leaf), real_end(soon))


@pytest.mark.parametrize(
    "damage", ["missing", "empty", "key", "half", "no base64", "no certificate"]
)
def test_what_can_not_be_read_has_ended(damage: str, tmp_path: Path) -> None:
    path, pem = tmp_path / "cert", trustme.CA().cert_pem.bytes().decode()
    head, *body, tail = pem.splitlines()
    texts = {
        "empty": "",
        "key": trustme.CA().private_key_pem.bytes().decode(),
        "half": pem[: len(pem) // 2],
        "no base64": "\n".join([head, "!", tail]),
        "no certificate": "\n".join([head, body[0][:8], tail]),
    }
    if damage != "missing":
        path.write_text(texts[damage])
    assert expiry.ends_at(str(path)) == 0.0


def test_a_version_that_openssl_serves_with_and_the_library_does_not_read(tmp_path: Path) -> None:
    identity = Identity(tmp_path / "identity", trustme.CA())
    path, version = identity.folder / "cert", bytes.fromhex("a003020102")
    der = x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(Encoding.DER)
    assert der.count(version) == 1
    path.write_text(ssl.DER_cert_to_PEM_cert(der.replace(version, version[:-1] + b"\1")))
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path, identity.folder / "key")
    assert expiry.ends_at(str(path)) == 0.0


def test_a_renewed_file_is_seen_at_the_next_look(tmp_path: Path) -> None:
    def exported() -> float:
        lines = generate_latest().decode().splitlines()
        name = 'epd_certificate_expires_timestamp_seconds{use="inner"} '
        (value,) = (line.removeprefix(name) for line in lines if line.startswith(name))
        return float(value)

    identity = Identity(tmp_path / "identity", trustme.CA())
    expiry.watch("inner", str(identity.folder / "cert"))
    first = exported()
    assert first == real_end((identity.folder / "cert").read_bytes())
    identity.renew(trustme.CA(), lives_s=7200.0)
    assert exported() > first
