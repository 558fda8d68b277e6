"""`bench.interference` with scripted servers on a virtual clock."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench.interference import burst_load, measure
from bench.interference_figures import Found, best_budget, document, draw, tables
from bench.scenarios import AS_RECORDED
from epd.bench.load import Target
from tests.unit.bench_script import At, Script, answer
from tests.unit.virtual_time import run


def script(gap_s: float, image_gap_s: float) -> Script:
    """Tokens at even times, or, of steady answers, every hundredth later by so much."""

    def steps(body: dict[str, Any]) -> list[At]:
        made = answer(0.2, gap_s, body["max_tokens"])
        if body["max_tokens"] < 100:
            return made
        late = 0.0
        shifted = []
        for number, step in enumerate(made):
            late += image_gap_s if number % 50 == 49 else 0.0
            shifted.append(At(step.s + late, step.what))
        return shifted

    return Script(steps)


SERVERS = {
    "epd split": script(0.05, 0.0),
    "epd monolithic, 30 ms": script(0.09, 0.3),  # low gaps, but far too slow
    "epd monolithic, 60 ms": script(0.05, 0.4),
    "epd monolithic, 250 ms": script(0.04, 0.9),
    "vllm": script(0.05, 0.2),
    "transformers": script(0.1, 0.4),
}


@pytest.fixture(scope="module")
def found() -> Found:
    async def main() -> Found:
        made = Found([1, 2, 4], dict.fromkeys(SERVERS, "how"))
        targets = [Target(name, "http://x/v1", server, "m") for name, server in SERVERS.items()]
        until = asyncio.get_running_loop().time() + 450
        await measure(made, targets, until)
        assert asyncio.get_running_loop().time() < until
        return made

    return run(main())


def test_the_best_budget_is_the_least_p99_that_keeps_its_throughput(found: Found) -> None:
    assert found.best == best_budget(found.budgets) == "epd monolithic, 60 ms"
    assert set(found.targets) == {"epd split", "epd monolithic, 60 ms", "vllm", "transformers"}
    assert all(len(found.of(images, "epd split")) >= 1 for images in (1, 2, 4))


def test_latency_beside_throughput_and_goodput(found: Found) -> None:
    rows = [line.split(" | ") for line in tables(found).splitlines() if line.startswith("| 4 ")]
    split, mono, _, ratio, _ = rows
    assert float(split[3]) == pytest.approx(50, abs=1)
    assert float(mono[3]) == pytest.approx(450, abs=5)
    assert float(ratio[2]) == pytest.approx(9, abs=0.2)
    assert float(ratio[3]) == pytest.approx(1, abs=0.02)  # the last burst is the end of both
    assert "100%" in split


def test_a_rival_that_answers_one_after_another_has_the_middle_load_once(found: Found) -> None:
    assert [len(found.of(images, "transformers")) for images in (1, 2, 4)] == [0, 1, 0]
    rows = [line.split(" | ") for line in tables(found).splitlines() if "| transformers" in line]
    assert [row[0] for row in rows] == ["| 2", "| 2"]


def test_document_and_picture(found: Found, tmp_path: Path) -> None:
    whole = json.loads(document(found))
    assert {row["part"] for row in whole["requests"]} == {
        "alone", "budgets", "bursts of 1", "bursts of 2", "bursts of 4",
    }  # fmt: skip
    draw(found, tmp_path / "interference.png")
    assert (tmp_path / "interference.png").stat().st_size > 10_000


def test_a_long_prompt_comes_with_each_burst() -> None:
    timed = burst_load(2, 1, long_tokens=900).timed(AS_RECORDED, 1)
    at = [(one.at_s, one.shape.text_tokens, one.shape.kind) for one in timed if one.at_s >= 1]
    assert [one for one in at if one[2] == "long"] == [(5.0 * n, 900, "long") for n in (1, 2, 3, 4)]
    assert len(at) == 4 * (2 + 1)
    assert at == sorted(at, key=lambda one: one[0])
    assert not any(one.shape.kind == "long" for one in burst_load(2, 1).timed(AS_RECORDED, 1))


def test_long_prompts_have_an_slo_of_their_own() -> None:
    async def main() -> Found:
        made = Found([1], {"epd split": "how"}, long_tokens=900)
        await measure(made, [Target("epd split", "http://x/v1", script(0.05, 0.0), "m")], 0.0)
        return made

    found = run(main())
    assert found.slo("long") is not None
    assert "good long: TTFT <=" in tables(found)
    assert "a text prompt of 900 tokens" in tables(found)
    assert {row["kind"] for row in json.loads(document(found))["requests"]} >= {"long", "burst"}


def test_no_picture_comes_twice_in_any_load_or_round() -> None:
    """Else the caches answer part of the larger bursts."""
    seen = [
        picture.identity
        for number in (1, 2)
        for images in (1, 2, 4)
        for timed in burst_load(images, number).timed(AS_RECORDED, number)
        for picture in timed.shape.pictures
    ]
    assert len(seen) == 2 * 4 * (1 + 2 + 4)  # four bursts while the streams decode
    assert len(set(seen)) == len(seen)
