"""One sequence in decode: what is known of it, what it reports."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from epd.jobs import DecodeJob, FinishReason, SampledToken, StageTiming
from epd.kv.prefix import BlockChain
from epd.runtime.mailbox import Mailbox
from epd.runtime.streams import Stopwatch
from epd.sampling.state import SamplerState
from epd.transfer.contract import Handle


@dataclass(frozen=True, slots=True)
class Admitted:
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class KvFetched:
    transfer_ms: float
    transfer_bytes: int


@dataclass(frozen=True, slots=True)
class TokenMade:
    index: int
    """Among the output tokens, from 0."""
    token: SampledToken
    reason: FinishReason | None = None
    """If it is the last."""


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    output_tokens: int
    timing: StageTiming


@dataclass(frozen=True, slots=True)
class ReadsTerminal:
    clean: bool


Event = Admitted | KvFetched | TokenMade | Finished | ReadsTerminal


@dataclass(slots=True, eq=False)
class Ticket:
    """Made by `DecodeWorker.submit`, ended by `DecodeWorker.close`."""

    # set by submit
    key: int
    job: DecodeJob
    sampler: SamplerState
    chain: BlockChain
    """Hashes of its full blocks; grows with what decode computes."""
    since: Stopwatch = field(default_factory=Stopwatch)

    # KV on its way
    pending: deque[Handle] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `pending` has something."""
    adopts: bool = False
    """Prefill is in this process: its blocks are shared, not read."""
    announced_blocks: int = 0
    announced_tokens: int = 0
    loaded_blocks: int = 0
    """That are here: cached ones, and those read and verified."""
    loader: asyncio.Task[None] | None = None
    fetched: bool = False

    # progress
    first: SampledToken | None = None
    """Start's token; there from Start on."""
    last_id: int = 0
    """The token that the next step feeds."""
    ended: bool = False
    """Its last token is made, or a step failed: no step needs to make another."""
    stopped: bool = False
    events: Mailbox[Event] = field(default_factory=Mailbox)

    # timeline
    queue_ms: float = 0.0
    run_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_bytes: int = 0

    @property
    def read_key(self) -> tuple[str, int]:
        """Names its reads to the transfer engine."""
        return ("kv", self.key)

    @property
    def waits_for(self) -> str:
        """In words."""
        if self.stopped:
            return "its stream's end"
        if self.loader is None:
            return "blocks" if self.pending else "its first blocks to be announced"
        if not self.fetched:
            return f"reads: {self.loaded_blocks} of {self.announced_blocks} announced blocks here"
        if self.first is None:
            return "its first token"
        return f"a step ({self.sampler.num_output} tokens made)"

    @property
    def total(self) -> int:
        """Tokens whose KV prefill makes."""
        return len(self.job.token_ids)

    @property
    def length(self) -> int:
        """Prompt and output, the last token included."""
        return self.job.prompt_length + self.sampler.num_output

    def accept(self, token_id: int, max_context: int) -> FinishReason | None:
        """The token is output now; whether it is the last. Called where steps are made."""
        self.last_id = token_id
        context_full = self.length + 1 >= max_context
        reason = self.sampler.accept(token_id, context_full=context_full)
        self.ended = reason is not None
        return reason

    @property
    def timing(self) -> StageTiming:
        return StageTiming(
            queue_ms=self.queue_ms,
            run_ms=self.run_ms,
            transfer_ms=self.transfer_ms,
            transfer_bytes=self.transfer_bytes,
        )
