"""Certificates of tests, and their renewal."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import trustme

from epd.config import RpcConfig


class Identity:
    """The three files of one part."""

    def __init__(self, folder: Path, authority: trustme.CA, *names: str) -> None:
        folder.mkdir()
        self.folder, self.names = folder, names or ("127.0.0.1", "localhost")
        self.renew(authority)

    def renew(self, authority: trustme.CA, lives_s: float = 3600.0) -> None:
        """Replace the files, as an operator's tool does: one after another, each whole."""
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=lives_s)
        issued = authority.issue_cert(*self.names, not_after=until)
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        self.put("cert", chain)
        self.put("key", issued.private_key_pem.bytes())
        self.put("ca", authority.cert_pem.bytes())

    def put(self, name: str, content: bytes) -> None:
        fresh = self.folder / f"{name}.new"
        fresh.write_bytes(content)
        fresh.replace(self.folder / name)

    def config(self, **more: Any) -> RpcConfig:
        files = {f"tls_{name}": str(self.folder / name) for name in ("cert", "key", "ca")}
        return RpcConfig.model_validate(files | more)
