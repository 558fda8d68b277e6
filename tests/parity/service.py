"""A service of four real processes for the parity tests, in which prefill's chunks change."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from tests.e2e.cluster import Cluster
from tests.parity.conversations import Conversation

WHOLE = 4096
"""A chunk larger than every prompt."""
OFF = {
    "prefill.prefix_cache": False,
    "prefill.embedding_cache": False,
    "decode.prefix_cache": False,
    "encode.cache_mib": 0,
}


def png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


@contextmanager
def service(
    folder: Path,
    checkpoint: Path,
    chunk: int,
    settings: Mapping[str, object] | None = None,
    groups: Sequence[str] = (),
    *,
    caches: bool = False,
) -> Iterator[Cluster]:
    """One worker of each stage (or processes that host `groups` of stages); prefill computes
    `chunk` tokens of a request at a time. Without `caches` separate stages compute every
    token of every request, which decode then reads."""
    off = {} if caches or groups else OFF
    settings = {"kv.block_tokens": 16, **off, **(settings or {})}
    cluster = Cluster(folder, checkpoint=checkpoint, settings=settings, groups=groups)
    _set_chunk(cluster, chunk)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def change_chunk(cluster: Cluster, chunk: int) -> None:
    """Restarts prefill, and nothing else, with chunks of so many tokens."""
    _set_chunk(cluster, chunk)
    assert cluster.worker("prefill").end() == 0
    cluster.restart("prefill")


def _set_chunk(cluster: Cluster, chunk: int) -> None:
    cluster.worker("prefill").settings |= {
        "prefill.chunk_tokens": str(chunk),
        "prefill.step_tokens": str(max(chunk, 512)),
    }


def body(conversation: Conversation, **options: Any) -> dict[str, Any]:
    """A request over HTTP, greedy."""
    messages, images = conversation
    rest = iter(images)
    content = [
        {"type": "image_url", "image_url": {"url": _url(next(rest))}}
        if part["type"] == "image"
        else part
        for message in messages
        for part in message["content"]
    ]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **options}


def _url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()
