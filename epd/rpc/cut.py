"""Ends a call from the server's side, where its peer takes nothing any more.

grpc.aio has no way to do that: a status waits behind the messages before it, and those wait
for a peer that may never read. A call that is dropped by all who hold it is reset by gRPC's
core at once. Who holds it is its servicer, and a task of grpc.aio's own that watches for the
peer's cancellation (`_schedule_rpc_coro`). The latter is found by what it refers to.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

_WATCHER = "_schedule_rpc_coro"


def cut_off() -> bool:
    """Reset the call that the current task serves, once this task ends (the caller sees to
    that). False: this grpc.aio is built otherwise, and the call stays until its peer, its
    deadline or its connection ends it.
    """
    served = asyncio.current_task()
    for task in asyncio.all_tasks():
        coroutine = task.get_coro()
        if getattr(coroutine, "__name__", "") == _WATCHER and _refers_to(coroutine, served):
            task.cancel()
            return True
    return False


def _refers_to(coroutine: Any, wanted: Any) -> bool:
    """Whether a variable of the coroutine is `wanted`; Cython keeps them in one object."""
    near = gc.get_referents(coroutine)
    return any(found is wanted for found in (*near, *gc.get_referents(*near)))
