"""Files that are refused, with which reason, and that no bytes end in another exception."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from epd.config import LimitsConfig
from epd.errors import EpdError, ErrorKind
from epd.images import FORMATS, decode, read_header
from tests.unit.pictures import chunk, encoded, noise, with_chunk

LIMITS = LimitsConfig()
PARAM = "messages[0].content[1]"


def refusal(data: bytes, limits: LimitsConfig = LIMITS) -> EpdError:
    with pytest.raises(EpdError) as caught:
        decode(data, limits, PARAM)
    assert caught.value.param == PARAM
    assert " at 0x" not in caught.value.message
    return caught.value


# What is never done


def test_the_header_is_read_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {f: encoded(noise(70, 50), f, exif=exif) for f in ("PNG", "JPEG", "WEBP", "TIFF")}
    files["GIF"], files["BMP"] = encoded(noise(70, 50), "GIF"), encoded(noise(70, 50), "BMP")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    for format, data in files.items():
        header = read_header(data, LIMITS, PARAM)
        turned = format not in ("GIF", "BMP")
        assert (header.width, header.height) == ((50, 70) if turned else (70, 50)), format
    with pytest.raises(AssertionError, match="decoded"):  # the trap works
        Image.open(io.BytesIO(files["PNG"])).load()


# What is refused


def test_empty_file() -> None:
    assert "empty" in refusal(b"").message


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"<?xml version='1.0'?>\n<!DOCTYPE svg>\n<svg/>", "SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 64, "HEIC"),
        (b"\0\0\0\x18ftypisom" + b"\0" * 64, "video"),
        (b"%PDF-1.7\n", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "PostScript"),
        (b"8BPS\0\1" + b"\0" * 64, "Photoshop"),
        (b"PK\3\4" + b"\0" * 64, "ZIP"),
        (b"\0\0\1\0\1\0" + b"\0" * 64, "ICO"),
        (b"\n <!DOCTYPE html><html>404</html>", "web page"),
        (b"Hello World", "no picture in a known format"),
        (b"\0", "no picture in a known format"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, says: str) -> None:
    error = refusal(data)
    assert error.kind is ErrorKind.INVALID_IMAGE
    assert says in error.message
    assert "PNG" in error.message  # and what would do


@pytest.mark.parametrize("format", ["PPM", "TGA", "ICO", "PCX"])
def test_formats_that_pillow_knows_but_we_do_not_serve(format: str) -> None:
    assert refusal(encoded(noise(32, 32), format)).kind is ErrorKind.INVALID_IMAGE


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_cut_short(format: str, keep: float) -> None:
    data = encoded(noise(120, 100), format)
    error = refusal(data[: int(len(data) * keep)])
    assert error.kind is ErrorKind.INVALID_IMAGE
    assert format in error.message


def test_cut_jpeg_is_called_cut() -> None:
    data = encoded(noise(120, 100), "JPEG")
    assert "cut short" in refusal(data[:-128]).message


def test_damaged_png_data() -> None:
    data = bytearray(encoded(noise(60, 60)))
    data[len(data) // 2] ^= 0xFF
    assert "damaged" in refusal(bytes(data)).message


def test_too_many_bytes() -> None:
    data = encoded(noise(60, 60))
    error = refusal(data, LimitsConfig(max_image_bytes=len(data) - 1))
    assert error.kind is ErrorKind.IMAGE_TOO_LARGE
    assert str(len(data)) in error.message
    decode(data, LimitsConfig(max_image_bytes=len(data)), PARAM)


@pytest.mark.parametrize("side", [5_000, 20_000, 65_000])
def test_however_many_pixels_there_are_the_refusal_says_how_many_may_be(side: int) -> None:
    """Beyond its own limit Pillow would raise before it says how many there are."""
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))
    error = refusal(data)
    assert error.kind is ErrorKind.IMAGE_TOO_LARGE
    assert f"{side} x {side} = {side * side} pixels" in error.message
    assert f"{LIMITS.max_image_pixels} are allowed" in error.message


def test_too_many_pixels_is_exact() -> None:
    data = encoded(noise(60, 50))
    error = refusal(data, LimitsConfig(max_image_pixels=2999))
    assert error.kind is ErrorKind.IMAGE_TOO_LARGE
    assert "60 x 50" in error.message
    decode(data, LimitsConfig(max_image_pixels=3000), PARAM)


def test_aspect_ratio_limit_itself_is_allowed() -> None:
    assert read_header(encoded(noise(400, 2)), LIMITS, PARAM).width == 400
    for size in ((401, 2), (2, 401)):
        error = refusal(encoded(noise(*size)))
        assert error.kind is ErrorKind.INVALID_IMAGE
        assert "200 times" in error.message


def _png_header(width: int, height: int) -> bytes:
    ihdr = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "data",
    [
        _png_header(13000, 13000),
        _png_header(20000, 20000),
        _png_header(2**31 - 1, 2**31 - 1),
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\2\0;",
        b"BM"
        + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 3000000, 2000000, 1, 24, *[0] * 6),
    ],
    ids=["169 MP", "400 MP", "4 EP", "gif", "bmp"],
)
def test_bombs_are_refused_from_the_header(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(EpdError) as caught:
        read_header(data, LIMITS, PARAM)
    assert caught.value.kind is ErrorKind.IMAGE_TOO_LARGE


def test_text_chunk_that_inflates_hugely() -> None:
    bomb = b"k\0\0" + zlib.compress(b"\0" * (64 << 20))
    error = refusal(with_chunk(encoded(noise(8, 8)), b"zTXt", bomb))
    assert error.kind is ErrorKind.INVALID_IMAGE


def test_32_bit_samples() -> None:
    picture = Image.fromarray(np.zeros((4, 4), dtype=np.float32))
    assert "32-bit samples" in refusal(encoded(picture, "TIFF")).message


# Any bytes at all


def _files() -> dict[str, bytes]:
    return {format: encoded(noise(40, 30), format) for format in FORMATS}


@pytest.mark.parametrize("format", FORMATS)
def test_no_damage_ends_in_another_exception(format: str) -> None:
    data = _files()[format]

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=4),
        st.data(),
    )
    def check(changes: list[tuple[int, int]], draw: st.DataObject) -> None:
        broken = bytearray(data)
        for place, value in changes:
            broken[place] = value
        cut = draw.draw(st.integers(0, len(data)))
        _decodes_or_refuses(bytes(broken[:cut]))
        _decodes_or_refuses(bytes(broken))

    check()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", *[data[:12] for data in _files().values()]]))
def test_no_bytes_end_in_another_exception(data: bytes, start: bytes) -> None:
    _decodes_or_refuses(start + data)


def _decodes_or_refuses(data: bytes) -> None:
    limits = LimitsConfig(max_image_pixels=1_000_000)
    refused = None
    try:
        header = read_header(data, limits, PARAM)
        picture = decode(data, limits, PARAM)
    except EpdError as error:
        refused = error
    if refused is not None:
        assert refused.mapping.http_status == 400
        assert " at 0x" not in refused.message
        return
    assert picture.mode == "RGB"
    assert picture.size == (header.width, header.height)
