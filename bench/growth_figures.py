"""Curves of `bench.growth`: exponents, a table, a picture. Pure but for the picture's file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from bench.theory import Machine, Model, exponent
from epd.bench.machine import environment
from epd.bench.report import markdown

WITHIN = 0.15
AXES: Mapping[str, str] = {
    "prompt": "time to first token over tokens of the prompt",
    "images": "time to first token over pictures",
    "streams": "time between tokens over streams that decode",
}


@dataclass(frozen=True, slots=True)
class Curve:
    axis: str
    sizes: Sequence[int]
    seconds: Sequence[Sequence[float]]
    """Measured, all rounds, by size."""
    expected: Sequence[float]
    """By theory, s."""

    @property
    def medians(self) -> list[float]:
        return [statistics.median(values) for values in self.seconds]

    @property
    def exponent(self) -> float:
        return exponent(self.sizes, self.medians)

    @property
    def expected_exponent(self) -> float:
        return exponent(self.sizes, self.expected)

    @property
    def off(self) -> float:
        return self.exponent - self.expected_exponent


def table(curves: Sequence[Curve]) -> str:
    """Exponents, then every point."""
    head = ("what", "from", "to", "exponent", "theory's", f"difference (aim: within {WITHIN})")
    rows = [
        [
            AXES[c.axis], str(c.sizes[0]), str(c.sizes[-1]), f"{c.exponent:.2f}",
            f"{c.expected_exponent:.2f}", f"{c.off:+.2f}",
        ]
        for c in curves
    ]  # fmt: skip
    points = [
        [c.axis, str(size), f"{statistics.median(values):.3f}", f"{min(values):.3f}",
         f"{max(values):.3f}", str(len(values)), f"{expected:.3f}",
         f"{statistics.median(values) / expected:.2f}"]
        for c in curves
        for size, values, expected in zip(c.sizes, c.seconds, c.expected, strict=True)
    ]  # fmt: skip
    columns = ("axis", "size", "s, median", "least", "most", "n", "theory s", "of theory")
    return "\n\n".join([markdown(head, rows), markdown(columns, points)])


def document(
    curves: Sequence[Curve], model: Model, machine: Machine, settings: Sequence[str]
) -> bytes:
    whole: dict[str, Any] = {
        "environment": environment(),
        "settings": settings,
        "model": asdict(model),
        "machine": asdict(machine),
        "curves": [
            asdict(c)
            | {"exponent": c.exponent, "expected_exponent": c.expected_exponent, "off": c.off}
            for c in curves
        ],
    }
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """A panel an axis, both scales logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(curves), 4), layout="constrained")
    for panel, c in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        spread = [
            [median - min(values) for median, values in zip(c.medians, c.seconds, strict=True)],
            [max(values) - median for median, values in zip(c.medians, c.seconds, strict=True)],
        ]
        label = f"measured, exponent {c.exponent:.2f}"
        panel.errorbar(c.sizes, c.medians, yerr=spread, marker="o", capsize=3, label=label)
        panel.plot(c.sizes, c.expected, "--", label=f"theory, {c.expected_exponent:.2f}")
        panel.set(xscale="log", yscale="log", title=AXES[c.axis], xlabel=c.axis, ylabel="s")
        panel.title.set_fontsize("small")
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)
