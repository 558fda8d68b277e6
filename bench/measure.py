"""Where the time of a request goes: TTFT, TPOT, every stage, every transfer, memory.

    python -m bench.measure CHECKPOINT [--rounds 7] [--set key=value ...] [--json FILE]

Starts `epd serve CHECKPOINT` on free ports, sends every kind of request in turn (rounds
interleaved, so that drift of the machine hits all kinds alike), and prints a Markdown
table of medians. Client-side: TTFT and TPOT. Server-side: the request's own timeline.
Pictures and texts differ in every request, so that no cache can answer.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from openai import OpenAI
from PIL import Image, ImageDraw

_WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "life",
    "child",
    "world",
    "school",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of request."""

    name: str
    words: int
    pictures: tuple[int, ...] = ()
    """Side of each picture in pixels."""


KINDS = (
    Kind("text, short", 12),
    Kind("text, long", 0),
    Kind("1 picture", 12, (0,)),
    Kind("3 pictures", 12, (0, 0, 0)),
)


@dataclass(slots=True)
class Sample:
    """One answered request; all times in ms."""

    ttft: float
    tpot: float
    prompt_tokens: int
    phases: dict[str, float] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def _picture(rng: random.Random, side: int) -> str:
    image = Image.new("RGB", (side, side), tuple(rng.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y = rng.randrange(side), rng.randrange(side)
        colour = tuple(rng.randrange(256) for _ in range(3))
        draw.rectangle((x, y, x + side // 5, y + side // 5), fill=colour)
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def _message(rng: random.Random, kind: Kind, side: int, long_words: int) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": _picture(rng, given or side)}}
        for given in kind.pictures
    ]
    parts.append({"type": "text", "text": _words(rng, kind.words or long_words)})
    return [{"role": "user", "content": parts}]


def _ask(client: OpenAI, model: str, messages: list[Any], tokens: int) -> Sample:
    began = time.perf_counter()
    arrivals: list[float] = []
    usage: Any = None
    phases: list[dict[str, Any]] = []
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        # Ids of a random model may be halves of characters, which make no text; logprobs
        # come with every token.
        logprobs=True,
        extra_body={"ignore_eos": True, "timeline": True},
    )
    for event in stream:
        usage = event.usage or usage
        phases = _phases((event.model_extra or {}).get("timeline")) or phases
        for choice in event.choices:
            content = (choice.logprobs and choice.logprobs.content) or []
            arrivals += [time.perf_counter()] * len(content)
    sample = Sample(
        ttft=(arrivals[0] - began) * 1e3,
        tpot=(arrivals[-1] - arrivals[0]) * 1e3 / max(1, len(arrivals) - 1),
        prompt_tokens=usage.prompt_tokens,
    )
    for phase in phases:
        name = re.sub(r"\[\d+\]", "", phase["name"])
        sample.phases[name] = sample.phases.get(name, 0.0) + phase["duration_ms"]
        sample.moved[name] = sample.moved.get(name, 0) + phase.get("bytes", 0)
    return sample


def _phases(timeline: Any) -> list[dict[str, Any]]:
    phases: list[dict[str, Any]] = (
        timeline["phases"] if isinstance(timeline, dict) else timeline or []
    )
    return phases


@contextmanager
def _service(checkpoint: str, settings: list[str]) -> Iterator[tuple[str, str, dict[str, int]]]:
    """(base URL, model, pid by process name) of a service that lives for the block."""
    command = [sys.executable, "-m", "epd.cli", "serve", checkpoint]
    for setting in ("gateway.http_port=0", "gateway.grpc_port=0", "gateway.membership_port=0"):
        command += ["--set", setting]
    for setting in settings:
        command += ["--set", setting]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield _read_state(process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _read_state(process: subprocess.Popen[str]) -> tuple[str, str, dict[str, int]]:
    pids: dict[str, int] = {}
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(r"epd serve: (\S+) ready .*\bpid (\d+)", line):
            pids[found[1]] = int(found[2])
        if found := re.match(r"epd serve: serving (\S+) at (\S+) ", line):
            return found[2], found[1], pids
    raise SystemExit("epd serve did not start")


def _tables(samples: dict[str, list[Sample]]) -> str:
    names = list(dict.fromkeys(n for rows in samples.values() for s in rows for n in s.phases))
    head = ["request", "prompt tokens", "TTFT ms", "TPOT ms", *[f"{n} ms" for n in names]]
    moving = [n for n in names if any(s.moved.get(n) for rows in samples.values() for s in rows)]
    head += [f"{n} bytes" for n in moving]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for kind, rows in samples.items():
        cells = [kind, str(rows[0].prompt_tokens)]
        cells += [_median(s.ttft for s in rows), _median(s.tpot for s in rows)]
        cells += [_median(s.phases.get(n, 0.0) for s in rows) for n in names]
        cells += [f"{statistics.median(s.moved.get(n, 0) for s in rows):,.0f}" for n in moving]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _median(values: Iterator[float]) -> str:
    listed = list(values)
    return f"{statistics.median(listed):.1f} ({min(listed):.1f}-{max(listed):.1f})"


def _memory(pids: dict[str, int]) -> str:
    lines = ["| process | RSS MiB | of it private (USS) MiB |", "|---|---|---|"]
    for name, pid in pids.items():
        memory = psutil.Process(pid).memory_full_info()
        lines.append(f"| {name} | {memory.rss / 2**20:.0f} | {memory.uss / 2**20:.0f} |")
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> None:
    """Run all rounds and print the tables."""
    rng = random.Random(options.seed)
    samples: dict[str, list[Sample]] = defaultdict(list)
    with _service(options.checkpoint, options.settings) as (url, model, pids):
        idle = _memory(pids)
        with OpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) as client:
            for number in range(options.rounds + 1):
                for kind in KINDS:
                    messages = _message(rng, kind, options.side, options.long_words)
                    sample = _ask(client, model, messages, options.tokens)
                    if number:  # the first round warms up
                        samples[kind.name].append(sample)
        busy = _memory(pids)
    print(f"\n{options.rounds} rounds, {options.tokens} tokens each, medians (min-max)\n")
    print(_tables(samples))
    print(f"\nMemory before the first request\n\n{idle}\n\nMemory after the last\n\n{busy}")
    if options.json:
        rows = {
            k: [{"ttft": s.ttft, "tpot": s.tpot, "phases": s.phases} for s in v]
            for k, v in samples.items()
        }
        Path(options.json).write_text(json.dumps(rows, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--side", type=int, default=448, help="side of the pictures, px")
    parser.add_argument("--long-words", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--json")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
