"""Composition root of a process of one or more stages: environment, imports, event loop, exit code.

The only module that imports stages. Their imports are inside functions, since they bring
torch and transformers.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from epd.config import Config
from epd.cpus import joined, pin, prepare_threads, release_threads
from epd.errors import EpdError, invalid
from epd.lifetime import die_with_expected_parent
from epd.pages import give_back
from epd.preflight import check, gateway_ports, worker_ports

if TYPE_CHECKING:
    from epd.runtime.resources import Resources
    from epd.runtime.stage import Part

GATEWAY = "gateway"
STAGES = ("encode", "prefill", "decode")

Serve = Callable[[Config], Coroutine[Any, Any, None]]
Build = Callable[["Resources"], Coroutine[Any, Any, "Part"]]


def run_stage(role: str, config: Config) -> int:
    """Serve a stage, several ("prefill+decode"), or the gateway until SIGTERM or Ctrl-C;
    returns the exit code.

    The process then ends without taking its modules apart: everything of ours is closed,
    and for torch, gRPC and Mooncake that takes seconds and frees nothing that the kernel
    does not.
    """
    codes: list[int] = []

    def leave() -> None:
        if codes:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[0])

    # Until the stage can drain there is nothing to drain: loading takes a while.
    signal.signal(signal.SIGTERM, _on_early_stop)
    atexit.register(leave)  # registered before the others, so it runs after them
    codes.append(serve_stage(role, config))
    return codes[0]


def serve_stage(role: str, config: Config) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code.

    A reason for not starting is one line on stderr and exit code 1. Only an exception that
    nobody foresaw shows a traceback.
    """
    die_with_expected_parent()
    parts = role.split("+")
    if role != GATEWAY:
        config = config.for_stages(parts)
    prepare_threads(config.model.threads)
    _prepare_environment()
    if torch := sys.modules.get("torch"):  # imported before this process was forked
        torch.set_num_threads(config.model.threads)
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        _check(role, config)
        pin(joined(getattr(config, part).cpus for part in parts))
        serve = _serve_of(role)
        with asyncio.Runner(loop_factory=_loop_factory(role)) as runner:
            runner.run(serve(config))
    except EpdError as error:
        return _failed(role, error.message)
    except (OSError, ImportError) as error:
        return _failed(role, f"{type(error).__name__}: {error}")
    return 0


def preload(model: str) -> None:
    """Import what stages on CPUs import, so that forks of this process needn't.

    It begins nothing that a fork would break: no thread, nothing of gRPC, Mooncake or a
    device. `model` is a checkpoint, or "" for what all have in common. What can't be
    imported is left to the stages that need it: they say why.
    """
    prepare_threads(1)
    _prepare_environment()
    with contextlib.suppress(ImportError, OSError, EpdError):
        _serve_of(GATEWAY)
        for stage in STAGES:
            _builder(stage)
        import epd.models.lm
        import epd.runtime.kv  # noqa: F401
        from epd.models.processor import load_hf_processor
        from epd.models.spec import model_config, supported_class

        if model:
            supported_class(model_config(model), model)
            load_hf_processor(model)


def _loop_factory(role: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """A gateway does nothing but wait for many sockets: libuv's loop takes less time for
    that. The stages' loops have little to do, and keep to the standard one."""
    if role != GATEWAY:
        return None
    import uvloop

    return uvloop.new_event_loop


def _check(role: str, config: Config) -> None:
    """What would stop it after all has been loaded."""
    gateway = role == GATEWAY
    ports = gateway_ports(config.gateway) if gateway else worker_ports(config.worker)
    check(config, ports, gateway=gateway, worker=not gateway)


def stages_of(role: str) -> tuple[str, ...]:
    """The stages of a process, e.g. ("prefill", "decode") for "prefill+decode".

    Raises:
        EpdError: no such stage, or one twice.
    """
    stages = tuple(part.strip() for part in role.split("+"))
    for stage in stages:
        if stage not in STAGES:
            raise invalid(f"{role!r}: the stages are {', '.join(STAGES)}, joined by +", "stages")
    if len(set(stages)) < len(stages):
        raise invalid(f"{role!r}: a stage comes twice", "stages")
    return tuple(stage for stage in STAGES if stage in stages)


def _serve_of(role: str) -> Serve:
    if role == GATEWAY:
        import gateway.main

        return gateway.main.serve
    stages = stages_of(role)
    return lambda config: _serve_stages(stages, config)


async def _serve_stages(stages: Sequence[str], config: Config) -> None:
    """Build the stages, with what they share made once, and serve them as one worker."""
    from epd.jobs import Stage
    from epd.obs import logs
    from epd.runtime.resources import Resources
    from epd.runtime.stage import serve_parts

    logs.setup(config.log, "+".join(stages))
    shared = Resources(config, [Stage(stage) for stage in stages])
    parts = [await _builder(stage)(shared) for stage in stages]
    give_back()
    release_threads()  # this thread loaded and packed; from now on the engine thread computes
    await serve_parts(config, parts)


def _builder(stage: str) -> Build:
    if stage == "encode":
        import encode.main

        return encode.main.build
    if stage == "prefill":
        import prefill.main

        return prefill.main.build
    assert stage == "decode"
    import decode.main

    return decode.main.build


def _prepare_environment() -> None:
    """Set what tokenizers and transformers read once, when they are first imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # gRPC's own lines on stderr (a peer went away) say nothing that our log doesn't.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # A checkpoint is a folder; nothing is ever looked up on a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C drains, as SIGTERM does; a second one ends the process at once."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    os.kill(os.getpid(), signal.SIGTERM)


def _on_early_stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM before the stage serves (it then has a handler of its own): a clean end."""
    os._exit(0)


def _failed(role: str, reason: str) -> int:
    print(f"epd {role}: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    return 1
