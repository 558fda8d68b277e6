"""`epd serve`: the gateway and its workers as processes of this machine.

A child's life::

    starting --READY--> ready --it ends--> pause --> starting (again and again)
       |  it ends or takes too long, at the first start
       v
    the whole service stops, with that child's last words as the reason
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Sequence
from typing import Any

from epd import preflight
from epd.addresses import joined
from epd.background import until_stop
from epd.child import Child, StartFailure, child_environment, say
from epd.config import Config, ServeConfig, WorkerConfig
from epd.errors import EpdError, invalid
from epd.forkserver import ForkServer
from epd.host import GATEWAY, STAGES, stages_of
from epd.obs.logs import clock
from epd.ready import tell_systemd

_LONGEST_PAUSE_S = 30.0
_STEADY_AFTER_S = 60.0
_KILL_MARGIN_S = 3.0
_LOOPBACK = "127.0.0.1"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks the gateway itself, not the http_proxy of the environment."""


class Supervisor:
    """Starts, watches, restarts and stops the processes of one configuration.

    `started` is when a person began to wait for it, by time.monotonic(): now, if nobody says.
    """

    def __init__(self, config: Config, started: float | None = None) -> None:
        self.config = config
        self.started = time.monotonic() if started is None else started
        self.gateway = Child(GATEWAY, 0)
        self.workers = [
            Child(role, index, _own_ports(config.worker, place))
            for place, (role, index) in enumerate(planned(config.serve))
        ]
        self._turns = _share_turns(self.workers) if _shares_turns(config) else None
        self._environ = child_environment(config, os.environ)
        self._forks = ForkServer(self._environ, preloaded_model(config))
        self._stopping = asyncio.Event()

    @property
    def children(self) -> list[Child]:
        return [self.gateway, *self.workers]

    def stop(self) -> None:
        """Ask `serve` to end; for a signal handler of the loop."""
        self._stopping.set()

    async def serve(self) -> int:
        """Run until `stop`; returns the exit code. No child is left when this returns."""
        try:
            if await self._unless_stopped(self._start_all()):
                self._show_states(self._waited_s())
                await self._watch_all()
        except StartFailure as failure:
            _complain(f"can't start: {failure}")
            await self._stop_all()
            return 1
        finally:
            self._forks.close()
            if self._turns is not None:
                os.close(self._turns)
        return 0 if await self._stop_all() else 1

    async def _start_all(self) -> None:
        """All at once: most of the time goes to imports, and workers dial until they are heard."""
        gateway = _as_served(self.config).gateway
        host = gateway.membership_host
        port = gateway.membership_port or _free_port(host)
        self.gateway.settings["gateway.membership_host"] = host
        self.gateway.settings["gateway.membership_port"] = str(port)
        if not (self.config.serve.encode or self.config.serve.stages):
            # All other keys of this section are the supervisor's own business.
            self.gateway.settings["serve.encode"] = "0"
        for worker in self.workers:
            worker.settings["worker.gateways"] = joined(_reachable(host), int(port))
        _say(f"starting {', '.join(child.name for child in self.children)}")
        for child in self.children:
            await child.start(self._forks, self._environ)
        await asyncio.gather(*map(self._until_ready, self.children))
        self._pin_ports()
        await self._until_joined()

    async def _until_ready(self, child: Child) -> None:
        await child.until_ready(self.config.serve.start_timeout_s)
        # What was imported before it was forked is part of what was waited for.
        _say(f"{child.name} ready after {self._waited_s():.1f} s, {_where(child)}")

    def _waited_s(self) -> float:
        return time.monotonic() - self.started

    def _pin_ports(self) -> None:
        """A restarted process comes back where clients and Prometheus look for it."""
        for key in ("http", "grpc", "metrics"):
            port = self.gateway.report[key].rpartition(":")[2]
            self.gateway.settings[f"gateway.{key}_port"] = port
        for worker in self.workers:
            if address := worker.report.get("metrics"):
                worker.settings["worker.metrics_port"] = address.rpartition(":")[2]

    async def _until_joined(self) -> None:
        """Wait until the gateway itself says that every stage has a worker."""
        address = self.gateway.report["metrics"]
        deadline = time.monotonic() + self.config.serve.start_timeout_s
        while (reason := await asyncio.to_thread(_why_not_ready, address)) is not None:
            for child in self.children:
                if not child.running:
                    raise StartFailure(child.why())
            if time.monotonic() > deadline:
                raise StartFailure(f"gateway: {reason}")
            await asyncio.sleep(0.1)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run work; False if `stop` came first (the work is then cancelled)."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    async def _watch_all(self) -> None:
        watchers = [asyncio.create_task(self._watch(child)) for child in self.children]
        try:
            await until_stop(self._stopping, watchers)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch(self, child: Child) -> None:
        """Start a child again whenever it ends, with a growing pause while it keeps ending."""
        pause = self.config.serve.backoff_s
        while True:
            since = time.monotonic()
            await child.wait()
            child.kill_group()
            if not self.config.serve.restart:
                _complain(f"ended: {child.why()}")
                return
            if time.monotonic() - since > _STEADY_AFTER_S:
                pause = self.config.serve.backoff_s
            _complain(f"ended, starts again in {pause:g} s: {child.why()}")
            await asyncio.sleep(pause)
            child.collect()
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            await self._restart(child)

    async def _restart(self, child: Child) -> None:
        try:
            await child.start(self._forks, self._environ)
            await child.until_ready(self.config.serve.start_timeout_s)
            _say(f"{child.name} is back, {_where(child)}")
        except (StartFailure, OSError) as failure:
            if str(failure) != child.why():  # else `_watch` says it
                _complain(f"can't start again: {failure}")
            child.kill_group()

    async def _stop_all(self) -> bool:
        """SIGTERM, the configured grace, SIGKILL; True if none had to be killed."""
        running = [child for child in self.children if child.running]
        if running:
            _say(f"stopping {len(running)} processes")
        for child in running:
            child.terminate()
        waits = {asyncio.create_task(child.wait()): child for child in running}
        late: set[asyncio.Task[None]] = set()
        if waits:
            grace_s = self.config.worker.grace_s + _KILL_MARGIN_S
            _, late = await asyncio.wait(waits, timeout=grace_s)
        for child in self.children:
            child.kill_group()
        for task in late:
            await task
            _complain(f"{waits[task].name} did not stop in time: killed")
        _say(f"stopped, {len(late)} by force" if late else "stopped")
        return not late

    def _show_states(self, seconds: float) -> None:
        if sys.stdout.isatty():
            _print_table(self.children)
        name = self.config.model.name or os.path.basename(self.config.model.path.rstrip("/"))
        scheme = "https" if self.config.gateway.tls_cert else "http"
        url = f"{scheme}://{self.gateway.report['http']}/v1"
        _say(f"serving {name} at {url} after {seconds:.1f} s; Ctrl-C stops")
        tell_systemd("READY=1")


