"""Figures from records, the report, the plot and the command."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from epd.bench.campaign import Results
from epd.bench.load import Round
from epd.bench.machine import Meter, Usage, environment
from epd.bench.record import Record
from epd.bench.report import document, tables
from epd.bench.summary import Slo, percentile, ratios, summarize
from epd.bench.workload import Load
from epd.cli import app

EIGHT = Load("rate", 8.0)


def record(at: float, ttft: float, tpot: float, tokens: int = 5, error: str = "") -> Record:
    one = Record("a", str(EIGHT), 1, 0, "", tokens, 1, scheduled=at, sent=at)
    one.arrivals = [at + ttft + tpot * n for n in range(tokens)]
    one.ended = one.arrivals[-1]
    one.output_tokens, one.prompt_tokens, one.error = tokens, 100, error
    return one


def a_round(*records: Record, target: str = "a", number: int = 1) -> Round:
    return Round(target, EIGHT, number, list(records), Usage(0.25, None, 1.5))


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 99, 100])
)
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_rates_and_goodput() -> None:
    one = a_round(
        record(0.0, 1.0, 0.5), record(0.0, 6.0, 0.5), record(0.0, 1.0, 2.0),
        record(0.0, 1.0, 0.5, error="timeout"),
    )  # fmt: skip
    row = summarize([one], Slo(ttft=5.0, tpot=1.0))
    assert one.wall_s == pytest.approx(9.0)
    assert row["tok_s"] == pytest.approx(15 / 9)
    assert row["req_s"] == row["image_s"] == pytest.approx(3 / 9)
    assert row["good_share"] == pytest.approx(0.25), "a failed request is not a good one"
    assert row["tokens_per_event"] == 1.0
    assert row["cores"] == {"client": 0.25, "server": None, "others": 1.5}
    assert row["itl_s"]["count"] == 12


def test_ratios_pair_rounds() -> None:
    """The machine is twice as slow in round 2; the ratio doesn't care."""
    a = [a_round(record(0, 1.0, 0.5)), a_round(record(0, 2.0, 1.0))]
    b = [a_round(record(0, 3.0, 0.5)), a_round(record(0, 6.0, 1.0))]
    found = ratios(b, a)
    assert found["ttft_s p50"] == {"median": 3.0, "min": 3.0, "max": 3.0}
    assert found["tpot_s p50"]["max"] == 1.0


def results() -> Results:
    found = Results(["a", "b"], slo=Slo(5.0, 1.0))
    for number, (name, load) in enumerate(
        (name, Load("rate", rate)) for rate in (1.0, 2.0) for name in "ab"
    ):
        one = a_round(record(0.0, 1.0 + number, 0.5), target=name)
        found.rounds.append(Round(name, load, 1, one.records, one.usage))
    return found


def test_everything_is_in_the_document() -> None:
    whole = json.loads(document(results(), {"a": "http://x"}, {"requests": 1}))
    assert len(whole["requests"]) == 4
    assert whole["requests"][0]["arrivals"][0] == pytest.approx(1.0)
    assert len(whole["summaries"]) == 4
    assert whole["comparisons"][0]["ratios"]["ttft_s p50"]["median"] == pytest.approx(2.0)
    assert whole["environment"]["cores"] >= 1
    assert whole["environment"]["versions"]["epd"]
    assert "rate 2" in tables(results())


def test_the_table_has_goodput_and_three_percentiles_of_every_latency() -> None:
    lines = [line.strip("| ").split(" | ") for line in tables(results()).splitlines()]
    row = dict(zip(lines[0], lines[2], strict=True))
    assert row["good"] == "100%"
    assert row["good req/s"] == "0.333", "one in the 3 s of the round"
    for latency in ("TTFT ms", "TPOT ms", "ITL ms", "end to end s"):
        assert len(row[f"{latency} p50 / p90 / p99"].split(" / ")) == 3
    assert row["TPOT ms p50 / p90 / p99"] == "500.0 / 500.0 / 500.0"
    assert row["end to end s p50 / p90 / p99"] == "3.00 / 3.00 / 3.00"


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    from epd.bench.plot import draw

    draw(results().summaries(), tmp_path / "load.png")
    with Image.open(tmp_path / "load.png") as image:
        colours = image.convert("RGB").resize((300, 210)).getcolors(100_000)
    assert colours is not None
    assert len(colours) > 10, "lines were drawn"


def test_the_meter_counts_this_process() -> None:
    meter = Meter()
    sum(random.random() for _ in range(200_000))
    assert 0.0 < meter.read().client < 1.5
    assert environment()["cpu"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--target"),
        (["--target", "nonsense"], "NAME=URL"),
        (["--target", "a=http://x", "--rate", "0"], "above 0"),
        (["--target", "a=http://x", "--image", "448"], "WIDTHxHEIGHT"),
        (["--target", "a=http://x", "--slo-ttft", "1"], "--slo-tpot"),
        (["--target", "a=http://x", "--extra", "a=[1]"], "JSON object"),
        (["--target", "a=http://x", "--trace", "/none"], "trace /none"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_an_unreachable_target_is_said() -> None:
    result = CliRunner().invoke(app, ["bench", "--target", "a=http://127.0.0.1:1/v1"])
    assert result.exit_code == 1
    assert "a (http://127.0.0.1:1/v1)" in result.output
