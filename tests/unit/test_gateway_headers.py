"""Plain headers are read in the gateway itself: which ones, and with the sandbox's answer."""

from __future__ import annotations

import contextlib
import io
import struct
import time
import zlib
from collections.abc import Callable, Iterator

import pytest
from PIL import Image, PngImagePlugin

from epd import images
from epd.config import Config, LimitsConfig
from epd.errors import EpdError
from gateway.headers import HeaderReader, is_plain
from tests.unit.pictures import chunk

PNG = b"\x89PNG\r\n\x1a\n"


def file(kind: str, size: tuple[int, int] = (40, 30), **options: object) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, "red").save(out, kind, **options)
    return out.getvalue()


def png_with(*chunks: bytes) -> bytes:
    """A whole picture with more chunks before its data."""
    whole = file("PNG")
    at = whole.index(b"IDAT") - 4
    return whole[:at] + b"".join(chunks) + whole[at:]


def jpeg_with(*segments: tuple[int, bytes]) -> bytes:
    whole = file("JPEG")
    parts = [
        bytes([0xFF, kind]) + struct.pack(">H", 2 + len(data)) + data for kind, data in segments
    ]
    return whole[:2] + b"".join(parts) + whole[2:]


def with_exif(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file(kind, exif=exif)


def text_png() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("Software", "somebody's")
    return file("PNG", pnginfo=info)


PLAIN: dict[str, Callable[[], bytes]] = {
    "png": lambda: file("PNG"),
    "png with text": text_png,
    "png, turned": lambda: with_exif("PNG", 6),
    "png with a profile": lambda: png_with(chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(900)))),
    "jpeg": lambda: file("JPEG"),
    "jpeg, progressive": lambda: file("JPEG", progressive=True),
    "jpeg, turned": lambda: with_exif("JPEG", 8),
    "jpeg with a comment": lambda: jpeg_with((0xFE, b"hello")),
}
OTHERS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "webp": lambda: file("WEBP"),
    "gif": lambda: file("GIF"),
    "bmp": lambda: file("BMP"),
    "tiff": lambda: file("TIFF"),
    "a million chunks": lambda: png_with(*[chunk(b"tEXt")] * 100_000),
    "25 chunks": lambda: png_with(*[chunk(b"tEXt")] * 25),
    "a long chunk": lambda: png_with(chunk(b"tEXt", bytes(9 << 10))),
    "compressed text": lambda: png_with(chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(900)))),
    "an animation": lambda: png_with(chunk(b"acTL", bytes(8))),
    "png without data": lambda: PNG + chunk(b"IHDR", bytes(13)),
    "png, cut in a chunk": lambda: file("PNG")[:20],
    "a chunk longer than the file": lambda: PNG + struct.pack(">I", 0xFFFFFFFF) + b"IHDR",
    "jpeg with many frames": lambda: jpeg_with((0xE2, b"MPF\0" + bytes(40))),
    "jpeg with xmp": lambda: jpeg_with((0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")),
    "jpeg with photoshop's": lambda: jpeg_with((0xED, b"Photoshop 3.0\0" + bytes(40))),
    "jpeg with long exif": lambda: jpeg_with((0xE1, b"Exif\0\0" + bytes(9 << 10))),
    "jpeg of padding": lambda: b"\xff\xd8" + b"\xff" * 9000,
    "jpeg of comments": lambda: jpeg_with(*[(0xFE, b"")] * 30),
    "jpeg, cut": lambda: file("JPEG")[:30],
}


@pytest.mark.parametrize("name", PLAIN)
def test_usual_files_are_plain(name: str) -> None:
    assert is_plain(PLAIN[name]())


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_could_take_long_is_not(name: str) -> None:
    assert not is_plain(OTHERS[name]())


@pytest.fixture(scope="module")
def reader() -> Iterator[HeaderReader]:
    reader = HeaderReader(Config())
    yield reader
    reader.close()


@pytest.mark.parametrize("name", PLAIN)
async def test_both_ways_give_one_answer(name: str, reader: HeaderReader) -> None:
    data = PLAIN[name]()
    assert reader.read_plain(data, "x") == await reader.read(data, "x")


async def test_both_ways_refuse_alike(reader: HeaderReader) -> None:
    huge = PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", 20000, 20000, 1, 0, 0, 0, 0))
    for data in (huge + chunk(b"IDAT", b"x"), file("PNG", (2, 900))):
        assert is_plain(data)
        with pytest.raises(EpdError) as here:
            reader.read_plain(data, "messages[0].content[0]")
        with pytest.raises(EpdError) as there:
            await reader.read(data, "messages[0].content[0]")
        for error in (here.value, there.value):
            assert error.param == "messages[0].content[0]"
        assert (here.value.kind, here.value.message) == (there.value.kind, there.value.message)


def costliest_exif() -> bytes:
    """As many entries as fit, each of which points at nearly all of it."""
    count = 7000 // 12
    entries = b"".join(struct.pack("<HHII", tag, 2, 6000, 900) for tag in range(count))
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, count) + entries + bytes(30)


@pytest.mark.filterwarnings("ignore:Tag data larger than file")
def test_the_costliest_plain_headers_are_cheap() -> None:
    """Milliseconds; hostile ones take many seconds, which is all that the bound tells apart."""
    profile = chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(7 << 20), 9)[: 8 << 10])
    for data in (png_with(profile), jpeg_with((0xE1, costliest_exif()))):
        assert is_plain(data)
        began = time.process_time()
        with contextlib.suppress(EpdError):  # Pillow stops at a megabyte
            images.read_header(data, LimitsConfig(), "x")
        assert time.process_time() - began < 1.0
