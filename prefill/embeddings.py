"""Landing memory: where embeddings are read to, and how.

Every image of a request has its place reserved before anything is encoded
(promise 9). A place is freed only when no read can write into it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from epd.errors import EpdError, ErrorKind
from epd.handoff import embedding_bytes, embedding_contract
from epd.jobs import ImageItem
from epd.models.spec import ModelSpec
from epd.runtime.memory import OwnedMemory
from epd.transfer.arena import Arena, Extent
from epd.transfer.contract import Handle
from epd.transfer.engine import ReadStats
from epd.transfer.pieces import Piece


class Landing:
    """Registered once; `freed` is called when space became free."""

    def __init__(
        self, spec: ModelSpec, nbytes: int, memory: OwnedMemory, freed: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._memory = memory
        self._freed = freed
        self.arena = Arena(nbytes)
        memory.register(self.arena.address, self.arena.nbytes, self.arena)

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

    def reserve(self, items: Sequence[ImageItem]) -> dict[int, Extent] | None:
        """A place for each image, or None and nothing."""
        places: dict[int, Extent] = {}
        try:
            for item in items:
                places[item.index] = self.arena.allocate(embedding_bytes(self._spec, item.rows))
        except EpdError:
            for extent in places.values():
                self.arena.free(extent)
            return None
        return places

    async def fetch(
        self, key: object, item: ImageItem, nonce: int, place: Extent, handle: Handle
    ) -> ReadStats:
        """Read and verify one image's rows.

        Raises:
            EpdError: CONTRACT_MISMATCH, CHECKSUM_MISMATCH, TRANSFER_FAILED.
        """
        handle.check(embedding_contract(self._spec, item.rows, nonce), spans=1)
        span, local = handle.spans[0], self.arena.address_of(place)
        stats = await self._memory.engine.read(
            handle.owner,
            self._spec.fingerprint,
            [Piece(local, span.address, span.length)],
            self.arena,
            handle.read_deadline_ms / 1000,
            kind="embedding",
            key=key,
        )
        what = f"embedding of image {item.index}"
        await self._memory.verify("embedding", [(local, span)], what)
        return stats

    def rows(self, place: Extent) -> Tensor:
        """[planes, rows, hidden]; a view of the arena."""
        flat = self.arena.view(place).view(getattr(torch, self._spec.dtype))
        return flat.view(self._spec.planes, -1, self._spec.hidden)

    def free(self, places: Sequence[Extent], key: object) -> None:
        """Give places back as soon as no read of `key` is under way: now, as a rule."""
        if places:
            self._memory.engine.when_settled(key, lambda: self._free_now(places))

    def _free_now(self, places: Sequence[Extent]) -> None:
        for extent in places:
            self.arena.free(extent)
        self._freed()
