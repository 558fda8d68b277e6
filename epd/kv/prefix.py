"""Which blocks already hold the start of a prompt. Pure: ids and digests, no tensors.

A block's hash is chained: it covers everything before it, too, because keys and
values depend on all earlier tokens. It covers

    parent hash | token ids | (digest, first row, rows) of each image in the block

and the root covers weights, numerics, layout and tenant salt. The placeholder ids of
two pictures are the same; the image digest is what keeps their blocks apart.

Invariants of the cache (`check_integrity`):

    hash -> block and block -> hash are each other's inverse
    the blocks are exactly those that the allocator keeps
    a block in the cache is full, computed (or read and verified), and never written again
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

from epd.jobs import ImageItem
from epd.kv.blocks import BlockAllocator
from epd.kv.layout import KvLayout

_VERSION = b"epd-prefix/2"


def root_hash(fingerprint: str, numerics_id: str, layout: KvLayout, salt: bytes = b"") -> bytes:
    """Parent of a first block: what must be equal before tokens are compared."""
    parts = (
        _VERSION,
        fingerprint.encode(),
        numerics_id.encode(),
        layout.name.encode(),
        layout.dtype.encode(),
        struct.pack("<I", layout.block_tokens),
        salt,
    )
    return blake3(b"".join(struct.pack("<I", len(part)) + part for part in parts)).digest()


class BlockChain:
    """Hashes of one request's full blocks, in order; grows with its output.

    Placeholders beyond `prompt_length` were generated and stand for no image.
    """

    def __init__(
        self,
        root: bytes,
        token_ids: Sequence[int],
        items: Sequence[ImageItem],
        *,
        image_token_id: int,
        prompt_length: int,
        block_tokens: int,
    ) -> None:
        self._block_tokens = block_tokens
        self._runs = _image_runs(token_ids, items, image_token_id, prompt_length)
        self._at = 0
        """Of the runs, the first that the next block may touch."""
        self._rest: list[int] = []
        """Tokens after the last full block."""
        self._parent = root
        self.hashes: list[bytes] = []
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """More tokens of the sequence."""
        size = self._block_tokens
        self._rest += token_ids
        whole = len(self._rest) // size * size
        for start in range(0, whole, size):
            self._add(self._rest[start : start + size])
        del self._rest[:whole]

    def _add(self, ids: Sequence[int]) -> None:
        start = len(self.hashes) * self._block_tokens
        hasher = blake3(self._parent)
        hasher.update(struct.pack(f"<{len(ids)}Q", *ids))
        for digest, first, count in self._rows_in(start, start + len(ids)):
            hasher.update(struct.pack("<IQQ", len(digest), first, count) + digest)
        self._parent = hasher.digest()
        self.hashes.append(self._parent)

    def _rows_in(self, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
        """(digest, first row, number of rows) of the runs inside a block."""
        runs = self._runs
        while self._at < len(runs) and runs[self._at].stop <= start:
            self._at += 1
        for run in itertools.takewhile(lambda run: run.start < end, runs[self._at :]):
            first = max(start, run.start)
            yield run.digest, run.row + first - run.start, min(end, run.stop) - first


@dataclass(frozen=True, slots=True)
class _Run:
    """Placeholders [start, stop) of a sequence, and what they stand for."""

    start: int
    stop: int
    digest: bytes
    row: int
    """Of the image, at `start`."""


def _image_runs(
    token_ids: Sequence[int], items: Sequence[ImageItem], image_token_id: int, prompt_length: int
) -> list[_Run]:
    """In order. Rows fill placeholders in order."""
    if not items:
        assert image_token_id not in token_ids[:prompt_length], "placeholders for 0 rows"
        return []
    places = [i for i, token in enumerate(token_ids[:prompt_length]) if token == image_token_id]
    rows = sum(item.rows for item in items)
    assert len(places) == rows, f"{len(places)} placeholders for {rows} rows"
    runs: list[_Run] = []
    at = 0
    for item in items:
        runs += _runs(places[at : at + item.rows], item.digest)
        at += item.rows
    return runs


def _runs(places: Sequence[int], digest: bytes) -> Iterator[_Run]:
    """Of one image: a run for each stretch without a token between."""
    row = 0
    while row < len(places):
        start, stop = places[row], len(places)
        if places[-1] - start != stop - row - 1:  # something lies between, but where?
            stop = next(i for i in range(row + 1, stop) if places[i] - start != i - row)
        yield _Run(start, start + stop - row, digest, row)
        row = stop


CacheEvent = Literal["hit", "joined", "miss", "evicted"]
Count = Callable[[CacheEvent, int], None]
"""Told of what happens in a cache, and how often: for metrics."""


def uncounted(event: CacheEvent, number: int) -> None:
    """For caches that nobody watches."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks of one request, in order; it holds all of them."""

    blocks: list[int]
    cached: int
    """The first so many were computed before, and are read-only."""
    looked_up: int
    """Hashes that were asked for."""


