"""How cost grows: with the prompt's length, with pictures, with streams; beside theory.

    python -m bench.growth CHECKPOINT OUT [--minutes 10] [--side 448] [--set key=value ...]
                           [--prompts 128,...,8192] [--images 1,...,16] [--streams 1,...,64]

One service: encode on one core, everything else on another, one thread a stage. Every size of
every axis once a round, in random order, each round anew, until the time is over (a size that
would not end in time is left out; every size runs at least once). Medians, their exponents
(slope of the logarithms), and the same of what `bench.theory` derives from the checkpoint's
operations and bytes: they should be within 0.15. Writes OUT/growth.{json,md,png}.

What is measured: time to the first token of a new prompt of so many tokens; the same of a
short prompt with so many new pictures; the time between tokens while so many streams decode,
all of them past their first token and none at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.asking import Asker, user
from bench.flags import flag_parser, whole_numbers
from bench.growth_figures import AXES, Curve, document, draw, table
from bench.overlap import pinned
from bench.service import Service, end_on_sigterm, epd_service
from bench.theory import Machine, Model, Theory, measured, model_of
from epd.bench.campaign import connect
from epd.bench.client import open_session
from epd.bench.load import Limits, Workload, run_round
from epd.bench.record import Record
from epd.bench.workload import Load, Template

STEP_TOKENS = 256
"""Of prefill: a fixed budget, so that theory knows the chunks."""
_READ_BYTES = 512 << 20
_WORDS = 12


@dataclass
class Growth:
    until: float
    """On time.monotonic(): no size begins that would end later, but for its first time."""
    sizes: dict[str, Sequence[int]]
    side: int
    found: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """Seconds, a round after the other."""
    tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    """Prompt tokens as the service counts them; of streams the mean context."""
    shortest: list[float] = field(default_factory=list)
    """TTFT of the shortest prompt there is, a round after the other."""
    shortest_tokens: int = 0

    def out_of_time(self, spent: Mapping[tuple[str, int], float]) -> bool:
        """Whether not even the shortest size would end in time."""
        return time.monotonic() + min(spent.values()) > self.until

    def keep(self, axis: str, size: int, seconds: float, tokens: int) -> None:
        self.found.setdefault((axis, size), []).append(seconds)
        self.tokens[axis, size] = tokens


async def measure(growth: Growth, service: Service, seed: int = 0) -> None:
    async with open_session(900.0) as http:
        asker = Asker(await connect("epd", service.url, http, service.model), seed)
        await _images(asker, growth.side, 1)  # warm-up
        spent: dict[tuple[str, int], float] = {}
        rng = random.Random(seed)
        for number in range(1000):
            for axis, size in _in_random_order(growth.sizes, rng):
                late = time.monotonic() + spent.get((axis, size), 0.0) > growth.until
                if number and late:
                    continue
                start = time.monotonic()
                seconds, tokens = await _once(asker, growth.side, axis, size, number)
                spent[axis, size] = time.monotonic() - start
                growth.keep(axis, size, seconds, tokens)
                print(f"{number:>3} {axis} {size}: {seconds:.3f} s", flush=True)
            record = await asker.ask([user("a", (), "")], "shortest")
            growth.shortest.append(record.ttft)
            growth.shortest_tokens = record.prompt_tokens
            if growth.out_of_time(spent):
                return


def _in_random_order(
    sizes: dict[str, Sequence[int]], rng: random.Random
) -> Iterator[tuple[str, int]]:
    points = [(axis, size) for axis, of in sizes.items() for size in of]
    yield from rng.sample(points, len(points))


async def _once(asker: Asker, side: int, axis: str, size: int, number: int) -> tuple[float, int]:
    """(seconds, tokens) of one size."""
    if axis == "prompt":
        record = await asker.ask([user(asker.words(size), (), "")], axis)
        return record.ttft, record.prompt_tokens
    if axis == "images":
        record = await _images(asker, side, size)
        return record.ttft, record.prompt_tokens
    return await _streams(asker, size, number)


async def _images(asker: Asker, side: int, count: int) -> Record:
    pictures = [asker.picture(side) for _ in range(count)]
    return await asker.ask([user("", pictures, asker.words(_WORDS))], "images")


async def _streams(asker: Asker, count: int, number: int) -> tuple[float, int]:
    """(time between tokens while all decode, their mean context).

    Raises:
        SystemExit: a request failed, or the streams were never all there at once.
    """
    tokens = 64 + 2 * count  # the first must not be at its end when the last begins
    shapes = Template(_WORDS, tokens).shapes(count, random.Random(number))
    extra = {"ignore_eos": True, "logprobs": True}
    workload = Workload(shapes, extra=extra, seed=number)
    load = Load("concurrency", count)
    done = await run_round(asker.target, load, number, workload, Limits(900.0))
    if failed := [record for record in done.records if not record.ok]:
        raise SystemExit(f"{count} streams: {failed[0].error}: {failed[0].detail}")
    gaps = together(done.records)
    if not gaps:
        raise SystemExit(f"{count} streams were never decoded all at once: fewer --streams")
    context = done.records[0].prompt_tokens + tokens // 2
    return statistics.median(gaps), context


def together(records: Sequence[Record]) -> list[float]:
    """Gaps between tokens from when all had their first one until the first had its last."""
    start = max(record.arrivals[0] for record in records)
    end = min(record.arrivals[-1] for record in records)
    return [
        later - earlier
        for record in records
        for earlier, later in zip(record.arrivals, record.arrivals[1:], strict=False)
        if start <= earlier and later <= end
    ]


def curves(growth: Growth, model: Model, machine: Machine) -> list[Curve]:
    """Measured medians of each axis beside theory's."""
    bare = Theory(model, machine, STEP_TOKENS)
    shortest = statistics.median(growth.shortest)
    fixed = max(0.0, shortest - bare.prompt(growth.shortest_tokens))
    theory = Theory(model, machine, STEP_TOKENS, fixed)
    made = []
    for axis, sizes in growth.sizes.items():
        expected = [_expected(theory, growth, axis, size) for size in sizes]
        xs = [growth.tokens[axis, size] if axis == "prompt" else size for size in sizes]
        made.append(Curve(axis, xs, [growth.found[axis, size] for size in sizes], expected))
    return made


