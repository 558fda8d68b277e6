"""Where the time of a request goes: TTFT, TPOT, every stage, every transfer, memory.

    python -m bench.measure CHECKPOINT [--rounds 7] [--set key=value ...] [--out FILE]

Starts `epd serve CHECKPOINT` on free ports, sends every kind of request in turn (rounds
interleaved, so that drift of the machine hits all kinds alike), and prints Markdown tables
of medians: what the client saw (`epd.bench`), and the request's own timeline. Pictures and
texts differ in every request, so that no cache can answer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import orjson

from bench.asking import EXTRA
from bench.footprint import memory
from bench.service import Service, end_on_sigterm, epd_service
from epd.bench.campaign import connect
from epd.bench.client import open_session
from epd.bench.load import Limits, Target, Workload, run_round
from epd.bench.record import Record
from epd.bench.report import markdown
from epd.bench.workload import UNLOADED, Template

Kinds = Mapping[str, Template]


def kinds(options: argparse.Namespace) -> Kinds:
    picture = (options.side, options.side)
    return {
        "text, short": Template(12, options.tokens),
        "text, long": Template(options.long_words, options.tokens),
        "1 picture": Template(12, options.tokens, (picture,)),
        "3 pictures": Template(12, options.tokens, (picture,) * 3),
    }


async def measure(target: Target, wanted: Kinds, rounds: int, seed: int) -> dict[str, list[Record]]:
    """One request of each kind a round; the first round warms up.

    Raises:
        SystemExit: a request failed.
    """
    found: dict[str, list[Record]] = defaultdict(list)
    for number in range(rounds + 1):
        for place, (kind, template) in enumerate(wanted.items()):
            shapes = template.shapes(1, random.Random(seed))
            workload = Workload(shapes, extra=EXTRA, seed=seed * 10 + place)
            done = await run_round(target, UNLOADED, number, workload, Limits())
            (record,) = done.records
            if not record.ok:
                raise SystemExit(f"{kind}: {record.error}: {record.detail}")
            if number:
                found[kind].append(record)
    return dict(found)


async def _run(service: Service, options: argparse.Namespace) -> dict[str, list[Record]]:
    async with open_session(600.0) as http:
        target = await connect("epd", service.url, http, service.model)
        return await measure(target, kinds(options), options.rounds, options.seed)


def timeline(found: Mapping[str, list[Record]]) -> str:
    """One row a kind of request."""
    records = [record for rows in found.values() for record in rows]
    names = list(dict.fromkeys(name for record in records for name in record.phases))
    moving = [name for name in names if any(record.moved.get(name) for record in records)]
    head = ["request", "prompt tokens", "TTFT ms", "TPOT ms", *[f"{n} ms" for n in names]]
    lines = []
    for kind, rows in found.items():
        cells = [kind, str(rows[0].prompt_tokens)]
        cells.append(_median(r.ttft * 1e3 for r in rows))
        cells.append(_median((r.tpot or 0.0) * 1e3 for r in rows))
        cells += [_median(r.phases.get(name, 0.0) for r in rows) for name in names]
        cells += [f"{statistics.median(r.moved.get(n, 0) for r in rows):,.0f}" for n in moving]
        lines.append(cells)
    return markdown([*head, *[f"{name} bytes" for name in moving]], lines)


def _median(values: Iterable[float]) -> str:
    listed = list(values)
    return f"{statistics.median(listed):.1f} ({min(listed):.1f}-{max(listed):.1f})"


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--side", type=int, default=448, help="side of the pictures, px")
    parser.add_argument("--long-words", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--json", type=Path, help="every request's record")
    parser.add_argument("--out", type=Path, help="the tables, as Markdown")
    options = parser.parse_args()
    with epd_service(options.checkpoint, options.settings, say=print) as service:
        idle = memory(service)
        found = asyncio.run(_run(service, options))
        busy = memory(service)
    report = "\n\n".join(
        [
            f"{options.rounds} rounds, {options.tokens} tokens each, medians (min-max)",
            timeline(found),
            f"Memory before the first request\n\n{idle}",
            f"Memory after the last\n\n{busy}",
        ]
    )
    print(f"\n{report}")
    if options.out:
        options.out.write_text(f"{report}\n")
    if options.json:
        rows = {kind: [r.row(r.scheduled) for r in records] for kind, records in found.items()}
        options.json.write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
