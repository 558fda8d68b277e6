"""data: URLs and base64 in every legal spelling; everything else refused with the reason."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest

from epd.config import LimitsConfig
from epd.errors import EpdError, ErrorKind
from gateway.content import ImageSource
from gateway.pictures import file_bytes

DATA = bytes(range(256)) + b"\xfb\xff\xfe?"
PLAIN = base64.b64encode(DATA).decode()
LIMITS = LimitsConfig(max_image_bytes=1000)
WRAPPED = "\r\n".join(PLAIN[i : i + 60] for i in range(0, len(PLAIN), 60))


def read(value: str | bytes) -> bytes:
    return file_bytes(ImageSource(value, "there", bare_base64=True), LIMITS)


@pytest.mark.parametrize(
    "value",
    [
        f"data:image/png;base64,{PLAIN}",
        f"DATA:IMAGE/PNG;BASE64,{PLAIN}",
        f"data:;base64,{PLAIN}",
        f"data:image/png;charset=utf-8;base64,{PLAIN}",
        f"data:image/png; base64,{PLAIN}",
        f"data:image/png;base64,{PLAIN.rstrip('=')}",
        f"data:image/png;base64, {WRAPPED}\n",
        f"  data:image/png;base64,{PLAIN}",
        f"data:image/png;base64,{quote(PLAIN, safe='')}",
        f"data:image/png;base64,{PLAIN.replace('+', '-').replace('/', '_')}",
        f"data:image/png,{quote(DATA)}",
        f"data:,{quote(DATA)}",
        PLAIN,
        PLAIN.rstrip("="),
        WRAPPED,
    ],
)
def test_legal_spellings(value: str) -> None:
    assert read(value) == DATA


def test_bytes_are_taken_as_they_are() -> None:
    assert read(DATA) == DATA


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("file:///etc/passwd", ErrorKind.INVALID_IMAGE_URL, "file: is not allowed"),
        ("ftp://a/b", ErrorKind.INVALID_IMAGE_URL, "ftp: is not allowed"),
        (f"data:image/png;base64,data:image/png;base64,{PLAIN}", ErrorKind.INVALID_IMAGE, "itself"),
        (f"data:image/png;name=a,b;base64,{PLAIN}", ErrorKind.INVALID_IMAGE, "comma before"),
        ("data:image/png;base64", ErrorKind.INVALID_IMAGE, "comma"),
        ("data:image/png;base64,", ErrorKind.INVALID_IMAGE, "empty"),
        ("data:image/png,", ErrorKind.INVALID_IMAGE, "empty"),
        ("", ErrorKind.INVALID_IMAGE, "empty"),
        (b"", ErrorKind.INVALID_IMAGE, "empty"),
        ("data:image/png;base64,A", ErrorKind.INVALID_IMAGE, "damaged"),
        ("data:image/png;base64,!!!!", ErrorKind.INVALID_IMAGE, "damaged"),
        ("data:image/png;base64,AA=A", ErrorKind.INVALID_IMAGE, "damaged"),
        ("data:image/png;base64,é", ErrorKind.INVALID_IMAGE, "ASCII"),
        ("a picture, of a cat!", ErrorKind.INVALID_IMAGE, "neither"),
        (base64.b64encode(bytes(1001)).decode(), ErrorKind.IMAGE_TOO_LARGE, "1000"),
        ("data:," + "a" * 100_000, ErrorKind.IMAGE_TOO_LARGE, "1000"),
        (bytes(1001), ErrorKind.IMAGE_TOO_LARGE, "1000"),
    ],
)
def test_the_rest_is_refused(value: str | bytes, kind: ErrorKind, words: str) -> None:
    with pytest.raises(EpdError) as caught:
        read(value)
    assert caught.value.kind is kind
    assert words in caught.value.message
    assert caught.value.param == "there"


@pytest.mark.parametrize("value", [PLAIN, "/etc/hostname", "", "a picture, of a cat!"])
def test_where_a_url_belongs_it_must_be_one(value: str) -> None:
    with pytest.raises(EpdError) as caught:
        file_bytes(ImageSource(value, "there"), LIMITS)
    assert caught.value.kind is ErrorKind.INVALID_IMAGE_URL
    assert caught.value.message == "expected a data: URL or an http(s) URL"
