"""Which sequences make a token in the next forward. Pure: no torch, gRPC, clock.

    admit -> JOINED --announced--> WAITING --reserve--> LOADING --start--> RUNNING --finish--> gone
                                                           |                  |
                                                           +---- preempt -----+--> gone, retried

Invariants
    reservation     blocks of the whole prompt and one more, all or nothing; those of a
                    cached prefix are shared. Within a client in the order of
                    `announced`, between clients whoever was given least (`epd.fairness`)
    fits alone      a request's largest KV fits an empty pool (checked by `admit`)
    growth          one block at a time; when none is free the youngest holder leaves,
                    so the oldest always goes on
    a running step  never loses a block: what leaves during it is freed by `complete`
    two steps       the one behind the running one is planned as if nobody ended, and takes
                    no block from anybody (`look_ahead`, `withdraw`)
    reads           blocks that reads still write into are freed by `release` only
    adopted         full blocks of a prefill in this process are never written; what
                    comes behind them is the request's own
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from epd.errors import EpdError, ErrorKind
from epd.fairness import FairQueue, gives_way
from epd.kv.blocks import BlockAllocator
from epd.kv.prefix import PrefixCache, Reserved


class _State(Enum):
    JOINED = auto()
    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    LEAVING = auto()  # preempted while loading: waits for its reads to end
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Slot:
    """One sequence in a step: it feeds one token and writes KV at `kv_len - 1`."""

    key: int
    kv_len: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What to run, and who lost its place to make room."""

    slots: tuple[Slot, ...]
    preempted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Block table of a request that may read now; the first `cached` need no reading.
    Where prefill is in this process: only the blocks behind those that it gives (`adopt`)."""

    key: int
    blocks: tuple[int, ...]
    cached: int


@dataclass(slots=True)
class _Sequence:
    key: int
    age: tuple[float, int]  # first arrival, then key: smaller is older
    kv_tokens: int
    most_tokens: int
    most_blocks: int
    hashes: tuple[bytes, ...]
    client: bytes
    resumed: bool
    state: _State = _State.JOINED
    blocks: list[int] = field(default_factory=list)
    adopts: bool = False  # prefill, in this process, gives it all full blocks
    adopted: int = 0  # of the first blocks: read-only, and prefill's as well
    in_steps: int = 0  # running or planned
    gone: bool = False  # left during them

    @property
    def next_kv(self) -> int:
        """Tokens with KV after the next step that can be planned for it."""
        return self.kv_tokens + self.in_steps + 1


class Scheduler:
    """Keys are the worker's own numbers, unique over its life."""

    def __init__(
        self,
        blocks: BlockAllocator,
        prefix: PrefixCache,
        block_tokens: int,
        max_running: int,
        max_queue: int,
        num_blocks: int | None = None,
    ) -> None:
        self._blocks = blocks
        self._num_blocks = num_blocks or blocks.num_blocks
        """That are decode's whatever else the pool holds: the others come and go."""
        self._prefix = prefix
        self._block_tokens = block_tokens
        self._max_running = max_running
        self._max_queue = max_queue
        self._all: dict[int, _Sequence] = {}
        self._queue = FairQueue()  # WAITING
        self._steps: deque[list[_Sequence]] = deque()
        """The running one, and the one that is planned behind it."""

    def _count(self, *states: _State) -> int:
        return sum(s.state in states for s in self._all.values())

    @property
    def waiting(self) -> int:
        return self._count(_State.JOINED, _State.WAITING)

    @property
    def running(self) -> int:
        return self._count(_State.LOADING, _State.RUNNING, _State.LEAVING)

    @property
    def runnable(self) -> bool:
        """Whether a step could do something now (one that runs already included)."""
        return self._count(_State.RUNNING) > 0

    def admit(
        self,
        key: int,
        kv_tokens: int,
        most_tokens: int,
        arrival: float,
        hashes: Sequence[bytes] = (),
        client: bytes = b"",
        resumed: bool = False,
    ) -> None:
        """A request joins: `kv_tokens` come from prefill, `most_tokens` is all the KV
        that it can ever need. `arrival` decides who is youngest; a request that was
        preempted keeps its first one. `hashes` name the full blocks of `kv_tokens`.
        `client` is whose share it takes of. `resumed`: its client has a part of the answer
        already, so that no full queue refuses it, and it takes no place in one.

        Raises:
            EpdError: CONTEXT_LENGTH_EXCEEDED if it can't fit even an empty pool,
                OVERLOADED when the queue is full.
        """
        most_tokens = max(most_tokens, kv_tokens)
        most = self._blocks_for(most_tokens)
        if most > self._num_blocks:
            pool = self._num_blocks * self._block_tokens
            raise EpdError(
                ErrorKind.CONTEXT_LENGTH_EXCEEDED,
                f"prompt and output may take {most_tokens} tokens, decode's pool "
                f"(kv.decode_tokens) holds {pool}",
                param="max_tokens",
            )
        if not resumed and (waiting := len(self._new())) >= self._max_queue:
            reason = f"{waiting} requests wait, {self._max_queue} may (decode.max_queue)"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)
        age, names = (arrival, key), tuple(hashes)
        self._all[key] = _Sequence(key, age, kv_tokens, most_tokens, most, names, client, resumed)

    def _new(self) -> list[_Sequence]:
        """Who waits and can be refused, in order of arrival."""
        waiting = self._by_age(_State.JOINED, _State.WAITING)
        return [sequence for sequence in waiting if not sequence.resumed]

    def make_room(self, client: bytes, most_tokens: int) -> int | None:
        """Where the queue is full: who gives its place to a request of `client` that may need
        `most_tokens`, so that no client keeps the others out. It must be finished then."""
        waiting = self._new()
        if len(waiting) < self._max_queue or self._blocks_for(most_tokens) > self._num_blocks:
            return None
        return gives_way(((s.client, s.key) for s in waiting), client)

    def announced(self, key: int, adopts: bool = False) -> None:
        """Its first blocks can be read, or adopted: it may reserve from now on."""
        sequence = self._all.get(key)
        if sequence is not None and sequence.state is _State.JOINED:
            sequence.state = _State.WAITING
            sequence.adopts = adopts
            self._queue.add(key, sequence.client)

    def reserve(self) -> list[Place]:
        """Give WAITING requests their blocks, clients in their turn.

        Keeps one free block for each running sequence, so that a newcomer is not
        preempted at once. Returns who may read now.
        """
        admitted: list[Place] = []
        while self.running < self._max_running and (key := self._queue.first()) is not None:
            head = self._all[key]
            reserved = self._reserve(head, self._count(_State.RUNNING))
            if reserved is None:
                break
            self._prefix.taken(reserved)
            self._queue.take(key, head.most_blocks)
            head.state = _State.LOADING
            head.blocks = reserved.blocks
            admitted.append(Place(head.key, tuple(reserved.blocks), reserved.cached))
        return admitted

    def _reserve(self, head: _Sequence, spare: int) -> Reserved | None:
        if head.adopts:  # a place for the next token, and for what it has before it
            full = head.kv_tokens // self._block_tokens
            own = min(self._blocks_for(head.kv_tokens + 1), head.most_blocks) - full
            return self._prefix.reserve((), own, spare)
        need = min(self._blocks_for(head.kv_tokens) + 1, head.most_blocks)
        return self._prefix.reserve(head.hashes, need, spare)

    def adopt(self, key: int, blocks: Sequence[int]) -> None:
        """Hold these next full blocks too, which prefill computed in this process.
        Ignored once the request has left."""
        sequence = self._all.get(key)
        if sequence is None:
            return
        assert sequence.adopts
        for block in blocks:
            self._blocks.share(block)
        at = sequence.adopted
        sequence.blocks[at:at] = blocks
        sequence.adopted += len(blocks)

    def replace(self, key: int, index: int, block: int) -> None:
        """Another block with the same content takes a place of the request's table; the
        request holds it already, and its own is free."""
        sequence = self._all[key]
        own, sequence.blocks[index] = sequence.blocks[index], block
        self._blocks.free([own])

    def start(self, key: int) -> None:
        """All its KV is here and the first token is known. Ignored once preempted."""
        sequence = self._all.get(key)
        if sequence is not None and sequence.state is _State.LOADING:
            sequence.state = _State.RUNNING

    def next_batch(self) -> Step:
        """Slots of the next forward, oldest first; nothing while a step runs."""
        if self._steps:
            return Step((), ())
        preempted: list[int] = []
        grown = [
            sequence
            for sequence in self._by_age(_State.RUNNING)
            if sequence.state is _State.RUNNING and self._grow(sequence, preempted)
        ]
        return Step(self._planned(grown), tuple(preempted))

    def look_ahead(self) -> Step | None:
        """Slots of the forward behind the running one, as if none of its sequences ended in
        it; None where there is no running one, where one is planned already, or where a
        sequence would need a block that another holds. `complete` or `withdraw` it."""
        if len(self._steps) != 1:
            return None
        running = self._by_age(_State.RUNNING)
        longer = [sequence for sequence in running if sequence.next_kv <= sequence.most_tokens]
        if not longer or not all(self._extend(sequence) for sequence in longer):
            return None
        return Step(self._planned(longer), ())

    def _planned(self, sequences: list[_Sequence]) -> tuple[Slot, ...]:
        slots = tuple(Slot(s.key, s.next_kv, tuple(s.blocks)) for s in sequences)
        for sequence in sequences:
            sequence.in_steps += 1
        if sequences:
            self._steps.append(sequences)
        return slots

    def complete(self) -> bool:
        """The running step is done: its sequences have one more token of KV. Whether blocks
        are free now, of those that left during it."""
        done = self._steps.popleft() if self._steps else []
        for sequence in done:
            sequence.kv_tokens += 1
        return self._over(done)

    def withdraw(self) -> bool:
        """The step that was planned behind the running one won't run. Whether blocks are free
        now, as in `complete`."""
        return self._over(self._steps.pop())

    def _over(self, step: list[_Sequence]) -> bool:
        for sequence in step:
            sequence.in_steps -= 1
        left = [sequence for sequence in step if sequence.gone and not sequence.in_steps]
        for sequence in left:
            self._release(sequence)
        return bool(left)

    def finish(self, key: int) -> None:
        """The request leaves; its blocks are free now, or when the running step is
        done. No read may be under way into them (see `release`)."""
        sequence = self._all.pop(key, None)
        if sequence is None:
            return
        self._queue.drop(key)
        if sequence.in_steps:
            sequence.gone = True
        else:
            self._release(sequence)

    release = finish
    """For a sequence that was preempted while loading, after its reads ended."""

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _by_age(self, *states: _State) -> list[_Sequence]:
        return sorted((s for s in self._all.values() if s.state in states), key=lambda s: s.age)

    def _grow(self, sequence: _Sequence, preempted: list[int]) -> bool:
        """Whether the sequence has a place for its next token; makes one if it must."""
        while not self._extend(sequence):
            if self._count(_State.LEAVING):
                return False  # blocks are on their way
            victim = self._by_age(_State.LOADING, _State.RUNNING)[-1]
            self._preempt(victim, preempted)
            if victim is sequence:
                return False
        return True

    def _extend(self, sequence: _Sequence) -> bool:
        """The same, of free blocks alone."""
        lacking = self._blocks_for(sequence.next_kv) - len(sequence.blocks)
        if lacking > 0 and self._blocks.free_count >= lacking:
            sequence.blocks += self._blocks.allocate(lacking)
            return True
        return lacking <= 0

    def _preempt(self, victim: _Sequence, preempted: list[int]) -> None:
        preempted.append(victim.key)
        if victim.state is _State.LOADING:
            victim.state = _State.LEAVING
        else:
            del self._all[victim.key]
            victim.state = _State.GONE
            self._release(victim)

    def _release(self, sequence: _Sequence) -> None:
        blocks, sequence.blocks = sequence.blocks, []
        if blocks:
            self._blocks.free(blocks)

    def check_integrity(self) -> None:
        planned = {sequence.key: sequence for step in self._steps for sequence in step}
        sequences = {**planned, **self._all}.values()
        assert Counter(s.key for step in self._steps for s in step) == Counter(
            {s.key: s.in_steps for s in sequences if s.in_steps}
        )
        held = Counter(b for s in sequences for b in s.blocks[s.adopted :])
        for block, holders in held.items():
            assert self._blocks.references(block) >= holders, f"block {block} is held, and free"
            assert holders == 1 or self._prefix.knows(block), "two sequences hold one block"
        assert len(self._queue) == self._count(_State.WAITING)
        assert all(s.key in self._queue for s in self._by_age(_State.WAITING))
        for sequence in sequences:
            assert sequence.adopted == 0 or sequence.adopts
            assert all(self._blocks.references(block) for block in sequence.blocks)
        for sequence in self._by_age(_State.JOINED, _State.WAITING):
            assert not sequence.blocks
