"""Server side of membership: workers register here and report their load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from epd.config import GatewayConfig
from epd.errors import EpdError, too_many
from epd.jobs import Stage
from gateway.worker import Capacity, Card, Worker, card_identity
from gateway.workers import Registry
from protos.epd.v1 import membership_pb2 as pb
from protos.epd.v1 import membership_pb2_grpc as pb_grpc

_log = logging.getLogger(__name__)
_STAGES = {
    pb.STAGE_ENCODE: Stage.ENCODE,
    pb.STAGE_PREFILL: Stage.PREFILL,
    pb.STAGE_DECODE: Stage.DECODE,
}


class MembershipService(pb_grpc.MembershipServicer):
    """Translates reports into the registry's verbs."""

    def __init__(self, registry: Registry, config: GatewayConfig) -> None:
        self._registry = registry
        self._config = config
        # Which stream speaks for a worker: one that joins again outlives its old stream.
        self._speakers: dict[int, object] = {}

    async def Join(
        self, request_iterator: AsyncIterator[pb.WorkerReport], context: Any
    ) -> AsyncIterator[pb.GatewayReply]:
        reports = aiter(request_iterator)
        first = await anext(reports, None)
        if first is None or first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is Hello")
            return
        try:
            worker = self._registry.join(card_from_hello(first.hello))
        except EpdError as error:
            shown = first.hello.address[:_MOST_CHARACTERS]
            _log.warning("refused %s: %s", shown, error.message)
            yield pb.GatewayReply(refused=pb.Refused(reason=error.message))
            return
        _log.info("%s joined: %s", card_identity(worker.card), "+".join(worker.card.stages))
        token = object()
        self._speakers[id(worker)] = token
        try:
            yield self._welcome()
            async for report in reports:
                if worker.gone:
                    return  # dropped after silence: it sees the end, and joins again
                self._take(worker, report)
                yield pb.GatewayReply(beat=pb.Beat())
        finally:
            self._left(worker, token)

    def _left(self, worker: Worker, token: object) -> None:
        if self._speakers.get(id(worker)) is not token:
            return
        del self._speakers[id(worker)]
        if worker.gone:
            return
        _log.info("%s left", card_identity(worker.card))
        # Calls of a worker that died fail by themselves; those of one that drains
        # go on to their end.
        self._registry.drop(worker, "its membership ended", lose_calls=False)

    def _welcome(self) -> pb.GatewayReply:
        return pb.GatewayReply(
            welcome=pb.Welcome(
                heartbeat_ms=int(self._config.heartbeat_s * 1000),
                dead_ms=int(self._config.dead_s * 1000),
            )
        )

    def _take(self, worker: Worker, report: pb.WorkerReport) -> None:
        kind = report.WhichOneof("kind")
        if kind == "heartbeat":
            beat = report.heartbeat
            worker.running, worker.waiting = beat.running, beat.waiting
            worker.kv_tokens_free, worker.steps = beat.kv_tokens_free, beat.steps
            worker.serving = beat.serving
            worker.queued_rows, worker.us_per_row = beat.queued_rows, beat.us_per_row
            self._registry.heard(worker)
        elif kind == "leaving":
            grace_s = report.leaving.grace_ms / 1000
            _log.info("%s drains, within %g s", card_identity(worker.card), grace_s)
            self._registry.drain(worker, grace_s)


_MOST_CHARACTERS, _MOST_DIMENSIONS, _MOST_STAGES = 256, 8, 8


def card_from_hello(hello: pb.Hello) -> Card:
    """
    Raises:
        EpdError: a field is longer than any worker of ours makes it.
    """
    _check_hello(hello)
    capacity = hello.capacity
    return Card(
        address=hello.address,
        epoch=hello.epoch,
        stages=frozenset(_STAGES[stage] for stage in hello.stages if stage in _STAGES),
        fingerprint=hello.fingerprint,
        dtype=hello.dtype,
        kv_layout=hello.kv_layout,
        kv_block_shape=tuple(hello.kv_block_shape),
        numerics_id=hello.numerics_id,
        capacity=Capacity(
            kv_tokens=capacity.kv_tokens,
            max_context=capacity.max_context,
            max_rows=capacity.max_rows,
            max_queue=capacity.max_queue,
        ),
        version=hello.version,
    )


def _check_hello(hello: pb.Hello) -> None:
    names = ("address", "fingerprint", "kv_layout", "dtype", "numerics_id", "version")
    for name in names:
        if (length := len(getattr(hello, name))) > _MOST_CHARACTERS:
            raise too_many(name, length, _MOST_CHARACTERS, "characters")
    if len(hello.kv_block_shape) > _MOST_DIMENSIONS:
        raise too_many("kv_block_shape", len(hello.kv_block_shape), _MOST_DIMENSIONS, "dimensions")
    if len(hello.stages) > _MOST_STAGES:
        raise too_many("stages", len(hello.stages), _MOST_STAGES, "stages")


async def sweep_forever(registry: Registry) -> None:
    """Notice silent workers: stopped processes and cut links, which end no stream."""
    while True:
        await asyncio.sleep(registry.sweep_s)
        for worker in registry.sweep():
            _log.warning("%s is silent: dropped", card_identity(worker.card))
