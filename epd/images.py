"""The one rule by which a picture file becomes pixels, for every stage.

The gateway reads the header only (`read_header`); encode decodes (`decode`). Both
take the same formats, the same frame and the same orientation, so that the size that
the gateway planned with is the size that encode gets.

Rule: first frame; EXIF orientation applied; colours as Pillow converts them to RGB,
16-bit gray scaled to 8 bit; transparency blended on white. Pillow parses hostile
bytes here: whatever it raises becomes an `EpdError` with a reason for people, and only
the formats of `FORMATS` ever reach it (others would start programs or read files).
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from typing import NoReturn

from blake3 import blake3
from PIL import Image, UnidentifiedImageError, features

from epd.config import LimitsConfig
from epd.errors import EpdError, ErrorKind

FORMATS: tuple[str, ...] = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF") + (
    ("AVIF",) if features.check("avif") else ()
)
# Ours is looked at instead, before any pixel is decoded: it says how many there are.
Image.MAX_IMAGE_PIXELS = None
# Pillow warns about metadata and sizes with texts made from the file. Python keeps each
# text that it has shown: a leak that clients control. What matters here raises instead.
warnings.filterwarnings("ignore", module=r"PIL\.")

_RULE = b"epd-picture/1"
"""Enters every digest. Change it with the rule above, or caches answer for the old one."""

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
)
_OTHER_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript file"),
    (b"\xc5\xd0\xd3\xc6", "a PostScript file"),
    (b"8BPS", "a Photoshop file"),
    (b"\0\0\1\0", "an icon (ICO)"),
    (b"PK\3\4", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 picture"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL picture"),
    (b"\xff\x0a", "a JPEG XL picture"),
    (b"MZ", "a Windows program"),
    (b"\x7fELF", "a program"),
)
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_ORIENTATION_TAG = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MOST_IN_16_BITS = 65535
_SCAN = b"\xff\xda"
"""Starts a JPEG's scan, and stands nowhere inside one."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Upright size in pixels, and Pillow's name of the format."""

    width: int
    height: int
    format: str


def read_header(data: bytes, limits: LimitsConfig, param: str) -> ImageHeader:
    """Size and format of a picture file, from its header; no pixel is decoded.

    Raises:
        EpdError: INVALID_IMAGE or IMAGE_TOO_LARGE with the reason; `param` is passed on.
    """
    return _open(data, limits, param)[1]


def decode(data: bytes, limits: LimitsConfig, param: str) -> Image.Image:
    """The upright RGB picture in a file, by the rule of this module.

    The limits are checked in the header first. Memory is the caller's.

    Raises:
        EpdError: as `read_header`; also where the data behind the header is cut short
            or damaged.
    """
    picture, header, orientation = _open(data, limits, param)
    try:
        picture.load()
        rgb = _to_rgb(picture)
        if orientation in _TRANSPOSE:
            rgb = rgb.transpose(_TRANSPOSE[orientation])
    except Exception as error:
        _refuse(error, data, param)
    if rgb.size != (header.width, header.height):
        raise _bad(
            f"the image header says {header.width} x {header.height} pixels, but the "
            f"picture has {rgb.width} x {rgb.height}",
            param,
        )
    return rgb


def reduced_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The largest size of about the same shape with at most `max_pixels`; never larger."""
    if width * height <= max_pixels:
        return width, height
    shorter, longer = sorted((width, height))
    # The short side up, the long side down: the shape never gets more extreme.
    exact = shorter * math.sqrt(max_pixels / (width * height))
    short = min(math.ceil(exact), math.isqrt(max_pixels))
    long = min(max_pixels // short, short * longer // shorter)
    return (short, long) if width < height else (long, short)


def reduce(picture: Image.Image, max_pixels: int) -> Image.Image:
    """The picture at `reduced_size` (bicubic, antialiased); 0 leaves it as it is."""
    size = reduced_size(*picture.size, max_pixels) if max_pixels else picture.size
    if size == picture.size:
        return picture
    return picture.resize(size, Image.Resampling.BICUBIC)


def item_digest(
    data: bytes,
    processor_config_digest: bytes,
    fingerprint: str,
    salt: bytes,
    image_key: int,
    max_pixels: int = 0,
) -> bytes:
    """32 bytes that name the embedding of a picture; the only key of every cache.

    Covers the file's bytes (not its pixels: equal files are equal, nothing else is
    promised), how it becomes tensors, the weights, and the tenant's salt. `image_key`
    is `Processor.image_key(images_in_request)`, `max_pixels` what `reduce` is called with.
    """
    digest = blake3()
    made = bytes([image_key]) + max_pixels.to_bytes(8, "little")
    parts = (_RULE, processor_config_digest, fingerprint.encode(), salt, made)
    for part in (*parts, data):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _open(data: bytes, limits: LimitsConfig, param: str) -> tuple[Image.Image, ImageHeader, int]:
    """(picture not yet loaded, header, orientation still to apply), limits checked."""
    if not data:
        raise _bad("the image is empty (0 bytes)", param)
    if len(data) > limits.max_image_bytes:
        raise _large(
            f"the image has {len(data)} bytes; {limits.max_image_bytes} are allowed", param
        )
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:
        _refuse(error, data, param)
    width, height = picture.size
    _check_size(width, height, limits, param)
    if picture.format in ("JPEG", "MPO") and (scans := data.count(_SCAN)) > limits.max_image_scans:
        raise _large(f"the image has {scans} scans; {limits.max_image_scans} are allowed", param)
    if picture.mode in ("I", "F"):
        raise _bad("the image has 32-bit samples, whose scale is unknown; 8 or 16 are read", param)
    orientation = _orientation(picture)
    if orientation >= 5:
        width, height = height, width
    return picture, ImageHeader(width, height, str(picture.format)), orientation


def _check_size(width: int, height: int, limits: LimitsConfig, param: str) -> None:
    if width < 1 or height < 1:
        raise _bad(f"the image is empty: its header says {width} x {height} pixels", param)
    if width * height > limits.max_image_pixels:
        raise _large(
            f"the image has {width} x {height} = {width * height} pixels; "
            f"{limits.max_image_pixels} are allowed",
            param,
        )
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise _bad(
            f"the image is {width} x {height} pixels: one side is more than "
            f"{limits.max_aspect_ratio:g} times the other",
            param,
        )


def _orientation(picture: Image.Image) -> int:
    """EXIF (or XMP) orientation 1 to 8 that is still to be applied, from the header alone."""
    if picture.format == "TIFF":  # Pillow gives upright TIFFs
        return 1
    try:
        # Not picture.getexif(): for PNG that decodes the whole picture first.
        value = Image.Image.getexif(picture).get(_ORIENTATION_TAG, 1)
    except Exception:  # broken metadata, of which there is much, is no reason to refuse a picture
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I;16"):
        return _from_16_bit(picture)
    if picture.has_transparency_data:
        rgba = picture.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return picture.convert("RGB")


def _from_16_bit(picture: Image.Image) -> Image.Image:
    """Gray of 16 bits, scaled to 8 (Pillow's own conversion clips); tRNS becomes white."""
    import numpy as np

    samples = np.asarray(picture).astype(np.uint32)
    gray = ((samples * 255 + _MOST_IN_16_BITS // 2) // _MOST_IN_16_BITS).astype(np.uint8)
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        gray[samples == transparent] = 255
    return Image.fromarray(gray).convert("RGB")


def _refuse(error: Exception, data: bytes, param: str) -> NoReturn:
    """Raise what a person can use instead of what Pillow said."""
    if isinstance(error, MemoryError):
        raise _large("the image needs more memory to decode than it may take", param) from error
    known = _served_format(data)
    if known is None:
        raise _bad(f"{_what_it_is(data)}; {_SERVED}", param) from error
    if isinstance(error, UnidentifiedImageError):
        raise _bad(f"the image starts like {known}, but its header is damaged", param) from error
    cut = isinstance(error, EOFError) or "truncated" in str(error).lower()
    what = "is cut short" if cut else "is damaged"
    raise _bad(f"the image is {known}, but its data {what}", param) from error


_SERVED = f"images are read as {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


def _served_format(data: bytes) -> str | None:
    """The format that a file claims by its first bytes, if it is one of `FORMATS`."""
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis"):
        return "AVIF" if "AVIF" in FORMATS else None
    return None


def _what_it_is(data: bytes) -> str:
    for magic, name in _OTHER_MAGIC:
        if data.startswith(magic):
            return f"the image is {name}"
    if data[4:8] == b"ftyp":
        heif = data[8:12] in _HEIF_BRANDS
        return f"the image is {'HEIC/HEIF' if heif else 'a video or an unknown ISO media file'}"
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in head:
        return "the image is an SVG drawing; convert it to pixels"
    if head.startswith((b"<!doctype html", b"<html")):
        return "the image is a web page (HTML)"
    return "the image is no picture in a known format"


def _bad(message: str, param: str) -> EpdError:
    return EpdError(ErrorKind.INVALID_IMAGE, message, param=param)


def _large(message: str, param: str) -> EpdError:
    return EpdError(ErrorKind.IMAGE_TOO_LARGE, message, param=param)
