"""The gateway process: what it is made of, its start, and its orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from epd.background import until_stop
from epd.config import Config, GatewayConfig
from epd.models.spec import ModelSpec
from epd.obs import logs
from epd.obs.http import ObservationServer
from epd.pulse import pulse
from epd.ready import announce
from epd.rpc import tls as inner_tls
from epd.rpc.server import Server
from gateway import grpc_receipt, tls
from gateway.access import Access, AccessControl
from gateway.access_log import RequestLog
from gateway.app import build_app, counts, why_not_ready
from gateway.bodies import BodyReader
from gateway.body_process import Room
from gateway.chat import ChatService
from gateway.checkpoint import Loaded, load
from gateway.grpc_access import AccessLog
from gateway.grpc_api import SERVICE, GatewayService
from gateway.http_server import STOP_S, HttpServer
from gateway.images import Served
from gateway.membership import MembershipService, sweep_forever
from gateway.outcomes import STAGE
from gateway.pipeline import Pipeline
from gateway.prepare import Preparer
from gateway.progress import Stages
from gateway.prompt_process import Bounds
from gateway.prompts import PromptPool
from gateway.streams import Connections
from gateway.workers import Registry
from protos.epd.v1 import gateway_pb2_grpc, membership_pb2_grpc

_log = logging.getLogger(__name__)
_MEMBERSHIP = "epd.v1.Membership"
_SHOWN_HEADERS = ("x-request-id", "x-client-request-id", "retry-after", "x-should-retry")
"""Of answers, to scripts of other pages: OpenAI's client goes by the last two."""
_PRUNE_S = 5.0
_CLOSE_S = 20.0
"""Teardowns are bounded one by one; this is for what nobody thought of."""


async def serve(config: Config) -> None:
    """Serve until SIGTERM, then drain: no new requests, running ones get their time.

    Prints one line ``READY {json}`` on stdout when all addresses are open.

    Raises:
        EpdError: the checkpoint or an address can't be used.
        Whatever a task died of that a gateway can't be without.
    """
    logs.setup(config.log, STAGE)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    gateway = await Gateway.create(config)
    try:
        addresses = await gateway.start()
        announce({"stage": STAGE, **addresses, "pid": os.getpid()})
        await until_stop(stop, gateway.tasks)
        await gateway.drain(config.worker.grace_s)
    finally:
        await _close(gateway)


async def _close(gateway: Gateway) -> None:
    """Close it; a part that never ends must not keep a process that was told to stop."""
    try:
        await asyncio.wait_for(gateway.close(), _CLOSE_S)
    except TimeoutError:
        waiting = sorted(task.get_name() for task in asyncio.all_tasks())
        _log.critical("not closed after %g s, ending anyway; at work: %s", _CLOSE_S, waiting)
        sys.stderr.flush()
        os._exit(1)


