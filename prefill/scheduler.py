"""Which tokens run in the next forward. Pure: no torch, no gRPC, no clock.

    admit -> WAITING --reserve--> RUNNING --(next_batch, complete)*--> computed == total
                 \\____________________\\________ abort ___________________/

Invariants
    reservations    all or nothing; within a client in order of arrival, between clients
                    whoever was given least. Nobody overtakes the first once it is first
    images          no chunk holds a placeholder of an image that is not ready; without
                    `overlap` no chunk runs while any image of its request is not ready
    budget          a batch holds at most `step_tokens`, a request's part `chunk_tokens`;
                    only an atomic span may exceed them, alone in its batch
    fairness        between clients by tokens (`epd.fairness`). Within a client who was
                    served goes to the back, but for one whose rest fits the next step: that
                    ends first. Taking turns to the last token, prompts that came together
                    would all have their first token when the last has. Every runnable
                    request runs within twice as many of its client's turns as that has
                    requests, while the budget of a batch doesn't shrink
    one step        a request is in one running step at most
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epd.errors import EpdError, ErrorKind
from epd.fairness import FairQueue, Round, Shares, gives_way


@dataclass(frozen=True, slots=True)
class ItemSpan:
    """Where the placeholders of one image are: token positions, ascending."""

    index: int
    positions: Sequence[int]

    def reaches(self, computed: int) -> bool:
        """Whether a placeholder is left behind the first `computed` tokens."""
        return bool(self.positions) and self.positions[-1] >= computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of one request in one forward."""

    key: int
    start: int
    end: int
    last: bool

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class _Request:
    key: int
    total: int
    items: tuple[ItemSpan, ...]
    atomic: tuple[tuple[int, int], ...]
    overlap: bool
    client: bytes
    resumed: bool
    computed: int = 0
    ready: set[int] = field(default_factory=set)
    in_step: bool = False

    def limit(self) -> int:
        """First position that can't be computed yet."""
        blocked = [
            span.positions[at]
            for span in self.items
            if span.index not in self.ready
            and (at := bisect_left(span.positions, self.computed)) < len(span.positions)
        ]
        if blocked and not self.overlap:
            return self.computed
        return min(blocked, default=self.total)

    def end_of_chunk(self, budget: int, alone: bool) -> int:
        """Where a chunk of at most `budget` tokens ends, without cutting an atomic span."""
        limit = self.limit()
        end = min(self.computed + budget, limit)
        for first, stop in self.atomic:
            if first < end < stop:
                whole_fits = alone and first <= self.computed and stop <= limit
                end = stop if whole_fits else max(first, self.computed)
                break
        return end


@dataclass(slots=True)
class _Load:
    """Sums over what waits, kept as it comes and goes: a long queue is not gone through for
    each request that comes."""

    tokens: int = 0
    """Of all."""
    new: int = 0
    """Requests that can be refused: their clients have nothing of the answer yet."""
    new_tokens: int = 0

    def count(self, request: _Request, sign: int) -> None:
        """One comes (1) or leaves (-1)."""
        self.tokens += sign * request.total
        if not request.resumed:
            self.new += sign
            self.new_tokens += sign * request.total


