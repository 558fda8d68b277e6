"""Headers of picture files, read in processes that can be killed; plain ones here.

A hostile file of 20 MB keeps Pillow busy with its header for seconds (a million empty
chunks), in Python code that would hold up the whole gateway. Most files are not like that:
where all that Pillow will look at is short and of common kinds (`is_plain`), it is done
here in a tenth of a millisecond, by the same code, and no process is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from epd import images
from epd.config import Config, LimitsConfig
from epd.errors import EpdError, ErrorKind
from epd.images import ImageHeader
from epd.obs import metrics
from epd.sandbox import Sandbox, SandboxLimits, WorkerDied
from epd.sandbox_worker import Buffer, Work

_CPU_S: Final = 1.0
_MEMORY: Final = 256 << 20
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNKS = frozenset(b"IHDR PLTE tRNS gAMA cHRM sRGB sBIT bKGD pHYs tIME tEXt iCCP eXIf".split())
"""The last two mean decompressing and parsing, of so little that it takes no time."""
_JPEG = b"\xff\xd8"
_JPEG_SCAN = 0xDA
_JPEG_SEGMENTS = frozenset((0xC0, 0xC1, 0xC2, 0xC4, 0xDB, 0xDD, 0xE0, 0xEE, 0xFE))
"""Frame, tables, JFIF, Adobe, comment. EXIF and colour profiles (E1, E2) are parsed by more
code, but are so common that short ones of the usual beginnings are let in, too."""
_JPEG_NAMED = {0xE1: (b"Exif\0\0",), 0xE2: (b"ICC_PROFILE\0",)}
_MOST_PARTS: Final = 24
_MOST_HEADER: Final = 8 << 10


def load(limits: Mapping[str, Any]) -> Work:
    """The work of the sandbox: the body is the file, the head says what to call it."""
    allowed = LimitsConfig.model_validate(limits)

    def work(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], tuple[Buffer, ...]]:
        return asdict(images.read_header(body, allowed, head["param"])), ()

    return work


def is_plain(data: bytes) -> bool:
    """Whether reading this file's header is sure to be quick: Pillow's way to the first
    pixel is short, and leads past nothing but well-known parts."""
    if data.startswith(_PNG):
        return _is_plain_png(data)
    return data.startswith(_JPEG) and _is_plain_jpeg(data)


def _is_plain_png(data: bytes) -> bool:
    at = len(_PNG)
    for _ in range(_MOST_PARTS):
        if at > _MOST_HEADER or at + 8 > len(data):
            return False
        kind = data[at + 4 : at + 8]
        if kind == b"IDAT":
            return True
        if kind not in _PNG_CHUNKS:
            return False
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return False


def _is_plain_jpeg(data: bytes) -> bool:
    at = len(_JPEG)
    for _ in range(_MOST_PARTS):
        if at > _MOST_HEADER or at + 4 > len(data) or data[at] != 0xFF:
            return False
        marker = data[at + 1]
        if marker == _JPEG_SCAN:
            return True
        named = _JPEG_NAMED.get(marker)
        if marker not in _JPEG_SEGMENTS and not (named and data.startswith(named, at + 4)):
            return False
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False


class HeaderReader:
    """`epd.images.read_header` for files from anyone."""

    def __init__(self, config: Config) -> None:
        self._limits = config.limits
        self._sandbox = Sandbox(
            "gateway.headers:load",
            {"limits": config.limits.model_dump()},
            config.gateway.header_workers,
            SandboxLimits(_CPU_S, _MEMORY),
        )

    async def read(self, data: bytes, param: str, client: bytes = b"") -> ImageHeader:
        """Size and format of a picture file; asks a process, whatever the file is. Clients
        take turns.

        Raises:
            EpdError: see `read_header`; also INVALID_IMAGE for a header that takes too
                long to read, or breaks its reader.
        """
        try:
            reply = await self._sandbox.run({"param": param}, data, client)
        except WorkerDied as died:
            metrics.DECODERS_LOST.labels("time" if died.timed_out else "crash").inc()
            what = f"takes more than {_CPU_S:g} s to read" if died.timed_out else "can't be read"
            reason = f"the image's header {what}"
            raise EpdError(ErrorKind.INVALID_IMAGE, reason, param=param) from died
        return ImageHeader(**reply.head)

    def read_plain(self, data: bytes, param: str) -> ImageHeader:
        """The same here and now; `data` is plain (`is_plain`).

        Raises:
            EpdError: see `epd.images.read_header`.
        """
        return images.read_header(data, self._limits, param)

    def close(self) -> None:
        self._sandbox.close()
