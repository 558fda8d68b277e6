"""From what a client sent as an image to the file's bytes. Nothing is fetched."""

from __future__ import annotations

import binascii
import re
from urllib.parse import unquote_to_bytes

from epd.config import LimitsConfig
from epd.errors import EpdError, ErrorKind
from gateway.content import ImageSource

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):")
_BASE64_FLAG = re.compile(r";\s*base64\s*\Z", re.IGNORECASE)
_SPACE = b" \t\r\n\f\v"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def file_bytes(source: ImageSource, limits: LimitsConfig) -> bytes:
    """Decode a data: URL (RFC 2397, base64 or percent-encoded) or bare base64.

    Raises:
        EpdError: INVALID_REQUEST for another kind of URL, INVALID_IMAGE for what can't
            be decoded, IMAGE_TOO_LARGE by size; `param` is the source's.
    """
    value = source.value
    if isinstance(value, bytes):
        data = value
    else:
        # Base64 takes 4/3, percent-encoding up to 3 characters a byte; a little is
        # left for the media type. Checked before anything is copied.
        if len(value) > 3 * limits.max_image_bytes + 1024:
            raise _too_large(source, limits)
        data = _decode(value, source.param)
    if len(data) > limits.max_image_bytes:
        raise _too_large(source, limits)
    if not data:
        raise _bad("the image is empty", source.param)
    return data


def _decode(value: str, param: str) -> bytes:
    scheme = _SCHEME.match(value)
    if scheme is None:
        return _base64(value, param, "neither a data: URL nor base64")
    name = scheme[1].lower()
    if name in ("http", "https"):
        raise EpdError(
            ErrorKind.INVALID_REQUEST,
            "fetching images from URLs is off; send a data: URL or base64",
            param=param,
        )
    if name != "data":
        raise EpdError(
            ErrorKind.INVALID_REQUEST,
            f"{name}: URLs are not supported; send a data: URL",
            param=param,
        )
    head, comma, body = value[scheme.end() :].partition(",")
    if not comma:
        raise _bad("a data: URL without a comma", param)
    if _BASE64_FLAG.search(head):
        return _base64(body, param, "the data: URL's base64 is damaged")
    return unquote_to_bytes(body)


def _base64(text: str, param: str, reason: str) -> bytes:
    """Standard or URL-safe alphabet; white space, escapes and missing padding allowed."""
    try:
        raw = unquote_to_bytes(text) if "%" in text else text.encode("ascii")
        raw = raw.translate(_URL_SAFE, _SPACE).rstrip(b"=")
        return binascii.a2b_base64(raw + b"=" * (-len(raw) % 4), strict_mode=True)
    except (ValueError, UnicodeEncodeError) as error:
        raise _bad(f"{reason}: {_brief(error)}", param) from error


def _brief(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "it holds characters outside ASCII"
    return str(error)


def _bad(message: str, param: str) -> EpdError:
    return EpdError(ErrorKind.INVALID_IMAGE, message, param=param)


def _too_large(source: ImageSource, limits: LimitsConfig) -> EpdError:
    return EpdError(
        ErrorKind.IMAGE_TOO_LARGE,
        f"the image has more than {limits.max_image_bytes} bytes",
        param=source.param,
    )
