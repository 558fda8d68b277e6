"""When certificates end, as a metric: an alert must come before the first refused handshake.

The file is looked at when the metric is: it is what the next handshake uses (`epd.rpc.tls`).
"""

from __future__ import annotations

from pathlib import Path

from cryptography import x509

from epd.obs import metrics


def watch(use: str, path: str) -> None:
    """Export when the certificates of a file end: `use` is "inner", "authority" or "public"."""
    metrics.CERTIFICATE_EXPIRES.labels(use).set_function(lambda: ends_at(path))


def ends_at(path: str) -> float:
    """Unix time at which the first of a PEM file's certificates ends; 0: they can't be read.
    It never raises: all other metrics are on the same page."""
    try:
        certificates = x509.load_pem_x509_certificates(Path(path).read_bytes())
    except (OSError, ValueError, x509.InvalidVersion):  # no block, no base64, no certificate
        return 0.0  # of another version than OpenSSL minds: it serves with it
    return min(certificate.not_valid_after_utc.timestamp() for certificate in certificates)
