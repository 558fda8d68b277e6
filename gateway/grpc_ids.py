"""Ids of gRPC calls: said in the first metadata that a call gets, whatever becomes of it."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc.aio

from epd.obs import logs
from gateway.ids import id_headers, new_request_id


@dataclass(slots=True)
class _Call:
    request_id: str
    said: str
    """What the client's metadata calls it."""
    told: bool = False


_current: ContextVar[_Call] = ContextVar("epd_grpc_call")


def begin(method: str, context: Any) -> None:
    """Name the call that this task serves; its log lines have that name."""
    metadata = dict(context.invocation_metadata() or ())
    said = metadata.get("x-request-id", "")
    call = _Call(new_request_id(method), said if isinstance(said, str) else "")
    logs.set_request(call.request_id)
    _current.set(call)


def request_id() -> str:
    """Of the call that this task serves."""
    return _current.get().request_id


async def tell(context: Any, said: str = "") -> None:
    """Say the ids to the client, if that was not done yet. `said` is what its message calls
    the request; it counts before what its metadata does."""
    call = _current.get()
    if call.told or context.done():
        return
    call.told = True
    shown = id_headers(call.request_id, said or call.said)
    with contextlib.suppress(grpc.aio.InternalError):  # it has left meanwhile
        await context.send_initial_metadata(tuple(shown.items()))
