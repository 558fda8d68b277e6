"""JSON bodies, read on the event loop where that takes no time, else in another process.

A parser holds up everybody while it reads: 60 MB for a tenth of a second, 400,000 small
values for three. What is sure to be quick (`is_light`: most requests, with a picture or two)
is read at once, since a process costs more than it takes; the rest by `gateway.body_process`,
in a sandbox that bounds its time and memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

from epd.config import Config
from epd.errors import invalid
from epd.forked import may_fork
from epd.sandbox import Sandbox, SandboxLimits, WorkerDied
from gateway.body_process import MEMORY_MIB, Room, check_room, unpacked
from gateway.forms import Form, parse
from gateway.schema import ChatCall, count_values

LIGHT_BYTES: Final = 1 << 20
"""A picture file of 768 KiB; a millisecond."""
LIGHT_VALUES: Final = 4096
"""Two milliseconds, with their checks."""
_CPU_S: Final = 10.0


class BodyReader:
    """One per gateway. `room` says what prompt can fit, now."""

    def __init__(self, config: Config, vocab_size: int, room: Callable[[], Room]) -> None:
        self._limits = config.limits
        self._workers = config.gateway.body_workers
        self._vocab_size = vocab_size
        self._room = room
        self._closed = False
        # Where a fork is all that it takes; else when the first heavy body is there.
        self._sandbox = self._made() if may_fork() else None

    def _made(self) -> Sandbox:
        return Sandbox(
            "gateway.body_process:load",
            {"limits": self._limits.model_dump(), "vocab_size": self._vocab_size},
            self._workers,
            SandboxLimits(_CPU_S, MEMORY_MIB << 20),
        )

    def close(self) -> None:
        self._closed = True
        if self._sandbox is not None:
            self._sandbox.close()

    def read_at_once(self, form: Form, body: Sequence[bytes]) -> ChatCall | None:
        """The checked request that a body, in pieces, holds; None for one that takes time.

        Raises:
            EpdError: INVALID_REQUEST naming the field, or CONTEXT_LENGTH_EXCEEDED.
        """
        if not is_light(body):
            return None
        call = parse(form, b"".join(body), self._limits, self._vocab_size)
        check_room(form, call, self._room())
        return call

    async def read_apart(self, form: Form, body: Sequence[bytes], client: bytes = b"") -> ChatCall:
        """The same by another process, with pictures decoded to files. Clients take turns.

        Raises:
            EpdError: also for a picture whose coding is damaged, and for a body that takes
                too much time or memory.
        """
        assert not self._closed
        if self._sandbox is None:
            self._sandbox = self._made()
        try:
            asked = {"form": form, "room": asdict(self._room())}
            reply = await self._sandbox.run(asked, body, client)
        except WorkerDied as died:
            what = f"takes more than {_CPU_S:g} s to read" if died.timed_out else "can't be read"
            raise invalid(f"the body {what}") from died
        return await asyncio.to_thread(unpacked, reply.head, reply.data)


def is_light(body: Sequence[bytes]) -> bool:
    """Whether reading this is sure to be quick. Counts what stands in texts as well: a
    kilobyte of program more or less decides nothing but where it is read."""
    if sum(map(len, body)) > LIGHT_BYTES:
        return False
    return sum(map(count_values, body)) <= LIGHT_VALUES
