"""What the gateway adds: a real gateway process before an engine that costs nothing.

    python -m bench.gateway.overhead [CHECKPOINT] [--requests 40] [--pin] [--json FILE]

- TTFT of a text, of a picture in a size seen before, of one in a new size. In turn with each
  request two floors are measured: the same client against a server that answers at once
  (`bench.gateway.bare`), and the same stages called without a gateway, in the gateway's order
  (`bench.gateway.direct`). What is left is the gateway's: its web server, checks, prompt,
  routing, its ends of the calls.
- CPU of the gateway's processes for each streamed token, at 1 and at 64 streams whose tokens
  come 33 times a second; and of a gateway that has nothing to do, which is in those figures.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.flags import flag_parser
from bench.gateway.clients import request, run
from bench.gateway.direct import Direct
from bench.gateway.processes import CHECKPOINT, child, cpu_s, engine, gateway, served
from epd.bench.client import HttpTransport, open_session, send
from epd.bench.content import Words, body, data_url
from epd.bench.record import Record
from epd.bench.report import markdown
from epd.bench.workload import Picture, Shape

PICTURE = (640, 480)
TOKENS = 64
RATE = 33.0
STREAMS = (1, 64)
_WORDS = 30
_LEAST_REQUESTS = 8
_IDLE_S = 5.0
_LIMIT_S = 60.0


@dataclass
class Kind:
    """One kind of request. Times in seconds, request by request."""

    name: str
    shapes: list[Shape]
    total: list[float] = field(default_factory=list)
    client: list[float] = field(default_factory=list)
    stages: list[float] = field(default_factory=list)

    def added(self, of: Callable[[list[float]], float]) -> float:
        """What is left of the whole when both floors are taken off it."""
        return of(self.total) - of(self.client) - of(self.stages)

    def rows(self) -> list[list[str]]:
        times = {
            f"TTFT, {self.name}": self.total,
            "— the client alone": self.client,
            "— the stages alone": self.stages,
        }
        rows = [[name, _ms(statistics.median(v)), _ms(min(v))] for name, v in times.items()]
        added = (_ms(self.added(of)) for of in (statistics.median, min))
        return [*rows, ["— **added by the gateway**", *added]]


def kinds(requests: int) -> list[Kind]:
    """The texts are short, so that tokenizing is not the subject."""
    rng = random.Random(0)
    seen = [Picture(*PICTURE, rng.getrandbits(62)) for _ in range(requests)]
    new = [Picture(320 + 28 * (n % 20), 300 + n, n) for n in range(requests)]
    width, height = PICTURE
    return [
        Kind("text", [Shape(_WORDS, 1)] * requests),
        Kind(
            f"picture of {width} x {height}, size seen before",
            [Shape(_WORDS, 1, (picture,)) for picture in seen],
        ),
        Kind("picture of a new size", [Shape(_WORDS, 1, (picture,)) for picture in new]),
    ]


async def measure_ttft(
    addresses: dict[str, Any], stages: str, bare: str, requests: int
) -> list[Kind]:
    """One request at a time, kinds and floors in turn; the first of each kind is dropped."""
    found = kinds(requests)
    model, _ = served(addresses["http"])
    async with open_session(_LIMIT_S) as http:
        whole = HttpTransport(f"http://{addresses['http']}/v1", http)
        alone = HttpTransport(f"http://{bare}/v1", http)
        direct = Direct(stages)
        for number in range(requests):
            for kind in found:
                shape = kind.shapes[number]
                sent = body(shape, model, Words(), random.Random(number), {})
                files = [_file(picture) for picture in shape.pictures]
                answer = await _ask(whole, sent)
                kind.total.append(answer.ttft)
                kind.client.append((await _ask(alone, sent)).ttft)
                kind.stages.append(await direct.first_token(answer.prompt_tokens, files))
        await direct.close()
    for kind in found:
        for values in (kind.total, kind.client, kind.stages):
            del values[0]
    return found


async def _ask(transport: HttpTransport, sent: bytes) -> Record:
    now = asyncio.get_running_loop().time()
    record = Record("", "", 0, 0, "", 1, 0, scheduled=now)
    await send(transport, sent, record, _LIMIT_S)
    if not record.ok:
        raise SystemExit(f"a request failed: {record.error}: {record.detail}")
    return record


def _file(picture: Picture) -> bytes:
    return base64.b64decode(data_url(picture).partition(",")[2])


async def measure_streams(server: psutil.Process, address: str) -> dict[int, float]:
    """Streams -> CPU seconds of the gateway a token."""
    model, _ = served(address)
    raw = request(address, model, TOKENS)
    found = {}
    for streams in STREAMS:
        rounds = max(1, _LEAST_REQUESTS // streams)
        await run(address, raw, streams, 0.0)  # warms up
        before = cpu_s(server)
        done = [one for _ in range(rounds) for one in await run(address, raw, streams, 0.0)]
        if broken := [one for one in done if one.status != 200 or not one.done or one.error]:
            raise SystemExit(f"a stream broke: {broken[0]}")
        found[streams] = (cpu_s(server) - before) / (len(done) * TOKENS)
    return found


def measure_idle(server: psutil.Process) -> float:
    """CPU seconds a second of a gateway that has workers and no requests."""
    before = cpu_s(server)
    time.sleep(_IDLE_S)
    return (cpu_s(server) - before) / _IDLE_S


def _split_cores() -> str:
    """This process and its children are kept off the core that is the gateway's; its name."""
    own, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise SystemExit("--pin needs two cores")
    os.sched_setaffinity(0, others)
    return str(own)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def main() -> None:
    parser = flag_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=CHECKPOINT)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument(
        "--pin", action="store_true", help="the gateway on a core of its own, all else on the rest"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    own = _split_cores() if given.pin else ""
    with (
        gateway(given.checkpoint, own) as (server, addresses),
        child("-m", "bench.gateway.bare") as bare,
        engine(addresses, TOKENS, RATE) as stages,
    ):
        ttft = measure_ttft(addresses, stages, bare[1]["http"], given.requests)
        found = asyncio.run(ttft)
        idle = measure_idle(server)
        cpu = asyncio.run(measure_streams(server, addresses["http"]))
        cores = {"gateway": server.cpu_affinity(), "others": sorted(os.sched_getaffinity(0))}
    rows = [row for kind in found for row in kind.rows()]
    rows += [[f"CPU a token, {n} streams", f"{s * 1e3:.3f} ms", ""] for n, s in cpu.items()]
    rows.append(["CPU a second, idle", _ms(idle), ""])
    print(markdown(["", "median", "least"], rows))
    if given.json:
        times = {
            kind.name: {
                "total": kind.total,
                "client": kind.client,
                "stages": kind.stages,
                "added": kind.added(statistics.median),
            }
            for kind in found
        }
        figures = {"ttft_s": times, "cpu_s_per_token": cpu, "idle_cpu": idle, "cores": cores}
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
