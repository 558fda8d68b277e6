"""Services of real processes, started once for many tests where a test doesn't hurt them."""

from __future__ import annotations

import base64
import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.cluster import GATEWAY, ROOT, STAGES, Cluster
from tests.e2e.gateway_house import empty, house, loaded  # noqa: F401 (fixtures)
from tests.e2e.stage_house import (  # noqa: F401 (fixtures)
    checkpoint,
    planner,
    running_stages,
    stage_client,
    stages,
)
from tests.netns import LAN, Network, Node, open_network
from tests.unit.pictures import chunk

MakeCluster = Callable[..., Cluster]
DATA = "data"
"""The switch that Mooncake goes over, where processes have network namespaces."""
PICTURES = ROOT / "demo" / "pictures"


COLOUR = "What colour is the circle?"


def picture(name: str) -> bytes:
    return (PICTURES / name).read_bytes()


def image_part(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: str | bytes) -> dict[str, Any]:
    """A user message of texts and image files, in order."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else image_part(part)
        for part in parts
    ]
    return {"role": "user", "content": content}


def grey_png(width: int, height: int, shade: int = 128) -> bytes:
    """A grey picture, and with huge sizes a header that nobody should decode."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = b"" if width * height > 1 << 24 else (b"\0" + bytes([shade]) * width) * height
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


_shades = itertools.count(1)


def another_picture() -> bytes:
    """All of one size, and none that a cache has seen: not in a second try of a test, either."""
    return grey_png(96, 96, next(_shades) % 256)


def answer(client: OpenAI, *parts: str | bytes, **options: Any) -> str:
    completions: Any = client.chat.completions
    model = client.models.list().data[0].id
    options = {"temperature": 0, **options}
    reply = completions.create(model=model, messages=[user(*parts)], **options)
    return str(reply.choices[0].message.content)


def demo_questions() -> list[dict[str, Any]]:
    questions: list[dict[str, Any]] = json.loads((ROOT / "demo" / "questions.json").read_text())
    return questions


@pytest.fixture(scope="module")
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeCluster]:
    """``make_cluster(counts={"encode": 2}, settings={...})``, stopped and checked at the end."""
    started: list[Cluster] = []

    def make(**options: Any) -> Cluster:
        folder: Path = tmp_path_factory.mktemp("cluster")
        cluster = Cluster(folder, **options)
        started.append(cluster)
        return cluster.start()

    yield make
    faults = []
    for cluster in started:
        try:
            cluster.close()
        except AssertionError as error:
            faults.append(str(error))
    assert not faults, faults


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with open_network((LAN, DATA)) as network:
        yield network


@pytest.fixture(scope="module")
def nodes(network: Network) -> Mapping[str, Node]:
    return {role: network.node(role) for role in (GATEWAY, *STAGES)}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker of each stage with the demo checkpoint, for tests that don't hurt it."""
    cluster = Cluster(tmp_path_factory.mktemp("shared")).start()
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """The shared service; each test ends on the proof that it left nothing behind."""
    shared.make_whole()
    yield shared
    shared.assert_clean()


@pytest.fixture
def client(cluster: Cluster) -> OpenAI:
    return OpenAI(base_url=cluster.base_url, api_key="none", timeout=60, max_retries=0)
