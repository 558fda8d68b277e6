"""The life of a stage process, the same for all three.

    load -> register memory -> bind -> READY -> (serve) -> SIGTERM -> drain -> exit

Drain: health says NOT_SERVING and gateways are told; running work goes on for
`worker.grace_s`; what is left ends with a typed error; exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from epd import __version__
from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from epd.obs.http import ObservationServer
from epd.rpc import tls
from epd.rpc.membership_client import MembershipClient
from epd.rpc.server import Server
from epd.runtime.steps import StepLoop
from epd.runtime.streams import Streams
from protos.epd.v1 import membership_pb2 as pb

logger = logging.getLogger(__name__)
_WATCH_S = 0.25
_STUCK_EXIT_S = 15.0
_TO_PROTO = {
    Stage.ENCODE: pb.STAGE_ENCODE,
    Stage.PREFILL: pb.STAGE_PREFILL,
    Stage.DECODE: pb.STAGE_DECODE,
}


@dataclass(frozen=True, slots=True)
class Description:
    """What a worker tells gateways about itself, once."""

    epoch: int
    fingerprint: str
    dtype: str
    numerics_id: str
    kv_layout: str = ""
    kv_block_shape: tuple[int, ...] = ()
    kv_tokens: int = 0
    max_context: int = 0
    max_rows: int = 0
    max_queue: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker tells gateways with every heartbeat."""

    running: int
    waiting: int
    kv_tokens_free: int = 0


class Worker(Protocol):
    """What this file needs of a stage's worker."""

    stage: Stage
    streams: Streams
    steps: StepLoop

    def describe(self) -> Description: ...
    def load(self) -> Load: ...
    def state(self) -> Mapping[str, object]:
        """Counts for /metrics and /debug/state; all zero-able ones are zero when idle."""
        ...

    def check_integrity(self) -> None:
        """Assert the bookkeeping of memory and queues."""
        ...

    def healthy(self) -> bool:
        """False where something below is stuck, e.g. the transfer engine."""
        ...

    def tick(self) -> None:
        """Called a few times a second: quarantines end here."""
        ...

    def start(self) -> asyncio.Task[None]:
        """Start working; the task ends only by a bug of ours, which it raises."""
        ...

    async def shut_down(self) -> None: ...


AddService = Callable[[Server], None]


async def serve_worker(
    config: Config, worker: Worker, service: str, add_service: AddService, max_message_bytes: int
) -> None:
    """Serve `worker` until SIGTERM; prints one READY line on stdout.

    Raises:
        EpdError: a port is taken.
        Whatever the step loop died of: the process ends with a traceback.
    """
    stage = str(worker.stage)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.push_async_callback(worker.shut_down)
        steps = worker.start()
        server = Server(stage, [service], config.rpc, max_message_bytes)
        add_service(server)
        credentials = tls.server_credentials(config.rpc, config.worker.host, "worker.host")
        address = await server.start(config.worker.host, config.worker.port, credentials)
        cleanup.push_async_callback(server.stop, 0.5)
        metrics_address = await _observe(config, worker, server, cleanup)
        members = MembershipClient(
            stage,
            config.worker.gateways,
            _hello(worker, address),
            lambda: _heartbeat(worker, server),
            config.rpc,
        )
        cleanup.push_async_callback(members.close)
        await server.set_serving(True)
        members.start()
        watch = asyncio.create_task(_watch(config, worker, server), name="watch")
        cleanup.callback(watch.cancel)
        _print_ready(stage, address, metrics_address)
        await _until_stop(stop, steps, watch)
        watch.cancel()
        await _drain(config, worker, server, members)


async def _observe(
    config: Config, worker: Worker, server: Server, cleanup: contextlib.AsyncExitStack
) -> str:
    if config.worker.metrics_port < 0:
        return ""
    observation = ObservationServer(
        str(worker.stage),
        lambda: _observed(worker),
        lambda: "" if server.serving else "it drains, or has work and makes no step",
    )
    host = config.worker.metrics_host or config.worker.host
    address = await observation.start(host, config.worker.metrics_port)
    cleanup.push_async_callback(observation.close)
    return address


