"""Pictures of one request: order, sharing of fetches, limits, and the first fault ends all."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.config import Config, FetchConfig, LimitsConfig
from epd.errors import EpdError, ErrorKind
from gateway import pictures
from gateway.budget import Budget
from gateway.content import ImageSource
from gateway.images import PictureReader, Served
from tests.unit.pictures import encoded, noise
from tests.waiting import promised

FILES = [encoded(noise(20 + n, 30, n)) for n in range(4)]
LIMITS = LimitsConfig(max_body_bytes=3 * len(FILES[3]), low_detail_pixels=300)


class Web:
    """Stands in for the fetcher: answers by URL, remembers who asked and who left."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left: list[str] = []

    async def fetch(self, url: str, param: str, client: bytes) -> bytes:
        self.asked.append(url)
        try:
            if url.endswith("slow"):
                await asyncio.sleep(60)
            if url.endswith("bad"):
                raise EpdError(ErrorKind.INVALID_IMAGE_URL, "status 404", param=param)
        except asyncio.CancelledError:
            self.left.append(url)
            raise
        return FILES[int(url[-1])]

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
async def reader(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[PictureReader, Web]]:
    web = Web()
    monkeypatch.setattr("gateway.images.Fetcher", lambda config: web)
    spec: Any = SimpleNamespace(fingerprint="f")
    served = Served(spec, b"processor", lambda images: min(images, 2))
    config = Config(limits=LIMITS, fetch=FetchConfig(mode="public"))
    reader = PictureReader(served, config)
    yield reader, web
    reader.close()


def sources(*values: str | bytes, **more: bool) -> list[ImageSource]:
    return [ImageSource(value, f"image {n}", **more) for n, value in enumerate(values)]


async def test_pictures_keep_their_order(reader: tuple[PictureReader, Web]) -> None:
    pictures = await reader[0].read(
        sources(FILES[0], "http://a/1", FILES[2]), Budget(1 << 30).hold()
    )
    assert [picture.data for picture in pictures] == FILES[:3]
    assert [picture.size.width for picture in pictures] == [20, 21, 22]
    assert [picture.size.param for picture in pictures] == ["image 0", "image 1", "image 2"]


async def test_a_url_named_twice_is_fetched_once(reader: tuple[PictureReader, Web]) -> None:
    first, second, other = await reader[0].read(
        sources("http://a/1", "http://a/1", "http://b/1"), Budget(1 << 30).hold()
    )
    assert first.data == second.data == other.data
    assert first.digest == second.digest == other.digest, "a URL is no part of an identity"
    assert reader[1].asked == ["http://a/1", "http://b/1"]
    await reader[0].read(sources("http://a/1"), Budget(1 << 30).hold())
    assert len(reader[1].asked) == 3


async def test_the_first_fault_ends_the_others(reader: tuple[PictureReader, Web]) -> None:
    with pytest.raises(EpdError, match="404") as caught:
        await reader[0].read(
            sources("http://a/slow", FILES[0], "http://a/bad"), Budget(1 << 30).hold()
        )
    assert caught.value.param == "image 2"
    await asyncio.sleep(0)
    assert reader[1].left == ["http://a/slow"]


async def test_a_small_request_can_not_fetch_without_end(
    reader: tuple[PictureReader, Web],
) -> None:
    await reader[0].read(sources("http://a/3", "http://b/3", "http://a/3"), Budget(1 << 30).hold())
    with pytest.raises(EpdError) as caught:
        await reader[0].read(sources(*(f"http://{n}/3" for n in range(4))), Budget(1 << 30).hold())
    assert caught.value.kind is ErrorKind.IMAGE_TOO_LARGE
    assert "together" in caught.value.message


async def test_low_detail_is_another_identity(reader: tuple[PictureReader, Web]) -> None:
    (whole,) = await reader[0].read(sources(FILES[0]), Budget(1 << 30).hold())
    (low,) = await reader[0].read(sources(FILES[0], low_detail=True), Budget(1 << 30).hold())
    assert (whole.max_pixels, low.max_pixels) == (0, 300)
    assert low.size.width * low.size.height <= 300 < whole.size.width * whole.size.height
    assert low.digest != whole.digest
    tiny = encoded(noise(10, 10))
    (small,) = await reader[0].read(sources(tiny), Budget(1 << 30).hold())
    (same,) = await reader[0].read(sources(tiny, low_detail=True), Budget(1 << 30).hold())
    assert small == same, "what is small already is not another picture"


@given(st.text("%0aF\xe9xg", max_size=40), st.integers(3, 9))
def test_escapes_are_read_as_pythons_library_does(text: str, size: int) -> None:
    """In slices of any size, none of which cuts an escape in two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "_SLICE", size)
        assert pictures.unescaped(text) == unquote_to_bytes(text)


@given(st.binary(max_size=40), st.sampled_from([4, 8]))
def test_base64_in_slices(data: bytes, size: int) -> None:
    text = base64.b64encode(data).decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "_SLICE", size)
        assert pictures._strict(text) == data
        if text.endswith("="):
            with pytest.raises(ValueError, match="padding"):
                pictures._strict(text + "AAAA")


@pytest.mark.parametrize(
    "url",
    ["a" * 30_000_000, " " * 30_000_000, ";" * 30_000_000, "data:" + "a" * 30_000_000,
     "data:," + "%00" * 10_000_000, "data:,;" + " " * 30_000_000],
)  # fmt: skip
def test_long_texts_hold_nobody_up(url: str) -> None:
    """What holds the interpreter holds every other thread."""
    longest, over = [0.0], threading.Event()

    def tick() -> None:
        while not over.is_set():
            before = time.perf_counter()
            time.sleep(0.001)
            longest[0] = max(longest[0], time.perf_counter() - before)

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.process_time()
    with contextlib.suppress(EpdError):
        pictures.file_bytes(ImageSource(url, "url"), LimitsConfig())
    took = time.process_time() - began
    over.set()
    ticking.join()
    assert took < 5
    assert longest[0] < promised(0.5)
