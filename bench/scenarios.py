"""What `bench.compare` and `bench.interference` ask of every server, and the figures that they
take from each."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd.bench.load import Round, Workload
from epd.bench.report import cell
from epd.bench.summary import percentile
from epd.bench.workload import Load, Picture, Shape, Template, Timed

IMAGE = (448, 448)
ONE, EIGHT = Load("concurrency", 1), Load("concurrency", 8)
AS_RECORDED = Load("trace", 1)
Figure = Callable[[Round], float | None]


def tpot_ms(one: Round) -> float | None:
    return _median([r.tpot * 1e3 for r in one.records if r.ok and r.tpot is not None])


def gap_ms(one: Round) -> float | None:
    """The usual step, without the prompts of others in between."""
    return _median([gap * 1e3 for r in one.records if r.ok for gap in r.gaps])


def ttft_s(one: Round) -> float | None:
    return _median([r.ttft for r in one.records if r.ok])


def tok_s(one: Round) -> float | None:
    return sum(r.output_tokens for r in one.records if r.ok) / one.wall_s


def req_s(one: Round) -> float | None:
    return sum(r.ok for r in one.records) / one.wall_s


def steady_itl_ms(percent: float) -> Figure:
    """Of the requests that were decoding all the time."""

    def figure(one: Round) -> float | None:
        gaps = [gap for r in one.records if r.ok and r.kind == "steady" for gap in r.gaps]
        return percentile(gaps, percent) * 1e3 if gaps else None

    return figure


def burst_ttft_s(one: Round) -> float | None:
    return _median([r.ttft for r in one.records if r.ok and r.kind == "burst"])


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a scenario."""

    name: str
    figure: Figure
    digits: int = 1
    more_is_better: bool = False

    def shown(self, one: Round) -> str:
        return cell(self.figure(one), self.digits)


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    load: Load
    template: Template
    requests: int
    columns: tuple[Column, ...]

    def workload(self, number: int, requests: int = 0) -> Workload:
        """Of one round. No two scenarios share a picture or a text: what one asked, a cache
        would know in the next."""
        rng = random.Random(f"{self.name} {number}")
        shapes = self.template.shapes(requests or self.requests, rng)
        return Workload(shapes, extra={"ignore_eos": True}, seed=rng.getrandbits(32))


SCENARIOS = (
    Scenario(
        "1 stream", ONE, Template(100, 48), 2,
        (Column("decode, 1 stream, ms/token", tpot_ms),),
    ),
    Scenario(
        "8 streams", EIGHT, Template(100, 48), 8,
        (
            Column("decode, 8 streams, ms/token (median gap)", gap_ms),
            Column("8 streams that start together, ms/token", tpot_ms),
        ),
    ),
    Scenario(
        "1 image", ONE, Template(80, 2, (IMAGE,)), 2,
        (Column("TTFT, 1 image, s", ttft_s, 2),),
    ),
    Scenario(
        "1k tokens", ONE, Template(1000, 2), 2,
        (Column("TTFT, 1k tokens, s", ttft_s, 2),),
    ),
    Scenario(
        "4 images", ONE, Template(80, 2, (IMAGE,) * 4), 1,
        (Column("TTFT, 4 images, s", ttft_s, 2),),
    ),
    Scenario(
        "8 clients, text", EIGHT, Template(100, 32), 16,
        (Column("8 clients, text, tok/s", tok_s, 1, more_is_better=True),),
    ),
    Scenario(
        "8 clients, image", EIGHT, Template(80, 32, (IMAGE,)), 8,
        (Column("8 clients, image, req/s", req_s, 3, more_is_better=True),),
    ),
)  # fmt: skip

INTERFERENCE = (
    Column("ITL p50, ms", steady_itl_ms(50)),
    Column("ITL p99, ms", steady_itl_ms(99)),
    Column("longest gap, ms", steady_itl_ms(100)),
    Column("burst TTFT, s", burst_ttft_s, 2),
    Column("all tok/s", tok_s, 1, more_is_better=True),
)


def interference(
    streams: int = 4,
    tokens: int = 320,
    bursts: int = 3,
    images: int = 3,
    every_s: float = 5.0,
    long_tokens: int = 0,
) -> Workload:
    """Streams that decode all the time, and bursts of image prompts that come in between, each
    with one prompt of so many tokens of text, if any. Log probabilities make servers send an
    event for every token, so that gaps are true."""
    rng = random.Random(5)
    steady = [Timed(0.05 * n, Shape(60, tokens, kind="steady")) for n in range(streams)]
    picture = [Picture(*IMAGE, rng.getrandbits(62)) for _ in range(bursts * images)]
    burst = [
        Timed(every_s * (1 + n // images), Shape(80, 4, (picture[n],), kind="burst"))
        for n in range(bursts * images)
    ]
    long = Shape(long_tokens, 4, kind="long")
    burst += [Timed(every_s * (1 + n), long) for n in range(bursts if long_tokens else 0)]
    trace = sorted([*steady, *burst], key=lambda timed: timed.at_s)
    return Workload(trace=trace, extra={"ignore_eos": True, "logprobs": True}, seed=5)
