"""`bench.compare`: rounds, time, and the tables, with scripted servers on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from bench.compare import SLOW_ROUNDS, Comparison, document, measure, tables
from bench.contenders import Contender
from bench.scenarios import SCENARIOS, interference
from epd.bench.content import Words
from epd.bench.load import Target
from epd.bench.workload import Picture, Shape
from tests.unit.bench_script import At, Script, answer
from tests.unit.virtual_time import run


def script(first_s: float, gap_s: float, slots: int) -> Script:
    def steps(body: dict[str, Any]) -> list[At]:
        return answer(first_s, gap_s, body["max_tokens"])

    return Script(steps, slots)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Ours: 1 s to the first token, 50 ms a token. vllm: twice that. transformers: as vllm,
    one request after another."""
    servers = {
        "epd colocated": script(1.0, 0.05, 64),
        "vllm": script(2.0, 0.1, 64),
        "transformers": script(2.0, 0.1, 1),
    }
    contenders = [Contender(name, "http://x/v1", "m", 1, how=f"how {name}") for name in servers]

    async def main() -> Comparison:
        until = asyncio.get_running_loop().time() + 1200
        found = Comparison(contenders, until)
        targets = [Target(name, "http://x/v1", server, "m") for name, server in servers.items()]
        await measure(found, targets, SCENARIOS)
        assert asyncio.get_running_loop().time() < until
        return found

    return run(main())


def test_rounds_go_on_while_there_is_time(comparison: Comparison) -> None:
    fast, slow = (len(comparison.of("1 image", name)) for name in ("vllm", "transformers"))
    assert fast > 3
    assert slow == SLOW_ROUNDS, "it would take the others' time"
    assert len(comparison.of("1 image", "epd colocated")) == fast
    assert not comparison.of("interference", "transformers")


def test_figures_and_ratios(comparison: Comparison) -> None:
    rows = {
        line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:]
        for line in tables(comparison, SCENARIOS).splitlines()
        if line.startswith("| ")
    }
    ours, theirs, _, ratio = rows["decode, 1 stream, ms/token"]
    assert (ours.split()[0], theirs.split()[0]) == ("50.0", "100.0")
    assert float(ratio.removesuffix(" |")) == 0.5
    assert rows["TTFT, 1 image, s"][0].startswith("1.00")
    assert rows["decode, 8 streams, ms/token (median gap)"][0].startswith("50.0")
    text = rows["8 clients, text, tok/s"]
    assert float(text[0].split()[0]) == pytest.approx(8 * 32 / (1.0 + 31 * 0.05), rel=0.01)
    assert float(text[3].removesuffix(" |")) == 2.0, "more is better: ours over the best rival"
    assert rows["ITL p99, ms"][0].startswith("50.0")
    assert "how vllm" in tables(comparison, SCENARIOS)


def test_no_two_scenarios_of_any_rounds_share_a_picture_or_a_text() -> None:
    pictures: list[Picture] = []
    starts: list[str] = []
    for number in range(3):
        for scenario in SCENARIOS:
            workload = scenario.workload(number)
            for timed in workload.timed(scenario.load, number):
                pictures += timed.shape.pictures
            rng = random.Random(f"{workload.seed} {number} {scenario.load} words")
            starts.append(Words().text(Shape(40, 1), rng))
    assert len(pictures) == 3 * (2 + 4 + 8)
    assert len(set(pictures)) == len(pictures)
    assert len({start[:40] for start in starts}) == len(starts)


def test_every_request_is_in_the_document(comparison: Comparison) -> None:
    text = document(comparison)
    rounds = [one for rounds in comparison.rounds.values() for one in rounds]
    assert text.count(b'"scheduled"') == sum(len(one.records) for one in rounds)


def test_bursts_come_while_streams_decode() -> None:
    trace = interference(streams=2, tokens=50, bursts=2, images=3).trace
    assert [t.shape.kind for t in trace] == ["steady"] * 2 + ["burst"] * 6
    assert [t.at_s for t in trace[2:]] == [5.0] * 3 + [10.0] * 3
    pictures = [t.shape.pictures[0] for t in trace[2:]]
    assert len(set(pictures)) == 6, "each new"
