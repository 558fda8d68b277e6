"""Whether and when a refused client had better ask again."""

from __future__ import annotations

import math

from epd.errors import EpdError


def retry_headers(error: EpdError) -> dict[str, str]:
    """Retry-After where we know when; `x-should-retry: false` where it would be in vain.

    OpenAI's clients ask twice more after any status from 500 on: a request that took its
    whole deadline would take it three times, just when there is too much to do.
    """
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.mapping.http_status >= 500 and not error.mapping.retryable:
        headers["x-should-retry"] = "false"
    return headers
