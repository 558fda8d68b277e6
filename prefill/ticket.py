"""One request in prefill: what is known of it, what it holds, what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from epd.jobs import FinishReason, PrefillJob, SampledToken, StageTiming
from epd.kv.prefix import BlockChain
from epd.runtime.mailbox import Mailbox
from epd.runtime.streams import Stopwatch
from epd.sampling.state import SamplerState
from epd.transfer.contract import Handle
from epd.transfer.lease import Lease
from prefill.rows import Rows
from prefill.scheduler import ItemSpan


@dataclass(frozen=True, slots=True)
class Admitted:
    cached_tokens: int
    missing_items: tuple[int, ...]
    position_delta: int


@dataclass(frozen=True, slots=True)
class EmbeddingFetched:
    index: int
    transfer_ms: float
    transfer_bytes: int


@dataclass(frozen=True, slots=True)
class KvReady:
    first_block: int
    handle: Handle
    tokens: int


@dataclass(frozen=True, slots=True)
class ChoiceToken:
    token: SampledToken
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class FirstToken:
    token: SampledToken
    finish: FinishReason | None
    kv_tokens: int
    timing: StageTiming
    others: tuple[ChoiceToken, ...] = ()
    """Of the choices after the first."""


@dataclass(frozen=True, slots=True)
class ReadsTerminal:
    clean: bool


Event = Admitted | EmbeddingFetched | KvReady | FirstToken | ReadsTerminal


@dataclass(slots=True, eq=False)
class Ticket:
    """Made by `PrefillWorker.submit`, ended by `PrefillWorker.close`."""

    # set by submit
    key: int
    job: PrefillJob
    positions: Tensor
    """[P, T] position rows."""
    delta: int
    spans: tuple[ItemSpan, ...]
    """Placeholders of each image, in order."""
    samplers: tuple[SamplerState, ...]
    """One for each choice."""
    chain: BlockChain
    """Hashes of its full blocks."""
    since: Stopwatch

    # held while reserved
    blocks: list[int] = field(default_factory=list)
    landing: dict[int, Rows] = field(default_factory=dict)
    """By item index; those inside the cached prefix have none."""
    admitted: bool = False
    cached_tokens: int = 0
    """Computed before it came: the first blocks of its table."""
    missing: tuple[int, ...] = ()
    """Items that it asked for and that nobody has announced yet."""

    # progress
    fetches: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """By item index; there from EmbeddingReady on."""
    sums: list[int] = field(default_factory=list)
    """Checksums of the sealed blocks, in order."""
    announced: int = 0
    """Blocks that the lease covers: `blocks[:announced]`."""
    lease: Lease | None = None
    in_step: bool = False
    cancelled: bool = False
    half_closed: bool = False
    closed: bool = False
    lost: bool = False
    """Contact was lost: what was announced is quarantined."""
    damaged: bool = False
    """Its reader found other bytes than were announced: nothing more of it is cached."""
    told_last: bool = False
    """FirstToken or ReadsTerminal is in the mailbox: a half-close is a release."""
    events: Mailbox[Event] = field(default_factory=Mailbox)

    # timeline
    queue_ms: float = 0.0
    run_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_bytes: int = 0

    @property
    def read_key(self) -> tuple[str, int]:
        """Names its reads to the transfer engine."""
        return ("embedding", self.key)

    @property
    def waits_for(self) -> str:
        """In words."""
        reading = [index for index, fetch in self.fetches.items() if not fetch.done()]
        if self.in_step:
            return "the running step"
        if self.closed or self.cancelled:
            return "its memory's release"
        if not self.admitted:
            return f"blocks for {self.total} tokens, landing memory for {len(self.spans)} images"
        if self.told_last:
            return f"its stream's end: decode may read {self.announced} blocks"
        if self.missing or reading:
            return f"images: {list(self.missing)} to be announced, {reading} to be read"
        return "its turn in a step"

    @property
    def total(self) -> int:
        return len(self.job.token_ids)

    @property
    def timing(self) -> StageTiming:
        return StageTiming(
            queue_ms=self.queue_ms,
            run_ms=self.run_ms,
            transfer_ms=self.transfer_ms,
            transfer_bytes=self.transfer_bytes,
        )


def item_spans(job: PrefillJob, image_token_id: int) -> tuple[ItemSpan, ...]:
    """Each image's placeholders: rows fill the prompt's placeholders in item order."""
    prompt = job.token_ids[: job.prompt_length]
    places: Sequence[int] = [i for i, token in enumerate(prompt) if token == image_token_id]
    spans, start = [], 0
    for item in job.items:
        spans.append(ItemSpan(item.index, places[start : start + item.rows]))
        start += item.rows
    assert start == len(places), "checked when the job was read"
    return tuple(spans)
