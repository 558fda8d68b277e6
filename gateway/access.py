"""Who may call, and how much: API keys, and limits for each key.

The same for HTTP and gRPC: a bearer token. Without configured keys everybody may call,
and all are one caller as far as limits go.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epd.config import GatewayConfig
from epd.errors import EpdError, ErrorKind, invalid
from epd.obs import metrics
from epd.rpc.status import internal
from gateway.access_log import OPEN_PATHS
from gateway.budget import GREED
from gateway.outcomes import STAGE, count
from gateway.retries import retry_headers

_log = logging.getLogger(__name__)
ANSWER_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Requests here are counted by how they end (`gateway.outcomes`)."""
_SALT = b"epd tenant salt 1"


@dataclass(slots=True)
class Caller:
    """One key. `name` is for logs: it tells keys apart and none of them."""

    name: str
    digest: bytes
    running: int = 0
    budget: float = 0.0
    """Requests that may come at once; grows with time up to a minute's worth."""
    seen: float = 0.0
    salt: bytes = b""
    """Part of the keys of all caches: keys share no entries. The same in every gateway."""


class Access:
    """Keys and limits of one gateway, which runs `most_running` requests at most."""

    def __init__(
        self,
        config: GatewayConfig,
        most_running: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._most_running = most_running
        self._per_minute = config.requests_per_minute
        self._concurrent = config.concurrent_requests
        self._open = not config.api_keys
        self._origins = frozenset(config.cors_origins)
        keys = config.api_keys or ("",)
        self._callers = [_caller(key, self._per_minute, clock()) for key in keys]

    @contextmanager
    def admit(self, authorization: str | None) -> Iterator[Caller]:
        """While one request runs.

        Raises:
            EpdError: UNAUTHENTICATED, or OVERLOADED with the time to wait.
        """
        with self.running(self.identify(authorization)) as caller:
            yield caller

    @contextmanager
    def running(self, caller: Caller) -> Iterator[Caller]:
        """While one request of theirs runs.

        Raises:
            EpdError: OVERLOADED with the time to wait.
        """
        self._spend(caller)
        caller.running += 1
        try:
            yield caller
        finally:
            caller.running -= 1

    def identify(self, authorization: str | None) -> Caller:
        """The key's owner. Takes the same time whichever key it is, or none."""
        if self._open:
            return self._callers[0]
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode()).digest()
        found: Caller | None = None
        for caller in self._callers:
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        if found is None or scheme.lower() != "bearer":
            reason = "no valid API key; send 'Authorization: Bearer <key>'"
            raise EpdError(ErrorKind.UNAUTHENTICATED, reason)
        return found

    def check_page(self, origin: str | None) -> None:
        """Where there are no keys, a browser is all that a foreign page needs to have its
        wishes done (and, by a name of its own that it points here, to read the answer): CORS
        alone keeps a page from reading, not from asking. With keys a page has none.

        Raises:
            EpdError: the request comes from a page whose origin is not configured.
        """
        if not self._open or origin is None or self._origins & {"*", origin}:
            return
        raise invalid(f"pages of {origin[:64]!r} may not call; gateway.cors_origins says who may")

    def _spend(self, caller: Caller) -> None:
        if self._concurrent and caller.running >= self._concurrent:
            reason = f"{caller.running} requests of {self._who} are running, the most at once"
            raise self._limit(reason, 1.0)
        self._leave_room(caller)
        if not self._per_minute:
            return
        now = self._clock()
        grown = caller.budget + (now - caller.seen) * self._per_minute / 60
        caller.budget, caller.seen = min(grown, self._per_minute), now
        if caller.budget < 1:
            wait = (1 - caller.budget) * 60 / self._per_minute
            reason = f"{self._who} may make {self._per_minute} requests a minute"
            raise self._limit(reason, wait)
        caller.budget -= 1

    @property
    def _who(self) -> str:
        return "all clients" if self._open else "this key"

    def _limit(self, reason: str, retry_after_s: float) -> EpdError:
        """The service has room, and a key has used up its own. Without keys all clients
        together have: that is the service's limit, and no single client's doing."""
        kind, own = ErrorKind.OVERLOADED, not self._open
        return EpdError(kind, reason, retry_after_s=retry_after_s, by_client=own)

    def _leave_room(self, caller: Caller) -> None:
        """One key among several never takes the last places: it may have `GREED` times as
        many as are left (dynamic thresholds, Choudhury and Hahne 1998)."""
        left = self._most_running - sum(other.running for other in self._callers)
        if len(self._callers) > 1 and caller.running >= GREED * left:
            reason = f"this key has {caller.running} requests running, and {left} places are left"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)


def _caller(key: str, budget: float, now: float) -> Caller:
    digest = hashlib.sha256(key.encode()).digest()
    if not key:
        return Caller("anyone", digest, budget=budget, seen=now)
    salt = hashlib.sha256(_SALT + digest).digest()
    return Caller(digest.hex()[:8], digest, budget=budget, seen=now, salt=salt)


class AccessControl:
    """ASGI: admits HTTP requests. What fails below without an answer is answered here.

    `scope["state"]` gets the key's name for the log, and the salt of its cache entries.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            with self._admitted(scope):
                await self._app(scope, receive, watched)
        except EpdError as error:
            if scope["path"] in ANSWER_PATHS and scope["method"] == "POST":
                count("refused")
            extra = {"kind": str(error.kind), "param": error.param}
            _log.log(error.log_level, "refused: %s", error.for_log, extra=extra)
            await _refuse(error, send)
        except Exception as error:
            if begun:
                raise
            _log.error("unforeseen", exc_info=error)
            await _refuse(internal(scope["state"]["request_id"]), send)

    @contextmanager
    def _admitted(self, scope: Scope) -> Iterator[None]:
        if scope["path"] in OPEN_PATHS:
            yield
            return
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        state = scope["state"]
        caller = self._access.identify(authorization)
        state["key"], state["salt"] = caller.name, caller.salt
        if scope["method"] != "POST":
            yield
            return
        origin = headers.get(b"origin")
        self._access.check_page(None if origin is None else origin.decode("latin-1"))
        with self._access.running(caller):
            yield


async def _refuse(error: EpdError, send: Send) -> None:
    metrics.ERRORS.labels(STAGE, str(error.kind)).inc()
    headers = [(b"content-type", b"application/json")]
    headers += [(name.encode(), value.encode()) for name, value in retry_headers(error).items()]
    if error.kind is ErrorKind.UNAUTHENTICATED:
        headers.append((b"www-authenticate", b"Bearer"))
    body = orjson.dumps(error.openai_body())
    headers.append((b"content-length", str(len(body)).encode()))
    status = error.mapping.http_status
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
