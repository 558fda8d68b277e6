"""Structured logs: every line of a request carries its id.

`bind` or `set_request` sets it for the current task (and the tasks it starts);
any logger writes it. Text for terminals, one JSON object a line for collectors.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import orjson

from epd.config import LogConfig

_request: ContextVar[str] = ContextVar("epd_request", default="")
_VISIBLE = {
    point: f"\\x{point:02x}" if point < 256 else f"\\u{point:04x}"
    for point in (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F))
}
"""Control characters, line ends and turns of the writing direction, as people can see them."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def request_id() -> str:
    """Id of the request that this task works on; empty outside of one."""
    return _request.get()


def set_request(request: str) -> None:
    """Lines logged by this task from now on, and by tasks that it starts, belong to
    `request`. For a gRPC call, which is a task of its own."""
    _request.set(request)


@contextmanager
def bind(request: str) -> Iterator[None]:
    """Lines logged inside belong to `request`."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def setup(config: LogConfig, stage: str) -> None:
    """Send all logs of this process to stderr (stdout is for READY lines).

    Fields given by ``logger.info(..., extra={...})`` are written after the message.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(stage) if config.format == "json" else _Text(stage))
    handler.addFilter(_add_request)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())


def clock(seconds: float) -> str:
    """A time as lines for people begin with, of one of `time.time`."""
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{int(seconds % 1 * 1000):03d}"


def _add_request(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request"):
        record.request = _request.get()
    return True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    hidden = _STANDARD | {"request", "color_message"}  # the latter is uvicorn's, for terminals
    return {key: value for key, value in vars(record).items() if key not in hidden}


class _Json(logging.Formatter):
    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "stage": self._stage,
            "logger": record.name,
            "request": getattr(record, "request", ""),
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class _Text(logging.Formatter):
    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    def format(self, record: logging.LogRecord) -> str:
        request = getattr(record, "request", "")
        parts = [
            f"{clock(record.created)} {record.levelname[0]} {self._stage}",
            *([f"[{request}]"] if request else []),
            record.getMessage(),
            *(f"{key}={value}" for key, value in _fields(record).items()),
        ]
        # What clients wrote is in here: it must not begin a line of its own, or move a cursor.
        text = " ".join(parts).translate(_VISIBLE)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text
