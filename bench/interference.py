"""What bursts of image prompts do to running answers: split, monolithic, rivals.

    python -m bench.interference CHECKPOINT OUT [--minutes 12] [--budgets 30,60,125,250]
                                 [--bursts 1,2,4] [--every 5] [--long 1000]
                                 [--unpinned [SETTING,SETTING]]...
                                 [--turns [SETTING,SETTING]]... [--vllm VENV]
                                 [--preload LIB:LIB] [--llama BINARY,MODEL,MMPROJ]
                                 [--openvino VENV,MODEL] [--transformers VENV]

Steady streams decode all the time; every few seconds, for as long as they do, a burst of
image prompts comes in between. Servers: split `epd` (decode and gateway on one half of the
cores, encode and prefill on the other), monolithic `epd` (all stages in one process, all
cores) with several chunk budgets (`prefill.step_ms`), if asked for split `epd` whose processes
share all cores, without turns or with them, and rivals that it is told of. `--long` adds a text
prompt of so many tokens to each burst.

1. Each server alone: medians of an unloaded stream and image prompt, which make the SLO
   (TTFT <= 5 x, TPOT <= 2 x, of the best server of each kind).
2. The middle burst, once for each budget: the monolithic server goes on with its best one,
   that with the least p99 of the time between tokens, of those whose throughput is at least
   0.9 of the best budget's.
3. All loads at the servers that are left, in turn, round by round, until the time is over.
   A rival that answers one request after another gets the middle load once, first of all.

Writes OUT/interference.{json,md,png}.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from bench.contenders import Contender, Start, all_running, connected, epd_monolithic, epd_split
from bench.flags import whole_numbers
from bench.interference_figures import Found, best_budget, document, draw, tables
from bench.rivals import SLOW, contest, rivals, sharing
from bench.scenarios import AS_RECORDED, IMAGE, interference
from bench.service import end_on_sigterm
from epd.bench.campaign import in_turn
from epd.bench.load import Limits, Round, Target, Workload, run_round
from epd.bench.workload import UNLOADED, Picture, Shape

STREAMS, TOKENS, EVERY_S = 4, 320, 5.0
_DECODING_S = 21.0
"""About how long the streams take with nothing between them, s: bursts come until then."""
_ALONE = 2
_LOADS = 1000
"""More than there are images in a burst."""
_MONOLITHIC = "epd monolithic"


def burst_load(images: int, seed: int, every_s: float = EVERY_S, long_tokens: int = 0) -> Workload:
    """Steady streams, and bursts of so many image prompts. No two loads share a picture or a
    text: what one asked, a cache would know in the next."""
    bursts = max(1, int(_DECODING_S / every_s))
    load = interference(STREAMS, TOKENS, bursts, images, every_s, long_tokens)
    return Workload(trace=load.trace, extra=load.extra, seed=_LOADS * seed + images)


def alone(kind: str, seed: int, long_tokens: int = 0) -> Workload:
    """One request of a kind, with nobody else there."""
    shape = Shape(60, 32, kind="steady")
    if kind == "burst":
        shape = Shape(80, 4, (Picture(*IMAGE, seed),), kind="burst")
    elif kind == "long":
        shape = Shape(long_tokens, 4, kind="long")
    return Workload([shape], extra={"ignore_eos": True, "logprobs": True}, seed=seed)


async def experiment(
    contenders: Sequence[Contender],
    bursts: Sequence[int],
    every_s: float,
    long_tokens: int,
    until: float,
) -> Found:
    """All three parts; `until` on the event loop's clock."""
    how = {c.name: c.how for c in contenders}
    found = Found(list(bursts), how, every_s, long_tokens)
    async with connected(contenders) as targets:
        await measure(found, targets, until)
    return found


async def measure(found: Found, targets: Sequence[Target], until: float) -> None:
    clock = asyncio.get_running_loop().time
    for number in range(_ALONE + 1):
        for target in targets:
            for kind in found.kinds:
                load = alone(kind, number, found.long_tokens)
                done = await run_round(target, UNLOADED, number, load, Limits())
                if number:
                    found.alone.append(done)
    middle = found.bursts[len(found.bursts) // 2]
    for target in targets:
        if target.name.startswith(_MONOLITHIC):
            found.budgets.append(_told(await _burst(found, target, middle, 0)))
    left = _without_worse_budgets(found, targets)
    for target in (one for one in left if one.name in SLOW):
        found.keep(middle, _told(await _burst(found, target, middle, 1)))
    left = [target for target in left if target.name not in SLOW]
    number, longest = 0, 0.0
    while number < 1 or clock() + longest < until:
        start = clock()
        for images in found.bursts:
            for target in in_turn(left, number):
                found.keep(images, _told(await _burst(found, target, images, number + 1)))
        number, longest = number + 1, max(longest, clock() - start)


def _without_worse_budgets(found: Found, targets: Sequence[Target]) -> list[Target]:
    found.best = best_budget(found.budgets)
    return [
        target
        for target in targets
        if target.name == found.best or not target.name.startswith(_MONOLITHIC)
    ]


async def _burst(found: Found, target: Target, images: int, number: int) -> Round:
    load = burst_load(images, number, found.every_s, found.long_tokens)
    return await run_round(target, AS_RECORDED, number, load, Limits(400.0))


def _told(done: Round) -> Round:
    failed = [record for record in done.records if not record.ok]
    said = f"; {len(failed)} failed: {failed[0].error} {failed[0].detail}" if failed else ""
    print(f"{done.number:>3} {done.target}: {done.wall_s:.1f} s{said}", flush=True)
    return done


def main() -> None:
    end_on_sigterm()
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + given.minutes * 60
    with all_running(_starts(given)) as contenders:
        found = asyncio.run(experiment(contenders, given.bursts, given.every, given.long, until))
    (given.out / "interference.json").write_bytes(document(found))
    told = tables(found) + "\n"
    (given.out / "interference.md").write_text(told)
    draw(found, given.out / "interference.png")
    print(f"\n{told}")


def _starts(given: argparse.Namespace) -> list[Start]:
    threads, checkpoint, out = given.threads, given.checkpoint, given.out
    starts = [epd_split(checkpoint, out)]
    starts += [epd_monolithic(checkpoint, threads, out, ms) for ms in given.budgets]
    return [*starts, *sharing(given), *rivals(given, out)]


def _arguments() -> argparse.Namespace:
    parser = contest(__doc__, minutes=12.0)
    parser.add_argument("--budgets", type=whole_numbers, default="30,60,125,250")
    parser.add_argument("--bursts", type=whole_numbers, default="1,2,4")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between bursts")
    parser.add_argument("--long", type=int, default=0, metavar="TOKENS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
