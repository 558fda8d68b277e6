"""Latency, throughput and goodput over load, as a picture. Needs the extra `bench`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from epd.errors import invalid

Summary = Mapping[str, Any]
Line = tuple[str, Callable[[Summary], float | None], str]

_PANELS: tuple[tuple[str, tuple[Line, ...]], ...] = (
    (
        "time to first token, s",
        (("p50", lambda s: _of(s, "ttft_s", "p50"), "-"),
         ("p99", lambda s: _of(s, "ttft_s", "p99"), "--")),
    ),
    (
        "inter-token latency, s",
        (("p50", lambda s: _of(s, "itl_s", "p50"), "-"),
         ("p99", lambda s: _of(s, "itl_s", "p99"), "--")),
    ),
    ("output tokens a second", (("", lambda s: s["tok_s"], "-"),)),
    (
        "requests a second",
        (("answered", lambda s: s["req_s"], "-"), ("good", lambda s: s["good_req_s"], "--")),
    ),
)  # fmt: skip


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """One panel a figure, one colour a target; x is the load.

    Raises:
        EpdError: INVALID_REQUEST, matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise invalid('a plot needs matplotlib: pip install "epd[bench]"', "plot") from error
    lines, axis = _by_target(summaries)
    figure = Figure(figsize=(10, 7), layout="constrained")
    for panel, (title, curves) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for number, (target, points) in enumerate(lines.items()):
            for label, of, style in curves:
                known = [(x, y) for x, s in points if (y := of(s)) is not None]
                panel.plot(
                    [x for x, _ in known], [y for _, y in known],
                    style, color=f"C{number}", marker="o", label=f"{target} {label}".strip(),
                )  # fmt: skip
        panel.set_title(title)
        panel.set_xlabel(axis)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _by_target(
    summaries: Sequence[Summary],
) -> tuple[dict[str, list[tuple[float, Summary]]], str]:
    """Points of each target, over the kind of load that there is most of."""
    counts: dict[str, int] = defaultdict(int)
    for summary in summaries:
        counts[summary["load"].split()[0]] += 1
    how = max(counts, key=lambda name: counts[name])
    lines: dict[str, list[tuple[float, Summary]]] = defaultdict(list)
    for summary in summaries:
        name, value = summary["load"].split()
        if name == how and not summary["kind"]:
            lines[summary["target"]].append((float(value), summary))
    unit = {"rate": "requests a second offered", "trace": "speed of the trace"}
    return {k: sorted(v, key=lambda p: p[0]) for k, v in lines.items()}, unit.get(how, how)


def _of(summary: Summary, name: str, percentile: str) -> float | None:
    values = summary[name]
    return None if values is None else float(values[percentile])
