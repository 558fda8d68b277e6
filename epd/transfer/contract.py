"""What one stage promises another about bytes: the domain side of common.proto.

A reader compares every field before it uses a byte. Whatever differs fails that
one request with CONTRACT_MISMATCH; nothing is guessed and nothing is converted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod

from epd.errors import EpdError, ErrorKind

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
"""Bytes of one element of each dtype that may travel."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a worker's registered memory is reached, in which life of it."""

    session: str
    """"host:port" of its transfer engine."""
    epoch: int
    """Drawn at random at its start: a restarted worker is another peer."""
    identity_address: int
    """Where its identity page lies (`epd.transfer.identity`)."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What the bytes are."""

    fingerprint: str
    dtype: str
    layout: str
    shape: tuple[int, ...]
    """Of one span, in elements."""
    nonce: int

    @property
    def span_bytes(self) -> int:
        """Bytes of one span.

        Raises:
            EpdError: CONTRACT_MISMATCH, a dtype that never travels.
        """
        if self.dtype not in ITEM_BYTES:
            raise mismatch("dtype", self.dtype, " or ".join(ITEM_BYTES))
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def check(self, expected: Contract) -> None:
        """Compare every field with what this worker would have announced.

        Raises:
            EpdError: CONTRACT_MISMATCH, naming the field and both values.
        """
        for field in fields(self):
            ours, theirs = getattr(expected, field.name), getattr(self, field.name)
            if ours != theirs:
                raise mismatch(field.name, theirs, ours)


@dataclass(frozen=True, slots=True)
class Span:
    """One contiguous piece of registered memory and the sum over its bytes."""

    address: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Handle:
    """A leased, immutable set of spans, in the order of the logical content."""

    owner: Peer
    contract: Contract
    spans: tuple[Span, ...]
    read_deadline_ms: int

    def check(self, expected: Contract, spans: int | None = None) -> None:
        """Check the contract, the number of spans, and each span's length.

        Raises:
            EpdError: CONTRACT_MISMATCH, naming what differs and both values.
        """
        self.contract.check(expected)
        if spans is not None and len(self.spans) != spans:
            raise mismatch("number of spans", len(self.spans), spans)
        nbytes = self.contract.span_bytes
        for index, span in enumerate(self.spans):
            if span.length != nbytes:
                raise mismatch(f"length of span {index}", span.length, nbytes)


def mismatch(field: str, announced: object, expected: object) -> EpdError:
    """The one wording of a broken contract."""
    return EpdError(
        ErrorKind.CONTRACT_MISMATCH,
        f"hand-off refused: {field} is {announced!r}, expected {expected!r}",
    )
