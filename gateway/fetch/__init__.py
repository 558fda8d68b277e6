"""Pictures from the web, fetched by the gateway alone and never named downstream.

URL ──> checked (`urls`) ──> resolved once, every address public (`addresses`)
    ──> dialled at a checked address ──> redirect? from the start again
    ──> bytes, under one deadline and one cap (`fetcher`)
"""

from gateway.fetch.fetcher import Fetcher, is_web_url

__all__ = ["Fetcher", "is_web_url"]
