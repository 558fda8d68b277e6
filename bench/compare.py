"""epd beside real rivals: the same checkpoint, the same cores, interleaved.

    python -m bench.compare CHECKPOINT OUT [--minutes 18] [--vllm VENV] [--preload LIB:LIB]
                            [--transformers VENV] [--llama BINARY,MODEL,MMPROJ]
                            [--openvino VENV,MODEL]
                            [--colocated SETTING,SETTING]... [--unpinned [SETTING,SETTING]]...
                            [--turns [SETTING,SETTING]]...
                            [--no-split] [--no-interference] [--only SCENARIO]...

Starts every server, then goes round after round through the scenarios of
`bench.scenarios`, each server in turn, until the time is over; the first round is dropped.
Then the interference of image prompts with running decodes. `--colocated` adds an `epd` in
one process with other settings, e.g. prefill.step_ms=1000; `--unpinned` one of three processes
that share all cores, `--turns` one of three that take turns on them; `--only "8 clients, image"`
leaves other scenarios out. Writes OUT/compare.json with every request and OUT/compare.md. How to
install the rivals: bench/peers/README.md.

Servers that are not being measured idle; what other processes used is in the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import psutil

from bench.contenders import (
    Contender,
    Start,
    all_running,
    connected,
    epd_split,
    epd_with,
)
from bench.rivals import SLOW, contest, rivals, sharing
from bench.scenarios import (
    AS_RECORDED,
    INTERFERENCE,
    SCENARIOS,
    Column,
    Scenario,
    interference,
)
from bench.service import end_on_sigterm
from epd.bench.campaign import in_turn
from epd.bench.load import Limits, Round, Target, run_round
from epd.bench.machine import environment
from epd.bench.report import cell, markdown

SLOW_ROUNDS = 2
_SLOW_SHARE = 4
_INTERFERENCE_ROUNDS = 2
_INTERFERENCE_S = 35.0


@dataclass
class Comparison:
    contenders: list[Contender]
    until: float
    """On the event loop's clock (time.monotonic()): no round begins that would end later."""
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    """By scenario; "interference" is one of them."""
    interference_rounds: int = _INTERFERENCE_ROUNDS

    def keep(self, scenario: str, done: Round) -> None:
        self.rounds.setdefault(scenario, []).append(done)

    def of(self, scenario: str, contender: str) -> list[Round]:
        return [r for r in self.rounds.get(scenario, ()) if r.target == contender]


async def compare(comparison: Comparison, scenarios: Sequence[Scenario]) -> None:
    """Connect, then warm-up, rounds while there is time, interference."""
    async with connected(comparison.contenders) as targets:
        await measure(comparison, targets, scenarios)


async def measure(
    comparison: Comparison, targets: Sequence[Target], scenarios: Sequence[Scenario]
) -> None:
    """Warm-up, then rounds as long as one more fits before the interference."""
    fast = [target for target in targets if target.name not in SLOW]
    clock = asyncio.get_running_loop().time
    end = comparison.until - _INTERFERENCE_S * comparison.interference_rounds * len(fast)
    number, expected_s = 0, 0.0
    while number < 2 or clock() + expected_s < end:
        taking_part = list(targets) if number <= SLOW_ROUNDS else fast
        spent = await _round(comparison, taking_part, scenarios, number)
        expected_s = sum(spent[t.name] for t in (targets if number < SLOW_ROUNDS else fast))
        number += 1
    await _interfere(comparison, targets)


async def _round(
    comparison: Comparison, targets: Sequence[Target], scenarios: Sequence[Scenario], number: int
) -> dict[str, float]:
    """All scenarios at all targets; seconds that each target took."""
    clock = asyncio.get_running_loop().time
    spent = {target.name: 0.0 for target in targets}
    for scenario in scenarios:
        for target in in_turn(targets, number):
            start = clock()
            done = await _once(scenario, target, number)
            spent[target.name] += clock() - start
            if number:
                comparison.keep(scenario.name, done)
    return spent


