"""Ids of requests: ours, which everything inside goes by, and the client's, which is sent back."""

from __future__ import annotations

import logging
import secrets

_log = logging.getLogger(__name__)
_MAX_CLIENT_ID = 128
_PREFIXES = {
    "/v1/chat/completions": "chatcmpl",
    "/v1/completions": "cmpl",
    "/v1/responses": "resp",
    "/epd.v1.Gateway/Chat": "chatcmpl",
    "/epd.v1.Gateway/Complete": "cmpl",
}
"""Of answers, whose ids are the request's."""


def new_request_id(path: str = "") -> str:
    """For a request to this path, or a call of this method."""
    return f"{_PREFIXES.get(path, 'req')}-{secrets.token_hex(12)}"


def id_headers(request_id: str, said: str) -> dict[str, str]:
    """What tells clients which of their requests this is, also the log: our id, and as much
    of their own, if they gave one, as a log line, a header and gRPC metadata can hold."""
    ours = {"x-request-id": request_id}
    kept = (char for char in said[:_MAX_CLIENT_ID] if char.isascii() and char.isprintable())
    if not (shown := "".join(kept).strip()):
        return ours
    _log.info("client calls this request %s", shown)
    return {**ours, "x-client-request-id": shown}
