"""Connections to peers: probed first, proven by the identity page, backed off.

    unknown --describe, read identity page--> open --a read failed--> unknown
       |                                        (probed again before the next read)
       +-- unreachable, or silent for a whole read: refused for backoff_s, then tried again
       +-- other epoch, other transport: refused for good (that life is over)

Mooncake remembers for ever what it learned about a session's *name*, so a worker
that restarts on the same address stays unreachable under that name. The port in
a name may carry leading zeros without changing what is dialled; each new engine
on an address (told by its description's digest) gets a name of its own. See
docs/adr/0004-session-names.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from epd.config import TransferConfig
from epd.errors import EpdError, ErrorKind, without_frames
from epd.transfer.contract import Peer, mismatch
from epd.transfer.handshake import Description, describe
from epd.transfer.identity import Identity

MOST_LINKS = 1024
"""Remembered lives of peers; the oldest is forgotten (and met again as new)."""

ISOLATED_PEERS, ISOLATED_S = 2, 10.0
"""So many peers silent within so many seconds, and none that answered: isolated."""

ReadPage = Callable[[str, Peer], Awaitable[bytes]]
"""Reads the identity page of a peer under a session name."""


@dataclass(slots=True, eq=False)
class _Link:
    """One life of one peer: open if it has an identity."""

    name: str = ""
    identity: Identity | None = None
    opening: asyncio.Task[None] | None = None
    error: EpdError | None = None
    retry_at: float = 0.0


class Sessions:
    """All peers that one engine reads from."""

    def __init__(
        self,
        config: TransferConfig,
        read_page: ReadPage,
        *,
        probe: Callable[[str, float], Awaitable[Description]] = describe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._read_page = read_page
        self._probe = probe
        self._clock = clock
        self._links: dict[tuple[str, int], _Link] = {}
        self._silent: dict[str, float] = {}
        """When each peer was silent last, since one last answered."""
        self._names = SessionNames()

    @property
    def isolated(self) -> bool:
        """Several peers were silent lately and none has answered since: it is rather us.

        A refused connection is an answer: that machine lives. Ends by itself, since a
        worker that gets no work meets nobody who could prove it wrong.
        """
        since = self._clock() - ISOLATED_S
        return sum(when > since for when in self._silent.values()) >= ISOLATED_PEERS

    async def connect(self, peer: Peer, fingerprint: str) -> str:
        """Mooncake's name of a session with exactly this life of the peer.

        Callers at the same time share one attempt; cancelling one of them does
        not end it for the others.

        Raises:
            EpdError: TRANSFER_FAILED, unreachable or in back-off (`retry_after_s`
                says until when); CONTRACT_MISMATCH, another epoch, transport, or
                model than announced.
        """
        link = self._link(peer)
        while link.identity is None:  # again where a read failed as soon as it was proven
            self._raise_if_backed_off(link)
            if link.opening is None:
                link.opening = asyncio.create_task(self._open(link, peer))
            await asyncio.shield(link.opening)
        link.identity.check(peer, fingerprint)
        return link.name

    def doubt(self, peer: Peer, waited_s: float = 0.0) -> None:
        """A read failed after `waited_s`: prove the peer again before the next one.

        One that was silent for a whole read deadline is backed off like one that can't
        be reached: who tries again would wait for the probe on top.
        """
        link = self._links.get((peer.session, peer.epoch))
        if link is None:
            return
        link.identity = None
        if waited_s >= self._config.read_deadline_s:
            self._was_silent(peer)
            what = f"peer {peer.session} can't be reached: silent for {waited_s:.1f} s"
            error = EpdError(ErrorKind.TRANSFER_FAILED, what)
            self._refuse(link, error, self._config.backoff_s)

    def _link(self, peer: Peer) -> _Link:
        key = (peer.session, peer.epoch)
        if key not in self._links and len(self._links) >= MOST_LINKS:
            idle = (key for key, link in self._links.items() if link.opening is None)
            self._links.pop(next(idle, key), None)
        return self._links.setdefault(key, _Link())

    def _raise_if_backed_off(self, link: _Link) -> None:
        wait = link.retry_at - self._clock()
        if link.error and wait > 0:
            retry = None if wait == float("inf") else wait
            raise EpdError(link.error.kind, link.error.message, retry_after_s=retry)

    async def _open(self, link: _Link, peer: Peer) -> None:
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                link.identity = await self._prove(link, peer)
            link.error, link.retry_at = None, 0.0
            self._silent.clear()
        except EpdError as error:
            final = error.kind is ErrorKind.CONTRACT_MISMATCH
            self._refuse(link, error, float("inf") if final else self._config.backoff_s)
        except (OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                self._was_silent(peer)
            else:
                self._silent.clear()
            bound = f"no answer within {self._config.connect_timeout_s} s"
            reason = bound if isinstance(error, TimeoutError) else error
            what = f"peer {peer.session} can't be reached: {reason}"
            failure = EpdError(ErrorKind.TRANSFER_FAILED, what)
            self._refuse(link, failure, self._config.backoff_s)
        finally:
            link.opening = None

    async def _prove(self, link: _Link, peer: Peer) -> Identity:
        description = await self._probe(peer.session, self._config.connect_timeout_s)
        if description.protocol != self._config.protocol:
            where = f"transport of {peer.session}"
            raise mismatch(where, description.protocol, self._config.protocol)
        link.name = self._names.name(peer.session, description.digest)
        identity = Identity.unpack(await self._read_page(link.name, peer), peer.session)
        if identity.epoch != peer.epoch:
            raise mismatch(
                f"epoch of {peer.session}", f"{identity.epoch:016x}", f"{peer.epoch:016x}"
            )
        return identity

    def _was_silent(self, peer: Peer) -> None:
        self._silent.pop(peer.session, None)
        self._silent[peer.session] = self._clock()
        if len(self._silent) > MOST_LINKS:
            del self._silent[next(iter(self._silent))]

    def _refuse(self, link: _Link, error: EpdError, wait_s: float) -> None:
        link.error, link.retry_at = without_frames(error), self._clock() + wait_s


class SessionNames:
    """A name of its own for each engine that was ever met at an address."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[bytes, int]] = {}

    def name(self, session: str, digest: bytes) -> str:
        """ "host:port" for the first digest, "host:0port", "host:00port", ... after."""
        digests = self._seen.setdefault(session, {})
        life = digests.setdefault(digest, len(digests))
        host, _, port = session.rpartition(":")
        return f"{host}:{'0' * life}{port}"
