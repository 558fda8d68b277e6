"""How requests for answers end, counted once each, whichever API they came by.

read, checked, planned, accepted --> an answer --> ok, failed, cancelled
   \\___________________________________ `beginning` --> refused, failed, cancelled
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from epd.errors import EpdError, ErrorKind
from epd.obs import logs, metrics
from epd.rpc.status import internal

STAGE = "gateway"
_log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


def count(outcome: str) -> None:
    """One request for an answer has ended."""
    metrics.REQUESTS.labels(STAGE, outcome).inc()


def outcome_of(error: BaseException) -> str:
    """refused: the client's fault, or no room; cancelled: by the client; failed: by us."""
    if isinstance(error, ClientGone | asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    if not isinstance(error, EpdError):
        return "failed"
    given_up = error.kind is ErrorKind.DEADLINE_EXCEEDED and error.by_client
    if error.kind is ErrorKind.CANCELLED or given_up:
        return "cancelled"
    refused = error.by_client or error.kind is ErrorKind.OVERLOADED
    return "refused" if refused else "failed"


@contextmanager
def beginning() -> Iterator[None]:
    """Counts a request that ends in here, before there is an answer to it."""
    try:
        yield
    except BaseException as error:
        count(outcome_of(error))
        raise


@contextmanager
def typed(request_id: str) -> Iterator[None]:
    """What fails in here and is no `EpdError` is a fault of ours: the log has all of it,
    whoever asked is told where to find it.

    Raises:
        EpdError: INTERNAL in place of the fault.
    """
    try:
        yield
    except EpdError:
        raise
    except Exception as error:
        with logs.bind(request_id):
            _log.exception("unforeseen")
        raise internal(request_id) from error
