"""Cases IMG-*: picture files from the wild, by way of the whole service.

Two files are the same picture if the model's scores for them are the same: lossless
spellings of one picture must not differ at all.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps, features

from epd import images
from epd.config import LimitsConfig
from tests.cases.pictures import (
    QUESTION,
    ask,
    body,
    chunk,
    counter,
    data_url,
    distance,
    file,
    gray16,
    image_tokens,
    noise,
    part,
    png,
    prompt_tokens,
    quad,
    refused,
    solid,
    text,
)
from tests.cases.site import Site
from tests.e2e.cluster import Cluster
from tests.e2e.member import request
from tests.unit.pictures import as_held

SAME = 1e-3
"""Scores of equal pixels may differ by rounding only."""
OTHER = 0.1
LIMITS = LimitsConfig()
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9"/></svg>'


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(images.decode(data, LIMITS, "test"))


@pytest.mark.parametrize("stream", [False, True])
def test_img_01_jpeg_cut_short(cluster: Cluster, stream: bool) -> None:
    whole = file(noise(256, 256), "JPEG", quality=95)
    encode = cluster.worker("encode")
    before = counter(encode.metrics(), "epd_images_total")
    for cut in (whole[:-128], whole[: len(whole) // 2]):
        refused(ask(cluster, cut, stream=stream), "cut short")
    assert counter(encode.metrics(), "epd_images_total") == before, "the vision tower ran"
    assert ask(cluster, whole).status == 200


NO_PICTURES = {
    "empty": (b"", "empty"),
    "text": (b"Hello World", "no picture in a known format"),
    "program": (b"MZ" + bytes(100), "a Windows program"),
    "phone": (b"\0\0\0\x18ftypheic" + bytes(100), "HEIC"),
    "drawing": (SVG, "SVG"),
    "page": (b"<!DOCTYPE html><html></html>", "a web page"),
    "document": (b"%PDF-1.7\n", "a PDF document"),
    "archive": (b"PK\3\4" + bytes(50), "a ZIP archive"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "a PostScript file"),
    "photoshop": (b"8BPS" + bytes(50), "a Photoshop file"),
    "zeros": (bytes(1000), "no picture in a known format"),
}


@pytest.mark.parametrize("kind", NO_PICTURES)
def test_img_03_no_picture_at_all(cluster: Cluster, kind: str) -> None:
    data, words = NO_PICTURES[kind]
    refused(ask(cluster, part(data_url(data))), words)


def test_img_03_the_declared_type_is_not_believed(cluster: Cluster) -> None:
    """An unknown MIME type on a good file changes nothing; a good one saves no bad file."""
    good = ask(cluster, part(data_url(file(quad()))))
    odd = ask(cluster, part(data_url(file(quad()), "application/x-nonsense")))
    assert distance(good, odd) < SAME
    refused(ask(cluster, part(data_url(b"GIF89", "image/png"))), "starts like GIF")


SPELLINGS: dict[str, Callable[[Image.Image], bytes]] = {
    "png palette": lambda p: file(p.convert("P", palette=Image.Palette.ADAPTIVE)),
    "webp": lambda p: file(p, "WEBP", lossless=True),
    "webp with alpha": lambda p: file(p.convert("RGBA"), "WEBP", lossless=True),
    "gif": lambda p: file(p, "GIF"),
    "bmp": lambda p: file(p, "BMP"),
    "tiff": lambda p: file(p, "TIFF"),
    "tiff compressed": lambda p: file(p, "TIFF", compression="tiff_lzw"),
    "png with a tail": lambda p: file(p) + b"PK\3\4" + bytes(200),
    "gif animated": lambda p: file(p, "GIF", save_all=True, append_images=[solid("red", p.size)]),
    "webp animated": lambda p: file(
        p, "WEBP", lossless=True, save_all=True, append_images=[solid("red", p.size)]
    ),
    "tiff of two pages": lambda p: file(
        p, "TIFF", save_all=True, append_images=[solid("red", p.size)]
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_img_05_every_format_is_the_same_picture(cluster: Cluster, spelling: str) -> None:
    """What the gateway lets in, the encoder reads, and as the first frame only."""
    picture = quad()
    reply = ask(cluster, SPELLINGS[spelling](picture))
    plain = ask(cluster, file(picture))
    assert distance(reply, plain) < SAME
    assert prompt_tokens(reply) == prompt_tokens(plain)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_img_05_avif(cluster: Cluster) -> None:
    reply = ask(cluster, file(quad(), "AVIF", quality=100))
    assert image_tokens(reply) == image_tokens(ask(cluster, file(quad())))


def turned(orientation: int, format: str = "PNG") -> bytes:
    """A file whose stored picture, turned as its EXIF says, is `quad()`."""
    stored, exif = as_held(quad(), orientation)
    options = {"quality": 100, "subsampling": 0} if format == "JPEG" else {}
    return file(stored, format, exif=exif.tobytes(), **options)


@pytest.mark.parametrize("orientation", range(1, 10))
def test_img_06_exif_orientation(cluster: Cluster, orientation: int) -> None:
    """Nine files of one upright picture; 9 is no orientation and counts as 1."""
    upright = ask(cluster, file(quad()))
    assert distance(ask(cluster, turned(orientation)), upright) < SAME


def test_img_06_exif_orientation_of_jpegs() -> None:
    for orientation in range(1, 10):
        found = pixels(turned(orientation, "JPEG")).astype(int)
        off = np.abs(found - np.asarray(quad()).astype(int))
        assert np.median(off) <= 3, orientation


def test_img_07_grid_of_the_upright_picture(cluster: Cluster) -> None:
    """64 x 192 on its side is 192 x 64: count and row breaks are those of the upright one."""
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = quad(192, 64)
    on_its_side = file(wide.transpose(Image.Transpose.ROTATE_90), exif=exif.tobytes())
    first, second = ask(cluster, on_its_side), ask(cluster, file(wide))
    assert prompt_tokens(first) == prompt_tokens(second)
    assert distance(first, second) < SAME


def test_img_08_alpha_is_blended_on_white(cluster: Cluster) -> None:
    mark = Image.new("RGBA", (96, 64), (0, 0, 0, 0))
    ImageDraw.Draw(mark).rectangle((30, 20, 60, 40), (0, 0, 0, 255))
    on_white = Image.new("RGB", (96, 64), "white")
    ImageDraw.Draw(on_white).rectangle((30, 20, 60, 40), "black")
    plain = ask(cluster, file(on_white))
    assert distance(ask(cluster, file(mark)), plain) < SAME
    assert distance(ask(cluster, file(mark, "WEBP", lossless=True)), plain) < SAME
    assert distance(ask(cluster, file(solid("black", (96, 64)))), plain) > OTHER

    hidden = Image.new("RGBA", (96, 64), (255, 255, 255, 255))
    ImageDraw.Draw(hidden).rectangle((30, 20, 60, 40), (255, 0, 0, 0))
    assert distance(ask(cluster, file(hidden)), ask(cluster, file(solid("white", (96, 64))))) < SAME


def test_img_09_16_bit_gray_is_scaled(cluster: Cluster) -> None:
    ramp = np.tile(np.arange(128, dtype=np.uint16) * 2, (64, 1))
    eight = file(Image.fromarray(ramp.astype(np.uint8)))
    sixteen = gray16(ramp * 257)
    assert abs(pixels(sixteen).mean() - 127) < 1
    assert distance(ask(cluster, sixteen), ask(cluster, eight)) < SAME
    tiff = file(Image.fromarray(ramp * 257), "TIFF")
    assert distance(ask(cluster, tiff), ask(cluster, eight)) < SAME
    assert distance(ask(cluster, eight), ask(cluster, file(solid("white", (128, 64))))) > OTHER


def test_img_09_16_bit_colour(cluster: Cluster) -> None:
    rows = b"".join(
        b"\0" + np.asarray(quad())[y].astype(">u2").__mul__(257).astype(">u2").tobytes()
        for y in range(64)
    )
    assert distance(ask(cluster, png(96, 64, 16, 2, rows)), ask(cluster, file(quad()))) < SAME


def test_img_10_cmyk_has_natural_colours(cluster: Cluster) -> None:
    cmyk = file(quad().convert("CMYK"), "JPEG", quality=100, subsampling=0)
    off = np.abs(pixels(cmyk).astype(int) - np.asarray(quad()).astype(int))
    assert np.median(off) <= 4, "a negative, or other colours"
    tiff = file(quad().convert("CMYK"), "TIFF")
    plain = file(quad().convert("CMYK").convert("RGB"))
    assert distance(ask(cluster, tiff), ask(cluster, plain)) < SAME
    negative = ask(cluster, file(ImageOps.invert(quad())))
    assert distance(ask(cluster, cmyk), negative) > OTHER


@pytest.mark.parametrize("size", [(1, 1), (27, 257), (1, 150), (200, 1), (5, 5)])
def test_img_11_sides_shorter_than_a_patch(cluster: Cluster, size: tuple[int, int]) -> None:
    """The rule: a small picture is enlarged to the smallest size that the model takes."""
    assert image_tokens(ask(cluster, file(noise(*size)))) > 0


NARROW = [(1, 27), (27, 28), (28, 29), (29, 55), (55, 56), (56, 57), (57, 400)]
LARGE = [(400, 800), (800, 400), (448, 448), (1000, 1344), (1344, 1000), (3999, 4001)]
LONG = [(29, 4000), (4000, 28), (4000, 400)]


def test_img_14_every_size_has_the_promised_rows(cluster: Cluster) -> None:
    """Encode refuses a picture whose rows are not those that the gateway counted."""

    def count(size: tuple[int, int]) -> int:
        return image_tokens(ask(cluster, file(solid("red", size)), max_tokens=1))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(count, NARROW + LARGE + LONG))


def test_img_18_svg_is_named_and_never_followed(cluster: Cluster, site: Site) -> None:
    link = site.url("/inner.png").encode()
    external = (
        b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/hostname">]>'
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="' + link + b'"/>&x;</svg>'
    )
    for drawing in (SVG, external):
        for kind in ("image/svg+xml", "image/png"):
            reply = ask(cluster, part(data_url(drawing, kind)))
            refused(reply, "SVG")
            assert "PNG, JPEG, WEBP, GIF" in reply.error["message"]
    assert site.connections == 0


def test_img_19_a_bad_image_in_the_history_is_named(cluster: Cluster) -> None:
    def turn(*content: object) -> dict[str, object]:
        return {"role": "user", "content": list(content)}

    bad, good = part(data_url(b"no picture")), part(data_url(file(quad())))
    history = [
        turn(text("Hello")),
        {"role": "assistant", "content": "Hello!"},
        turn(text("Look at these."), good, bad),
        {"role": "assistant", "content": "A large red circle."},
        turn(text("And what is two and two?")),
    ]
    request = {"messages": history, "max_tokens": 3}
    refused(cluster.chat(request), "no picture", "messages[2].content[2].image_url.url")
    history[2] = turn(text("Look at these."), good)
    assert cluster.chat(request).status == 200


def test_img_20_sizes_are_read_in_every_format(cluster: Cluster) -> None:
    """One reader of headers: the count never depends on the format."""
    picture = quad(300, 200)
    formats = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]
    files = [file(picture, name) for name in formats]
    files.append(file(picture.convert("RGBA"), "WEBP", lossless=True))
    counts = {prompt_tokens(ask(cluster, data, max_tokens=1)) for data in files}
    for data in files:
        asked = {"model": cluster.model, "messages": body(data, text(QUESTION))["messages"]}
        reply = request(cluster.address, "/tokenize", asked)
        assert reply.status == 200, reply.body
        counts.add(reply.json["count"])
    assert len(counts) == 1


# --- beyond the log -----------------------------------------------------------------------


def twins() -> dict[str, tuple[bytes, bytes]]:
    """Pairs of files that a careless cache key can't tell apart."""
    red, blue = solid("red"), solid("blue")
    tall = noise(30, 150)
    indexed = [Image.new("P", (64, 64)) for _ in range(2)]
    for picture, colour in zip(indexed, ((255, 0, 0), (0, 0, 255)), strict=True):
        picture.putpalette(colour)
    same_id = Image.Exif()
    same_id[0xA420] = "0123456789abcdef0123456789abcdef"  # ImageUniqueID
    padding = chunk(b"tEXt", b"a\0" + b"x" * 8000)

    def late(picture: Image.Image) -> bytes:
        """Files of one length that are equal in their first 8 KB."""
        data = file(picture)
        return data[:33] + padding + data[33:]

    return {
        "palette": (file(indexed[0]), file(indexed[1])),
        "shape": (file(tall), file(Image.frombytes("RGB", (150, 30), tall.tobytes()))),
        "prefix": (late(red), late(blue)),
        "id": (file(red, "JPEG", exif=same_id), file(blue, "JPEG", exif=same_id)),
    }


