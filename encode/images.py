"""From a file's bytes to what the vision tower takes, in processes that can be killed."""

from __future__ import annotations

from encode.decoder import PARAM, describe, unpack
from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.jobs import EncodeJob
from epd.models.processor import PreparedImage
from epd.obs import metrics
from epd.sandbox import Sandbox, SandboxLimits, WorkerDied


class ImagePreparer:
    """Decodes and resizes pictures, and holds them to what was planned.

    Its processes start at once, while this one loads the model; `start` waits for them.
    A file that takes too long, too much memory, or crashes its process fails its own
    request; the process is replaced in milliseconds.
    """

    def __init__(self, config: Config) -> None:
        encode = config.encode
        self._cpu_s = encode.decode_cpu_s
        self._memory_mib = encode.decode_memory_mib
        self._sandbox = Sandbox(
            "encode.decoder:load",
            {"path": config.model.path, "limits": config.limits.model_dump()},
            encode.decode_workers,
            SandboxLimits(encode.decode_cpu_s, encode.decode_memory_mib << 20),
        )

    async def start(self) -> None:
        """Raises EpdError where the checkpoint's processor can't be loaded."""
        await self._sandbox.start()

    async def prepare(self, job: EncodeJob) -> PreparedImage:
        """Tensors of one picture; they own their memory.

        Raises:
            EpdError: INVALID_IMAGE or IMAGE_TOO_LARGE: it can't be decoded, or it is
                not the picture that its header promised.
        """
        try:
            return unpack(await self._sandbox.run(describe(job.item), job.image))
        except WorkerDied as died:
            metrics.DECODERS_LOST.labels("time" if died.timed_out else "crash").inc()
            if died.timed_out:
                reason = f"the image takes more than {self._cpu_s:g} s to decode"
            else:
                most = f"{self._memory_mib} MiB"
                reason = f"the image broke the decoder, or needs more than {most} to decode"
            raise EpdError(ErrorKind.INVALID_IMAGE, reason, param=PARAM) from died

    def close(self) -> None:
        self._sandbox.close()
