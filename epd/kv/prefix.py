"""Which blocks already hold the start of a prompt. Pure: ids and digests, no tensors.

A block's hash is chained: it covers everything before it, too, because keys and
values depend on all earlier tokens. It covers

    parent hash | token ids | (digest, first row, rows) of each image in the block

and the root covers fingerprint, block size and tenant salt. The placeholder ids of
two pictures are the same; the image digest is what keeps their blocks apart.

Invariants of the cache (`check_integrity`):

    | block                      | references                  |
    |----------------------------|-----------------------------|
    | in the cache, unpinned     | 1 (the cache's own)         |
    | in the cache, pinned by n  | 1 + n                       |
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from blake3 import blake3

from epd.jobs import ImageItem
from epd.kv.blocks import BlockAllocator, OutOfBlocks

_VERSION = b"epd-prefix/1"


def root_hash(fingerprint: str, block_tokens: int, salt: bytes = b"") -> bytes:
    """Parent of a first block: what must be equal before tokens are compared."""
    parts = (_VERSION, fingerprint.encode(), struct.pack("<I", block_tokens), salt)
    return blake3(b"".join(struct.pack("<I", len(part)) + part for part in parts)).digest()


def block_hashes(
    root: bytes,
    token_ids: Sequence[int],
    items: Sequence[ImageItem],
    *,
    image_token_id: int,
    prompt_length: int,
    block_tokens: int,
) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, in order; a partial last block has none.

    Placeholders beyond `prompt_length` were generated and stand for no image.
    """
    rows = _image_rows(token_ids, items, image_token_id, prompt_length)
    hashes = []
    parent = root
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        end = start + block_tokens
        hasher = blake3(parent)
        hasher.update(struct.pack(f"<{block_tokens}Q", *token_ids[start:end]))
        for digest, first, count in _runs(rows, start, end):
            hasher.update(struct.pack("<IQQ", len(digest), first, count) + digest)
        parent = hasher.digest()
        hashes.append(parent)
    return hashes


def _image_rows(
    token_ids: Sequence[int], items: Sequence[ImageItem], image_token_id: int, prompt_length: int
) -> dict[int, tuple[bytes, int]]:
    """Token index -> (image digest, row of that image). Rows fill placeholders in order."""
    supply = ((item.digest, row) for item in items for row in range(item.rows))
    places = [i for i, token in enumerate(token_ids[:prompt_length]) if token == image_token_id]
    rows = dict(zip(places, supply, strict=False))
    assert len(rows) == len(places) == sum(item.rows for item in items), (
        f"{len(places)} placeholders for {sum(item.rows for item in items)} rows"
    )
    return rows


def _runs(
    rows: dict[int, tuple[bytes, int]], start: int, end: int
) -> Iterator[tuple[bytes, int, int]]:
    """(digest, first row, number of rows) of each image with rows in [start, end)."""
    inside = [rows[i] for i in range(start, end) if i in rows]
    at = 0
    while at < len(inside):
        digest, first = inside[at]
        stop = at + 1
        while stop < len(inside) and inside[stop] == (digest, first + stop - at):
            stop += 1
        yield digest, first, stop - at
        at = stop


class PrefixCache:
    """Blocks that stay after their request, least recently used evicted first.

    Shares `allocator` with the requests: the cache is one more holder of each block
    in it, and a block is evictable while it is the only one.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def evictable(self) -> int:
        """Blocks that nobody but the cache holds."""
        return sum(self._allocator.references(block) == 1 for block in self._blocks.values())

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix, each with the caller as new holder.

        The last token of a prompt is always computed (its logits are wanted), and
        cached blocks are read-only: pass ``hashes[:(tokens - 1) // block_tokens]``.
        """
        found = []
        for digest in hashes:
            block = self._blocks.get(digest)
            if block is None:
                break
            self._allocator.share(block)
            found.append(block)
        self._touch(hashes[: len(found)])
        self.hits += len(found)
        self.misses += len(hashes) - len(found)
        return found

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Keep finished blocks; the caller stays a holder and frees its own share.

        A hash that is there already keeps its first block: the content is the same.
        """
        for digest, block in zip(hashes, blocks, strict=True):
            if digest not in self._blocks:
                self._allocator.share(block)
                self._blocks[digest] = block
        self._touch(hashes)

    def _touch(self, hashes: Sequence[bytes]) -> None:
        """Most recently used: the root last, so that a chain is evicted from its end."""
        for digest in reversed(hashes):
            self._blocks.move_to_end(digest)

    def evict(self, count: int) -> int:
        """Free up to `count` blocks that only the cache holds; the number freed.

        Evicting 0 is always safe.
        """
        victims: list[bytes] = []
        for digest, block in self._blocks.items():
            if len(victims) == count:
                break
            if self._allocator.references(block) == 1:
                victims.append(digest)
        self._allocator.free([self._blocks.pop(digest) for digest in victims])
        return len(victims)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, evicting for them where needed; all or nothing.

        Raises:
            OutOfBlocks: not enough are free or evictable; nothing was evicted.
        """
        lacking = count - self._allocator.free_count
        if lacking > 0:
            evictable = self.evictable
            if lacking > evictable:
                raise OutOfBlocks(count, self._allocator.free_count + evictable)
            self.evict(lacking)
        return self._allocator.allocate(count)

    def clear(self) -> None:
        """Let go of every block; pinned ones stay with their holders."""
        self._allocator.free(self._blocks.values())
        self._blocks.clear()

    def check_integrity(self) -> None:
        """Assert that each cached block is held by the cache, under one hash only."""
        blocks = list(self._blocks.values())
        assert len(set(blocks)) == len(blocks), "a block is cached under two hashes"
        for block in blocks:
            assert self._allocator.references(block) >= 1, f"cached block {block} is free"
        self._allocator.check_integrity()
