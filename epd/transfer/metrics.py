"""Counters of the transfer layer (docs/operations.md has the table)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

BYTES = Counter("epd_transfer_bytes_total", "Bytes read from peers.", ["kind"])
SECONDS = Counter("epd_transfer_seconds_total", "Time in reads that succeeded.", ["kind"])
READS = Counter("epd_transfer_reads_total", "Reads that succeeded.", ["kind"])
DESCRIPTORS = Counter(
    "epd_transfer_descriptors_total", "Mooncake descriptors of those reads.", ["kind"]
)
LOCAL_BYTES = Counter(
    "epd_transfer_local_bytes_total",
    "Bytes handed over inside the process, without Mooncake.",
    ["kind"],
)
FAILURES = Counter(
    "epd_transfer_failures_total", "Reads that failed, by reason.", ["kind", "reason"]
)
PARKED = Gauge("epd_transfer_parked", "Given-up reads whose memory the engine may still write.")
QUARANTINED = Gauge("epd_quarantined_bytes", "Announced bytes that wait for lost readers.")


def record(kind: str, nbytes: int, seconds: float, descriptors: int) -> None:
    """Count one read that succeeded."""
    BYTES.labels(kind).inc(nbytes)
    SECONDS.labels(kind).inc(seconds)
    READS.labels(kind).inc()
    DESCRIPTORS.labels(kind).inc(descriptors)
