"""`bench.growth`: theory's shape, exponents, and which gaps between tokens count."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.growth import Growth, curves, together
from bench.growth_figures import document, draw, table
from bench.theory import Machine, Model, Theory, exponent
from epd.bench.record import Record

MODEL = Model(
    linear=358_000_000, head=136_000_000, layers=24, query_width=896, kv_width=128, itemsize=2,
    picture_flops=220e9, picture_rows=256,
)  # fmt: skip
MACHINE = Machine(200e9, 27e9)
THEORY = Theory(MODEL, MACHINE, chunk=256)
SIZES = [128, 256, 512, 1024, 2048, 4096, 8192]


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power(slope: float) -> None:
    assert exponent(SIZES, [3.0 * size**slope for size in SIZES]) == pytest.approx(slope)


def test_operations_of_a_prompt_do_not_depend_on_its_chunks() -> None:
    whole = MODEL.prefill_flops(0, 1000)
    parts = sum(MODEL.prefill_flops(n, n + 100) for n in range(0, 1000, 100))
    assert parts == pytest.approx(whole)
    linear = 2 * 358e6 * 1000
    assert whole - linear == pytest.approx(4 * 1000 * 1001 / 2 * 896 * 24)


def test_long_prompts_grow_faster_than_their_length_and_fixed_costs_hide_it() -> None:
    slope = exponent(SIZES, [THEORY.prompt(size) for size in SIZES])
    assert 1.02 < slope < 1.2
    held_up = Theory(MODEL, MACHINE, 256, fixed_s=5.0)
    assert exponent(SIZES, [held_up.prompt(size) for size in SIZES]) < 0.8


def test_a_decode_step_is_its_weights_until_its_rows_are() -> None:
    steps = [THEORY.step(count, 64) for count in (1, 8, 16, 64)]
    assert steps[0] == pytest.approx(0.0366 + 0.0049, rel=0.02)
    assert exponent([1, 2], [THEORY.step(1, 64), THEORY.step(2, 64)]) < 0.2
    assert exponent([32, 64], [THEORY.step(32, 64), THEORY.step(64, 64)]) > 0.75


def test_pictures_are_encoded_while_others_are_computed() -> None:
    each, rows = MODEL.picture_flops / MACHINE.flops, THEORY.prompt(256)
    assert THEORY.pictures(1, 0, 0) == pytest.approx(each + rows, rel=0.05)
    many = THEORY.pictures(8, 0, 0)
    assert many < 8 * (each + rows) * 0.75
    assert many > 8 * max(each, rows)


def _stream(start: float, gap: float, tokens: int) -> Record:
    arrivals = [start + gap * n for n in range(tokens)]
    return Record("t", "", 1, 0, "", tokens, 0, scheduled=0.0, arrivals=arrivals)


def test_only_gaps_while_all_decode_count() -> None:
    streams = [_stream(0.0, 0.5, 20), _stream(4.0, 1.0, 30)]
    # The second begins at 4.0, the first ends at 9.5.
    gaps = together(streams)
    assert sorted(gaps) == [*[0.5] * 11, *[1.0] * 5]
    assert together([_stream(0.0, 0.1, 3), _stream(5.0, 0.1, 3)]) == []


@pytest.fixture
def growth() -> Growth:
    made = Growth(time.monotonic(), {"prompt": SIZES, "streams": [1, 8, 64]}, 448)
    for size in SIZES:
        made.keep("prompt", size, THEORY.prompt(size) * 1.3 + 0.02, size)
    for count in (1, 8, 64):
        made.keep("streams", count, THEORY.step(count, 64) * 1.1, 64)
    made.shortest, made.shortest_tokens = [THEORY.prompt(20) * 1.3 + 0.02], 20
    return made


def test_curves_beside_theory(growth: Growth, tmp_path: Path) -> None:
    made = curves(growth, MODEL, MACHINE)
    assert [curve.axis for curve in made] == ["prompt", "streams"]
    assert all(abs(curve.off) < 0.05 for curve in made)
    told = table(made)
    assert told.count("\n| prompt | ") == len(SIZES)
    assert b'"expected_exponent"' in document(made, MODEL, MACHINE, [])
    draw(made, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000
