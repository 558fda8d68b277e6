"""How many tokens one request may have: model, configuration and pool together."""

from __future__ import annotations

from epd.config import Config
from epd.models.spec import ModelSpec


def max_context(config: Config, spec: ModelSpec, pool_tokens: int | None = None) -> int:
    """Most tokens of prompt and output of one request.

    `pool_tokens` is given where no request can ever have more (decode; prefill tells
    gateways of its own pool, and takes whatever prompt fits it). The gateway takes the
    smallest that its workers report.
    """
    limits = [spec.max_positions, config.limits.max_context or spec.max_positions]
    return min([*limits, *([] if pool_tokens is None else [pool_tokens])])
