"""What overlap inside one request brings, and what is not done twice.

    python -m bench.overlap CHECKPOINT [--rounds 7] [--images 4] [--sides 448]
                            [--only "words,"] [--no-caches] [--set key=value ...]
                            [--json FILE] [--markdown FILE]

Two services, one with `prefill.overlap=false`; in each, encode has one core, everything else
another one, one thread a stage. Both are asked the same kinds of request in turn, round by
round; the first round is dropped. Encode time E and prefill time P are those of the arm
without overlap, from its own timeline: there nothing of the two happens at once.

*least* is what the order of things allows with that E and P: text is computed at once, each
picture's part when it was encoded and what is before it is computed. The last picture's part
can't be computed before all encoding is over, so max(E, P) is out of reach where the two are
of about one length (docs/adr/0008-overlap-bound.md). How much longer E is depends on the
checkpoint's tower, and on the pictures' size: `--sides 448,896` asks for others as well.
`--only` leaves the kinds of request whose names begin so, `--no-caches` leaves out what is not
done twice: large checkpoints take minutes a round.
*encoding beside prefill* is what two cores that share a memory cost each other.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.asking import Asker, counted, user
from bench.flags import flag_parser, whole_numbers
from bench.overlap_figures import ARMS, Case, Found, document, tables
from bench.service import Service, end_on_sigterm, epd_service
from bench.theory import model_of
from epd.bench.campaign import connect
from epd.bench.client import open_session
from epd.bench.record import Record

_ENCODED = 'epd_images_total{stage="encode"}'


async def measure(
    services: Mapping[str, Service], cases: Sequence[Case], rounds: int, caches: bool = True
) -> Found:
    """All cases in both arms, then the `caches` of the arm with overlap, `rounds` times."""
    found = Found()
    async with open_session(600.0) as http:
        askers = {}
        for number, (arm, service) in enumerate(services.items()):
            target = await connect(arm, service.url, http, service.model)
            askers[arm] = Asker(target, seed=number)
        for case in cases:
            found.image_tokens[case.name] = await _image_tokens(askers["on"], case)
        wall, cpu = time.monotonic(), time.process_time()
        for number in range(rounds + 1):
            for case in cases:
                for arm in ARMS if number % 2 else ARMS[::-1]:
                    record = await _new(askers[arm], case)
                    if number:
                        found.cases[case.name, arm].append(record)
                    print(f"{number:>3} {case.name}, {arm}: {record.ttft:.2f} s", flush=True)
            if caches:
                await _caches(found, askers["on"], services["on"], cases[0], keep=number > 0)
        found.client_cores = (time.process_time() - cpu) / (time.monotonic() - wall)
    return found


async def _new(asker: Asker, case: Case) -> Record:
    pictures = [asker.picture(case.side) for _ in range(case.images)]
    message = user(asker.words(case.before), pictures, asker.words(case.after))
    return await asker.ask([message], case.name)


async def _image_tokens(asker: Asker, case: Case) -> int:
    """Of one picture, with its marks: the service's own count."""
    counts = []
    for images in (0, 1):
        pictures = [asker.picture(case.side) for _ in range(images)]
        message = user("a", pictures, "b")
        counts.append((await asker.ask([message], "count")).prompt_tokens)
    return counts[1] - counts[0]


async def _caches(found: Found, asker: Asker, service: Service, case: Case, keep: bool) -> None:
    """A picture and a conversation again, beside new ones of the same size; one picture
    that two requests, and two places of one request, want at once."""

    async def asked(kind: str, *requests: list[dict[str, Any]]) -> list[Record]:
        before = counted(service, "encode-0", _ENCODED)
        records = await asyncio.gather(*(asker.ask(one, kind) for one in requests))
        if keep:
            found.caches[kind] += records
            found.encoded[kind].append(counted(service, "encode-0", _ENCODED) - before)
        return list(records)

    def about(*pictures: Any, words: int = 40) -> dict[str, Any]:
        return user("", pictures, asker.words(words))

    shown, shared, doubled = (asker.picture(case.side) for _ in range(3))
    await asked("a new picture", [about(shown)])
    await asked("the same picture, other words", [about(shown)])
    await asked("one picture, two requests at once", [about(shared)], [about(shared)])
    await asked("one picture, twice in a request", [about(doubled, doubled)])
    said = {"role": "assistant", "content": asker.words(30)}
    opening, strange = (about(asker.picture(case.side), words=600) for _ in range(2))
    await asked("a conversation's first turn", [opening])
    await asked("its next turn", [opening, said, about(words=20)])
    await asked("as long a conversation, all new", [strange, said, about(words=20)])


# --- the services


def pinned() -> list[str]:
    """Encode on one core, everything else on another, one thread each.

    Raises:
        SystemExit: there is one core only.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two arms with a core a stage need two cores")
    rest = [f"{part}.cpus={cores[0]}" for part in ("gateway", "prefill", "decode")]
    return ["model.threads=1", f"encode.cpus={cores[1]}", *rest]


@contextmanager
def both(checkpoint: Path, settings: Sequence[str]) -> Iterator[dict[str, Service]]:
    with ExitStack() as stack:
        services = {}
        for arm in ARMS:
            switch = f"prefill.overlap={'true' if arm == 'on' else 'false'}"
            service = epd_service(checkpoint, [*pinned(), *settings, switch])
            services[arm] = stack.enter_context(service)
        yield services


def cases_of(
    images: int, sides: Sequence[int], before: int, only: Sequence[str] = ("",)
) -> list[Case]:
    """All orders of pictures and words with the first size, one order with the others; of
    these, those whose names begin as `only` says."""
    first, *others = sides
    name = f"{images} pictures of {first} x {first}"
    cases = [
        Case(f"{name}, then words", images, first, 0, 40),
        Case(f"words, {name}", images, first, 40, 0),
        Case(f"many words, {name}", images, first, before, 0),
        *(Case(f"words, {images} of {side} x {side}", images, side, 40, 0) for side in others),
    ]
    return [case for case in cases if case.name.startswith(tuple(only))]


def main() -> None:
    end_on_sigterm()
    parser = flag_parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--sides", type=whole_numbers, default="448", help="of the pictures")
    parser.add_argument("--before", type=int, default=700, help="tokens of the many words")
    parser.add_argument("--only", action="append", metavar="BEGINNING", help="of a request's name")
    parser.add_argument("--no-caches", action="store_true")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    # One picture is one chunk: nobody else is held up here, and large chunks are cheaper.
    settings = ["prefill.step_ms=1000", *given.settings]
    cases = cases_of(given.images, given.sides, given.before, given.only or ("",))
    if not cases:
        parser.error(f"--only {given.only}: no request's name begins so")
    with both(given.checkpoint, settings) as services:
        found = asyncio.run(measure(services, cases, given.rounds, not given.no_caches))
    told = f"{given.rounds} rounds, {', '.join([*pinned(), *settings])}; "
    work = model_of(given.checkpoint, cases[0].side).prefill_flops
    told += f"client: {found.client_cores:.2f} cores\n\n{tables(found, cases, work)}\n"
    print(f"\n{told}")
    if given.markdown:
        given.markdown.write_text(told)
    if given.json:
        given.json.write_bytes(document(found, cases, {"set": [*pinned(), *settings]}, work))


if __name__ == "__main__":
    main()
