"""Reducing pictures: at most so many pixels, about the same shape, never larger."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from epd.images import item_digest, reduce, reduced_size

SIDE = st.integers(1, 6000)


@given(SIDE, SIDE, st.integers(1, 2_000_000))
def test_reduced_size(width: int, height: int, most: int) -> None:
    w, h = reduced_size(width, height, most)
    assert 1 <= w * h <= max(most, 1)
    assert w <= width
    assert h <= height
    if width * height <= most:
        assert (w, h) == (width, height)
    else:
        # Rounding never makes a shape more extreme, and wastes less than two rows.
        assert max(w, h) * min(width, height) <= min(w, h) * max(width, height)
        assert w * h >= most - w - h


def test_reduce_keeps_what_is_seen() -> None:
    picture = Image.new("RGB", (900, 600), "red")
    picture.paste("blue", (450, 0, 900, 600))
    small = reduce(picture, 600)
    assert small.size == reduced_size(900, 600, 600) == (30, 20)
    left, right = (small.crop((x, 10, x + 1, 11)).tobytes() for x in (2, 27))
    assert left[0] > 240
    assert right[2] > 240
    assert reduce(picture, 0) is picture
    assert reduce(picture, 900 * 600) is picture


def test_reduction_is_part_of_the_identity() -> None:
    digests = {item_digest(b"file", b"p", "f", b"", 0, most) for most in (0, 1, 256, 1 << 40)}
    assert len(digests) == 4