@dataclass(slots=True)
class _Entry:
    digest: bytes
    checksum: int | None


class PrefixCache:
    """Blocks that stay after their request; the allocator evicts them when it must.

    Off (`enabled` false) it finds and keeps nothing.
    """

    def __init__(
        self, allocator: BlockAllocator, *, enabled: bool = True, count: Count = uncounted
    ) -> None:
        self._allocator = allocator
        self._enabled = enabled
        self._count = count
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        allocator.on_evicted = self._evicted

    def __len__(self) -> int:
        return len(self._blocks)

    def reserve(self, hashes: Sequence[bytes], total: int, spare: int = 0) -> Reserved | None:
        """`total` blocks: those of the longest cached prefix of `hashes`, then fresh ones.
        None, and nothing changed, where they can't be had with `spare` more left. It
        counts as a lookup once it is `taken`; else free its blocks.

        The last token of a prompt is always computed (its logits are wanted): prefill
        passes ``hashes[:(tokens - 1) // block_tokens]``.
        """
        found = self._longest(hashes)
        for block in found:
            self._allocator.share(block)
        lacking = total - len(found)
        assert lacking >= 0
        if self._allocator.free_count < lacking + spare:
            self._allocator.free(found)
            return None
        fresh = self._allocator.allocate(lacking)
        return Reserved(found + fresh, len(found), len(hashes))

    def taken(self, reserved: Reserved) -> None:
        """The request goes on with this reservation: count its hits and misses."""
        if self._enabled:
            self._count("hit", reserved.cached)
            self._count("miss", reserved.looked_up - reserved.cached)

    def _longest(self, hashes: Sequence[bytes]) -> list[int]:
        found = []
        for digest in hashes:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    @property
    def enabled(self) -> bool:
        return self._enabled

    def has(self, digest: bytes) -> bool:
        """Whether a block can be found under this hash."""
        return digest in self._blocks

    def join(self, digest: bytes) -> int | None:
        """The block that somebody else has brought meanwhile, with the caller as a holder;
        it counts as joined."""
        block = self._blocks.get(digest)
        if block is not None:
            self._allocator.share(block)
            self._count("joined", 1)
        return block

    def knows(self, block: int) -> bool:
        """Whether the block can be found."""
        return block in self._entries

    def checksum_of(self, block: int) -> int | None:
        """Sum of a cached block; None of one that came without it (`insert` may bring it)."""
        return self._entries[block].checksum

    def insert(
        self, hashes: Sequence[bytes], blocks: Sequence[int], sums: Sequence[int] | None = None
    ) -> None:
        """Keep finished blocks; the caller stays a holder and frees its own share.

        A hash that is there already keeps its first block: the content is the same.
        `sums` are the blocks' checksums, where they were computed; a block that is there
        without one gets it.
        """
        if not self._enabled:
            return
        checksums = [None] * len(blocks) if sums is None else sums
        for digest, block, checksum in zip(hashes, blocks, checksums, strict=True):
            if digest not in self._blocks:
                assert block not in self._entries, f"block {block} has two hashes"
                self._allocator.keep(block)
                self._blocks[digest] = block
                self._entries[block] = _Entry(digest, checksum)
            elif self._blocks[digest] == block and checksum is not None:
                self._entries[block].checksum = checksum

    def discard(self, hashes: Sequence[bytes]) -> None:
        """Find these no more, e.g. because what was computed is in doubt. Their holders
        go on."""
        for digest in hashes:
            block = self._blocks.pop(digest, None)
            if block is not None:
                del self._entries[block]
                self._allocator.forget(block)

    def clear(self) -> None:
        """Find nothing any more; holders go on."""
        self.discard(list(self._blocks))

    def _evicted(self, block: int) -> None:
        del self._blocks[self._entries.pop(block).digest]
        self._count("evicted", 1)

    def check_integrity(self) -> None:
        """Assert the table at the top of this file, and the allocator's."""
        assert {b: e.digest for b, e in self._entries.items()} == {
            block: digest for digest, block in self._blocks.items()
        }
        assert len(self._blocks) == self._allocator.kept, "a kept block has no hash"
        self._allocator.check_integrity()
