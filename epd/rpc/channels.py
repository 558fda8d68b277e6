"""Channel and server options: limits and keepalive, in one place for both sides."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from epd.config import RpcConfig
from epd.rpc import tls

Options = Sequence[tuple[str, int]]
_CONNECT_MS = 3000


def _keepalive(config: RpcConfig, unacknowledged_s: float) -> Options:
    """Pings, and how long the kernel keeps bytes that nobody acknowledges."""
    period = int(config.keepalive_s * 1000)
    return [
        ("grpc.keepalive_time_ms", period),
        # In spite of its name this sets TCP_USER_TIMEOUT alone: grpcio 1.85 never starts the
        # timer for the answer to a ping that it stands for (`grpc_chttp2_end_write`).
        ("grpc.keepalive_timeout_ms", int(unacknowledged_s * 1000)),
        # This one it starts, a minute by default, for every ping, also those that measure
        # the bandwidth. No other is sent while one waits: without a limit here, a peer that
        # is gone without a word is found a minute after one of those that it didn't answer.
        ("grpc.http2.ping_timeout_ms", period),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def client_options(config: RpcConfig) -> Options:
    """Options of a channel to a worker or gateway."""
    return [
        # A call that is given up during a cut is told to the worker after it. Were the
        # connection dropped first, nobody would say anything, and the worker, which holds
        # memory for the call, would have to find out by itself.
        *_keepalive(config, unacknowledged_s=2 * config.keepalive_s),
        ("grpc.max_send_message_length", config.encode_bytes),
        ("grpc.max_receive_message_length", config.control_bytes),
        # A worker that comes back on its address is dialled within a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # In spite of its name this is how long one attempt may take. On a crowded machine
        # the peer's side of a handshake takes a while; who is dead, heartbeats say.
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Parts of one service talk to each other, whatever http_proxy in the environment says:
        # gRPC would ask it for every address, loopback too.
        ("grpc.enable_http_proxy", 0),
        # Each worker's connection is its own: one hung peer holds up no other.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(config: RpcConfig, max_message_bytes: int) -> Options:
    """Options of a server that accepts messages of at most `max_message_bytes`."""
    return [
        *_keepalive(config, unacknowledged_s=config.keepalive_s / 2),
        ("grpc.http2.min_ping_interval_without_data_ms", int(config.keepalive_s * 500)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(config.keepalive_s * 500)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", config.control_bytes),
        # Two workers must never share a port in silence.
        ("grpc.so_reuseport", 0),
    ]


class Dialer:
    """Opens channels to other parts of the service, with the newest certificates."""

    def __init__(self, config: RpcConfig) -> None:
        """
        Raises:
            EpdError: the certificates can't be used.
        """
        self._config = config
        self._credentials = tls.client_credentials(config)

    def generation(self) -> int:
        """Looks at the files; another number: earlier channels show an old certificate."""
        self._credentials.refresh()
        return self._credentials.generation

    def dial(self, address: str, host: str = "") -> grpc.aio.Channel:
        """A channel to "host:port". The caller closes it.

        The certificate there must be for `rpc.tls_name`, else for `host`, else for the
        address's own host.
        """
        options: list[tuple[str, int | str]] = [*client_options(self._config)]
        self._credentials.refresh()
        credentials = self._credentials.value
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        if expected := self._config.tls_name or host:
            options.append(("grpc.ssl_target_name_override", expected))
        return grpc.aio.secure_channel(address, credentials, options=options)


def dial(address: str, config: RpcConfig) -> grpc.aio.Channel:
    """One channel to "host:port"; see `Dialer`."""
    return Dialer(config).dial(address)
