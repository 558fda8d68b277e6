"""What `bench.interference` makes of its rounds. Pure but for the picture's file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from bench.scenarios import burst_ttft_s, steady_itl_ms, tok_s
from epd.bench.load import Round
from epd.bench.machine import environment
from epd.bench.record import Record
from epd.bench.report import cell, markdown
from epd.bench.summary import Slo

SPLIT = "epd split"
_THROUGHPUT_SHARE = 0.9
"""Of the best budget's, that another one must keep to be preferred for its latency."""


@dataclass
class Found:
    bursts: list[int]
    how: dict[str, str]
    every_s: float = 5.0
    """Between two bursts."""
    long_tokens: int = 0
    """Of the text prompt that each burst has beside its images; 0: none."""
    alone: list[Round] = field(default_factory=list)
    budgets: list[Round] = field(default_factory=list)
    """The middle load, once for each budget of the monolithic server."""
    best: str = ""
    loaded: dict[int, list[Round]] = field(default_factory=dict)
    """By images in a burst."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of requests."""
        return ("steady", "burst", "long") if self.long_tokens else ("steady", "burst")

    def keep(self, images: int, done: Round) -> None:
        self.loaded.setdefault(images, []).append(done)

    def of(self, images: int, target: str) -> list[Round]:
        return [one for one in self.loaded.get(images, ()) if one.target == target]

    @property
    def targets(self) -> list[str]:
        return list(dict.fromkeys(one.target for rounds in self.loaded.values() for one in rounds))

    def slo(self, kind: str) -> Slo | None:
        """Of one kind of request: that of the server whose unloaded medians are the least."""
        names = dict.fromkeys(one.target for one in self.alone)
        each = [
            Slo.of_unloaded(r for one in self.alone if one.target == name for r in _of(one, kind))
            for name in names
        ]
        known = [slo for slo in each if slo is not None]
        if not known:
            return None
        return Slo(min(s.ttft for s in known), min(s.tpot for s in known))

    def good(self, record: Record) -> bool:
        slo = self.slo(record.kind)
        return slo is not None and slo.met(record)


def _of(one: Round, kind: str) -> list[Record]:
    return [record for record in one.records if record.kind == kind]


def burst_req_s(one: Round) -> float | None:
    """Image prompts answered a second, from the first burst on."""
    burst = [record for record in _of(one, "burst") if record.ok]
    if not burst:
        return None
    since = min(record.scheduled for record in burst)
    return len(burst) / (max(record.ended for record in burst) - since)


def client_cores(one: Round) -> float | None:
    return one.usage.client


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    of: Callable[[Round], float | None]
    digits: int = 1


FIGURES = (
    Figure("ITL p50, ms", steady_itl_ms(50)),
    Figure("ITL p99, ms", steady_itl_ms(99)),
    Figure("longest gap, ms", steady_itl_ms(100)),
    Figure("burst TTFT, s", burst_ttft_s, 2),
    Figure("tok/s", tok_s),
    Figure("image prompts/s", burst_req_s, 3),
    Figure("client, cores", client_cores, 2),
)
P99, TOKENS = FIGURES[1], FIGURES[4]


def best_budget(rounds: Sequence[Round]) -> str:
    """The monolithic server with the least p99 among those that are not much slower."""
    rates = {one.target: TOKENS.of(one) or 0.0 for one in rounds}
    least = _THROUGHPUT_SHARE * max(rates.values(), default=0.0)
    kept = [one for one in rounds if rates[one.target] >= least]
    slowest = {one.target: P99.of(one) or float("inf") for one in kept}
    return min(slowest, key=lambda name: slowest[name], default="")


def median(rounds: Sequence[Round], figure: Figure) -> float | None:
    values = [value for one in rounds if (value := figure.of(one)) is not None]
    return statistics.median(values) if values else None


def good_share(found: Found, rounds: Sequence[Round]) -> float | None:
    records = [record for one in rounds for record in one.records]
    return sum(map(found.good, records)) / len(records) if records else None


def goodput(found: Found, rounds: Sequence[Round]) -> float | None:
    """Good requests a second, median of rounds."""
    values = [sum(map(found.good, one.records)) / one.wall_s for one in rounds]
    return statistics.median(values) if values else None


# --- what is written


