"""Which pictures are decoded next, and which run in the next forward. Pure: no torch, no
gRPC, no clock.

    admit -> QUEUED --next_pictures--> DECODING --decoded--> READY --next_batch--> RUNNING
                 \\_______________________\\______ abort _______/             complete -> gone

Invariants
    fairness        between clients whoever was given least (`epd.fairness`), in rows decoded
                    and in patches encoded; within a client in order of arrival. Nobody
                    overtakes the first once it is first and waits for a place
    first alone     a request's other pictures are not decoded before its first one
    decoded ahead   `ahead` pictures are decoded and not yet encoded at most, and no client
                    takes the last places of several (`_GREED`)
    budget          the patches of a batch stay within the budget, or it is one picture
    reservation     a picture is RUNNING only with its place in the arena reserved
    one batch       a second batch starts only after the first is complete
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from epd.errors import EpdError, ErrorKind
from epd.fairness import Round, Shares, gives_way

_GREED = 4
"""A client may hold so many times the places that are left."""


class _State(Enum):
    QUEUED = auto()
    DECODING = auto()
    READY = auto()


@dataclass(slots=True)
class _Picture:
    key: int
    client: bytes
    request: str
    rows: int
    behind: int | None
    """The first of its request, which is decoded before."""
    file_bytes: int
    """Of the file that it is still: it is none any more once it is decoded."""
    state: _State = _State.QUEUED
    patches: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at once."""

    batch_patches: int
    max_queue: int
    decoding: int = 4
    """Pictures that are being decoded."""
    ahead: int = 32
    max_file_bytes: int = 1 << 62
    """Of the files that wait, together; one may wait however large it is."""