@pytest.mark.parametrize("kind", ["palette", "shape", "prefix", "id"])
def test_img_twins_never_share_an_answer(cluster: Cluster, kind: str) -> None:
    one, other = twins()[kind]
    first, second, again = (ask(cluster, data) for data in (one, other, one))
    assert distance(first, second) > OTHER
    assert distance(first, again) < SAME


def test_img_pictures_of_one_size_are_told_apart(cluster: Cluster) -> None:
    red = file(solid("red", (448, 448)))
    green = file(solid("green", (448, 448)))
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda data: ask(cluster, data), [red, green, red, green]))
    assert distance(replies[0], replies[2]) < SAME
    assert distance(replies[1], replies[3]) < SAME
    assert distance(replies[0], replies[1]) > SAME


def test_img_detail_low_reduces_the_picture(cluster: Cluster) -> None:
    """The demo model takes little more than that anyway; what counts is the picture sent."""
    picture = noise(1200, 800)
    reduced = images.reduce(picture, LIMITS.low_detail_pixels)
    assert reduced.size[0] * reduced.size[1] <= LIMITS.low_detail_pixels
    low = ask(cluster, part(data_url(file(picture)), detail="low"))
    assert distance(low, ask(cluster, file(reduced))) < SAME
    high = ask(cluster, part(data_url(file(picture)), detail="high"))
    assert distance(high, ask(cluster, file(picture))) < SAME
    assert distance(high, ask(cluster, part(data_url(file(picture)), detail="auto"))) < SAME
    small = quad()
    small_low = ask(cluster, part(data_url(file(small)), detail="low"))
    assert distance(small_low, ask(cluster, file(small))) < SAME
    reply = cluster.chat(body(part(data_url(file(small)), detail="ultra")))
    refused(reply, "ultra", "messages[0].content[0].image_url.detail", "invalid_request")