def preloaded_model(config: Config) -> str | None:
    """The model whose imports are made once for all processes; None: each makes its own."""
    # What CUDA is told before a fork it doesn't know after it.
    shared = config.serve.preload and config.model.device == "cpu"
    return config.model.path if shared else None


def planned(config: ServeConfig) -> list[tuple[str, int]]:
    """The worker processes: what each hosts, and its number among its like.

    Raises:
        EpdError: a group names no stage, or nobody hosts prefill or decode.
    """
    groups = config.stages or [stage for stage in STAGES for _ in range(getattr(config, stage))]
    roles = ["+".join(stages_of(group)) for group in groups]
    hosted = {stage for role in roles for stage in stages_of(role)}
    for stage in ("prefill", "decode"):
        if stage not in hosted:
            raise invalid(f"no process hosts {stage}: {', '.join(roles)}", "serve.stages")
    return [(role, roles[:place].count(role)) for place, role in enumerate(roles)]


def _own_ports(worker: WorkerConfig, place: int) -> dict[str, str]:
    """Settings of the worker at `place`."""
    return {key: str(port) for key, _, port in preflight.worker_ports(worker, place)}


def _shares_turns(config: Config) -> bool:
    """Whether `epd serve` makes the file of `worker.turns_file`: asked to, and none is named."""
    return config.serve.turns and not config.worker.turns_file


def _share_turns(workers: Sequence[Child]) -> int:
    """A file for their turns that ends with this process, whose descriptor is returned."""
    file = os.memfd_create("epd-turns")
    for worker in workers:
        worker.settings["worker.turns_file"] = f"/proc/{os.getpid()}/fd/{file}"
    return file


def _as_served(config: Config) -> Config:
    """Workers of this machine need no membership port that the network reaches."""
    host = config.gateway.membership_host or _LOOPBACK
    gateway = config.gateway.model_copy(update={"membership_host": host})
    return config.model_copy(update={"gateway": gateway})


def fixed_ports(config: Config) -> list[preflight.Port]:
    """(configuration key, host, port) of all ports that `epd serve` must find free."""
    found = preflight.gateway_ports(_as_served(config).gateway)
    for place, _ in enumerate(planned(config.serve)):
        found += preflight.worker_ports(config.worker, place)
    return found


def run(config: Config) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code."""
    started = time.monotonic()
    try:
        planned(config.serve)
    except EpdError as error:
        _refuse(error.message)
        return 2
    try:
        # Here, before any process has begun to load for half a minute.
        preflight.check(_as_served(config), fixed_ports(config), gateway=True, worker=True)
    except EpdError as error:
        _refuse(f"can't start: {error.message}")
        return 1
    return asyncio.run(_run(config, started))


async def _run(config: Config, started: float) -> int:
    supervisor = Supervisor(config, started)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop)
    return await supervisor.serve()


def _why_not_ready(address: str) -> str | None:
    """None when the gateway's /ready answers 200, else what it says."""
    try:
        with _OPENER.open(f"http://{address}/ready", timeout=5) as response:
            response.read()
            return None
    except urllib.error.HTTPError as error:
        return f"not ready: {error.read(2000).decode(errors='replace')}"
    except OSError as error:
        return f"{address}: {error}"


def _free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _reachable(host: str) -> str:
    """An address of this machine to dial for one that was listened on."""
    return {"0.0.0.0": _LOOPBACK, "::": "::1"}.get(host, host)


def _where(child: Child) -> str:
    return f"pid {child.report['pid']}, {child.addresses}"


def _print_table(children: list[Child]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("process", "state", "pid", "addresses")
    for child in children:
        table.add_row(child.name, "ready", str(child.report["pid"]), child.addresses)
    Console().print(table)


def _refuse(text: str) -> None:
    """Before anything has begun, to whoever typed it."""
    say(f"epd serve: {text}", sys.stderr)


def _say(text: str) -> None:
    say(f"epd serve: {clock(time.time())} {text}", sys.stdout)


def _complain(text: str) -> None:
    say(f"epd serve: {clock(time.time())} {text}", sys.stderr)
