"""Pictures made by the tests themselves."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Random pixels: any mix-up of rows or pictures shows."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(picture: Image.Image, format: str = "PNG", **options: object) -> bytes:
    """The bytes of a picture file."""
    stream = io.BytesIO()
    picture.save(stream, format, **options)
    return stream.getvalue()


_UNDO = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def as_held(upright: Image.Image, orientation: int) -> tuple[Image.Image, Image.Exif]:
    """How a camera held that way stores a picture: the inverse of what its EXIF asks for.
    What is no orientation changes nothing."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    turn = _UNDO.get(orientation)
    return upright if turn is None else upright.transpose(turn), exif


def chunk(kind: bytes, content: bytes = b"") -> bytes:
    """One chunk of a PNG file."""
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def with_chunk(png: bytes, kind: bytes, content: bytes) -> bytes:
    """Insert a chunk behind the header (8 bytes of signature, 25 of IHDR)."""
    return png[:33] + chunk(kind, content) + png[33:]
