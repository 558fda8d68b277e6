"""Landing memory: where embeddings are read to, how, and which stay for later requests.

Every image that a request needs has its place reserved before anything is encoded
(docs/reservations.md). Requests with the same picture share one place: one of them reads,
and if it fails or goes away the next one does. A place is given away only when no read can
write into it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from epd.config import PrefillConfig
from epd.errors import EpdError, ErrorKind
from epd.handoff import embedding_bytes, embedding_contract
from epd.jobs import ImageItem
from epd.models.spec import ModelSpec
from epd.obs import metrics
from epd.pages import asked_for_by
from epd.runtime.memory import OwnedMemory
from epd.transfer.arena import Arena
from epd.transfer.contract import Handle
from epd.transfer.engine import ReadStats
from epd.transfer.verified import read_verified
from prefill.rows import Rows, RowTable

_SHARED = ReadStats(0, 0.0, 0)
"""Of rows that another request has read."""


class Landing:
    """Registered once; `freed` is called when space became free."""

    def __init__(
        self,
        spec: ModelSpec,
        config: PrefillConfig,
        memory: OwnedMemory,
        freed: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._memory = memory
        self._freed = freed
        with asked_for_by("prefill.landing_mib"):
            self.arena = Arena(config.landing_mib << 20)
        memory.register(self.arena.address, self.arena.nbytes, self.arena)
        count = partial(metrics.count_cache, "landing")
        self._table = RowTable(self.arena, enabled=config.embedding_cache, count=count)
        self._changed = asyncio.Event()

    def check_fits(self, items: Sequence[ImageItem]) -> None:
        """A request must fit the empty arena, or it would wait for ever.

        Raises:
            EpdError: IMAGE_TOO_LARGE, naming the limit.
        """
        need = sum(self.arena.rounded(embedding_bytes(self._spec, i.rows)) for i in items)
        if need > self.arena.nbytes:
            raise EpdError(
                ErrorKind.IMAGE_TOO_LARGE,
                f"the images' rows take {need} bytes, landing memory (prefill.landing_mib) "
                f"holds {self.arena.nbytes}",
                param="job.items",
            )

    def reserve(self, items: Sequence[ImageItem]) -> dict[int, Rows] | None:
        """A place for each image, by its index, or None and nothing."""
        wanted = [(item.digest, embedding_bytes(self._spec, item.rows)) for item in items]
        places = self._table.reserve(wanted)
        if places is None:
            return None
        return {item.index: rows for item, rows in zip(items, places, strict=True)}

    async def fetch(
        self, key: Hashable, item: ImageItem, nonce: int, rows: Rows, handle: Handle
    ) -> ReadStats:
        """Have one image's rows here, verified: wait for whoever is reading them, else
        read them from `handle`'s owner.

        Raises:
            EpdError: CONTRACT_MISMATCH, CHECKSUM_MISMATCH, TRANSFER_FAILED.
        """
        handle.check(embedding_contract(self._spec, item.rows, nonce), spans=1)
        while rows.busy:
            await self._changed.wait()
        if rows.ready:
            return _SHARED
        self._table.reading(rows)
        try:
            stats = await self._read(key, item, rows, handle)
        except BaseException:
            self._memory.engine.when_settled(key, partial(self._settled, rows))
            raise
        self._table.landed(rows)
        self._tell()
        return stats

    def _settled(self, rows: Rows) -> None:
        self._table.settled(rows)
        self._tell()
        self._freed()

    def _tell(self) -> None:
        """Wake everybody who waits for a read."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _read(self, key: Hashable, item: ImageItem, rows: Rows, handle: Handle) -> ReadStats:
        span, local = handle.spans[0], self.arena.address_of(rows.extent)
        return await read_verified(
            self._memory.engine,
            handle.owner,
            self._spec.fingerprint,
            [(local, span)],
            self.arena,
            handle.read_deadline_ms / 1000,
            what=f"embedding of image {item.index}",
            kind="embedding",
            key=key,
        )

    def rows(self, rows: Rows) -> Tensor:
        """[planes, rows, hidden]; a view of the arena."""
        flat = self.arena.view(rows.extent).view(getattr(torch, self._spec.dtype))
        return flat.view(self._spec.planes, -1, self._spec.hidden)

    def release(self, places: Iterable[Rows]) -> None:
        """One holder less for each. What a read may still write into is given away after
        it."""
        for rows in places:
            self._table.release(rows)
        self._freed()

    def doubt(self, places: Iterable[Rows]) -> None:
        """Give what is there to nobody else."""
        for rows in places:
            self._table.forget(rows)

    def state(self) -> dict[str, object]:
        """Counts for /metrics; idle rows are not used ones."""
        return {
            "arena_bytes_used": self.arena.used_bytes - self._table.idle_bytes,
            "arena_bytes": self.arena.nbytes,
            "arena_bytes_cached": self._table.idle_bytes,
            "embeddings_cached": len(self._table),
            "embeddings_pinned": len(self._table) - self._table.idle,
        }

    def check_integrity(self) -> None:
        self._table.check_integrity()
