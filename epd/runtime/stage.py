"""The life of a stage process, the same for all stages and for several in one.

    load -> register memory -> bind -> READY -> (serve) -> SIGTERM -> drain -> exit

Drain: health says NOT_SERVING and gateways are told; running work goes on for
`worker.grace_s`; what is left ends with a typed error; exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from epd import __version__
from epd.background import until_stop
from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from epd.obs.http import ObservationServer
from epd.pulse import pulse
from epd.ready import announce
from epd.rpc import tls
from epd.rpc.membership_client import MembershipClient
from epd.rpc.server import Server
from epd.runtime.group import Worker, WorkerGroup
from protos.epd.v1 import membership_pb2 as pb

logger = logging.getLogger(__name__)
_WATCH_S = 0.25
_MOST_WAITS = 100
"""That are logged when a worker stalls."""
_STUCK_EXIT_S = 15.0
_TO_PROTO = {
    Stage.ENCODE: pb.STAGE_ENCODE,
    Stage.PREFILL: pb.STAGE_PREFILL,
    Stage.DECODE: pb.STAGE_DECODE,
}


AddService = Callable[[Server], None]


@dataclass(frozen=True, slots=True)
class Part:
    """One stage of a process: who works, and how it is reached."""

    worker: Worker
    service: str
    """Name of its gRPC service."""
    add_service: AddService
    max_message_bytes: int


async def serve_parts(config: Config, parts: Sequence[Part]) -> None:
    """Serve the workers, together, until SIGTERM; prints one READY line on stdout.

    Raises:
        EpdError: a port is taken.
        Whatever a step loop died of: the process ends with a traceback.
    """
    group = WorkerGroup([part.worker for part in parts])
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.push_async_callback(group.shut_down)
        steps = group.start()
        server = _server(config, group, parts)
        credentials = tls.server_credentials(config.rpc, config.worker.host, "worker.host")
        address = await server.start(config.worker.host, config.worker.port, credentials)
        cleanup.push_async_callback(server.stop, 0.5)
        members = MembershipClient(
            group.name,
            config.worker.gateways,
            _hello(group, address),
            lambda: _heartbeat(group, server),
            config.rpc,
        )
        metrics_address = await _observe(config, group, server, members, cleanup)
        cleanup.push_async_callback(members.close)
        await server.set_serving(True)
        names = members.start()
        watch = asyncio.create_task(_watch(config, group, server), name="watch")
        cleanup.callback(watch.cancel)
        beating = asyncio.create_task(pulse(config.worker.wedged_s), name="pulse")
        cleanup.callback(beating.cancel)
        facts = {"stage": group.name, "address": address, "metrics": metrics_address}
        announce(facts | {"pid": os.getpid()})
        await until_stop(stop, [*steps, watch, names, beating])
        watch.cancel()
        await _drain(config, group, server, members)


def _server(config: Config, group: WorkerGroup, parts: Sequence[Part]) -> Server:
    most = max(part.max_message_bytes for part in parts)
    server = Server(group.name, [part.service for part in parts], config.rpc, most)
    for part in parts:
        part.add_service(server)
    return server


async def _observe(
    config: Config,
    group: WorkerGroup,
    server: Server,
    members: MembershipClient,
    cleanup: contextlib.AsyncExitStack,
) -> str:
    if config.worker.metrics_port < 0:
        return ""

    def why_not() -> str:
        if not server.serving:
            return "it drains, or has work and makes no step"
        # One of another release gets no work: a rolling upgrade must not take it for ready.
        lost = config.worker.gateways and not members.joined
        return "no gateway has it registered" if lost else ""

    observation = ObservationServer(group.name, group.observed, why_not)
    host = config.worker.metrics_host or config.worker.host
    address = await observation.start(host, config.worker.metrics_port)
    cleanup.push_async_callback(observation.close)
    return address


async def _watch(config: Config, group: WorkerGroup, server: Server) -> None:
    """Health means progress: work and no step for too long is NOT_SERVING, and for much
    too long the end of this process.

    Raises:
        EpdError: the transfer engine has been stuck for long. Its lock is not ours, so
            only a new process helps.
    """
    stuck_since: float | None = None
    watched_s = 0.0
    """Since the last step, with work."""
    while True:
        group.tick()
        stalled = group.stalled_for()
        reaches = group.reaches_peers()
        serving = stalled <= config.worker.stall_s and group.healthy() and reaches
        if serving != server.serving:
            _tell(group, serving, stalled, reaches)
        await server.set_serving(serving)
        # Counted in rounds: while this process was stopped, nothing could move.
        watched_s = watched_s + _WATCH_S if stalled > _WATCH_S else 0.0
        if config.worker.wedged_s and watched_s > config.worker.wedged_s:
            _give_up(stalled)
        stuck_since = None if group.healthy() else stuck_since or time.monotonic()
        if stuck_since and time.monotonic() - stuck_since > _STUCK_EXIT_S:
            faulthandler.dump_traceback(2)  # stderr, whatever replaced sys.stderr
            raise EpdError(ErrorKind.INTERNAL, "the transfer engine is stuck; restart this worker")
        await asyncio.sleep(_WATCH_S)


def _give_up(stalled_s: float) -> NoReturn:
    """A forward that doesn't end can't be ended, and an orderly exit would wait for it.
    Whoever waits for this process sees its connections break, and goes elsewhere."""
    logger.critical("no step for %.0f s although there is work: giving up", stalled_s)
    faulthandler.dump_traceback(2)
    logging.shutdown()
    os._exit(1)


def _tell(group: WorkerGroup, serving: bool, stalled_s: float, reaches: bool) -> None:
    """Log a change of health; a bad one with what every request waits for."""
    extra = {"serving": serving, "stalled_s": round(stalled_s, 1), "reaches_peers": reaches}
    if serving:
        logger.info("health changes", extra=extra)
        return
    waits = group.waits()
    logger.error("health changes", extra=extra | {"requests": len(waits)})
    for stage, (request, age_s, what) in waits[:_MOST_WAITS]:
        logger.error("%s: %s waits for %s, %.1f s old", stage, request, what, age_s)


async def _drain(
    config: Config, group: WorkerGroup, server: Server, members: MembershipClient
) -> None:
    # A second SIGTERM must not turn an orderly exit into a killed one.
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grace_s = config.worker.grace_s
    logger.info("leaving", extra={"streams": group.streams, "grace_s": grace_s})
    members.leave(grace_s)
    draining = asyncio.create_task(group.drain(grace_s), name="drain")
    await server.set_serving(False)
    if not await draining:
        logger.warning("ending running work", extra={"streams": group.streams})
        await group.end_streams(1.0)


def _hello(group: WorkerGroup, address: str) -> pb.Hello:
    facts = group.describe()
    return pb.Hello(
        stages=[_TO_PROTO[stage] for stage in group.stages],
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


def _heartbeat(group: WorkerGroup, server: Server) -> pb.Heartbeat:
    load = group.load()
    return pb.Heartbeat(
        running=load.running,
        waiting=load.waiting,
        kv_tokens_free=load.kv_tokens_free,
        steps=group.steps,
        serving=server.serving,
        queued_rows=load.queued_rows,
        us_per_row=load.us_per_row,
    )
