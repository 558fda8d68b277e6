"""Headers of picture files, read in processes that can be killed.

A hostile file of 20 MB keeps Pillow busy with its header for seconds (a million empty
chunks), in Python code that would hold up the whole gateway.
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


def load(limits: Mapping[str, Any]) -> Work:
    """The work of the sandbox: the body is the file, the head says what to call it."""
    allowed = LimitsConfig.model_validate(limits)

    def work(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], tuple[Buffer, ...]]:
        return asdict(images.read_header(body, allowed, head["param"])), ()

    return work


class HeaderReader:
    """`epd.images.read_header` for files from anyone."""

    def __init__(self, config: Config) -> None:
        self._sandbox = Sandbox(
            "gateway.headers:load",
            {"limits": config.limits.model_dump()},
            config.gateway.header_workers,
            SandboxLimits(_CPU_S, _MEMORY),
        )

    async def read(self, data: bytes, param: str) -> ImageHeader:
        """Size and format of a picture file.

        Raises:
            EpdError: see `read_header`; also INVALID_IMAGE for a header that takes too
                long to read, or breaks its reader.
        """
        try:
            reply = await self._sandbox.run({"param": param}, data)
        except WorkerDied as died:
            metrics.DECODERS_LOST.labels("time" if died.timed_out else "crash").inc()
            what = f"takes more than {_CPU_S:g} s to read" if died.timed_out else "can't be read"
            reason = f"the image's header {what}"
            raise EpdError(ErrorKind.INVALID_IMAGE, reason, param=param) from died
        return ImageHeader(**reply.head)

    def close(self) -> None:
        self._sandbox.close()
