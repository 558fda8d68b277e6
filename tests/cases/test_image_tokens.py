"""Cases TOK-*: rows that the gateway counts are rows that the encoder makes; no video."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from PIL import Image

from epd.models.processor import Processor
from tests.cases.pictures import body, data_url, file, image_tokens, part, quad, refused, text
from tests.e2e.cluster import DEMO_CHECKPOINT, ROOT, Cluster

PICTURES = ROOT / "demo" / "pictures"


def test_tok_02_images_longer_than_a_step(cluster: Cluster) -> None:
    """`prefill.step_tokens` is 16 here, and a picture has more rows: the answer is right."""
    questions = json.loads((ROOT / "demo" / "questions.json").read_text())
    for question in questions[:4]:
        files = [(PICTURES / name).read_bytes() for name in question["pictures"]]
        asked = body(*files, text(question["question"]), max_tokens=40)
        reply = cluster.chat(asked)
        assert image_tokens(reply) > 16
        assert reply.json["choices"][0]["message"]["content"] == question["answer"]


def test_tok_03_one_rule_counts_rows() -> None:
    """Sizes around the edges of rounding: planned from the size, made from the pixels."""
    processor = Processor.load(DEMO_CHECKPOINT)
    rng = random.Random(3)
    edges = [32 * n + off for n in range(1, 40) for off in (-1, 0, 1, 15, 16, 17)]
    for _ in range(300):
        width, height = rng.choice(edges), rng.choice(edges)
        if max(width, height) > 200 * min(width, height):
            continue
        plan = processor.plan(width, height)
        made = processor.prepare(Image.new("RGB", (width, height)))
        assert (plan.rows, plan.grid) == (made.rows, made.grid), (width, height)


VIDEOS: list[dict[str, Any]] = [
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    {"type": "video_url", "video_url": {"url": "http://127.0.0.1:1/a.mp4"}},
    {"type": "video", "video": ["a", "b"]},
]


@pytest.mark.parametrize("video", VIDEOS)
@pytest.mark.parametrize("stream", [False, True])
def test_tok_04_video_is_not_served(cluster: Cluster, video: dict[str, Any], stream: bool) -> None:
    asked = body(video, text("What happens?"), stream=stream)
    words = f"'{video['type']}' is not supported"
    refused(cluster.chat(asked), words, "messages[0].content[0].type", "invalid_request")


def test_tok_05_a_video_file_is_no_picture(cluster: Cluster) -> None:
    mp4 = b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41" + bytes(64)
    refused(cluster.chat(body(part(data_url(mp4, "video/mp4")))), "a video")


OPTIONS: list[Any] = [
    {"fps": [1, 2, 3]},
    {"max_pixels": -1},
    {"size": {"longest_edge": 10**9}},
    {"do_resize": "no"},
    {"min_pixels": 10**18},
    [],
    "x",
    7,
    True,
]


@pytest.mark.parametrize("options", OPTIONS)
def test_tok_06_clients_set_no_processor_options(cluster: Cluster, options: Any) -> None:
    asked = body(file(quad()), mm_processor_kwargs=options)
    refused(cluster.chat(asked), "not supported", "mm_processor_kwargs", "invalid_request")


def test_tok_06_no_options_are_no_options(cluster: Cluster) -> None:
    assert cluster.chat(body(file(quad()), mm_processor_kwargs={}, max_tokens=1)).status == 200
