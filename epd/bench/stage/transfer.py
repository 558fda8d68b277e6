"""A pull through the whole path, beside memcpy, a raw socket and Mooncake's bare read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from epd.bench.stage.case import Case
from epd.bench.stage.peer import FINGERPRINT, Memory, Remote, content, peer_process
from epd.bench.stage.raw_socket import receiver
from epd.config import TransferConfig
from epd.transfer.bare import BareReader
from epd.transfer.checksum import checksum, checksum_at
from epd.transfer.contract import Contract, Handle, Span
from epd.transfer.engine import Engine
from epd.transfer.lease import LeaseTable
from epd.transfer.pieces import Piece
from epd.transfer.verified import read_verified

MIB = 1 << 20
NBYTES = 64 * MIB
SPAN = 4 * MIB
BLOCK = 64 << 10
_DEADLINE_MS = 60_000
_HOLD_S = 6.0


@dataclass(frozen=True, slots=True)
class Pull:
    """What a stage does to get announced bytes: lease, contract, read, checksum."""

    engine: Engine
    here: Memory
    remote: Remote
    loop: asyncio.Runner
    leases: LeaseTable

    def announce(self, spans: Sequence[tuple[int, int]]) -> Handle:
        """Of (offset, length); the sums are computed here, once, as owners do."""
        whole = memoryview(content(NBYTES))
        length = spans[0][1]
        made = [Span(self.remote.address + at, n, checksum(whole[at : at + n])) for at, n in spans]
        contract = Contract(FINGERPRINT, "uint8", "bytes", (length,), 1)
        return Handle(self.remote.peer, contract, tuple(made), _DEADLINE_MS)

    def run(self, handle: Handle, to: Sequence[int], *, verify: bool) -> None:
        """The spans land at offsets `to` of our memory."""
        lease = self.leases.announce("bench", sum(s.length for s in handle.spans), lambda: None)
        handle.check(handle.contract, len(to))
        spans = [(self.here.address + at, s) for at, s in zip(to, handle.spans, strict=True)]
        self.loop.run(self._read(handle, spans, verify))
        self.leases.release(lease)

    async def _read(self, handle: Handle, spans: Sequence[tuple[int, Span]], verify: bool) -> None:
        engine, owner, seconds = self.engine, handle.owner, handle.read_deadline_ms / 1000
        if verify:
            await read_verified(engine, owner, FINGERPRINT, spans, self.here, seconds, what="bench")
        else:
            pieces = [Piece(local, span.address, span.length) for local, span in spans]
            await engine.read(owner, FINGERPRINT, pieces, self.here, seconds)


@contextmanager
def pulling() -> Iterator[Pull]:
    """An engine here, a peer process there."""
    with ExitStack() as stack:
        remote = stack.enter_context(peer_process(NBYTES))
        loop = stack.enter_context(asyncio.Runner())
        engine = Engine(TransferConfig(read_deadline_s=60.0), FINGERPRINT, epoch=1)
        engine.start()
        stack.callback(lambda: loop.run(_close(engine)))
        here = Memory(NBYTES)
        engine.register(here.address, NBYTES, here)
        yield Pull(engine, here, remote, loop, LeaseTable(_HOLD_S, NBYTES))


async def _close(engine: Engine) -> None:
    await engine.close()


@contextmanager
def transfer_cases() -> Iterator[list[Case]]:
    """Valid inside of the block: processes and connections live for it."""
    with receiver(NBYTES) as socket, pulling() as pull:
        bare = BareReader(TransferConfig(read_deadline_s=60.0))
        landing = Memory(NBYTES)
        bare.register(landing.address, NBYTES)
        other = Memory(NBYTES)
        cases = []
        for label, nbytes in (("64 KiB", BLOCK), ("1 MiB", MIB), ("64 MiB", NBYTES)):
            into = memoryview(landing.bytes)[:nbytes]
            raw = _case(f"{label} raw socket", partial(socket.pull, into), nbytes)
            copy = partial(_copy, into, memoryview(other.bytes)[:nbytes])
            read = partial(
                bare.read, pull.remote.peer.session, landing.address, pull.remote.address, nbytes
            )
            lone = _case(f"{label} Mooncake's bare read", read, nbytes, raw)
            whole = pull.announce([(at, min(SPAN, nbytes)) for at in range(0, nbytes, SPAN)])
            to = range(0, nbytes, SPAN)
            unverified = partial(pull.run, whole, to, verify=False)
            verified = partial(pull.run, whole, to, verify=True)
            sums = partial(checksum_at, landing.address, nbytes)
            cases += [
                _case(f"{label} memcpy", copy, nbytes, raw),
                raw,
                lone,
                _case(f"{label} pull without checksum", unverified, nbytes, lone),
                _case(f"{label} pull, whole path", verified, nbytes, raw),
                _case(f"{label} checksum alone", sums, nbytes, raw),
            ]
        yield [*cases, *_block_cases(pull)]


def _block_cases(pull: Pull) -> list[Case]:
    """Half of the memory as KV-like blocks, in order and in reverse."""
    blocks = NBYTES // 2 // BLOCK
    in_order = [(i * BLOCK, BLOCK) for i in range(blocks)]
    to = [at for at, _ in in_order]
    neighbours = pull.announce(in_order)
    scattered = pull.announce(in_order[::-1])
    nbytes = blocks * BLOCK
    joined = partial(pull.run, neighbours, to, verify=True)
    first = _case(f"32 MiB in {blocks} neighbouring blocks, whole path", joined, nbytes)
    apart = partial(pull.run, scattered, to, verify=True)
    return [first, _case(f"32 MiB in {blocks} scattered blocks, whole path", apart, nbytes, first)]


def _case(name: str, run: Callable[[], object], nbytes: int, base: Case | None = None) -> Case:
    return Case(name, run, nbytes, "GB/s", base)


def _copy(to: memoryview, source: memoryview) -> None:
    to[:] = source