def tables(found: Found) -> str:
    parts = [_budget_table(found), _load_table(found), _ratio_table(found)]
    lines = [f"- a burst every {found.every_s:g} s, while four streams decode"]
    if found.long_tokens:
        lines += [f"- each with a text prompt of {found.long_tokens} tokens"]
    lines += [f"- {name}: {how}" for name, how in found.how.items()]
    for kind in found.kinds:
        if slo := found.slo(kind):
            lines.append(
                f"- good {kind}: TTFT <= {slo.ttft:.2f} s, TPOT <= {slo.tpot * 1e3:.0f} ms"
            )
    return "\n\n".join([*parts, "\n".join(lines)])


def _budget_table(found: Found) -> str:
    names = (P99, FIGURES[3], TOKENS)
    rows = [
        [one.target + (" (best)" if one.target == found.best else "")]
        + [cell(figure.of(one), figure.digits) for figure in names]
        for one in found.budgets
    ]
    return markdown(("chunk budget", *(figure.name for figure in names)), rows)


def _load_table(found: Found) -> str:
    rows = []
    for images in found.bursts:
        for target in found.targets:
            if not (rounds := found.of(images, target)):
                continue
            failed = sum(not record.ok for one in rounds for record in one.records)
            cells = [cell(median(rounds, figure), figure.digits) for figure in FIGURES]
            good = good_share(found, rounds)
            rows.append([
                str(images), target, *cells, "-" if good is None else f"{good:.0%}",
                cell(goodput(found, rounds), 3), str(failed), str(len(rounds)),
            ])  # fmt: skip
    head = ("images a burst", "server", *(figure.name for figure in FIGURES))
    return markdown((*head, "good", "good requests/s", "failed", "n"), rows)


def _ratio_table(found: Found) -> str:
    """The split service beside each other one, paired by round."""
    rows = []
    for images in found.bursts:
        ours = found.of(images, SPLIT)
        for other in found.targets:
            if other == SPLIT:
                continue
            if not (theirs := found.of(images, other)):
                continue
            p99 = _paired(theirs, ours, P99)
            rows.append([
                str(images), other, cell(p99, 1),
                *(cell(_paired(ours, theirs, figure), 2) for figure in FIGURES[4:6]),
            ])  # fmt: skip
    head = ("images a burst", "beside", "its ITL p99 over the split service's (aim: 3)")
    return markdown((*head, "split's tok/s over its", "split's image prompts/s over its"), rows)


def _paired(these: Sequence[Round], base: Sequence[Round], figure: Figure) -> float | None:
    bases = {one.number: one for one in base}
    pairs = [(one, bases[one.number]) for one in these if one.number in bases]
    values = [(figure.of(one), figure.of(other)) for one, other in pairs]
    known = [a / b for a, b in values if a is not None and b]
    return statistics.median(known) if known else None


def document(found: Found) -> bytes:
    rows: list[dict[str, Any]] = []
    parts = [("alone", found.alone), ("budgets", found.budgets)]
    parts += [(f"bursts of {images}", rounds) for images, rounds in found.loaded.items()]
    for part, rounds in parts:
        for one in rounds:
            cores = {"client": one.usage.client, "server": one.usage.server}
            rows += [
                {"part": part, "cores": cores, "good": found.good(r)} | r.row(one.origin)
                for r in one.records
            ]
    whole = {
        "environment": environment(),
        "servers": found.how,
        "best budget": found.best,
        "every_s": found.every_s,
        "long_tokens": found.long_tokens,
        "requests": rows,
    }
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2)


def draw(found: Found, path: Path) -> None:
    """Latency, throughput and goodput over the load."""
    from matplotlib.figure import Figure as Canvas

    panels: list[tuple[str, Callable[[Sequence[Round]], float | None]]] = [
        (figure.name, lambda rounds, figure=figure: median(rounds, figure))  # type: ignore[misc]
        for figure in (P99, FIGURES[3], TOKENS)
    ]
    panels.append(("good requests a second", lambda rounds: goodput(found, rounds)))
    canvas = Canvas(figsize=(10, 7), layout="constrained")
    for panel, (title, of) in zip(canvas.subplots(2, 2).flat, panels, strict=True):
        for target in found.targets:
            points = [(images, of(found.of(images, target))) for images in found.bursts]
            known = [(x, y) for x, y in points if y is not None]
            panel.plot([x for x, _ in known], [y for _, y in known], "o-", label=target)
        panel.set(title=title, xlabel="image prompts in a burst")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    canvas.savefig(path, dpi=120)
