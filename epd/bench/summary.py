"""From records to figures: percentiles, throughput, goodput, ratios. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from epd.bench.load import Round
from epd.bench.record import Record

PERCENTILES = (50, 90, 99)
TTFT_FACTOR, TPOT_FACTOR = 5.0, 2.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good; s."""

    ttft: float
    tpot: float

    @classmethod
    def of_unloaded(cls, records: Iterable[Record]) -> Slo | None:
        """5 x the median TTFT and 2 x the median TPOT; None without a good request."""
        good = [r for r in records if r.ok]
        tpots = [r.tpot for r in good if r.tpot is not None]
        if not good:
            return None
        tpot = statistics.median(tpots) if tpots else float("inf")
        return cls(TTFT_FACTOR * statistics.median(r.ttft for r in good), TPOT_FACTOR * tpot)

    def met(self, record: Record) -> bool:
        if not record.ok or record.ttft > self.ttft:
            return False
        return record.tpot is None or record.tpot <= self.tpot


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks, in proportion (numpy's default). Not of nothing."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99, mean, and how many."""
    if not values:
        return None
    row = {f"p{p}": percentile(values, p) for p in PERCENTILES}
    return {**row, "mean": statistics.fmean(values), "count": len(values)}


LATENCIES: dict[str, Callable[[Record], list[float]]] = {
    "ttft_s": lambda r: [r.ttft],
    "tpot_s": lambda r: [r.tpot] if r.tpot is not None else [],
    "itl_s": lambda r: r.gaps,
    "latency_s": lambda r: [r.latency],
}


def summarize(rounds: Sequence[Round], slo: Slo | None, kind: str | None = None) -> dict[str, Any]:
    """All rounds of one target under one load: latencies over all requests together, rates
    as medians of rounds. `kind`: of this class of request only."""
    kept = [[r for r in one.records if kind is None or r.kind == kind] for one in rounds]
    records = [record for one in kept for record in one]
    good = [record for record in records if record.ok]
    row: dict[str, Any] = {
        "requests": len(records),
        "ok": len(good),
        "errors": dict(Counter(r.error for r in records if not r.ok)),
        "short": sum(r.output_tokens < r.asked_tokens for r in good),
    }
    for name, of in LATENCIES.items():
        row[name] = spread([value for record in good for value in of(record)])
    row["client_lag_s"] = spread([record.lag for record in records])
    row["tokens_per_event"] = _tokens_per_event(good)
    pairs = list(zip(kept, rounds, strict=True))
    row |= {
        name: _median_of(_rates(one, r.wall_s, slo)[name] for one, r in pairs) for name in RATES
    }
    row["slo"] = {"ttft_s": slo.ttft, "tpot_s": slo.tpot} if slo else None
    row["good_share"] = sum(map(slo.met, records)) / len(records) if slo and records else None
    row["cores"] = {
        "client": _median_of(r.usage.client for r in rounds),
        "server": _median_of(r.usage.server for r in rounds),
        "others": _median_of(r.usage.others for r in rounds),
    }
    return row


RATES = ("req_s", "tok_s", "prompt_tok_s", "image_s", "good_req_s")


def _rates(records: Sequence[Record], wall_s: float, slo: Slo | None) -> dict[str, float | None]:
    """Per second of the round, of answered requests."""
    good = [record for record in records if record.ok]
    return {
        "req_s": len(good) / wall_s,
        "tok_s": sum(r.output_tokens for r in good) / wall_s,
        "prompt_tok_s": sum(r.prompt_tokens for r in good) / wall_s,
        "image_s": sum(r.images for r in good) / wall_s,
        "good_req_s": sum(map(slo.met, records)) / wall_s if slo else None,
    }


def _tokens_per_event(records: Sequence[Record]) -> float | None:
    events = sum(len(r.arrivals) for r in records)
    return sum(r.output_tokens for r in records) / events if events else None


def _median_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


COMPARED: dict[str, Callable[[Round], float | None]] = {
    "ttft_s p50": lambda r: _of_round(r, "ttft_s", 50),
    "ttft_s p99": lambda r: _of_round(r, "ttft_s", 99),
    "tpot_s p50": lambda r: _of_round(r, "tpot_s", 50),
    "itl_s p99": lambda r: _of_round(r, "itl_s", 99),
    "latency_s p50": lambda r: _of_round(r, "latency_s", 50),
    "req_s": lambda r: _rates(r.records, r.wall_s, None)["req_s"],
    "tok_s": lambda r: _rates(r.records, r.wall_s, None)["tok_s"],
    "image_s": lambda r: _rates(r.records, r.wall_s, None)["image_s"],
}


def _of_round(one: Round, name: str, percent: float) -> float | None:
    values = [value for r in one.records if r.ok for value in LATENCIES[name](r)]
    return percentile(values, percent) if values else None


def ratios(these: Sequence[Round], base: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Each figure of `these` over that of `base` in the round beside it: median, least and
    most of the ratios. Rounds are paired since the machine drifts."""
    pairs = list(zip(these, base, strict=True))
    compared = {}
    for name, figure in COMPARED.items():
        values = [(figure(one), figure(other)) for one, other in pairs]
        known = [a / b for a, b in values if a is not None and b]
        if known:
            compared[name] = {
                "median": statistics.median(known), "min": min(known), "max": max(known),
            }  # fmt: skip
    return compared
