"""Trace files: each format's own rows, and what is made of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from epd.bench.content import Words, data_url
from epd.bench.traces import Limits, read_trace
from epd.bench.workload import Picture, Shape, Timed, Zipf
from epd.errors import EpdError

MOONCAKE = {"timestamp": 2500, "input_length": 1300, "output_length": 40, "hash_ids": [0, 7, 9]}
SERVEGEN = {"t_ms": 250, "client": 3, "text_tokens": 74, "image_tokens": [252], "output_tokens": 9}
AZURE = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-10-15T12:00:00.250Z,0,770,491
2024-10-15T12:00:05.750Z,2,949,126
"""
AZURE_TEXT = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""


def read(folder: Path, content: str | list[dict[str, Any]], limits: Limits) -> list[Timed]:
    path = folder / "trace"
    if not isinstance(content, str):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_text(content)
    return read_trace(path, limits, random.Random(0)).requests


def test_mooncake(tmp_path: Path) -> None:
    later = MOONCAKE | {"timestamp": 4000, "hash_ids": [0, 8, 10]}
    first, second = read(tmp_path, [MOONCAKE, later], Limits(text_tokens=1100))
    assert first == Timed(0.0, Shape(1100, 40, (), (0, 7), 512))
    assert second.at_s == 1.5
    words = Words()
    texts = [words.text(t.shape, random.Random(n)).split() for n, t in enumerate((first, second))]
    assert texts[0][:512] == texts[1][:512], "the same block is the same text"
    assert texts[0][512:600] != texts[1][512:600]
    assert len(texts[0]) == 1100


def test_servegen_pictures_have_identity(tmp_path: Path) -> None:
    rows = [SERVEGEN | {"t_ms": n} for n in range(400)]
    rows += [SERVEGEN | {"t_ms": n, "client": 4} for n in range(400, 440)]
    timed = read(tmp_path, rows, Limits(pool=5, zipf=1.0))
    counts = Counter(t.shape.pictures[0].identity for t in timed[:400])
    assert len(counts) == 5, "a pool of five"
    assert counts[0] / counts[4] == pytest.approx(5.0, rel=0.6), "by Zipf's law"
    others = {t.shape.pictures[0].identity for t in timed[400:]}
    assert not others & set(counts), "another client has pictures of its own"
    picture = timed[0].shape.pictures[0]
    assert picture.width * picture.height / 28**2 == pytest.approx(252, rel=0.05)


def test_azure(tmp_path: Path) -> None:
    first, second = read(tmp_path, AZURE, Limits(image_tokens=256))
    assert first == Timed(0.0, Shape(770, 491))
    assert second.at_s == pytest.approx(5.5)
    assert second.shape.text_tokens == 949 - 2 * 256
    assert len(second.shape.pictures) == 2
    first, second = read(tmp_path, AZURE_TEXT, Limits())
    assert second.at_s == pytest.approx(0.052)
    assert (second.shape.text_tokens, second.shape.output_tokens) == (3180, 8)


def test_our_own(tmp_path: Path) -> None:
    images = [{"width": 448, "height": 336, "id": 5}, {"width": 28, "height": 28, "id": 6}]
    rows: list[dict[str, Any]] = [
        {"at_s": 0.0, "text_tokens": 80, "output_tokens": 32, "kind": "steady"},
        {"at_s": 1.25, "text_tokens": 20, "output_tokens": 4, "kind": "burst", "images": images},
    ]
    assert read(tmp_path, rows, Limits()) == [
        Timed(0.0, Shape(80, 32, kind="steady")),
        Timed(1.25, Shape(20, 4, (Picture(448, 336, 5), Picture(28, 28, 6)), kind="burst")),
    ]


def test_the_sample_in_the_repository_reads() -> None:
    path = Path(__file__).parents[2] / "bench" / "traces" / "servegen_mm_sample.jsonl"
    trace = read_trace(path, Limits(requests=20), random.Random(0))
    assert len(trace.requests) == 20
    assert any(t.shape.pictures for t in trace.requests)
    assert str(trace).startswith("the first 20 of 120 requests; ")
    whole = read_trace(path, Limits(), random.Random(0))
    assert (len(whole.requests), whole.left_out) == (120, 0)
    assert str(whole).startswith("all 120 requests; 203 pictures, ")


@pytest.mark.parametrize("content", [AZURE, AZURE_TEXT + "\n"])
def test_what_is_left_out_is_counted(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    assert read_trace(path, Limits(requests=1), random.Random(0)).left_out == 1
    assert read_trace(path, Limits(requests=2), random.Random(0)).left_out == 0


NOT_AT_ANY_TIME = '{"at_s": NaN, "text_tokens": 1, "output_tokens": 1}\n'
NO_PICTURE = (
    '{"at_s": 0, "text_tokens": 1, "output_tokens": 1, "images": [{"width": 0, "height": 9}]}\n'
)


@pytest.mark.parametrize(
    "content",
    ["", "nonsense\n", '{"a": 1}\n', "TIMESTAMP,X\n1,2\n", NOT_AT_ANY_TIME, NO_PICTURE],
)
def test_what_is_no_trace_is_said(tmp_path: Path, content: str) -> None:
    with pytest.raises(EpdError, match="trace"):
        read(tmp_path, content, Limits())


def test_pictures_by_identity() -> None:
    assert data_url(Picture(56, 28, 1)) == data_url(Picture(56, 28, 1))
    assert data_url(Picture(56, 28, 1)) != data_url(Picture(56, 28, 2))


def test_zipf_zero_is_even() -> None:
    rng, draw = random.Random(0), Zipf(4, 0.0)
    counts = Counter(draw(rng) for _ in range(4000))
    assert all(count == pytest.approx(1000, rel=0.15) for count in counts.values())