class Batcher:
    """Keys are the worker's own numbers, unique over its life."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[int, _Picture] = {}  # in order of arrival
        self._file_bytes = 0
        """Of those that wait: a long queue is not gone through for each picture that comes."""
        self._running: dict[int, _Picture] = {}
        self._decoded = Shares()
        self._encoded = Shares()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def first(self) -> int | None:
        """The picture that the next batch starts with, once it finds a place."""
        if self._running:
            return None
        picture = self._ready().first()
        return None if picture is None else picture.key

    def make_room(self, client: bytes, file_bytes: int = 0) -> list[int]:
        """Where the queue is too full for a file of so many bytes: whose pictures give their
        places to one of `client`, so that no client keeps the others out. They must be
        aborted then."""
        leaving: list[int] = []
        held = self._file_bytes
        if not self._full(len(self._waiting), held, file_bytes):
            return leaving
        waiting = dict(self._waiting)
        while self._full(len(waiting), held, file_bytes):
            queued = ((p.client, p.key) for p in waiting.values() if p.state is _State.QUEUED)
            key = gives_way(queued, client)
            if key is None:
                return []
            held -= waiting.pop(key).file_bytes
            leaving.append(key)
        return leaving

    def _full(self, waiting: int, held: int, more: int) -> bool:
        """One file may wait however large it is."""
        too_large = held > 0 and held + more > self._limits.max_file_bytes
        return waiting >= self._limits.max_queue or too_large

    def admit(
        self,
        key: int,
        *,
        client: bytes = b"",
        request: str = "",
        rows: int = 1,
        file_bytes: int = 0,
    ) -> int:
        """Queue a picture; returns how many wait before it. `client` is whose share it
        takes of; `request` is a name of the client's, "" of none.

        Raises:
            EpdError: OVERLOADED when the queue is full.
        """
        self._check_queue(file_bytes)
        assert key not in self._waiting
        assert key not in self._running
        depth = len(self._waiting)
        behind = self._first_of(client, request) if request else None
        self._waiting[key] = _Picture(key, client, request, rows, behind, file_bytes)
        self._file_bytes += file_bytes
        return depth

    def _first_of(self, client: bytes, request: str) -> int | None:
        same = (p.key for p in self._waiting.values() if (p.client, p.request) == (client, request))
        return next(same, None)

    def _leave_queue(self, key: int) -> _Picture | None:
        picture = self._waiting.pop(key, None)
        if picture is not None:
            self._file_bytes -= picture.file_bytes
        return picture

    def _check_queue(self, more: int) -> None:
        depth, held = len(self._waiting), self._file_bytes
        if not self._full(depth, held, more):
            return
        if depth >= (most := self._limits.max_queue):
            reason = f"{depth} images wait, {most} may (encode.max_queue)"
        else:
            most = self._limits.max_file_bytes
            reason = f"{held} bytes of images wait, {most} may (encode.max_queue_mib)"
        raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)

    # -- decoding -----------------------------------------------------------

    def next_pictures(self) -> list[int]:
        """Keys to decode now: they are DECODING from here on."""
        begun: list[int] = []
        held = Counter(p.client for p in self._held())
        decoding = sum(p.state is _State.DECODING for p in self._waiting.values())
        queued = self._in_turn(self._decoded, (p for p in self._waiting.values() if self._next(p)))
        while decoding < self._limits.decoding and (picture := queued.first()) is not None:
            left = self._limits.ahead - held.total()
            if left <= 0:
                break
            if held[picture.client] >= _GREED * left:
                queued.skip()
                continue
            queued.take(picture.rows)
            picture.state = _State.DECODING
            held[picture.client] += 1
            decoding += 1
            begun.append(picture.key)
        return begun

    def _held(self) -> list[_Picture]:
        """Whose pixels are here, or coming."""
        waiting = (p for p in self._waiting.values() if p.state is not _State.QUEUED)
        return [*waiting, *self._running.values()]

    def _next(self, picture: _Picture) -> bool:
        first = None if picture.behind is None else self._waiting.get(picture.behind)
        return picture.state is _State.QUEUED and (first is None or first.state is _State.READY)

    def decoded(self, key: int, patches: int) -> None:
        """The picture is decoded and resized; it may run. Ignored after an abort."""
        picture = self._waiting.get(key)
        if picture is not None:
            assert picture.state is _State.DECODING
            self._file_bytes -= picture.file_bytes
            picture.state, picture.patches, picture.file_bytes = _State.READY, patches, 0

    # -- encoding -----------------------------------------------------------

    def _ready(self) -> Round[_Picture]:
        ready = (p for p in self._waiting.values() if p.state is _State.READY)
        return self._in_turn(self._encoded, ready)

    @staticmethod
    def _in_turn(shares: Shares, pictures: Iterable[_Picture]) -> Round[_Picture]:
        return Round(shares, pictures, lambda picture: picture.client)

    def next_batch(self, reserve: Callable[[int], bool]) -> list[int]:
        """Keys to run now; empty while a batch runs.

        `reserve(key)` reserves the picture's whole place in the arena or nothing;
        the first refusal ends the batch, so that a large picture is not starved
        by small ones behind it.
        """
        if self._running:
            return []
        ready, patches = self._ready(), 0
        while (picture := ready.first()) is not None:
            if self._running and patches + picture.patches > self._limits.batch_patches:
                break
            if not reserve(picture.key):
                break
            ready.take(picture.patches)
            patches += picture.patches
            self._leave_queue(picture.key)
            self._running[picture.key] = picture
        return list(self._running)

    def complete(self, keys: Iterable[int]) -> None:
        """The running batch is done."""
        assert self._running.keys() == set(keys), "only the running batch can complete"
        self._running.clear()

    def abort(self, key: int) -> bool:
        """Forget a waiting picture. True if it is running instead: its place in the
        arena is in use until the batch is complete."""
        self._leave_queue(key)
        return key in self._running

    def check_integrity(self) -> None:
        assert not self._running.keys() & self._waiting.keys()
        assert len(self._waiting) <= self._limits.max_queue
        assert len(self._held()) <= self._limits.ahead
        assert self._file_bytes == sum(picture.file_bytes for picture in self._waiting.values())