async def _once(scenario: Scenario, target: Target, number: int) -> Round:
    requests = scenario.requests
    if target.name in SLOW:
        requests = max(1, requests // _SLOW_SHARE)
    if not number:
        requests = 1  # the warm-up asks for one of each
    done = await run_round(
        target, scenario.load, number, scenario.workload(number, requests), Limits(300.0)
    )
    figures = [f"{c.name}: {c.shown(done)}" for c in scenario.columns]
    failed = [f"FAILED {r.error} {r.detail}" for r in done.records if not r.ok][:1]
    print(f"{number:>3} {target.name:<14} {'; '.join([*figures, *failed])}", flush=True)
    return done


async def _interfere(comparison: Comparison, targets: Sequence[Target]) -> None:
    fast = [target for target in targets if target.name not in SLOW]
    for number in range(comparison.interference_rounds):
        for target in in_turn(fast, number):
            done = await run_round(target, AS_RECORDED, number, interference(), Limits(120.0))
            comparison.keep("interference", done)
            said = "; ".join(f"{c.name}: {c.shown(done)}" for c in INTERFERENCE)
            print(f"  interference {target.name:<14} {said}", flush=True)


# --- what is written


def tables(comparison: Comparison, scenarios: Sequence[Scenario]) -> str:
    """Markdown: one row a figure, one column a server, and the best of ours over the best
    rival."""
    names = [c.name for c in comparison.contenders]
    head = ["", *names, "best epd / best rival"]
    rows = [
        _figure_row(comparison, scenario.name, column)
        for scenario in scenarios
        for column in scenario.columns
    ]
    parts = [markdown(head, rows)]
    if "interference" in comparison.rounds:
        rows = [_figure_row(comparison, "interference", column) for column in INTERFERENCE]
        parts += ["Interference: 4 streams decode, 3 bursts of 3 image prompts"]
        parts += [markdown(head, rows)]
    parts += ["\n".join(f"- {c.name}: {c.how}" for c in comparison.contenders)]
    parts += ["Cores used while each was measured (median of rounds)", _cores(comparison)]
    return "\n\n".join(parts)


def _figure_row(comparison: Comparison, scenario: str, column: Column) -> list[str]:
    cells = [column.name]
    ours: list[float] = []
    theirs: list[float] = []
    for contender in comparison.contenders:
        rounds = comparison.of(scenario, contender.name)
        values = [v for r in rounds if (v := column.figure(r)) is not None]
        cells.append(_median_cell(column, values))
        if values:
            (ours if contender.ours else theirs).append(statistics.median(values))
    best = max if column.more_is_better else min
    cells.append(f"{best(ours) / best(theirs):.2f}" if ours and theirs else "-")
    return cells


def _median_cell(column: Column, values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle, low, high = (
        cell(value, column.digits)
        for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low}-{high}, n={len(values)})"


def _cores(comparison: Comparison) -> str:
    rows = []
    for contender in comparison.contenders:
        rounds = [r for rs in comparison.rounds.values() for r in rs if r.target == contender.name]
        usages = [r.usage for r in rounds]
        cells = [
            f"{statistics.median(values):.2f}" if (values := [v for v in column if v is not None])
            else "-"
            for column in zip(*((u.client, u.server, u.others) for u in usages), strict=True)
        ]  # fmt: skip
        rows.append([contender.name, *cells])
    return markdown(["", "client", "server", "others"], rows)


def memory(contenders: Sequence[Contender]) -> dict[str, dict[str, float]]:
    """MiB resident and private, of epd's processes and of rivals as a whole."""
    found: dict[str, dict[str, float]] = {}
    for contender in contenders:
        pids = contender.pids or {"": contender.pid}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                family = [process, *([] if contender.pids else process.children(recursive=True))]
                infos = [p.memory_full_info() for p in family]
                found[f"{contender.name} {name}".strip()] = {
                    "rss": sum(i.rss for i in infos) / 2**20,
                    "uss": sum(i.uss for i in infos) / 2**20,
                }
    return found


def document(comparison: Comparison) -> bytes:
    rows: list[dict[str, Any]] = []
    for scenario, rounds in comparison.rounds.items():
        for one in rounds:
            usage = {"client": one.usage.client, "server": one.usage.server}
            rows += [
                {"scenario": scenario, "round": one.number, "wall_s": one.wall_s}
                | {"cores": {**usage, "others": one.usage.others}}
                | r.row(one.origin)
                for r in one.records
            ]
    return orjson.dumps(
        {
            "environment": environment(),
            "contenders": {c.name: c.how for c in comparison.contenders},
            "memory_mib": memory(comparison.contenders),
            "requests": rows,
        },
        option=orjson.OPT_INDENT_2,
    )


def main() -> None:
    end_on_sigterm()
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + given.minutes * 60
    with all_running(_starts(given)) as contenders:
        print("up:", "; ".join(f"{c.name} ({c.how})" for c in contenders), flush=True)
        comparison = Comparison(contenders, until)
        scenarios = [s for s in SCENARIOS if s.name in (given.only or [s.name])]
        if given.no_interference:
            comparison.interference_rounds = 0
        try:
            asyncio.run(compare(comparison, scenarios))
        finally:  # what was measured is kept, whatever ended it
            (given.out / "compare.json").write_bytes(document(comparison))
            (given.out / "compare.md").write_text(tables(comparison, scenarios) + "\n")
    print((given.out / "compare.md").read_text())


def _starts(given: argparse.Namespace) -> list[Start]:
    threads, checkpoint = given.threads, given.checkpoint
    settings: list[Sequence[str]] = [(), *(text.split(",") for text in given.colocated)]
    starts = [epd_with(checkpoint, threads, given.out, each) for each in settings]
    if not given.no_split:
        starts.append(epd_split(checkpoint, given.out))
    return [*starts, *sharing(given), *rivals(given, given.out)]


def _arguments() -> argparse.Namespace:
    parser = contest(__doc__, minutes=18.0)
    parser.add_argument("--colocated", action="append", default=[], metavar="SETTING,SETTING")
    parser.add_argument("--no-split", action="store_true")
    parser.add_argument("--no-interference", action="store_true")
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--only", action="append", choices=names, metavar="SCENARIO")
    return parser.parse_args()


if __name__ == "__main__":
    main()
