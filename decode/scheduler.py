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
    reads           blocks that reads still write into are freed by `release` only
    adopted         full blocks of a prefill in this process are never written; what
                    comes behind them is the request's own
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from epd.errors import EpdError, ErrorKind
from epd.fairness import FairQueue
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
    most_blocks: int
    hashes: tuple[bytes, ...]
    client: bytes
    state: _State = _State.JOINED
    blocks: list[int] = field(default_factory=list)
    adopts: bool = False  # prefill, in this process, gives it all full blocks
    adopted: int = 0  # of the first blocks: read-only, and prefill's as well
    gone: bool = False  # left during the running step


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
        self._in_step: dict[int, _Sequence] = {}

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
    ) -> None:
        """A request joins: `kv_tokens` come from prefill, `most_tokens` is all the KV
        that it can ever need. `arrival` decides who is youngest; a request that was
        preempted keeps its first one. `hashes` name the full blocks of `kv_tokens`.
        `client` is whose share it takes of.

        Raises:
            EpdError: CONTEXT_LENGTH_EXCEEDED if it can't fit even an empty pool,
                OVERLOADED when the queue is full.
        """
        most = self._blocks_for(max(most_tokens, kv_tokens))
        if most > self._num_blocks:
            pool = self._num_blocks * self._block_tokens
            raise EpdError(
                ErrorKind.CONTEXT_LENGTH_EXCEEDED,
                f"prompt and output may take {most_tokens} tokens, decode's pool "
                f"(kv.decode_tokens) holds {pool}",
                param="max_tokens",
            )
        if self.waiting >= self._max_queue:
            reason = f"{self.waiting} requests wait, {self._max_queue} may (decode.max_queue)"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)
        age = (arrival, key)
        self._all[key] = _Sequence(key, age, kv_tokens, most, tuple(hashes), client)

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
        if self._in_step:
            return Step((), ())
        preempted: list[int] = []
        slots: list[Slot] = []
        for sequence in self._by_age(_State.RUNNING):
            if sequence.state is _State.RUNNING and self._grow(sequence, preempted):
                kv_len = sequence.kv_tokens + 1
                slots.append(Slot(sequence.key, kv_len, tuple(sequence.blocks)))
                self._in_step[sequence.key] = sequence
        return Step(tuple(slots), tuple(preempted))

    def complete(self) -> bool:
        """The running step is done: its sequences have one more token of KV. Whether blocks
        are free now, of those that left during it."""
        left = [sequence for sequence in self._in_step.values() if sequence.gone]
        for sequence in self._in_step.values():
            sequence.kv_tokens += 1
        for sequence in left:
            self._release(sequence)
        self._in_step.clear()
        return bool(left)

    def finish(self, key: int) -> None:
        """The request leaves; its blocks are free now, or when the running step is
        done. No read may be under way into them (see `release`)."""
        sequence = self._all.pop(key, None)
        if sequence is None:
            return
        self._queue.drop(key)
        if key in self._in_step:
            sequence.gone = True
        else:
            self._release(sequence)

    abort = finish
    """Same as `finish`; the caller has drained the reads."""

    release = finish
    """For a sequence that was preempted while loading, after its reads ended."""

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _by_age(self, *states: _State) -> list[_Sequence]:
        return sorted((s for s in self._all.values() if s.state in states), key=lambda s: s.age)

    def _grow(self, sequence: _Sequence, preempted: list[int]) -> bool:
        """Whether the sequence has a place for its next token; makes one if it must."""
        while len(sequence.blocks) * self._block_tokens <= sequence.kv_tokens:
            if self._blocks.free_count:
                sequence.blocks += self._blocks.allocate(1)
                continue
            if self._count(_State.LEAVING):
                return False  # blocks are on their way
            victim = self._by_age(_State.LOADING, _State.RUNNING)[-1]
            self._preempt(victim, preempted)
            if victim is sequence:
                return False
        return True

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
        sequences = {**self._in_step, **self._all}.values()
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
