"""Picture files of every kind, made here; and what a service says about them."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tests.e2e.cluster import Cluster
from tests.e2e.member import Reply
from tests.unit.pictures import chunk, noise  # noqa: F401 (passed on)
from tests.unit.pictures import encoded as file

QUESTION = "Describe the image."
URL_PARAM = "messages[0].content[0].image_url.url"
_CORNERS = ((220, 30, 30), (30, 170, 60), (40, 70, 220), (240, 210, 40))


def quad(width: int = 96, height: int = 64) -> Image.Image:
    """Corners red, green / blue, yellow: any turn or mirror shows."""
    picture = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(picture)
    for at, colour in enumerate(_CORNERS):
        left, top = (at % 2) * width // 2, (at // 2) * height // 2
        draw.rectangle((left, top, left + width // 2, top + height // 2), colour)
    return picture


def solid(colour: str, size: tuple[int, int] = (64, 64)) -> Image.Image:
    return Image.new("RGB", size, colour)


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    """A PNG file from raw scan lines (each with its filter byte); the header may lie."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def gray16(samples: np.ndarray[Any, Any]) -> bytes:
    """A gray PNG of 16 bits a sample."""
    height, width = samples.shape
    rows = b"".join(b"\0" + line.astype(">u2").tobytes() for line in samples)
    return png(width, height, 16, 0, rows)


def scan_bomb(scans: int, side: int = 4800) -> bytes:
    """A progressive JPEG that repeats its last scan: 60 bytes for 50 ms of work."""
    data = file(Image.new("L", (side, side), 200), "JPEG", progressive=True, quality=50)
    segments, at = [], 2
    while data[at + 1] != 0xD9:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == 0xDA:
            while data[end] != 0xFF or data[end + 1] == 0:
                end += 1
        segments.append(data[at:end])
        at = end
    return data[:2] + b"".join(segments) + b"".join(segments[-2:]) * scans + b"\xff\xd9"


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


_numbers = itertools.count()


def another() -> int:
    """A number, each time another, the same ones in every run."""
    return next(_numbers)


def fresh() -> str:
    """Letters and digits that no cache has seen."""
    return hashlib.sha256(another().to_bytes(8)).hexdigest()[:16]


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def body(*parts: Any, **fields: Any) -> dict[str, Any]:
    """A request of one user message: bytes are picture files, the rest parts."""
    content = [part(data_url(item)) if isinstance(item, bytes) else item for item in parts]
    greedy = {"temperature": 0, "max_tokens": 3}
    return {"messages": [{"role": "user", "content": content}], **greedy, **fields}


def ask(cluster: Cluster, *parts: Any, **fields: Any) -> Reply:
    """Show pictures and ask what they are; greedy, three tokens with their logprobs."""
    question = text(QUESTION)
    scores = {"logprobs": True, "top_logprobs": 5}
    return cluster.chat(body(*parts, question, **{**scores, **fields}))


Scores = list[dict[str, float]]


def scores(reply: Reply) -> Scores:
    """The likeliest tokens at each place: the picture's fingerprint in the model's eyes."""
    assert reply.status == 200, reply.body
    content = reply.json["choices"][0]["logprobs"]["content"]
    return [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in content]


def distance(one: Reply, other: Reply) -> float:
    """How far the model's views of two pictures are apart at the first token."""
    a, b = scores(one)[0], scores(other)[0]
    shared = a.keys() & b.keys()
    return max(abs(a[token] - b[token]) for token in shared) if len(shared) >= 3 else 99.0


def refused(reply: Reply, words: str, param: str = URL_PARAM, code: str = "invalid_image") -> None:
    """An error of the client's, in OpenAI's form, that names the part and the trouble."""
    assert reply.status == 400, (reply.status, reply.body[:300])
    assert reply.headers["content-type"].startswith("application/json")
    assert "usage" not in reply.json
    error = reply.error
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code), error
    assert words.lower() in error["message"].lower(), error["message"]
    assert "0x" not in error["message"], "an object's address is no reason"


def image_tokens(reply: Reply) -> int:
    assert reply.status == 200, reply.body
    return int(reply.json["usage"]["prompt_tokens_details"]["image_tokens"])


def prompt_tokens(reply: Reply) -> int:
    assert reply.status == 200, reply.body
    return int(reply.json["usage"]["prompt_tokens"])


def counter(metrics: str, name: str) -> float:
    """Sum of a counter over its labels, from a metrics page."""
    lines = [line for line in metrics.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def encodes(cluster: Cluster) -> float:
    """Pictures that went through the vision tower so far."""
    return counter(cluster.worker("encode").metrics(), "epd_images_total")


def parse(raw: bytes) -> Any:
    return json.loads(raw)
