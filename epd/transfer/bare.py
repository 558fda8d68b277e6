"""Mooncake's own asynchronous read, without anything of ours around it: what `epd bench
stage` measures the transfer engine beside. No service uses this."""

from __future__ import annotations

import time

from epd.config import TransferConfig
from epd.errors import EpdError, ErrorKind, invalid
from epd.obs.native import native_stderr
from epd.transfer.settings import load_mooncake
from epd.transfer.submitter import Native

_PAUSE_S = 0.0001
_BOUND_S = 60.0


class BareReader:
    """A second Mooncake engine in this process. Blocking; one read at a time.

    Raises:
        EpdError: INVALID_REQUEST, Mooncake can't start.
    """

    def __init__(self, config: TransferConfig) -> None:
        self._native: Native = load_mooncake(config)()
        with native_stderr("Mooncake"):  # as `Engine.start`
            failed = self._native.initialize(config.host, "P2PHANDSHAKE", config.protocol, "")
        if failed:
            raise invalid(f"Mooncake can't start on {config.host}", "transfer")

    def register(self, address: int, nbytes: int) -> None:
        """The caller keeps the memory alive as long as this reader."""
        code = self._native.register_memory(address, nbytes)
        assert not code, f"Mooncake can't register memory (error {code})"

    def read(self, session: str, local: int, remote: int, nbytes: int) -> None:
        """One descriptor, submitted and waited for.

        Raises:
            EpdError: TRANSFER_FAILED.
        """
        batch = self._native.batch_transfer_async_read(session, [local], [remote], [nbytes])
        end = time.monotonic() + _BOUND_S
        while batch and (status := self._native.transfer_check_status(batch)) != -1:
            if status == 1:
                return
            if time.monotonic() > end:
                break
            time.sleep(_PAUSE_S)
        raise EpdError(ErrorKind.TRANSFER_FAILED, f"bare read from {session} failed")