def _expected(theory: Theory, growth: Growth, axis: str, size: int) -> float:
    tokens = growth.tokens[axis, size]
    if axis == "prompt":
        return theory.prompt(tokens)
    if axis == "images":
        words = max(0, tokens - size * theory.model.picture_rows)
        return theory.pictures(size, 0, words)
    return theory.step(size, tokens)


def main() -> None:
    end_on_sigterm()
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    model = model_of(given.checkpoint, given.side)
    rates = [measured("bfloat16", _READ_BYTES)]
    settings = [
        *pinned(),
        f"prefill.step_tokens={STEP_TOKENS}",
        f"prefill.chunk_tokens={STEP_TOKENS}",
        "prefill.step_ms=0",
        *given.settings,
    ]
    sizes = {axis: getattr(given, axis) for axis in AXES}
    growth = Growth(started + given.minutes * 60, sizes, given.side)
    with epd_service(given.checkpoint, settings, log=given.out / "service.log") as service:
        asyncio.run(measure(growth, service))
    rates.append(measured("bfloat16", _READ_BYTES))
    machine = Machine(max(r.flops for r in rates), max(r.bytes for r in rates))
    made = curves(growth, model, machine)
    told = f"{', '.join(settings)}; {machine.flops / 1e9:.0f} Gflop/s, "
    told += f"{machine.bytes / 1e9:.1f} GB/s\n\n{table(made)}\n"
    (given.out / "growth.md").write_text(told)
    (given.out / "growth.json").write_bytes(document(made, model, machine, settings))
    draw(made, given.out / "growth.png")
    print(f"\n{told}")


def _arguments() -> argparse.Namespace:
    parser = flag_parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument(
        "--prompts",
        dest="prompt",
        type=whole_numbers,
        default="128,256,512,1024,2048,4096,8192",
    )
    parser.add_argument("--images", type=whole_numbers, default="1,2,4,8,16")
    parser.add_argument("--streams", type=whole_numbers, default="1,2,4,8,16,32,64")
    return parser.parse_args()


if __name__ == "__main__":
    main()
