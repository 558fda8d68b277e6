"""One bad request fails alone, not the batch that it happened to be in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from epd.errors import EpdError
from epd.obs import metrics
from epd.rpc.status import internal

Work = TypeVar("Work")
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


def run_isolated(
    run: Callable[[Sequence[Work]], Sequence[Result]],
    batch: Sequence[Work],
    name_of: Callable[[Work], str],
    stage: str,
) -> list[Result | EpdError]:
    """`run(batch)`; if it raises, each member once alone, and no more than once.

    `run` must be repeatable: a forward that failed half-way has only written what
    running it again writes again. `name_of` gives the request's id for log and error.
    Runs in the engine thread; a batch that raised is one failed step of `stage`.
    """
    try:
        return list(run(batch))
    except Exception as error:
        metrics.STEP_FAILURES.labels(stage).inc()
        if len(batch) == 1:
            return [_explained(error, name_of(batch[0]))]
        logger.warning("a batch of %d raised %r: running each alone", len(batch), error)
        return [_alone(run, one, name_of) for one in batch]


def doubtful(result: object) -> bool:
    """Whether a result makes what it was computed from suspect: a failure, but none that is
    the user's (a grammar that allows nothing). Else anybody could empty a cache of others."""
    return isinstance(result, EpdError) and not result.mapping.users_fault


def _alone(
    run: Callable[[Sequence[Work]], Sequence[Result]], one: Work, name_of: Callable[[Work], str]
) -> Result | EpdError:
    try:
        (result,) = run([one])
        return result
    except Exception as error:
        return _explained(error, name_of(one))


def _explained(error: Exception, request: str) -> EpdError:
    if isinstance(error, EpdError):
        return error
    logger.error("the model raised", exc_info=error, extra={"request": request})
    return internal(request)
