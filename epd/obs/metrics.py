"""Every metric of the system, so that a name is written once.

All are in prometheus' default registry of this process; a `stage` label tells
colocated stages apart. The transfer layer has its own, next to its code
(`epd.transfer.metrics`). Gauges that mirror a worker's state are set when
they are scraped (`epd.obs.http`), not at every change.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from epd.jobs import StageTiming

# Else each counter and histogram has a second series for each of its labels' values, when it
# was made: in no table, and of no use to Prometheus' text format.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# Up to `limits.request_deadline_s`.
_LONG_SECONDS = (*_SECONDS, 60, 120, 300)
_TOKEN_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(name, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(name, text, labels)


def _histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(name, text, labels, buckets=buckets)


REQUESTS = _counter("epd_requests", "Streams ended, by outcome", "stage", "outcome")
ERRORS = _counter("epd_errors", "Typed errors sent, by kind", "stage", "kind")
PHASE_SECONDS = _histogram(
    "epd_phase_seconds", "Time of one request in a phase", "stage", "phase", buckets=_LONG_SECONDS
)
FIRST_TOKEN_SECONDS = _histogram(
    "epd_first_token_seconds",
    "From a request's receipt to its answer's first token",
    "stage",
    buckets=_LONG_SECONDS,
)
ANSWER_SECONDS = _histogram(
    "epd_answer_seconds",
    "From a request's receipt to the end of its answer, of those that were answered whole",
    "stage",
    buckets=_LONG_SECONDS,
)
TOKEN_SECONDS = _histogram(
    "epd_token_seconds",
    "Between two tokens of an answer, its mean",
    "stage",
    buckets=_TOKEN_S,
)

STEPS = _counter("epd_steps", "Forward passes done", "stage")
STEP_SECONDS = _histogram("epd_step_seconds", "Time of one step", "stage", buckets=_SECONDS)
STEP_SIZE = _histogram(
    "epd_step_size", "Work in one step: images, or tokens", "stage", buckets=_SIZES
)
STEP_FAILURES = _counter("epd_step_failures", "Steps that raised", "stage")
TURN_WAIT_SECONDS = _counter(
    "epd_turn_wait_seconds", "Waited for other processes' forwards (worker.turns_file)", "stage"
)
TURN_OVERRUNS = _counter(
    "epd_turn_overruns",
    "Forwards beside another process's, which kept its turn for too long (worker.turns_file)",
    "stage",
)
PREEMPTIONS = _counter("epd_preemptions", "Sequences pushed out for want of blocks", "stage")
TOKENS = _counter("epd_tokens", "Tokens computed (prefill) or generated (decode)", "stage")
IMAGES = _counter("epd_images", "Images encoded", "stage")
ADOPTED_BLOCKS = _counter(
    "epd_kv_adopted_blocks",
    "KV blocks that decode shares with a prefill of its own process, instead of reading them",
)
CACHE_LOOKUPS = _counter(
    "epd_cache_lookups",
    "What was looked for in a cache: hit, miss, joined (somebody is making it already)",
    "cache",
    "outcome",
)
CACHE_EVICTIONS = _counter("epd_cache_evictions", "Cached entries that gave way", "cache")
DECODERS_LOST = _counter(
    "epd_decoders_lost", "Processes that a picture file killed, by time or crash", "reason"
)
IMAGE_FETCHES = _counter("epd_image_fetches", "Image URLs asked for, by outcome", "outcome")

STATE = _gauge(
    "epd_state",
    "Live counts of a worker: streams, waiting, running, kv_blocks_used, arena_bytes_used, "
    "leases_open, quarantined_bytes, reads_parked, tasks ...",
    "stage",
    "what",
)
SERVING = _gauge("epd_serving", "1 while health says SERVING", "stage")
MEMBERSHIPS = _gauge("epd_memberships", "Gateways that this worker is registered at", "stage")

CERTIFICATE_EXPIRES = _gauge(
    "epd_certificate_expires_timestamp_seconds",
    "When the first certificate of a file ends; 0: it can't be read",
    "use",
)


def count_cache(cache: str, event: str, number: int) -> None:
    """`number` hits, misses or evictions in a cache; the `Count` of `epd.kv.prefix`."""
    if event == "evicted":
        CACHE_EVICTIONS.labels(cache).inc(number)
    else:
        CACHE_LOOKUPS.labels(cache, event).inc(number)


def observe_phases(stage: str, timing: StageTiming) -> None:
    """Record where a request's time in a stage went; phases that it did not have
    are left out."""
    phases = {
        "queue": timing.queue_ms,
        "preprocess": timing.preprocess_ms,
        "run": timing.run_ms,
        "transfer": timing.transfer_ms,
    }
    for phase, milliseconds in phases.items():
        if milliseconds:
            PHASE_SECONDS.labels(stage, phase).observe(milliseconds / 1e3)
