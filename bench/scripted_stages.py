"""encode, prefill and decode as scripts in one process: an engine that costs nothing.

    python -m bench.scripted_stages CHECKPOINT MEMBERSHIP [--tokens 64] [--gap-s 0.03]

joins the gateway at MEMBERSHIP and answers until stdin ends. The stages are the fakes of the
gateway's own tests, so they keep to the protocol.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from epd.config import ModelConfig
from epd.jobs import Stage
from gateway.checkpoint import load
from tests.e2e.fake_stages import Call, Fake, Script, hello_of

_FIRST_ID = 300
"""Ids from here on are words in the demo checkpoint's vocabulary."""


async def serve(checkpoint: str, membership: str, tokens: int, gap_s: float) -> None:
    spec = load(ModelConfig(path=checkpoint)).spec
    hello = hello_of(spec)

    async def pace(call: Call) -> None:
        await asyncio.sleep(gap_s)

    script = Script(output=[_FIRST_ID + n % 64 for n in range(tokens)])
    if gap_s:
        script.hooks["decode.token"] = pace
    fakes = [
        Fake(stage, str(stage), script, {**hello, "epoch": epoch, "capacity": {}})
        for epoch, stage in enumerate(Stage, start=1)
    ]
    for fake in fakes:
        await fake.start(membership)
    print("joined", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for fake in fakes:
        await fake.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("membership")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gap-s", type=float, default=0.0)
    given = parser.parse_args()
    asyncio.run(serve(given.checkpoint, given.membership, given.tokens, given.gap_s))


if __name__ == "__main__":
    main()
