"""Loading Mooncake: its environment, set on purpose, and clear errors.

Mooncake takes its settings from environment variables that it reads once, when
the first engine is made. Recipes measured what each of these does; the reasons
are beside the values.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from math import ceil
from typing import Any

from epd.config import TransferConfig
from epd.errors import EpdError, invalid
from epd.wheel import require_mooncake

NEVER = {
    "MC_LOG_DIR": "aborts the process when the folder can't be written",
    "MC_TCP_PROTO": "1 has no acknowledgement: stale data is taken for new",
    "MC_SLICE_TIMEOUT": "reports a timeout while the engine still uses the memory",
    "MC_DISABLE_METACACHE": "asks the peer again for every descriptor",
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "a stopped peer holds the refresh, and the "
    "closing of an engine, for 60 s (docs/adr/0004-session-names.md says what is done instead)",
    "MC_USE_TENT": "another engine under the same name, not the one tested here",
}
"""Removed from the environment: each of these breaks a promise of ours."""


def environment(config: TransferConfig) -> dict[str, str]:
    """Variables that our promises rest on; they replace what was set before."""
    deadline = str(ceil(config.read_deadline_s))
    variables = {
        # A read that makes no progress fails by itself: memory is unpinned, and a
        # stopped peer is noticed, within the deadline that the owner counts with.
        "MC_TCP_STATUS_TIMEOUT_SEC": deadline,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": deadline,
        # Opening a session holds the engine's lock; an address that swallows
        # packets must not hold it for the kernel's two minutes.
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(max(1, int(config.connect_timeout_s))),
        # Without the pool every descriptor opens its own connection.
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    }
    if config.protocol == "tcp":
        # The protocol argument is ignored; this is what really decides.
        variables["MC_FORCE_TCP"] = "1"
    if config.port_min or config.port_max:
        # Two ports an engine; a firewall needs to know them. Without a range they
        # are random in 15000-17000.
        low, high = ports(config)
        variables["MC_MIN_RPC_PORT"] = str(low)
        variables["MC_MAX_RPC_PORT"] = str(high)
    return variables


def ports(config: TransferConfig) -> tuple[int, int]:
    """The range that the engine's two ports are drawn from."""
    return config.port_range


LANES = 16
"""Mooncake's connections per peer (16 is its maximum)."""

TUNING = {
    # Its INFO lines are one or more per connection and per read.
    "MC_LOG_LEVEL": "ERROR",
    # 66 -> 48 ms for 128 MiB on loopback.
    "MC_TCP_SLICE_SIZE": "1048576",
    # With fewer, one failed connection puts the peer on a 1 s cooldown.
    "MC_TCP_LANES_PER_PEER": str(LANES),
    # Our own window is far smaller; the default of 1024 fails, not waits, above it.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
}
"""Variables that only concern speed; what the operator has set stays."""


def apply_environment(
    config: TransferConfig, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set Mooncake's variables for this process; call before the first engine."""
    for name in NEVER:
        environ.pop(name, None)
    if config.protocol != "tcp":
        environ.pop("MC_FORCE_TCP", None)
    environ.update(environment(config))
    for name, value in TUNING.items():
        environ.setdefault(name, value)


def load_mooncake(config: TransferConfig) -> Any:
    """The `TransferEngine` class, with the environment set first.

    Raises:
        EpdError: INVALID_REQUEST, none, several or the wrong build of Mooncake is
            installed, or a system library is missing; the message says what to install.
    """
    require_mooncake("cpu")  # host memory only: the pools stage through it on any device
    apply_environment(config)
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise explain_import_error(error) from error
    return TransferEngine


def explain_import_error(error: ImportError) -> EpdError:
    """What to install, from what the dynamic linker or the importer said."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError):
        what = "Mooncake is not installed: pip install 'epd[cpu]', or 'epd[cuda]' on a CUDA machine"
    elif any(name in text for name in ("libcuda", "libcudart", "libmlx5", "libnvidia")):
        what = (
            "the CUDA build of Mooncake is installed on a machine without its libraries: "
            "pip uninstall mooncake-transfer-engine mooncake-transfer-engine-cuda13, "
            "then pip install 'epd[cpu]'"
        )
    elif any(name in text for name in ("libibverbs", "libnuma", "libcurl", "librdmacm")):
        what = "a system library is missing: apt-get install libibverbs1 libnuma1 libcurl4"
    else:
        what = "Mooncake can't be loaded; exactly one of 'epd[cpu]', 'epd[cuda]' must be installed"
    return invalid(f"{what} ({text})", "transfer")
