"""Works for the sandbox tests: loaded in the zygote, run in its workers."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any

from epd.errors import EpdError, ErrorKind, invalid
from epd.sandbox_worker import Work


def load(greeting: str) -> Work:
    held: list[bytes] = []

    def work(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], Sequence[bytes]]:
        action = head["do"]
        if action == "echo":
            return {"greeting": greeting, "pid": os.getpid()}, [body, body[::-1]]
        if action == "refuse":
            raise EpdError(ErrorKind.IMAGE_TOO_LARGE, "too much", param="here")
        if action == "raise":
            raise ZeroDivisionError("by design")
        if action == "spin":
            while True:
                pass
        if action == "sleep":
            time.sleep(3600)
        if action == "nap":
            time.sleep(0.5)
            return {"pid": os.getpid()}, ()
        if action == "crash":
            ctypes.string_at(0)
        if action == "exit":
            os._exit(3)
        assert action == "allocate"
        held.append(bytes(head["bytes"]))
        held.clear()
        return {}, ()

    return work


def load_refusing() -> Work:
    raise invalid("there is nothing to load", "model.path")


def load_dying() -> Work:
    os._exit(4)
