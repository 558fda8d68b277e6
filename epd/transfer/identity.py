"""The identity page: proof that an address leads to the worker that is meant.

Every worker registers one page; a reader reads it after connecting and compares
it with what it was told over gRPC. An address alone proves nothing: ports are
reused, and a restarted worker has other bytes at the same place.

| offset | bytes | what                                   |
|--------|-------|----------------------------------------|
| 0      | 8     | magic "EPD-ID\\0\\0"                     |
| 8      | 4     | version of this table, little endian   |
| 12     | 4     | zero                                   |
| 16     | 8     | epoch, little endian                   |
| 24     | 32    | blake3 of the model fingerprint (UTF-8)|
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from blake3 import blake3

from epd.transfer.contract import Peer, mismatch

_FORMAT = struct.Struct("<8sIIQ32s")
_MAGIC = b"EPD-ID\0\0"
_VERSION = 1

IDENTITY_BYTES = _FORMAT.size


@dataclass(frozen=True, slots=True)
class Identity:
    """What an owner says about itself in its own memory."""

    epoch: int
    fingerprint_digest: bytes

    @classmethod
    def of(cls, epoch: int, fingerprint: str) -> Identity:
        return cls(epoch, blake3(fingerprint.encode()).digest())

    def pack(self) -> bytes:
        return _FORMAT.pack(_MAGIC, _VERSION, 0, self.epoch, self.fingerprint_digest)

    @classmethod
    def unpack(cls, page: bytes, session: str) -> Identity:
        """Parse a page that was read from `session`.

        Raises:
            EpdError: CONTRACT_MISMATCH, it is no identity page of this version.
        """
        magic, version, _, epoch, digest = _FORMAT.unpack(page[:IDENTITY_BYTES])
        if magic != _MAGIC:
            raise mismatch(f"identity page of {session}", magic, _MAGIC)
        if version != _VERSION:
            raise mismatch(f"identity page version of {session}", version, _VERSION)
        return cls(epoch, digest)

    def check(self, peer: Peer, fingerprint: str) -> None:
        """Compare with what was announced over gRPC.

        Raises:
            EpdError: CONTRACT_MISMATCH, another life of the worker, or other weights.
        """
        if self.epoch != peer.epoch:
            raise mismatch(f"epoch of {peer.session}", f"{self.epoch:016x}", f"{peer.epoch:016x}")
        expected = blake3(fingerprint.encode()).digest()
        if self.fingerprint_digest != expected:
            raise mismatch(
                f"fingerprint digest of {peer.session}",
                self.fingerprint_digest.hex()[:16],
                expected.hex()[:16],
            )
