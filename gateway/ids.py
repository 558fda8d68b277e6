"""Ids of requests: ours, which everything inside goes by, and the client's, which is sent back."""

from __future__ import annotations

import logging
import secrets

_log = logging.getLogger(__name__)
_MAX_CLIENT_ID = 128


def new_request_id(prefix: str = "chatcmpl") -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def client_id_headers(said: str) -> dict[str, str]:
    """What tells clients which of their requests this is, also the log: as much of their
    own id as a log line, a header and gRPC metadata can hold. Empty if they gave none."""
    kept = (char for char in said[:_MAX_CLIENT_ID] if char.isascii() and char.isprintable())
    if not (shown := "".join(kept).strip()):
        return {}
    _log.info("client calls this request %s", shown)
    return {"x-client-request-id": shown}
