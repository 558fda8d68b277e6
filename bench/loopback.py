"""Asking servers of this machine themselves, whatever http_proxy in the environment says:
urllib and gRPC would ask the proxy for every address, loopback too. (aiohttp doesn't.)
"""

from __future__ import annotations

import urllib.request
from http.client import HTTPResponse
from typing import Final

GRPC_OPTIONS: Final = (("grpc.enable_http_proxy", 0),)
"""Of a channel."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout_s: float) -> HTTPResponse:
    """The answer to a GET; a context manager.

    Raises:
        OSError: nobody answers in time, or not with a 2xx (urllib.error.HTTPError).
    """
    response: HTTPResponse = _OPENER.open(url, timeout=timeout_s)
    return response
