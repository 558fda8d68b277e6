"""A language model and a transfer engine of a few lines, for the workers' own logic."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from epd.config import Config
from epd.config_sources import load_config
from epd.jobs import DecodeJob, ImageItem, PrefillJob, SamplingParams
from epd.kv.layout import KvLayout, LayerShape
from epd.kv.pool import KvPool
from epd.models.lm import Decoded, DecodeRow, ForwardBatch, SequenceSlice
from epd.models.spec import ModelSpec
from epd.transfer.contract import Peer
from epd.transfer.engine import ReadStats
from epd.transfer.faults import Faults
from epd.transfer.lease import LeaseTable
from epd.transfer.pieces import Piece
from tests.waiting import LIMIT_S

POISON = 13
"""A forward over this token raises."""
IMAGE = 9
BLOCK = 4


def config(**settings: Any) -> Config:
    flags = {key.replace("__", "."): value for key, value in settings.items()}
    defaults: dict[str, Any] = {
        "kv.block_tokens": BLOCK,
        "kv.prefill_tokens": 64,
        "kv.decode_tokens": 64,
        "prefill.landing_mib": 1,
    }
    return load_config(None, defaults | flags, {})


class FakeLm:
    """Next token = last token + 1; KV of a token is its id in every element."""

    numerics_id = "fake"
    device = "cpu"
    weights_bytes = 0

    def __init__(self) -> None:
        self.spec = ModelSpec(
            path="", name="fake", family="fake", fingerprint="f" * 64, dtype="float32",
            vocab_size=100, hidden=4, max_positions=1000, image_token_id=IMAGE,
            eos_token_ids=(), deepstack_levels=0,
        )  # fmt: skip
        self.kv_layout = KvLayout(BLOCK, "float32", (LayerShape(1, 2, 2),))
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[int]] = []

    def report_layers(self, done: Callable[[], None]) -> None:
        pass

    def positions(
        self, ids: torch.Tensor, items: Sequence[ImageItem], prompt: int
    ) -> tuple[torch.Tensor, int]:
        return torch.arange(len(ids))[None], 0

    def continuation(self, start: int, count: int, delta: int) -> torch.Tensor:
        return torch.arange(start, start + count)[None]

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        assert self.gate.wait(LIMIT_S)
        ids = batch.token_ids.tolist()
        self.batches.append(ids)
        if POISON in ids:
            raise ZeroDivisionError("poison")
        at = 0
        for sequence in batch.sequences:
            for offset in range(sequence.query_len):
                place = sequence.kv_len - sequence.query_len + offset
                pool.k(0)[sequence.blocks[place // BLOCK], place % BLOCK] = ids[at]
                at += 1
        logits = torch.zeros(len(batch.select), self.spec.vocab_size)
        for row, index in enumerate(batch.select):
            logits[row, (ids[int(index)] + 1) % 100] = 1
        return logits

    def decode(self, rows: Sequence[DecodeRow], pool: KvPool, begin: Callable[[], None]) -> Decoded:
        batch = ForwardBatch(
            torch.tensor([row.token_id for row in rows]),
            torch.tensor([[row.kv_len - 1 for row in rows]]),
            [SequenceSlice(1, row.kv_len, row.blocks) for row in rows],
            range(len(rows)),
        )
        begin()
        return Decoded(self.forward(batch, pool), None)


class FakeEngine:
    """Reads by copying in this process; `gate` holds reads up, even given-up ones."""

    stuck, parked, outstanding = False, 0, 0

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self._under_way: dict[Hashable, int] = {}
        self._copies: list[asyncio.Task[None]] = []
        self._then: list[tuple[Hashable, Callable[[], None]]] = []

    async def read(
        self, peer: Peer, fingerprint: str, pieces: Sequence[Piece], owner: object,
        deadline_s: float, *, kind: str, key: Hashable,
    ) -> ReadStats:  # fmt: skip
        self._under_way[key] = self._under_way.get(key, 0) + 1
        copying = asyncio.create_task(self._copy(pieces, key))
        self._copies.append(copying)
        await asyncio.shield(copying)
        return ReadStats(sum(piece.length for piece in pieces), 0.0, 1)

    async def _copy(self, pieces: Sequence[Piece], key: Hashable) -> None:
        await self.gate.wait()
        for piece in pieces:
            ctypes.memmove(piece.local, piece.remote, piece.length)
        self._under_way[key] -= 1
        due = [entry for entry in self._then if not self._under_way.get(entry[0])]
        for entry in due:
            self._then.remove(entry)
            entry[1]()

    async def settled(self) -> None:
        """Until all reads are over, those that nobody waits for too; raises what was raised
        where one was reported as over."""
        await asyncio.gather(*self._copies)

    @property
    def readers(self) -> int:
        """Keys with reads under way."""
        return sum(map(bool, self._under_way.values()))

    async def drain_reads(self, key: Hashable, bound_s: float) -> bool:
        for _ in range(int(bound_s * 100)):
            if not self._under_way.get(key):
                return True
            await asyncio.sleep(0.01)
        return False

    def when_settled(self, key: Hashable, then: Callable[[], None]) -> None:
        if self._under_way.get(key):
            self._then.append((key, then))
        else:
            then()


class FakeMemory:
    """Stands in for epd.runtime.memory.OwnedMemory."""

    peer = Peer("fake:1", 1, 2)
    read_deadline_ms = 1000

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.leases = LeaseTable(1.0, 1 << 30)
        self.faults = Faults()
        self.now = 0.0

    def register(self, address: int, nbytes: int, owner: object) -> None:
        pass

    def check_quarantine(self) -> None:
        pass

    def end(self, lease: Any, *, clean: bool) -> None:
        if clean:
            self.leases.release(lease)
        else:
            self.leases.lost(lease, self.now)

    def tick(self) -> bool:
        return self.leases.sweep(self.now) > 0

    def healthy(self) -> bool:
        return True

    def reaches_peers(self) -> bool:
        return True

    def state(self) -> dict[str, object]:
        return {}

    async def close(self) -> None:
        pass


def prefill_job(
    ids: Sequence[int],
    max_tokens: int = 8,
    items: tuple[ImageItem, ...] = (),
    follows: bool = True,
    **more: Any,
) -> PrefillJob:
    prompt = more.pop("prompt", len(ids))
    sampling = SamplingParams(max_tokens=max_tokens)
    return PrefillJob("r", 1, 5, tuple(ids), prompt, items, sampling, follows, **more)


def decode_job(
    ids: Sequence[int],
    max_tokens: int = 8,
    arrival_ms: int = 0,
    stops: Sequence[int] = (),
    **more: Any,
) -> DecodeJob:
    prompt, items = more.pop("prompt", len(ids)), more.pop("items", ())
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stops))
    ids = tuple(ids)
    return DecodeJob("r", 1, 5, ids, prompt, items, sampling, 0, arrival_ms=arrival_ms, **more)
