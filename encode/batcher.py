"""Which images run in the next forward. Pure: no torch, no gRPC, no clock.

    admit -> QUEUED --prepared--> PREPARED --next_batch--> RUNNING --complete--> gone
                 \\____________________\\____ abort ____________/

Invariants
    arrival order   a prepared image never overtakes an earlier prepared one
    budget          the patches of a batch stay within the budget, or it is one image
    reservation     an image is RUNNING only with its place in the arena reserved
    one batch       a second batch starts only after the first is complete
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from epd.errors import EpdError, ErrorKind


@dataclass(slots=True)
class _Image:
    key: int
    patches: int | None = None


class Batcher:
    """Keys are the worker's own numbers, unique over its life."""

    def __init__(self, batch_patches: int, max_queue: int) -> None:
        self._budget = batch_patches
        self._max_queue = max_queue
        self._waiting: dict[int, _Image] = {}  # in order of arrival
        self._running: frozenset[int] = frozenset()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def first(self) -> int | None:
        """The image that the next batch starts with, once it finds a place."""
        if self._running:
            return None
        return next((i.key for i in self._waiting.values() if i.patches is not None), None)

    def admit(self, key: int) -> int:
        """Queue an image; returns how many wait before it.

        Raises:
            EpdError: OVERLOADED when the queue is full.
        """
        depth = len(self._waiting)
        if depth >= self._max_queue:
            reason = f"{depth} images wait, {self._max_queue} may (encode.max_queue)"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)
        assert key not in self._waiting
        assert key not in self._running
        self._waiting[key] = _Image(key)
        return depth

    def prepared(self, key: int, patches: int) -> None:
        """The picture is decoded and resized; it may run. Ignored after an abort."""
        image = self._waiting.get(key)
        if image is not None:
            image.patches = patches

    def next_batch(self, reserve: Callable[[int], bool]) -> list[int]:
        """Keys to run now, in order of arrival; empty while a batch runs.

        `reserve(key)` reserves the image's whole place in the arena or nothing;
        the first refusal ends the batch, so that a large image is not starved
        by small ones behind it.
        """
        if self._running:
            return []
        batch: list[int] = []
        patches = 0
        for image in self._waiting.values():
            if image.patches is None:
                continue
            if batch and patches + image.patches > self._budget:
                break
            if not reserve(image.key):
                break
            batch.append(image.key)
            patches += image.patches
        for key in batch:
            del self._waiting[key]
        self._running = frozenset(batch)
        return batch

    def complete(self, keys: Iterable[int]) -> None:
        """The running batch is done."""
        assert self._running == frozenset(keys), "only the running batch can complete"
        self._running = frozenset()

    def abort(self, key: int) -> bool:
        """Forget a waiting image. True if it is running instead: its place in the
        arena is in use until the batch is complete."""
        self._waiting.pop(key, None)
        return key in self._running

    def check_integrity(self) -> None:
        assert not self._running & self._waiting.keys()
        assert len(self._waiting) <= self._max_queue
