"""Results as JSON (environment, command, every request) and as tables for people."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from epd.bench.campaign import Results
from epd.bench.machine import environment
from epd.bench.summary import PERCENTILES
from epd.errors import invalid

SCHEMA = 1
_SECRET = "--api-key"
_MS = 1e3


def document(results: Results, targets: Mapping[str, Any], workload: Mapping[str, Any]) -> bytes:
    """The whole measurement: enough to compute every figure again."""
    rows = [
        {**record.row(r.origin), "cores": {"client": r.usage.client}}
        for r in results.rounds
        for record in r.records
    ]
    whole = {
        "schema": SCHEMA,
        "command": command(sys.argv[1:]),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": environment(),
        "targets": targets,
        "workload": workload,
        "summaries": results.summaries(),
        "comparisons": results.comparisons(),
        "requests": rows,
    }
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2)


def command(arguments: Sequence[str]) -> str:
    """As it was typed, but for keys: results are passed on."""
    shown, hidden = ["epd"], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = bool(equals) and name == _SECRET
        shown.append(f"{_SECRET}=..." if secret else "..." if hidden else argument)
        hidden = argument == _SECRET
    return shlex.join(shown)


def require_place(path: Path, flag: str) -> None:
    """Before an hour of measuring: whether its results can be written.

    Raises:
        EpdError: they can't; it names the flag.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise invalid(f"--{flag} {path}: {error.strerror}", flag) from error


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


_NAMES = tuple(f"p{percent}" for percent in PERCENTILES)
_PERCENTILES = " / ".join(_NAMES)
COLUMNS = (
    "target", "load", "kind", "ok", "errors", f"TTFT ms {_PERCENTILES}", f"TPOT ms {_PERCENTILES}",
    f"ITL ms {_PERCENTILES}", f"end to end s {_PERCENTILES}", "tok/s", "req/s", "image/s",
    "good", "good req/s", "cores: client / server / others",
)  # fmt: skip


def tables(results: Results) -> str:
    """Markdown: a row for each target and load, then ratios to the first target."""
    rows = [_row(summary) for summary in results.summaries()]
    parts = [markdown(COLUMNS, rows)]
    if slo := results.slo:
        parts.append(
            f"good: share of requests with TTFT <= {slo.ttft * _MS:.0f} ms"
            f" and TPOT <= {slo.tpot * _MS:.1f} ms; good req/s: how many such a second (goodput)"
        )
    if compared := results.comparisons():
        names = list(dict.fromkeys(name for row in compared for name in row["ratios"]))
        head = ("load", "ratio", *names)
        parts.append(markdown(head, [_ratio_row(row, names) for row in compared]))
    return "\n\n".join(parts)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _row(s: Mapping[str, Any]) -> list[str]:
    errors = ", ".join(f"{n} {kind}" for kind, n in s["errors"].items()) or "-"
    if s["short"]:
        errors += f" ({s['short']} short)"
    cores = s["cores"]
    return [
        s["target"], s["load"], s["kind"] or "all", f"{s['ok']}/{s['requests']}", errors,
        _latency(s["ttft_s"], _MS), _latency(s["tpot_s"], _MS), _latency(s["itl_s"], _MS),
        _latency(s["latency_s"], 1.0),
        cell(s["tok_s"], 1), cell(s["req_s"], 3), cell(s["image_s"], 3),
        "-" if s["good_share"] is None else f"{s['good_share']:.0%}",
        cell(s["good_req_s"], 3),
        " / ".join(cell(cores[name], 2) for name in ("client", "server", "others")),
    ]  # fmt: skip


def _latency(values: Mapping[str, float] | None, scale: float) -> str:
    if not values:
        return "-"
    digits = 1 if scale == _MS else 2
    return " / ".join(f"{values[name] * scale:.{digits}f}" for name in _NAMES)


def cell(value: float | None, digits: int) -> str:
    """For a table; "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio_row(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    cells = [row["load"], f"{row['of']} / {row['over']}"]
    for name in names:
        found = row["ratios"].get(name)
        cells.append(
            f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f})" if found else "-"
        )
    return cells
