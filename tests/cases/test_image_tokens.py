"""Cases TOK-*: rows that the gateway counts are rows that the encoder makes; no video."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from encode.decoder import _prepare
from epd.config import LimitsConfig
from epd.errors import EpdError, ErrorKind
from epd.models.processor import Processor
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import gateway_pb2_grpc
from tests.cases.pictures import (
    body,
    counter,
    data_url,
    file,
    image_tokens,
    part,
    quad,
    refused,
    text,
)
from tests.e2e.cluster import DEMO_CHECKPOINT, ROOT, Cluster
from tests.e2e.member import request

LIMITS = LimitsConfig()

PICTURES = ROOT / "demo" / "pictures"


def test_tok_02_images_longer_than_a_step(cluster: Cluster) -> None:
    """`prefill.step_tokens` is 16 here, and a picture has more rows: the answer is right."""
    questions = json.loads((ROOT / "demo" / "questions.json").read_text())
    for question in questions[:4]:
        files = [(PICTURES / name).read_bytes() for name in question["pictures"]]
        asked = body(*files, text(question["question"]), max_tokens=40)
        reply = cluster.chat(asked)
        assert image_tokens(reply) > 16
        assert reply.text == question["answer"]


def resized(path: Path, least: int, most: int) -> Processor:
    """The demo's processor with other bounds of a picture's pixels."""
    shutil.copytree(DEMO_CHECKPOINT, path)
    config = path / "preprocessor_config.json"
    size = {"shortest_edge": least, "longest_edge": most}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"size": size}))
    return Processor.load(path)


BOUNDS = {"as it is": (9216, 36864), "small": (1024, 4096), "large": (65536, 262144)}


@pytest.mark.parametrize("bounds", BOUNDS)
def test_tok_03_one_rule_counts_rows(tmp_path: Path, bounds: str) -> None:
    """Any size, and those where rounding turns: what the gateway counts from the size is what
    the encoder's own decoder makes from the pixels of a file."""
    processor = resized(tmp_path / "checkpoint", *BOUNDS[bounds])
    rng = random.Random(3)
    for _ in range(200):
        size = any_size(rng)
        if size[0] * size[1] > 1_500_000 and rng.random() < 0.9:
            continue  # most of the time would go there
        plan = processor.plan(*size)
        item = {"width": size[0], "height": size[1], "rows": plan.rows, "grid": plan.grid}
        data = file(Image.new("RGB", size), compress_level=1)
        made = _prepare(processor, LIMITS, item | {"images_in_request": 1, "max_pixels": 0}, data)
        assert (plan.rows, plan.grid) == (made.rows, made.grid), size


def any_size(rng: random.Random) -> tuple[int, int]:
    """Half of them next to a multiple of the patch, where rounding turns."""

    def side() -> int:
        if rng.random() < 0.5:
            return rng.randint(28, 4000)
        return max(28, 32 * rng.randint(1, 125) + rng.choice((-17, -16, -15, -1, 0, 1)))

    while True:
        width, height = side(), side()
        if max(width, height) <= 200 * min(width, height):
            return width, height


@pytest.mark.parametrize("bounds", BOUNDS)
def test_tok_03_ten_thousand_sizes(tmp_path: Path, bounds: str) -> None:
    """The count from the size against what the image processor says of itself: no pixels, so
    that it can be all of them."""
    processor = resized(tmp_path / "checkpoint", *BOUNDS[bounds])
    pictures, rng = processor.hf.image_processor, random.Random(4)
    for _ in range(10_000):
        width, height = any_size(rng)
        plan = processor.plan(width, height)
        patches = pictures.get_number_of_image_patches(height, width, {})
        _, rows, columns = plan.grid
        assert (rows * columns, plan.rows) == (patches, patches // pictures.merge_size**2)


def test_tok_03_a_mismatch_tells_both_numbers() -> None:
    processor = Processor.load(DEMO_CHECKPOINT)
    plan, data = processor.plan(96, 64), file(quad())
    item = {"width": 96, "height": 64, "rows": plan.rows + 1, "grid": plan.grid}
    with pytest.raises(EpdError) as caught:
        _prepare(processor, LIMITS, item | {"images_in_request": 1, "max_pixels": 0}, data)
    words = f"{plan.rows + 1} rows planned, {plan.rows} rows decoded"
    assert words in caught.value.message
    assert caught.value.kind is ErrorKind.INVALID_IMAGE


VIDEOS: list[dict[str, Any]] = [
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    {"type": "video_url", "video_url": {"url": "http://127.0.0.1:1/a.mp4"}},
    {"type": "video_url", "video_url": {"url": "a", "num_frames": 16, "fps": 1, "max_frames": 9}},
    {"type": "video", "video": ["a", "b"]},
    {"type": "input_video", "input_video": {"data": "AAAA", "format": "mp4"}},
]


@pytest.mark.parametrize("video", VIDEOS)
@pytest.mark.parametrize("stream", [False, True])
def test_tok_04_video_is_not_served(cluster: Cluster, video: dict[str, Any], stream: bool) -> None:
    """On every route that takes content, by name; nothing of it reaches an encoder."""
    before = counter(cluster.worker("encode").metrics(), "epd_requests_total")
    content, words = [video, text("What happens?")], f"'{video['type']}' is not supported"
    asked = body(*content, stream=stream)
    param = "messages[0].content[0].type"
    refused(cluster.chat(asked), words, param, "invalid_request")
    counted = request(cluster.address, "/tokenize", {"messages": asked["messages"]})
    refused(counted, words, param, "invalid_request")
    said = {"model": cluster.model, "input": asked["messages"], "stream": stream}
    answered = request(cluster.address, "/v1/responses", said)
    refused(answered, words, "input[0].content[0].type", "invalid_request")
    assert counter(cluster.worker("encode").metrics(), "epd_requests_total") == before


@pytest.mark.parametrize("options", [{"num_frames": 16}, {"fps": 1, "max_frames": 16}])
def test_tok_04_options_of_videos_are_refused(cluster: Cluster, options: dict[str, int]) -> None:
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        asked = body(file(quad()), **{name: {"video": options}})
        refused(cluster.chat(asked), "not supported", name, "invalid_request")


def test_tok_04_no_part_of_a_grpc_message_is_a_video(cluster: Cluster) -> None:
    """There is no field for one; a client of a later protocol is told so."""
    assert {field.name for field in pb.ContentPart.DESCRIPTOR.fields} == {
        *("text", "image", "image_url", "detail")
    }
    unknown = pb.ContentPart.FromString(b"\xa2\x06\x04film")
    message = pb.Message(role=pb.ROLE_USER, parts=[unknown, pb.ContentPart(text="What is it?")])
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Chat(pb.ChatRequest(messages=[message]))
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "messages[0].parts[0]: neither text nor image"


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
