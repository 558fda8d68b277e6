"""Who serves: the workers that registered, which of them gets what, and what all can hold.

    join ──> LIVE ──silence: sweep──────────────> gone (its calls are cancelled)
              │ └──stream ends / new epoch──────> gone
              └──Leaving──> DRAINING ──stream ends──> gone

A worker is its address *and* its epoch: restarted on the same address it is a new
one. After lost contact on a call it is passed over until its next heartbeat, if there are
others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from epd import __version__
from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from gateway import router
from gateway.worker import Card, Worker, release

MOST_WORKERS = 4096
KV_STAGES = frozenset({Stage.PREFILL, Stage.DECODE})
_BEGINNINGS = 1 << 16
"""Blocks of prompts that are remembered, some 10 MB."""
_SOONEST_S, _LATEST_S = 1.0, 10.0  # to ask again for a stage without workers


@dataclass(frozen=True, slots=True)
class Limits:
    """The smallest of the live workers' capacities; None: nobody said."""

    max_context: int | None
    max_rows: int | None


class Registry:
    """All workers of one model. Every change wakes those in `changed`.

    `fingerprint` and `dtype` are the gateway's own checkpoint's.
    """

    def __init__(
        self,
        fingerprint: str,
        dtype: str,
        dead_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fingerprint = fingerprint
        self._dtype = dtype
        self._dead_s = dead_s
        self._clock = clock
        self._swept = clock()
        self._live_at = dict.fromkeys(Stage, clock())
        """When a stage last had a worker that lives; the start, if it never had."""
        self._workers: dict[str, Worker] = {}
        self._turn = 0
        self._kept = router.Kept()
        self._begun = router.Kept(_BEGINNINGS)
        self._change = asyncio.Event()
        self._least: Limits | None = None
        """What `limits` says until somebody joins, leaves or is heard."""

    @property
    def sweep_s(self) -> float:
        return self._dead_s / 8

    # --- membership ------------------------------------------------------------------

    def join(self, card: Card) -> Worker:
        """Take a worker in; the same life joining again keeps its place.

        Raises:
            EpdError: CONTRACT_MISMATCH naming what differs, with both values; OVERLOADED,
                there are `MOST_WORKERS` already.
        """
        self._check(card)
        known = self._workers.get(card.address)
        if known is not None and known.card.epoch == card.epoch:
            known.card, known.draining, known.suspect = card, False, False
            known.last_seen = self._clock()
        else:
            if known is not None:
                self.drop(known, "another life of it joined")
            elif len(self._workers) >= MOST_WORKERS:
                raise EpdError(ErrorKind.OVERLOADED, f"{MOST_WORKERS} workers have joined already")
            known = Worker(card, self._clock())
            self._workers[card.address] = known
        for other in self._workers.values():
            if other.draining:
                self._recall(other)
        self._note_life(known)
        self._wake()
        return known

    def heard(self, worker: Worker) -> None:
        """A heartbeat's load was stored: the worker lives."""
        worker.last_seen = self._clock()
        worker.pending = worker.pending_rows = 0
        worker.suspect = False
        self._note_life(worker)
        self._wake()

    def _note_life(self, worker: Worker) -> None:
        if worker.state == "live":
            self._live_at |= dict.fromkeys(worker.card.stages, self._clock())

    def drain(self, worker: Worker, grace_s: float = 0.0) -> None:
        """The worker takes nothing new, and ends what it began, within `grace_s`. What waits
        there goes to another one, as soon as there is one."""
        worker.draining = True
        worker.ends_at = self._clock() + grace_s
        self.heard(worker)
        self._recall(worker)

    def _recall(self, leaving: Worker) -> None:
        """Ask for all that waits there and that another worker could do; calls without a job
        end. (Pictures of a process that prefills, too, stay: most are of its own prompts, which
        end there.)"""
        stages = {stage for stage in leaving.card.stages if self.live(stage)}
        if Stage.PREFILL in leaving.card.stages:
            stages.discard(Stage.ENCODE)
        for stream in leaving.streams:
            if stream.stage in stages or not stream.spoken:
                stream.recall()

    def drop(self, worker: Worker, reason: str, lose_calls: bool = True) -> None:
        """The worker left. Its open calls are given up unless they may go on."""
        worker.gone = True
        if self._workers.get(worker.card.address) is worker:
            del self._workers[worker.card.address]
        if lose_calls:
            names = "+".join(sorted(worker.card.stages))
            error = EpdError(
                ErrorKind.STAGE_UNAVAILABLE, f"{names} worker lost: {reason}", retry_after_s=1.0
            )
            for stream in list(worker.streams):
                stream.lose(error)
        self._wake()

    def sweep(self) -> list[Worker]:
        """Drop every worker that was silent for too long; returns them. To be called
        every `sweep_s`.

        Time that this process itself lost (it was stopped, or its loop was held up)
        is nobody's silence: heartbeats may be waiting to be read.
        """
        now = self._clock()
        lost = max(0.0, now - self._swept - 2 * self.sweep_s)
        self._swept = now
        for worker in self._workers.values():
            worker.last_seen = min(now, worker.last_seen + lost)
        limit = now - self._dead_s
        silent = [worker for worker in self._workers.values() if worker.last_seen < limit]
        for worker in silent:
            self.drop(worker, f"silent for {self._dead_s:g} s")
        return silent

    def _check(self, card: Card) -> None:
        if release(card.version) != release(__version__):
            reason = f"version: worker has {card.version!r}, gateway wants {release(__version__)}.x"
            raise EpdError(ErrorKind.CONTRACT_MISMATCH, reason)
        _same("fingerprint", card.fingerprint, self._fingerprint)
        _same("dtype", card.dtype, self._dtype)
        if not card.stages or not card.address:
            raise EpdError(ErrorKind.CONTRACT_MISMATCH, "a worker needs stages and an address")
        if not card.stages & KV_STAGES:
            return
        for other in self._workers.values():
            if other.card.stages & KV_STAGES and other.card.address != card.address:
                _same("kv_layout", card.kv_layout, other.card.kv_layout)
                _same("kv_block_shape", card.kv_block_shape, other.card.kv_block_shape)

    # --- choice ------------------------------------------------------------------------

    def live(self, stage: Stage) -> list[Worker]:
        """Workers of a stage that work may be sent to."""
        return self._in_state(stage, "live")

    def _in_state(self, stage: Stage, state: str) -> list[Worker]:
        return [
            worker
            for worker in self._workers.values()
            if stage in worker.card.stages and worker.state == state
        ]

    def choose(
        self,
        stage: Stage,
        avoid: Iterable[Worker] = (),
        near: Worker | None = None,
        beginning: Sequence[bytes] = (),
    ) -> Worker:
        """A live worker, rather none of `avoid`, and rather `near`, if it hosts the stage:
        the request's prefill is there, even if it drains. Else rather the one that may
        have KV of the prompt's `beginning`, which counts as sent there now.

        Raises:
            EpdError: STAGE_UNAVAILABLE if none is live.
        """
        candidates = _rather_not(self._found(stage, near), avoid)
        self._turn += 1
        if near is not None and router.may_stay(candidates, near):
            chosen = near
        else:
            chosen = router.for_prefix(candidates, beginning, self._begun, self._turn)
        for name in reversed(beginning):  # the longest is forgotten first
            self._begun.sent(name, chosen.life)
        return chosen

    def only(self, stage: Stage) -> Worker | None:
        """The live worker of a stage, if there is no other."""
        live = self.live(stage)
        return live[0] if len(live) == 1 else None

    def knows(self, digest: bytes, encoder: Worker) -> bool:
        """Whether an image was sent to this encoder before."""
        return self._kept.has(digest, encoder.life)

    @property
    def has_choice(self) -> bool:
        """Whether several workers do prefill, or decode."""
        return any(len(self.live(stage)) > 1 for stage in KV_STAGES)

    def _found(self, stage: Stage, near: Worker | None) -> list[Worker]:
        """Those within reach.

        Raises:
            EpdError: STAGE_UNAVAILABLE if there is none.
        """
        if found := self._within_reach(stage, near):
            return found
        # As long again: who starts it waits for longer each time, and tells nobody here.
        wait_s = min(max(_SOONEST_S, self._clock() - self._live_at[stage]), _LATEST_S)
        reason = f"no {stage} worker is available"
        raise EpdError(ErrorKind.STAGE_UNAVAILABLE, reason, retry_after_s=wait_s)

    def _within_reach(self, stage: Stage, near: Worker | None) -> list[Worker]:
        """Live workers, and `near` although it drains: its own requests end there. Without
        any, those that broke a call lately: they may be well."""
        drains = near is not None and near.state == "draining" and stage in near.card.stages
        found = [*self.live(stage), *([near] if drains and near is not None else [])]
        return found or self._in_state(stage, "suspect")

    def choose_encoder(
        self,
        digest: bytes,
        rows: int,
        avoid: Iterable[Worker] = (),
        near: Worker | None = None,
    ) -> Worker:
        """An encoder for an image; it counts as sent there. Live, or where the request's
        prefill is (`near`), even if that drains.

        Raises:
            EpdError: STAGE_UNAVAILABLE if there is none.
        """
        candidates = _rather_not(self._found(Stage.ENCODE, near), avoid)
        encoder = router.for_image(candidates, digest, rows, self._kept)
        if not self._kept.has(digest, encoder.life):
            encoder.pending_rows += rows
        self._kept.sent(digest, encoder.life)
        return encoder

    def not_encoded(self, digest: bytes, encoder: Worker) -> None:
        """An image that was sent there came to nothing."""
        self._kept.forget(digest, encoder.life)

    def has_other(self, stage: Stage, avoid: Iterable[Worker]) -> bool:
        avoided = set(map(id, avoid))
        return any(id(worker) not in avoided for worker in self.live(stage))

    async def until_live(self, stages: Iterable[Stage], bound_s: float) -> None:
        """Wait, at most so long, until each of `stages` has a live worker."""
        wanted = tuple(stages)
        try:
            async with asyncio.timeout(bound_s):
                while not all(self.live(stage) for stage in wanted):
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError:
            return

    def limits(self) -> Limits:
        if self._least is None:
            self._least = self._limits()
        return self._least

    def _limits(self) -> Limits:
        cards = [worker.card for worker in self._workers.values() if not worker.draining]
        contexts = [c.capacity.max_context for c in cards if c.stages & KV_STAGES]
        rows = [c.capacity.max_rows for c in cards if c.stages - {Stage.DECODE}]
        return Limits(_least(contexts), _least(rows))

    def describe(self) -> list[dict[str, Any]]:
        """All workers, for operators."""
        return [
            {
                "address": worker.card.address,
                "epoch": f"{worker.card.epoch:016x}",
                "stages": sorted(worker.card.stages),
                "state": worker.state,
                "running": worker.running,
                "waiting": worker.waiting,
                "max_queue": worker.card.capacity.max_queue,
                "kv_tokens": worker.card.capacity.kv_tokens,
                "kv_tokens_free": worker.kv_tokens_free,
                "steps": worker.steps,
                "us_per_row": round(worker.us_per_row, 1),
                "streams": len(worker.streams),
                "ends_in_s": self._left_s(worker),
                "version": worker.card.version,
                "numerics_id": worker.card.numerics_id,
            }
            for worker in self._workers.values()
        ]

    def _left_s(self, worker: Worker) -> float | None:
        """Until one that drains ends what it hasn't done by then."""
        return round(max(0.0, worker.ends_at - self._clock()), 1) if worker.draining else None

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def _wake(self) -> None:
        self._least = None
        self._change.set()


def _rather_not(live: list[Worker], avoid: Iterable[Worker]) -> list[Worker]:
    """Live workers, without those to avoid if others are left."""
    avoided = set(map(id, avoid))
    return [worker for worker in live if id(worker) not in avoided] or live


def _least(values: Sequence[int]) -> int | None:
    return min((value for value in values if value > 0), default=None)


def _same(what: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise EpdError(
            ErrorKind.CONTRACT_MISMATCH, f"{what}: worker has {theirs!r}, gateway wants {ours!r}"
        )
