"""Decode's scheduler in drawn lives of many sequences: everybody ends, no block is lost."""

from __future__ import annotations

import random as random_module

from hypothesis import given, settings
from hypothesis import strategies as st

from decode.scheduler import Scheduler, Slot, Step
from epd.kv.blocks import BlockAllocator
from epd.kv.prefix import PrefixCache
from tests.unit.test_decode_scheduler import BLOCK, chain


class Simulation:
    """Sequences over one pool: read, step by step, pushed out, coming again; all blocks
    carry the hash of what was written last, as real ones carry KV."""

    def __init__(
        self, wanted: list[tuple[int, int, int]], num_blocks: int, max_running: int, seed: int
    ) -> None:
        self.random = random_module.Random(seed)
        self.blocks = BlockAllocator(num_blocks)
        self.prefix = PrefixCache(self.blocks)
        self.scheduler = Scheduler(self.blocks, self.prefix, BLOCK, max_running, 100)
        fits = num_blocks * BLOCK
        self.need = {k: kv + out for k, (_, kv, out) in enumerate(wanted) if kv + out <= fits}
        self.kind = {k: wanted[k][0] for k in self.need}
        self.have = {k: wanted[k][1] for k in self.need}
        self.loading: set[int] = set()
        self.leaving: set[int] = set()
        self.content: dict[int, bytes] = {}
        self.unfinished = set(self.need)
        for key in self.need:
            self.come(key)

    def hashes(self, key: int, tokens: int) -> list[bytes]:
        return chain([self.kind[key]] * tokens).hashes

    def come(self, key: int) -> None:
        hashes = self.hashes(key, self.have[key])
        self.scheduler.admit(key, self.have[key], self.need[key], key, hashes)
        self.scheduler.announced(key)

    def read(self) -> None:
        for place in self.scheduler.reserve():
            self.loading.add(place.key)
            hashes = self.hashes(place.key, self.have[place.key])
            found = [self.content.get(block) for block in place.blocks[: place.cached]]
            assert found == hashes[: place.cached], "cached blocks hold something else"
            for block in place.blocks[place.cached :]:
                assert not self.prefix.knows(block), "reads into a cached block"
                self.content[block] = b"being read"
            read = slice(place.cached, len(hashes))
            self.content.update(zip(place.blocks[read], hashes[read], strict=True))
            self.prefix.insert(hashes[read], place.blocks[read])
        for key in sorted(self.loading):
            if self.random.random() < 0.5:
                self.loading.discard(key)
                self.scheduler.start(key)

    def step(self) -> None:
        """One, or several that were planned before the one before was done."""
        first = self.scheduler.next_batch()
        for key in first.preempted:
            if key in self.loading:
                self.leaving.add(key)
            else:
                self.come(key)
            self.loading.discard(key)
        running: Step | None = first
        while running is not None:
            ahead = self.scheduler.look_ahead() if self.random.random() < 0.6 else None
            if ahead is not None and self.random.random() < 0.3:
                self.scheduler.withdraw()
                ahead = None
            self.scheduler.check_integrity()
            slots = [slot for slot in running.slots if slot.key in self.unfinished]
            for slot in slots:
                self.write(slot)
            self.scheduler.complete()
            for slot in slots:
                self.have[slot.key] += 1
                if self.have[slot.key] == self.need[slot.key]:
                    self.scheduler.finish(slot.key)
                    self.unfinished.discard(slot.key)
            running = ahead

    def write(self, slot: Slot) -> None:
        assert slot.kv_len == self.have[slot.key] + 1 <= len(slot.blocks) * BLOCK
        assert slot.kv_len <= self.need[slot.key]
        block = slot.blocks[(slot.kv_len - 1) // BLOCK]
        assert self.blocks.references(block) == 1, "writes into a block of two"
        assert not self.prefix.knows(block), "writes into a cached block"
        self.content[block] = b"being written"
        if slot.kv_len % BLOCK == 0:
            (filled,) = self.hashes(slot.key, slot.kv_len)[-1:]
            self.content[block] = filled
            self.prefix.insert([filled], [block])

    def reads_end(self) -> None:
        for key in sorted(self.leaving):
            if self.random.random() < 0.5:
                self.leaving.discard(key)
                self.scheduler.release(key)
                self.come(key)

    def run(self) -> None:
        for _ in range(5000):
            if not self.unfinished:
                break
            self.read()
            self.step()
            self.reads_end()
            self.scheduler.check_integrity()
            self.prefix.check_integrity()
        assert not self.unfinished
        assert self.blocks.used == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 20)),
        min_size=1,
        max_size=10,
    ),
    st.integers(5, 14),
    st.integers(1, 6),
    st.integers(0, 1 << 30),
)
def test_everyone_finishes_and_no_block_is_lost(
    wanted: list[tuple[int, int, int]], num_blocks: int, max_running: int, seed: int
) -> None:
    """Preempted ones come again with what they have; the oldest always goes on. Those of
    one kind share their prefix."""
    Simulation(wanted, num_blocks, max_running, seed).run()
