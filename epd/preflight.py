"""What can be known to be wrong before anything is loaded. Looked at first, since weights
and libraries take many seconds, and a port that is taken is taken before and after.

Imports neither torch, transformers nor mooncake.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import ExitStack

from epd.addresses import joined
from epd.config import Config, GatewayConfig, WorkerConfig
from epd.errors import EpdError, invalid
from epd.pages import give_back
from epd.rpc import tls
from epd.runtime.core_turns import open_file
from epd.transfer.wall import Wall
from epd.wheel import require_mooncake

Port = tuple[str, str, int]
"""(configuration key, host, port)"""


def check(config: Config, ports: Iterable[Port], *, gateway: bool, worker: bool) -> None:
    """Return if a gateway, a worker, or both may work, as far as files and `ports` tell.

    Raises:
        EpdError: a port is taken, a file of the checkpoint is missing or damaged, Mooncake's
            build is missing or the wrong one, or certificates are, or a network can't be
            read, or the file for turns not opened; it names the setting, or the file.
    """
    for _, problem in tried(ports):
        if problem:
            raise problem
    if gateway:
        inner = config.gateway.membership_host or config.gateway.host
        tls.check(config.rpc, inner, "gateway.membership_host")
    if worker:
        tls.check(config.rpc, config.worker.host, "worker.host")
        require_mooncake("cpu")
        _require_own("transfer.host", config.transfer.host)
        Wall.around(config.transfer.host, config.transfer.networks)
        _require_turns(config.worker.turns_file)
    _require_checkpoint(config.model.path)


def gateway_ports(gateway: GatewayConfig) -> list[Port]:
    """Those that the configuration fixes; 0 is any free one, and no matter."""
    inner = gateway.membership_host or gateway.host
    ports = [
        ("gateway.http_port", gateway.host, gateway.http_port),
        ("gateway.grpc_port", gateway.host, gateway.grpc_port),
        ("gateway.membership_port", inner, gateway.membership_port),
        ("gateway.metrics_port", gateway.metrics_host, gateway.metrics_port),
    ]
    return [entry for entry in ports if entry[2] > 0]


def worker_ports(worker: WorkerConfig, place: int = 0) -> list[Port]:
    """Of the worker at `place`: one configured port can't serve several, so each takes
    the next."""
    ports = [
        ("worker.port", worker.host, worker.port),
        ("worker.metrics_port", worker.metrics_host or worker.host, worker.metrics_port),
    ]
    return [(key, host, port + place) for key, host, port in ports if port > 0]


def tried(ports: Iterable[Port]) -> list[tuple[Port, EpdError | None]]:
    """Each port, and why it can't be had. All are held until the last was tried, so that
    two keys with one port are found as well."""
    found: list[tuple[Port, EpdError | None]] = []
    with ExitStack() as held:
        for key, host, port in ports:
            probe = held.enter_context(_socket(host))
            # As the servers do: what lingers of the last one is no reason.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            problem = None
            try:
                probe.bind((host, port))
                probe.listen()
            except OSError as error:
                problem = invalid(f"{key}: {why_not(host, port, error)}", key)
            except OverflowError:  # see `worker_ports`
                problem = invalid(f"{key}: {port} is no port; several workers take as many", key)
            found.append(((key, host, port), problem))
    return found


def why_not(host: str, port: int, error: OSError) -> str:
    """Why an address can't be listened on, and what to do."""
    return f"{joined(host, port)}: {error.strerror}; stop what has it, or choose another"


def _require_checkpoint(path: str) -> None:
    from epd.models.files import require_config, require_processor
    from epd.models.weights import weight_files

    require_config(path)
    weight_files(path)
    require_processor(path)
    # A vocabulary of 150,000 tokens was read with 150 MiB, which this process, and `epd serve`
    # for as long as it lives, would keep.
    give_back()


def _require_own(key: str, host: str) -> None:
    try:
        with _socket(host) as probe:
            probe.bind((host, 0))
    except OSError as error:
        what = f"{host}: {error.strerror}; it must be an address of this machine"
        raise invalid(f"{key}: {what}", key) from error


def _require_turns(path: str) -> None:
    """Called before this process takes turns: closing the file would end them."""
    if path:
        os.close(open_file(path))


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
