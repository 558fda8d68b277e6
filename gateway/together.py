"""Tasks of one request that stand and fall together, and fail with the cause.

An error refers to the frames that it passed, and whatever keeps the error (a task, a group,
a frame's own variable) is often found from one of those: a circle. Everything near it, a
request's pictures and its calls' connections, then stays until Python looks for circles,
which in a process that lives for long it does seldom. So nothing here keeps an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import TracebackType

from epd.errors import EpdError, without_frames
from gateway.streams import StageFault


class Together(asyncio.TaskGroup):
    """A task group that raises the cause itself instead of a group of all that followed."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cause: BaseException | None = None
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            cause = _cause(group)
        except asyncio.CancelledError as cancelled:
            cancelled.__traceback__ = None  # the group's own frame, which has it as well
            raise
        finally:
            # Cancelled, the task that ran this keeps frames that have this group.
            self._parent_task = None
            del error, trace
        if cause is not None:
            try:
                raise cause
            finally:
                del cause


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a stage or a check said, rather than what followed from it."""
    errors = list(_flat(group))
    group.__traceback__ = None  # likewise
    typed = [error for error in errors if isinstance(error, StageFault | EpdError)]
    cause = (typed or errors)[0]
    for error in errors:
        if error is not cause:
            without_frames(error)
    return cause


def _flat(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flat(error)
        else:
            yield error
