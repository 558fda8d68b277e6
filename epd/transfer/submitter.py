"""The one thread that hands descriptors to Mooncake.

Submitting takes the engine's lock, and whoever opens a session to a peer that
stops at that moment holds it for up to 61 s. On this thread that is a stuck
engine that health can report; on the event loop it would be a dead worker.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from epd.transfer.flow import Read
from epd.transfer.pieces import Piece

Job = list[tuple[Read, Piece]]
Result = tuple[Read, Piece, int | None]
"""A piece's id; None: refused by the engine, or skipped as its read was stopped."""


class Native(Protocol):
    """What is used of mooncake.engine.TransferEngine."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, nbytes: int, /) -> int: ...
    def unregister_memory(self, address: int, /) -> int: ...
    def batch_transfer_async_read(
        self, name: str, local: list[int], remote: list[int], lengths: list[int], /
    ) -> int: ...
    def transfer_check_status(self, batch_id: int, /) -> int: ...


class Submitter:
    """Takes jobs, calls `deliver(results)` on its own thread after each."""

    def __init__(self, native: Native, deliver: Callable[[list[Result]], None]) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        # A daemon: stuck in native code, it must not keep the process from exiting.
        # Only the thread refers to the engine, so that the engine ends with it.
        self._thread = threading.Thread(
            target=self._run, args=(native, deliver), name="epd-transfer", daemon=True
        )
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    @property
    def busy_s(self) -> float:
        """How long the present call into Mooncake has taken; 0: none; infinite: the
        thread died of an error (threading.excepthook has shown it)."""
        if not self._thread.is_alive():
            return float("inf")
        since = self._busy_since
        return time.monotonic() - since if since is not None else 0.0

    def stop(self, bound_s: float) -> bool:
        """End after the jobs that were put; false if it is stuck in one."""
        self._jobs.put(None)
        self._thread.join(bound_s)
        return not self._thread.is_alive()

    def _run(self, native: Native, deliver: Callable[[list[Result]], None]) -> None:
        while (job := self._jobs.get()) is not None:
            deliver([(read, p, self._submit(native, read, p)) for read, p in job])
            del job  # while idle, it would pin the memory of the last read

    def _submit(self, native: Native, read: Read, piece: Piece) -> int | None:
        if read.stopped:
            return None
        self._busy_since = time.monotonic()
        try:
            # One descriptor an id: Mooncake's status is that of descriptor 0 only.
            return (
                native.batch_transfer_async_read(
                    read.name, [piece.local], [piece.remote], [piece.length]
                )
                or None
            )
        finally:
            self._busy_since = None