def _observed(worker: Worker) -> Mapping[str, object]:
    """The worker's counts, and whether its bookkeeping holds (looked at when it is idle)."""
    state = worker.state()
    if state["tickets"]:
        return {**state, "integrity": "busy"}
    try:
        worker.check_integrity()
    except AssertionError as broken:
        return {**state, "integrity": f"broken: {broken}"}
    return {**state, "integrity": "ok"}


async def _until_stop(
    stop: asyncio.Event, steps: asyncio.Task[None], watch: asyncio.Task[None]
) -> None:
    stopping = asyncio.create_task(stop.wait(), name="stop signal")
    try:
        await asyncio.wait({stopping, steps, watch}, return_when=asyncio.FIRST_COMPLETED)
        for task in (steps, watch):
            if task.done():
                task.result()
    finally:
        stopping.cancel()


async def _watch(config: Config, worker: Worker, server: Server) -> None:
    """Health means progress: work and no step for too long is NOT_SERVING.

    Raises:
        EpdError: the transfer engine has been stuck for long. Its lock is not ours, so
            only a new process helps.
    """
    stuck_since: float | None = None
    while True:
        worker.tick()
        stalled = worker.steps.stalled_for()
        serving = stalled <= config.worker.stall_s and worker.healthy()
        if serving != server.serving:
            log = logger.info if serving else logger.error
            log("health changes", extra={"serving": serving, "stalled_s": round(stalled, 1)})
        await server.set_serving(serving)
        stuck_since = None if worker.healthy() else stuck_since or time.monotonic()
        if stuck_since and time.monotonic() - stuck_since > _STUCK_EXIT_S:
            faulthandler.dump_traceback(2)  # stderr, whatever replaced sys.stderr
            raise EpdError(ErrorKind.INTERNAL, "the transfer engine is stuck; restart this worker")
        await asyncio.sleep(_WATCH_S)


async def _drain(config: Config, worker: Worker, server: Server, members: MembershipClient) -> None:
    # A second SIGTERM must not turn an orderly exit into a killed one.
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logger.info("leaving", extra={"streams": len(worker.streams), "grace_s": config.worker.grace_s})
    worker.streams.refuse_new()
    await server.set_serving(False)
    members.leave(config.worker.grace_s)
    if not await worker.streams.finished(config.worker.grace_s):
        logger.warning("ending running work", extra={"streams": len(worker.streams)})
        stopped = EpdError(
            ErrorKind.STAGE_UNAVAILABLE, f"the {worker.stage} worker stopped", retry_after_s=1.0
        )
        worker.streams.fail_all(stopped)
        await worker.streams.finished(1.0)


def _hello(worker: Worker, address: str) -> pb.Hello:
    facts = worker.describe()
    return pb.Hello(
        stages=[_TO_PROTO[worker.stage]],
        address=address,
        epoch=facts.epoch,
        fingerprint=facts.fingerprint,
        kv_layout=facts.kv_layout,
        kv_block_shape=facts.kv_block_shape,
        dtype=facts.dtype,
        numerics_id=facts.numerics_id,
        capacity=pb.Capacity(
            kv_tokens=facts.kv_tokens,
            max_context=facts.max_context,
            max_rows=facts.max_rows,
            max_queue=facts.max_queue,
        ),
        version=__version__,
    )


def _heartbeat(worker: Worker, server: Server) -> pb.Heartbeat:
    load = worker.load()
    return pb.Heartbeat(
        running=load.running,
        waiting=load.waiting,
        kv_tokens_free=load.kv_tokens_free,
        steps=worker.steps.steps,
        serving=server.serving,
    )


def _print_ready(stage: str, address: str, metrics_address: str) -> None:
    line = {"stage": stage, "address": address, "metrics": metrics_address, "pid": os.getpid()}
    sys.stdout.write(f"READY {json.dumps(line)}\n")
    sys.stdout.flush()