class Scheduler:
    """Keys are the worker's own numbers, unique over its life."""

    def __init__(
        self,
        step_tokens: int,
        chunk_tokens: int,
        max_queue: int,
        *,
        max_queue_tokens: int = 1 << 62,
        overlap: bool = True,
    ) -> None:
        self._overlap = overlap
        self._max_queue_tokens = max_queue_tokens
        self._step_tokens = step_tokens
        self._chunk_tokens = min(chunk_tokens, step_tokens)
        self._max_queue = max_queue
        self._waiting: dict[int, _Request] = {}
        self._queue = FairQueue()  # of those that wait
        self._load = _Load()
        self._running: dict[int, _Request] = {}  # front = longest without service
        self._computed = Shares()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued_tokens(self) -> int:
        """That could be computed if there were time: of requests that wait all, of those that
        run up to the first image that is not here (that one waits for its encoder)."""
        behind = sum(max(0, r.limit() - r.computed) for r in self._running.values())
        return self._load.tokens + behind

    @property
    def runnable(self) -> bool:
        """Whether a step could do something now."""
        return any(not r.in_step and r.limit() > r.computed for r in self._running.values())

    def admit(
        self,
        key: int,
        total: int,
        items: Sequence[ItemSpan] = (),
        atomic: Sequence[tuple[int, int]] = (),
        client: bytes = b"",
        resumed: bool = False,
    ) -> None:
        """Queue a request of `total` tokens.

        `atomic` are spans [first, stop) that one forward must hold whole
        (bidirectional attention). `client` is whose share it takes of. `resumed`: its client
        has a part of the answer already, so that no full queue refuses it, and it takes no
        place in one; there are no more of these than ran before.

        Raises:
            EpdError: OVERLOADED when the queue is full.
        """
        if not resumed:
            self._check_queue(total)
        places = (tuple(items), tuple(atomic))
        request = _Request(key, total, *places, self._overlap, client, resumed)
        self._waiting[key] = request
        self._load.count(request, 1)
        self._queue.add(key, client)

    def _leave_queue(self, key: int) -> _Request | None:
        request = self._waiting.pop(key, None)
        if request is not None:
            self._load.count(request, -1)
        return request

    def _new(self) -> dict[int, _Request]:
        """What waits and can be refused, in order of arrival."""
        return {key: request for key, request in self._waiting.items() if not request.resumed}

    def make_room(self, client: bytes, total: int) -> list[int]:
        """Where the queue is too full for a request of `total` tokens: whose requests give
        their places to one of `client`, so that no client keeps the others out. They must
        be aborted then."""
        leaving: list[int] = []
        tokens = self._load.new_tokens
        if not self._full(self._load.new, tokens, total):
            return leaving
        waiting = self._new()
        while self._full(len(waiting), tokens, total):
            key = gives_way(((r.client, key) for key, r in waiting.items()), client)
            if key is None:
                return []
            tokens -= waiting.pop(key).total
            leaving.append(key)
        return leaving

    def _full(self, waiting: int, tokens: int, more: int) -> bool:
        """One request may wait however long it is."""
        too_long = waiting > 0 and tokens + more > self._max_queue_tokens
        return waiting >= self._max_queue or too_long

    def _check_queue(self, more: int) -> None:
        waiting, tokens = self._load.new, self._load.new_tokens
        if not self._full(waiting, tokens, more):
            return
        if waiting >= self._max_queue:
            reason = f"{waiting} requests wait, {self._max_queue} may (prefill.max_queue)"
        else:
            most = self._max_queue_tokens
            reason = f"{tokens} tokens wait, {most} may (prefill.max_queue_tokens)"
        raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)

    def reserve(self, try_reserve: Callable[[int], int | None]) -> list[int]:
        """Move requests from waiting to running, clients in their turn.

        `try_reserve(key)` takes all memory of the request and says how many of its
        tokens are computed already, or takes nothing and says None, which ends the
        round. A request that leaves later was given all the same what it asked for.
        Returns the keys that are running now.
        """
        admitted: list[int] = []
        while (key := self._queue.first()) is not None:
            computed = try_reserve(key)
            if computed is None:
                break
            request = self._leave_queue(key)
            assert request is not None
            assert 0 <= computed < request.total
            request.computed = computed
            self._queue.take(key, request.total - computed)
            self._running[key] = request
            admitted.append(key)
        return admitted

    def item_ready(self, key: int, index: int) -> None:
        """The rows of one image are here. Ignored after an abort."""
        request = self._running.get(key)
        if request is not None:
            request.ready.add(index)

    def next_batch(self, budget: int | None = None) -> list[Chunk]:
        """Chunks of the next forward; empty when nothing can run. `budget` lowers
        `step_tokens` for this batch."""
        batch: list[Chunk] = []
        budget = most = min(self._step_tokens, budget or self._step_tokens)
        idle = (r for r in self._running.values() if not r.in_step)
        in_turn = Round(self._computed, idle, lambda request: request.client)
        while budget > 0 and (request := in_turn.first()) is not None:
            end = request.end_of_chunk(min(budget, self._chunk_tokens), alone=not batch)
            if end <= request.computed:
                in_turn.skip()
                continue
            last = end == request.total
            batch.append(Chunk(request.key, request.computed, end, last))
            in_turn.take(end - request.computed)
            budget -= end - request.computed
            request.in_step = True
        for chunk in batch:
            if not self._ends_next(chunk, most):
                self._running[chunk.key] = self._running.pop(chunk.key)
        return batch

    def _ends_next(self, chunk: Chunk, most: int) -> bool:
        """Whether one more step of at most so many tokens is the request's last."""
        request = self._running[chunk.key]
        left = request.total - chunk.end
        return left <= min(most, self._chunk_tokens) and request.limit() == request.total

    def complete(self, chunk: Chunk) -> None:
        """The chunk's step is done. A request that is done leaves; aborted ones left."""
        request = self._running.get(chunk.key)
        if request is None:
            return
        assert request.in_step
        assert request.computed == chunk.start
        request.in_step = False
        request.computed = chunk.end
        if chunk.last:
            del self._running[chunk.key]

    def abort(self, key: int) -> bool:
        """Forget a request. True if a running step still uses its blocks."""
        request = self._running.pop(key, None)
        if request is None:
            self._leave_queue(key)
            self._queue.drop(key)
            return False
        return request.in_step

    def check_integrity(self) -> None:
        assert not self._waiting.keys() & self._running.keys()
        assert len(self._queue) == len(self._waiting)
        assert all(key in self._queue for key in self._waiting)
        recounted = _Load()
        for request in self._waiting.values():
            recounted.count(request, 1)
        assert self._load == recounted
        for request in self._running.values():
            assert request.computed <= request.limit()