class Gateway:
    """All parts of a gateway. `start`, then `drain`, then `close`."""

    def __init__(self, config: Config, loaded: Loaded, prompts: PromptPool) -> None:
        self._config = config
        spec = loaded.spec
        self.registry = Registry(spec.fingerprint, spec.dtype, config.gateway.dead_s)
        self._connections = Connections(config.rpc)
        stages = Stages(
            self.registry, self._connections, config, spec.fingerprint, spec.image_token_id
        )
        self._pipeline = Pipeline(stages)
        served = Served(spec, loaded.processor_digest, loaded.image_key)
        self._preparer = Preparer(served, config, prompts, self.registry.limits)
        self.service = ChatService(
            config.model.name or spec.name,
            config,
            self._preparer,
            self._pipeline,
            loaded.tokenizer,
        )
        self._bodies = BodyReader(
            config,
            spec.vocab_size,
            lambda: Room(self._preparer.max_context, loaded.longest_token),
        )
        access = Access(config.gateway, config.limits.max_inflight)
        self.app = build_app(self.service, self._bodies, spec.fingerprint)
        _guard(self.app, config.gateway, access)
        self._membership = _membership_server(config, self.registry)
        self._public = _public_server(config, self.service, self._bodies, spec, access)
        self._observation = ObservationServer(
            STAGE, lambda: counts(self.service), lambda: why_not_ready(self.service)
        )
        self._http: HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def create(cls, config: Config) -> Gateway:
        """Read the checkpoint's config, tokenizer and processor; no weights.

        Raises:
            EpdError: the checkpoint can't be used.
        """
        tls.http_options(config.gateway)  # what is wrong with the files, before all else
        workers = config.gateway.preprocess_workers
        if not workers:
            return cls.of(config, await asyncio.to_thread(load, config.model))
        bounds = Bounds(config.gateway.prompt_cpu_s, config.gateway.prompt_mib)
        prompts = PromptPool(config.model, workers, bounds=bounds)
        try:
            facts = await prompts.start()
            assert facts is not None
            return cls(config, await asyncio.to_thread(Loaded.of, facts), prompts)
        except BaseException:
            await prompts.close()
            raise

    @classmethod
    def of(cls, config: Config, loaded: Loaded) -> Gateway:
        """With what is loaded already; prompts are built in a thread of this process."""
        return cls(config, loaded, PromptPool(config.model, 0, loaded.builder))

    async def start(self) -> dict[str, str]:
        """Open the addresses; returns them by API."""
        config = self._config.gateway
        inner = config.membership_host or config.host
        credentials = inner_tls.server_credentials(
            self._config.rpc, inner, "gateway.membership_host"
        )
        membership = await self._membership.start(
            inner, config.membership_port, credentials, "gateway.membership_port"
        )
        self._http = HttpServer(self.app, config)
        public = await self._public.start(
            config.host, config.grpc_port, tls.grpc_credentials(config), "gateway.grpc_port"
        )
        observed = await self._observation.start(
            config.metrics_host, config.metrics_port, "gateway.metrics_port"
        )
        await self._membership.set_serving(True)
        await self._public.set_serving(True)
        await self._http.start()
        self._tasks = [
            asyncio.create_task(sweep_forever(self.registry)),
            asyncio.create_task(self._prune_forever()),
            asyncio.create_task(pulse(self._config.worker.wedged_s)),
        ]
        return {
            "http": self._http.address,
            "grpc": public,
            "membership": membership,
            "metrics": observed,
        }

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """That work as long as the gateway does."""
        return [*self._tasks, *(self._http.tasks if self._http else ())]

    async def drain(self, grace_s: float) -> None:
        """Refuse what is new; let what runs come to its end, at most so long. What is left then
        ends with a typed error."""
        self.service.draining = True
        await self._public.set_serving(False)
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        while self.service.inflight and loop.time() < until:
            await asyncio.sleep(0.05)
        self.service.end_all()

    async def close(self) -> None:
        """End every call, process and connection of this gateway."""
        for task in self._tasks:
            task.cancel()
        if self._http is not None:
            await self._http.stop()
        await self._public.stop(STOP_S)
        await self._observation.close()
        await self._pipeline.drain()
        # Workers that stop, too, leave by themselves meanwhile.
        await self._membership.stop(STOP_S)
        await self._connections.close()
        self._bodies.close()
        await self._preparer.close()

    async def _prune_forever(self) -> None:
        while True:
            await asyncio.sleep(_PRUNE_S)
            await self._connections.prune()


def _guard(app: FastAPI, config: GatewayConfig, access: Access) -> None:
    """What stands around the routes; what is added last is met first."""
    app.add_middleware(AccessControl, access=access)
    if config.cors_origins:
        # Around the keys: a browser asks without one what it may do.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            # Any: OpenAI's own client sends a dozen of its own. Who may call is decided
            # by the origin and the key, which pages send themselves (there are no cookies).
            allow_headers=["*"],
            expose_headers=_SHOWN_HEADERS,
        )
    app.add_middleware(RequestLog)


def _membership_server(config: Config, registry: Registry) -> Server:
    server = Server(
        STAGE,
        [_MEMBERSHIP],
        config.rpc,
        max_message_bytes=config.rpc.control_bytes,
        count_streams=False,
    )
    service = MembershipService(registry, config.gateway)
    membership_pb2_grpc.add_MembershipServicer_to_server(service, server.grpc)
    return server


def _public_server(
    config: Config, service: ChatService, bodies: BodyReader, spec: ModelSpec, access: Access
) -> Server:
    receipt = grpc_receipt.Receipt(config, access, bodies, service.budget)
    server = Server(
        STAGE,
        [SERVICE],
        config.rpc,
        max_message_bytes=config.limits.max_body_bytes,
        interceptors=[AccessLog(access), receipt],
        options=grpc_receipt.options(config),
        count_streams=False,
    )
    api = GatewayService(service, spec.vocab_size, spec.fingerprint, access)
    gateway_pb2_grpc.add_GatewayServicer_to_server(api, server.grpc)
    return server
