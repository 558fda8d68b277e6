"""An internet of one's own: names that lie, a public web server, an inner one, a gateway.

``unshare --net --mount python -m tests.cases.names FOLDER`` (it changes the network and the
resolver of the namespaces that it runs in, and nothing outside). The gateway fetches from
public addresses only, one of which is the loopback interface's here. For each name of `NAMES`
a picture is asked for; prints what came of it, a JSON object a line.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from tests.cases.pictures import file, part, quad, text
from tests.cases.site import Site, fetching_gateway, ok, redirect
from tests.e2e.member import Worker, request

PUBLIC, INNER = "93.184.215.14", "127.0.0.1"
_SERVER = ("127.0.0.53", 53)
_A, _AAAA = 1, 28
NAMES: dict[str, list[list[str]]] = {
    "honest.example": [[PUBLIC]],
    "rebinds.example": [[PUBLIC], [INNER]],
    "inner.example": [[INNER]],
    "mixed.example": [[PUBLIC, INNER]],
    "mixed6.example": [[PUBLIC, "::1"]],
    "mapped.example": [["::ffff:127.0.0.1"]],
    "nat64.example": [["64:ff9b::7f00:1"]],
    "link.example": [["169.254.169.254"]],
    "redirects.example": [[PUBLIC]],
    "turns.example": [[PUBLIC], [INNER]],
    "nothing.example": [[]],
}
"""Addresses that a name has when it is first looked up, the second time, ..."""
PATHS = {"redirects.example": "/inner", "turns.example": "/itself"}
SILENT = 20
"""Names that the server never answers for, asked for all at once: more than fetches."""


class NameServer:
    """Answers A and AAAA; the last of a name's answers for ever."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(_SERVER)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(4096)
            name, kind, end = _question(query)
            if name.startswith("silent"):
                continue
            if kind == _A:
                self.asked[name] += 1
            answers = NAMES.get(name, [[]])
            found = answers[min(max(self.asked[name], 1), len(answers)) - 1]
            records = [_record(kind, text) for text in found if (":" in text) == (kind == _AAAA)]
            head = query[:2] + struct.pack(">HHHHH", 0x8580, 1, len(records), 0, 0)
            self._socket.sendto(head + query[12:end] + b"".join(records), client)


def _question(query: bytes) -> tuple[str, int, int]:
    labels, at = [], 12
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode())
        at += 1 + size
    (kind,) = struct.unpack_from(">H", query, at + 1)
    return ".".join(labels).lower(), kind, at + 5


def _record(kind: int, text: str) -> bytes:
    address = ip_address(text).packed
    return struct.pack(">HHHIH", 0xC00C, kind, 1, 0, len(address)) + address


def _prepare(folder: Path) -> None:
    resolver = folder / "resolv.conf"
    resolver.write_text(f"nameserver {_SERVER[0]}\noptions timeout:5 attempts:2\n")
    for command in (
        "ip link set lo up",
        f"ip address add {PUBLIC}/32 dev lo",
        f"mount --bind {resolver} /etc/resolv.conf",
    ):
        subprocess.run(command.split(), check=True)


def _ask(gateway: Worker, url: str) -> dict[str, Any]:
    content = [part(url), text("?")]
    asked = {"messages": [{"role": "user", "content": content}]}
    reply = request(gateway.report["http"], "/tokenize", asked)
    said = "" if reply.status == 200 else reply.error["message"]
    return {"status": reply.status, "said": said}


def main(folder: Path) -> None:
    _prepare(folder)
    server = NameServer()
    with Site(PUBLIC) as site, Site(INNER, site.port) as inner:
        gateway = fetching_gateway(folder, site.port)
        try:
            for name in NAMES:
                site.reset()
                inner.reset()
                site.answers["/"] = inner.answers["/"] = ok(file(quad()))
                site.answers["/inner"] = redirect(inner.url("/", "inner.example"))
                site.answers["/itself"] = redirect(site.url("/", "turns.example"))
                found = _ask(gateway, site.url(PATHS.get(name, "/"), name))
                seen = {"site": site.connections, "inner": inner.connections}
                print(json.dumps({"name": name, **found, **seen, "asked": server.asked[name]}))
            with ThreadPoolExecutor(SILENT) as pool:
                urls = [site.url("/", f"silent{at}.example") for at in range(SILENT)]
                waiting = [pool.submit(_ask, gateway, url) for url in urls]
                statuses = Counter(asked.result()["status"] for asked in waiting)
            # At once: the system's resolver has not given up yet.
            found = _ask(gateway, site.url("/", "honest.example"))
            print(json.dumps({"name": "after silent ones", **found, "silent": statuses}))
        finally:
            gateway.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
