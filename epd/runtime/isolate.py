"""One bad request fails alone, not the batch that it happened to be in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from epd.errors import EpdError
from epd.rpc.status import internal

Work = TypeVar("Work")
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


def run_isolated(
    run: Callable[[Sequence[Work]], Sequence[Result]],
    batch: Sequence[Work],
    name_of: Callable[[Work], str],
) -> list[Result | EpdError]:
    """`run(batch)`; if it raises, each member once alone, and no more than once.

    `run` must be repeatable: a forward that failed half-way has only written what
    running it again writes again. `name_of` gives the request's id for log and error.
    Runs in the engine thread.
    """
    try:
        return list(run(batch))
    except Exception as error:
        if len(batch) > 1:
            logger.warning("a batch of %d raised %r: running each alone", len(batch), error)
            return [result for one in batch for result in run_isolated(run, [one], name_of)]
        return [_explained(error, name_of(batch[0]))]


def _explained(error: Exception, request: str) -> EpdError:
    if isinstance(error, EpdError):
        return error
    logger.error("the model raised", exc_info=error, extra={"request": request})
    return internal(request)
