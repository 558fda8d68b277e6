"""When certificates end, as a metric: an alert must come before the first refused handshake.

The file is looked at when the metric is: it is what the next handshake uses (`epd.rpc.tls`).
"""

from __future__ import annotations

import datetime
import re
import ssl
from pathlib import Path

from epd.obs import metrics

_BLOCK = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_EXPLICIT_VERSION, _UTC_TIME = 0xA0, 0x17


def watch(use: str, path: str) -> None:
    """Export when the certificates of a file end: `use` is "inner", "authority" or "public"."""
    metrics.CERTIFICATE_EXPIRES.labels(use).set_function(lambda: ends_at(path))


def ends_at(path: str) -> float:
    """Unix time at which the first of a PEM file's certificates ends; 0: none can be read."""
    try:
        blocks = _BLOCK.findall(Path(path).read_text())
        return min(not_after(ssl.PEM_cert_to_DER_cert(block)) for block in blocks)
    except (OSError, ValueError, IndexError):  # ValueError: no block, no base64, no date
        return 0.0


def not_after(der: bytes) -> float:
    """Of an X.509 certificate (RFC 5280, 4.1), which the standard library doesn't tell.

    Raises:
        ValueError or IndexError: it is none.
    """
    _, certificate, _ = _element(der, 0)
    _, at, _ = _element(der, certificate)
    tag, _, end = _element(der, at)
    if tag == _EXPLICIT_VERSION:
        at = end
    for _ in ("serial number", "signature algorithm", "issuer"):
        _, _, at = _element(der, at)
    _, validity, _ = _element(der, at)
    _, _, at = _element(der, validity)  # behind notBefore
    tag, start, end = _element(der, at)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    moment = datetime.datetime.strptime(der[start:end].decode("ascii"), form)
    return moment.replace(tzinfo=datetime.UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag of the DER element at an offset, and where its content starts and ends."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(der[start : start + size]), start + size
    return tag, start, start + length
