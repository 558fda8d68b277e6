"""From what a client sent as an image to the file's bytes. Fetching is `gateway.fetch`'s."""

from __future__ import annotations

import binascii
import re
from typing import Any

import numpy as np

from epd.config import LimitsConfig
from epd.errors import EpdError, ErrorKind
from gateway.content import ImageSource

# All repetitions have an end: one match over 60 MB would hold up every other thread.
_SCHEME = re.compile(r"\s{0,64}([A-Za-z][A-Za-z0-9+.-]{0,63}):")
_BASE64_FLAG = re.compile(r";\s*base64\s*\Z", re.IGNORECASE)
_MOST_HEAD = 4096
"""Characters of a data: URL before its comma."""
_SPACE = b" \t\r\n\f\v"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_PREFIX = re.compile(r"\s{0,64}data:", re.IGNORECASE)
_FLAG_IN_BODY = re.compile(r"[^,]{0,256};\s{0,64}base64\s{0,64},", re.IGNORECASE)
_SLICE = 1 << 20
"""Characters decoded at a time (groups of four): between two, other threads can run."""
_PERCENT = ord("%")
_DIGIT = np.full(256, 255, np.uint8)
_DIGIT[list(b"0123456789abcdef")] = _DIGIT[list(b"0123456789ABCDEF")] = range(16)


def file_bytes(source: ImageSource, limits: LimitsConfig) -> bytes:
    """Decode a data: URL (RFC 2397, base64 or percent-encoded), or base64 where it may be.

    The media type is not looked at: what a file is, its bytes tell.

    Raises:
        EpdError: INVALID_IMAGE_URL for another kind of URL, INVALID_IMAGE for what can't
            be decoded, IMAGE_TOO_LARGE by size; `param` is the source's.
    """
    value = source.value
    if isinstance(value, bytes):
        data = value
    else:
        # Base64 takes 4/3, percent-encoding up to 3 characters a byte; a little is
        # left for the media type. Checked before anything is copied.
        if len(value) > 3 * limits.max_image_bytes + 1024:
            raise _too_large(source, f"{len(value)} characters", limits)
        data = _decode(value, source)
    if len(data) > limits.max_image_bytes:
        raise _too_large(source, f"{len(data)} bytes", limits)
    if not data:
        raise _bad("the image is empty", source.param)
    return data


def _decode(value: str, source: ImageSource) -> bytes:
    param = source.param
    scheme = _SCHEME.match(value)
    if scheme is None:
        if source.bare_base64:
            return _base64(value, param, "neither a data: URL nor base64")
        raise _bad_url("expected a data: URL or an http(s) URL", param)
    name = scheme[1].lower()
    if name != "data":
        raise _bad_url(f"the scheme {name}: is not allowed; send a data: URL", param)
    comma = value.find(",", scheme.end(), scheme.end() + _MOST_HEAD)
    if comma < 0:
        raise _bad(f"a data: URL without a comma in its first {_MOST_HEAD} characters", param)
    head, body = value[scheme.end() : comma], value[comma + 1 :]
    if _PREFIX.match(body):
        raise _bad("the data: URL's payload is itself a data: URL", param)
    if _BASE64_FLAG.search(head):
        return _base64(body, param, "the data: URL's base64 is damaged")
    if _FLAG_IN_BODY.match(body):
        raise _bad("the data: URL has a comma before ;base64, which starts its payload", param)
    return unescaped(body)


def unescaped(text: str) -> bytes:
    """As `urllib.parse.unquote_to_bytes`, which makes an object of each escape: of 60 MB of
    them, two gigabytes."""
    raw, done, at = text.encode(), [], 0
    while at < len(raw):
        end = min(at + _SLICE, len(raw))
        # An escape is not cut in two.
        end -= next((back for back in (1, 2) if end < len(raw) and raw[end - back] == _PERCENT), 0)
        done.append(_unescaped(np.frombuffer(raw, np.uint8, end - at, at)))
        at = end
    return b"".join(done)


def _unescaped(raw: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    places = np.flatnonzero(raw == _PERCENT)
    places = places[places < len(raw) - 2]
    high, low = _DIGIT[raw[places + 1]], _DIGIT[raw[places + 2]]
    good = (high | low) < 16
    places = places[good]
    out, kept = raw.copy(), np.ones(len(raw), bool)
    out[places] = high[good] * 16 + low[good]
    kept[places + 1] = kept[places + 2] = False
    return out[kept].tobytes()


def _base64(text: str, param: str, reason: str) -> bytes:
    """Standard or URL-safe alphabet; white space, escapes and missing padding allowed."""
    try:
        return _strict(text)  # most texts need no help
    except ValueError:
        pass
    try:
        raw = unescaped(text) if "%" in text else text.encode("ascii")
        pieces = (raw[at : at + _SLICE] for at in range(0, len(raw), _SLICE))
        raw = b"".join(piece.translate(_URL_SAFE, _SPACE) for piece in pieces).rstrip(b"=")
        return _strict(raw + b"=" * (-len(raw) % 4))
    except (ValueError, UnicodeEncodeError) as error:
        raise _bad(f"{reason}: {_brief(error)}", param) from error


def _strict(text: str | bytes) -> bytes:
    """Raises ValueError: it is no base64, or has something after its padding."""
    last = max(0, len(text) - 1) // _SLICE * _SLICE
    padding = text.find("=", 0, last) if isinstance(text, str) else text.find(b"=", 0, last)
    if padding >= 0:
        raise ValueError("Excess data after padding")
    pieces = (text[at : at + _SLICE] for at in range(0, len(text), _SLICE))
    return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)


def _brief(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "it holds characters outside ASCII"
    return str(error)


def _bad_url(message: str, param: str) -> EpdError:
    return EpdError(ErrorKind.INVALID_IMAGE_URL, message, param=param)


def _bad(message: str, param: str) -> EpdError:
    return EpdError(ErrorKind.INVALID_IMAGE, message, param=param)


def _too_large(source: ImageSource, size: str, limits: LimitsConfig) -> EpdError:
    reason = f"the image has {size}; {limits.max_image_bytes} bytes are allowed"
    return EpdError(ErrorKind.IMAGE_TOO_LARGE, reason, param=source.param)
