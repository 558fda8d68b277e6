"""The one decode rule, on files made here: formats, frames, turns and colours."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from epd.config import LimitsConfig
from epd.images import FORMATS, decode, item_digest, read_header
from tests.unit.pictures import as_held, encoded, noise, with_chunk

LIMITS = LimitsConfig()
PARAM = "messages[0].content[1]"
CORNERS = [(220, 30, 30), (30, 200, 60), (40, 70, 220), (240, 220, 40)]
LOSSLESS: dict[str, dict[str, Any]] = {
    "WEBP": {"lossless": True},
    "AVIF": {"quality": 95, "subsampling": "4:4:4"},
}


def quad(width: int = 96, height: int = 64) -> Image.Image:
    """Red, green, blue, yellow quarters (reading order): shows any turn or mirroring."""
    picture = Image.new("RGB", (width, height))
    for i, colour in enumerate(CORNERS):
        left, top = (i % 2) * width // 2, (i // 2) * height // 2
        picture.paste(colour, (left, top, left + width // 2, top + height // 2))
    return picture


def assert_quad(picture: Image.Image, tolerance: int = 12) -> None:
    width, height = picture.size
    assert (width, height) == (96, 64)
    for i, colour in enumerate(CORNERS):
        at = (width // 4 + (i % 2) * width // 2, height // 4 + (i // 2) * height // 2)
        got = picture.getpixel(at)
        assert isinstance(got, tuple)
        assert max(abs(a - b) for a, b in zip(got, colour, strict=True)) <= tolerance, (i, got)


# What is read


@pytest.mark.parametrize("format", FORMATS)
def test_each_format(format: str) -> None:
    data = encoded(quad(), format, **LOSSLESS.get(format, {}))
    header = read_header(data, LIMITS, PARAM)
    assert (header.width, header.height, header.format) == (96, 64, format)
    picture = decode(data, LIMITS, PARAM)
    assert picture.mode == "RGB"
    assert_quad(picture, tolerance=30 if format == "GIF" else 12)


@pytest.mark.parametrize("format", [f for f in FORMATS if f not in ("GIF", "BMP")])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(format: str, orientation: int) -> None:
    stored, exif = as_held(quad(), orientation)
    data = encoded(stored, format, exif=exif, **LOSSLESS.get(format, {}))
    header = read_header(data, LIMITS, PARAM)
    assert (header.width, header.height) == (96, 64)
    assert_quad(decode(data, LIMITS, PARAM))


def test_orientation_that_does_not_exist_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 9
    assert_quad(decode(encoded(quad(), "JPEG", exif=exif), LIMITS, PARAM))


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0"]
)
def test_broken_metadata_is_no_reason_to_refuse(exif: bytes) -> None:
    assert_quad(decode(encoded(quad(), "JPEG", exif=exif), LIMITS, PARAM))


def test_transparency_is_blended_on_white() -> None:
    picture = Image.new("RGBA", (30, 10), (255, 0, 0, 0))  # hidden red
    picture.paste((0, 0, 0, 255), (10, 0, 20, 10))
    picture.paste((0, 0, 255, 128), (20, 0, 30, 10))
    for format, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        got = decode(encoded(picture, format, **options), LIMITS, PARAM)
        assert got.getpixel((5, 5)) == (255, 255, 255)
        assert got.getpixel((15, 5)) == (0, 0, 0)
        red, green, blue = got.getpixel((25, 5))  # type: ignore[misc]
        assert (abs(red - 127) <= 1, abs(green - 127) <= 1, blue) == (True, True, 255)


@pytest.mark.parametrize("mode", ["L", "RGB", "P"])
def test_a_transparent_colour_becomes_white(mode: str) -> None:
    picture = Image.new("RGB", (8, 8), (0, 0, 0))
    picture.paste((9, 9, 9), (4, 0, 8, 8))
    colour: object = {"L": 9, "RGB": (9, 9, 9), "P": 1}[mode]
    small = picture.quantize(2) if mode == "P" else picture.convert(mode)
    if mode == "P":
        colour = small.getpixel((6, 4))
    got = decode(encoded(small, "PNG", transparency=colour), LIMITS, PARAM)
    assert got.getpixel((6, 4)) == (255, 255, 255)
    assert got.getpixel((1, 4)) == (0, 0, 0)


def test_gray_with_alpha() -> None:
    picture = Image.merge("LA", (Image.new("L", (4, 4), 50), Image.new("L", (4, 4), 0)))
    assert decode(encoded(picture), LIMITS, PARAM).getpixel((1, 1)) == (255, 255, 255)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bit_gray_is_scaled_not_clipped(format: str) -> None:
    ramp = np.tile(np.linspace(0, 65535, 256).round().astype(np.uint16), (8, 1))
    got = np.asarray(decode(encoded(Image.fromarray(ramp), format), LIMITS, PARAM))
    assert np.array_equal(got[0, :, 0], np.arange(256))


def test_16_bit_gray_with_a_transparent_value() -> None:
    samples = np.full((4, 4), 1000, dtype=np.uint16)
    samples[0] = 40000
    png = encoded(Image.fromarray(samples))
    data = with_chunk(png, b"tRNS", struct.pack(">H", 40000))
    got = decode(data, LIMITS, PARAM)
    assert got.getpixel((0, 0)) == (255, 255, 255)
    assert got.getpixel((0, 1)) == (4, 4, 4)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK"])
def test_other_modes_keep_their_colours(mode: str) -> None:
    picture = quad().convert(mode) if mode != "P" else quad().quantize(4)
    format = "JPEG" if mode == "CMYK" else "PNG"
    got = decode(encoded(picture, format), LIMITS, PARAM)
    if mode in ("P", "CMYK"):
        assert_quad(got)
    else:
        assert got.tobytes() == picture.convert("RGB").tobytes()


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "lime", "blue")]
    options = {"save_all": True, "append_images": frames[1:], **LOSSLESS.get(format, {})}
    got = decode(encoded(frames[0], format, **options), LIMITS, PARAM)
    assert got.getpixel((10, 5)) == (255, 0, 0)


def test_bytes_behind_the_picture_do_not_matter() -> None:
    assert_quad(decode(encoded(quad()) + b"PK\3\4 a zip", LIMITS, PARAM))


# Digests


def test_digest_covers_each_of_its_parts() -> None:
    base: list[Any] = [b"picture", b"config", "fingerprint", b"salt", 0]
    first = item_digest(*base)
    assert len(first) == 32
    assert first == item_digest(*base)
    others = [b"Picture", b"Config", "Fingerprint", b"Salt", 1]
    digests = {item_digest(*(*base[:i], other, *base[i + 1 :])) for i, other in enumerate(others)}
    assert len(digests | {first}) == 6


def test_digest_does_not_mix_neighbouring_parts() -> None:
    make: Callable[..., bytes] = item_digest
    assert make(b"d", b"ab", "c", b"", 0) != make(b"d", b"a", "bc", b"", 0)
    assert make(b"d", b"", "f", b"s", 0) != make(b"d", b"", "fs", b"", 0)


def test_twins_have_other_digests() -> None:
    wide = noise(150, 30)
    tall = Image.frombytes("RGB", (30, 150), wide.tobytes())
    assert len({item_digest(encoded(p), b"", "", b"", 0) for p in (wide, tall)}) == 2
