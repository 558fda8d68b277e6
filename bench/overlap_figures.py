"""What `bench.overlap` makes of its records. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from epd.bench.machine import environment
from epd.bench.record import Record
from epd.bench.report import markdown

ARMS = ("on", "off")
AIM = 1.15

Work = Callable[[int, int], float]
"""Operations of prefill for the tokens [start, end) of a prompt (`theory.Model.prefill_flops`)."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request with pictures, and how many tokens of words are around them."""

    name: str
    images: int
    side: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Sequential:
    """What the arm without overlap did, s after prefill's admission."""

    landed: tuple[float, ...]
    """When each picture's rows were in prefill."""
    prefill: float
    """P: from there to the first token."""

    @property
    def encode(self) -> float:
        """E."""
        return max(self.landed)

    @property
    def bound(self) -> float:
        return max(self.encode, self.prefill) / (self.encode + self.prefill)

    @classmethod
    def of(cls, spans: Mapping[str, tuple[float, float]]) -> Sequential:
        began, computed = spans["prefill"]
        landed = landings(spans)
        return cls(landed, (computed - began) / 1e3 - max(landed))

    def least(self, before: int, image: int, total: int, work: Work) -> float:
        """When prefill could be done at the earliest, with `before` tokens of words, then
        pictures of `image` tokens each, `total` tokens in all. P is shared out by `work`: late
        tokens cost more than early ones, they attend to more."""
        pace = self.prefill / work(0, total)
        done, at = pace * work(0, before), before
        for landed in self.landed:
            done = max(done, landed) + pace * work(at, at + image)
            at += image
        return done + pace * work(at, total)


def landings(spans: Mapping[str, tuple[float, float]]) -> tuple[float, ...]:
    """When each picture's rows were in prefill, s after prefill began with the request."""
    began, _ = spans["prefill"]
    ends = (end for name, (_, end) in spans.items() if name.startswith("embedding transfer["))
    return tuple(sorted((end - began) / 1e3 for end in ends))


@dataclass
class Found:
    """Records by (case, arm), a round after the other; then what only one arm is asked."""

    cases: dict[tuple[str, str], list[Record]] = field(default_factory=lambda: defaultdict(list))
    caches: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    encoded: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Pictures that encode computed, by what was asked."""
    image_tokens: dict[str, int] = field(default_factory=dict)
    """Of one picture, by case."""
    client_cores: float = 0.0


def figures(found: Found, case: Case, work: Work) -> dict[str, Any]:
    """Medians over rounds; ratios are paired by round."""
    on, off = (found.cases[case.name, arm] for arm in ARMS)
    parts = [Sequential.of(record.spans) for record in off]
    total, image = off[0].prompt_tokens, found.image_tokens[case.name]
    words = total - case.images * image
    before = words * case.before // max(1, case.before + case.after)
    ratios = [a.ttft / b.ttft for a, b in zip(on, off, strict=True)]
    least = []
    for record, part in zip(off, parts, strict=True):
        around = record.ttft - part.encode - part.prefill
        least.append((around + part.least(before, image, total, work)) / record.ttft)
    slowed = [max(landings(a.spans)) / b.encode for a, b in zip(on, parts, strict=True)]
    median = statistics.median
    return {
        "case": case.name,
        "prompt_tokens": off[0].prompt_tokens,
        "encode_s": median(p.encode for p in parts),
        "encode_slowed": median(slowed),
        "prefill_s": median(p.prefill for p in parts),
        "ttft_off_s": median(r.ttft for r in off),
        "ttft_on_s": median(r.ttft for r in on),
        "on_off": median(ratios),
        "on_off_range": [min(ratios), max(ratios)],
        "bound": median(p.bound for p in parts),
        "of_bound": median(r / p.bound for r, p in zip(ratios, parts, strict=True)),
        "least": median(least),
        "least_of_bound": median(x / p.bound for x, p in zip(least, parts, strict=True)),
    }


_HEAD = (
    "request", "prompt tokens", "E s", "P s", "TTFT off s", "TTFT on s", "on / off (range)",
    "max(E, P) / (E + P)", f"ratio of the two (aim {AIM})", "least: on / off", "least: of the two",
    "encoding beside prefill / E",
)  # fmt: skip


def tables(found: Found, cases: Sequence[Case], work: Work) -> str:
    rows = []
    for case in cases:
        f = figures(found, case, work)
        low, high = f["on_off_range"]
        rows.append([
            case.name, str(f["prompt_tokens"]), f"{f['encode_s']:.2f}", f"{f['prefill_s']:.2f}",
            f"{f['ttft_off_s']:.2f}", f"{f['ttft_on_s']:.2f}",
            f"{f['on_off']:.3f} ({low:.3f}-{high:.3f})", f"{f['bound']:.3f}",
            f"**{f['of_bound']:.3f}**", f"{f['least']:.3f}", f"{f['least_of_bound']:.3f}",
            f"{f['encode_slowed']:.3f}",
        ])  # fmt: skip
    told = [markdown(_HEAD, rows)]
    if found.caches:
        told.append(_cache_table(found))
    return "\n\n".join(told)


_COMPARED = {
    "the same picture, other words": "a new picture",
    "its next turn": "as long a conversation, all new",
}


def _cache_table(found: Found) -> str:
    rows = []
    for kind, records in found.caches.items():
        ratio = ""
        if base := found.caches.get(_COMPARED.get(kind, "")):
            pairs = zip(records, base, strict=True)
            median = statistics.median(a.ttft / b.ttft for a, b in pairs)
            ratio = f"{median:.3f} of {_COMPARED[kind]}"
        times = [record.ttft for record in records]
        rows.append([
            kind, f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})", ratio,
            f"{statistics.median(record.prompt_tokens for record in records):.0f}",
            f"{statistics.median(record.cached_tokens for record in records):.0f}",
            _least_most(found.encoded[kind]),
        ])  # fmt: skip
    head = ("request", "TTFT s", "TTFT ratio", "prompt tokens", "of them cached", "encoded")
    return markdown(head, rows)


def _least_most(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def document(found: Found, cases: Sequence[Case], settings: Mapping[str, Any], work: Work) -> bytes:
    rows = [
        {"case": case, "arm": arm, **record.row(record.scheduled)}
        for (case, arm), records in found.cases.items()
        for record in records
    ]
    rows += [
        {"case": kind, "arm": "on", **record.row(record.scheduled)}
        for kind, records in found.caches.items()
        for record in records
    ]
    whole = {
        "environment": environment(),
        "settings": settings,
        "cases": [asdict(case) | figures(found, case, work) for case in cases],
        "encoded": found.encoded,
        "client_cores": found.client_cores,
        "requests": rows,
    }
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2)
