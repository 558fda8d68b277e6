"""`bench.overlap`: E, P, the bound and the least, from timelines made up."""

from __future__ import annotations

from typing import Any

import pytest

from bench.overlap import cases_of
from bench.overlap_figures import Case, Found, Sequential, document, figures, tables
from epd.bench.record import Record


def record(arm: str, ttft: float, spans: dict[str, tuple[float, float]], tokens: int) -> Record:
    made = Record(arm, "concurrency 1", 1, 0, "", 2, 0, scheduled=10.0, spans=spans)
    made.arrivals, made.ended, made.prompt_tokens = [10.0 + ttft, 11.0 + ttft], 12.0 + ttft, tokens
    return made


OFF = {
    "admission": (0.0, 100.0),
    "prefill": (100.0, 7100.0),
    "encode[0]": (100.0, 1090.0),
    "embedding transfer[0]": (1090.0, 1100.0),
    "embedding transfer[1]": (2080.0, 2100.0),
    "embedding transfer[2]": (3080.0, 3100.0),
    "embedding transfer[3]": (4080.0, 4100.0),
}
"""E = 4 s, a picture each; P = 3 s."""
ON = {"prefill": (100.0, 5100.0), "embedding transfer[0]": (4180.0, 4500.0)}
CASE = Case("4 pictures", 4, 448, 0, 40)


def test_what_the_arm_without_overlap_did() -> None:
    part = Sequential.of(OFF)
    assert part.landed == (1.0, 2.0, 3.0, 4.0)
    assert (part.encode, part.prefill) == (4.0, 3.0)
    assert part.bound == pytest.approx(4 / 7)


def each(start: int, end: int) -> float:
    """Every token costs the same."""
    return end - start


@pytest.mark.parametrize(
    ("before", "image", "least"),
    [
        (0, 250, 4.75),  # only the last picture's part is left after encoding
        (200, 150, 5.05),  # and the words behind it
        (800, 50, 4.15),  # words before are computed meanwhile
        (1000, 0, 4.0),
    ],
)
def test_the_least_that_the_order_of_things_allows(before: int, image: int, least: float) -> None:
    assert Sequential.of(OFF).least(before, image, 1000, each) == pytest.approx(least)


def test_a_prompt_that_takes_longer_than_its_pictures_is_never_idle() -> None:
    part = Sequential((1.0, 2.0), 10.0)
    assert part.least(500, 250, 1000, each) == pytest.approx(10.0)


def test_the_last_picture_s_rows_attend_to_more_and_cost_more() -> None:
    part = Sequential.of(OFF)
    least = part.least(0, 250, 1000, lambda start, end: end**2 - start**2)
    assert least == pytest.approx(4.0 + 3.0 * 7 / 16)


@pytest.fixture
def found() -> Found:
    made = Found(image_tokens={CASE.name: 250})
    for off_s, on_s in ((7.2, 5.2), (7.2, 4.9), (7.2, 5.5)):
        made.cases[CASE.name, "off"].append(record("off", off_s, OFF, 1000))
        made.cases[CASE.name, "on"].append(record("on", on_s, ON, 1000))
    for kind, ttft in (("a new picture", 2.0), ("the same picture, other words", 0.5)):
        made.caches[kind] = [record("on", ttft, {}, 300)]
        made.encoded[kind] = [float(kind.startswith("a"))]
    return made


def test_ratios_are_paired_and_compared_with_the_bound(found: Found) -> None:
    made: dict[str, Any] = figures(found, CASE, each)
    assert made["on_off"] == pytest.approx(5.2 / 7.2)
    assert made["on_off_range"] == pytest.approx([4.9 / 7.2, 5.5 / 7.2])
    assert made["of_bound"] == pytest.approx(5.2 / 7.2 / (4 / 7))
    assert made["least"] == pytest.approx((0.2 + 4.75) / 7.2)
    assert made["encode_slowed"] == pytest.approx(4.4 / 4.0)


def test_tables_and_document_have_them(found: Found) -> None:
    told = tables(found, [CASE], each)
    assert f"**{5.2 / 7.2 / (4 / 7):.3f}**" in told
    assert "| the same picture, other words | 0.50 (0.50-0.50) | 0.250 of a new picture |" in told
    assert document(found, [CASE], {}, each).count(b'"scheduled"') == 8


def test_the_requests_differ_in_where_the_words_are() -> None:
    assert [(case.before, case.after) for case in cases_of(4, [448], 700)] == [
        (0, 40), (40, 0), (700, 0),
    ]  # fmt: skip


def test_further_sizes_are_asked_in_one_order() -> None:
    cases = cases_of(4, [448, 672, 896], 700)
    assert [(case.side, case.before, case.after) for case in cases[3:]] == [
        (672, 40, 0), (896, 40, 0),
    ]  # fmt: skip
    assert len({case.name for case in cases}) == 5


def test_some_of_them_can_be_left_out() -> None:
    names = [case.name for case in cases_of(4, [448, 672], 700, ["words,"])]
    assert names == ["words, 4 pictures of 448 x 448", "words, 4 of 672 x 672"]
    assert cases_of(4, [448], 700, ["nothing"]) == []


def test_without_caches_there_is_no_table_of_them(found: Found) -> None:
    found.caches.clear()
    assert "same picture" not in tables(found, [CASE], each)
