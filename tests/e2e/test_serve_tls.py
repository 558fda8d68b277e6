"""`epd serve` with certificates everywhere: nobody else gets in, and they are renewed."""

from __future__ import annotations

import http.client
import json
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.service import still_runs
from tests.certificates import Identity
from tests.e2e.cluster import DEMO_CHECKPOINT, ROOT
from tests.e2e.member import request
from tests.waiting import LIMIT_S


class Service:
    """One `epd serve` and what it printed."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.identity = identity
        files = {name: str(identity.folder / name) for name in ("cert", "key", "ca")}
        config = folder / "epd.toml"
        config.write_text(
            f"""
            [gateway]
            host = "0.0.0.0"
            http_port = 0
            grpc_port = 0
            membership_port = 0
            tls_cert = "{files["cert"]}"
            tls_key = "{files["key"]}"
            [rpc]
            tls_cert = "{files["cert"]}"
            tls_key = "{files["key"]}"
            tls_ca = "{files["ca"]}"
            """
        )
        command = [sys.executable, "-m", "epd.cli", "serve", str(DEMO_CHECKPOINT)]
        self.process = subprocess.Popen(
            [*command, "--config", str(config)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def until(self, pattern: str, limit_s: float = 120.0) -> re.Match[str]:
        """The last printed line that has this."""
        deadline = time.monotonic() + limit_s
        while True:
            found = [match for line in self.lines if (match := re.search(pattern, line))]
            if found:
                return found[-1]
            assert time.monotonic() < deadline, f"never said {pattern}:\n{''.join(self.lines)}"
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(0.05)

    def ask(self, authority: trustme.CA) -> str:
        """A whole answer over HTTPS by a client that knows this authority."""
        port = int(self.until(r"serving .* at https://0\.0\.0\.0:(\d+)/v1")[1])
        context = ssl.create_default_context()
        authority.configure_trust(context)
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
        body = {
            "model": "checkpoint",
            "temperature": 0,
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "How many?"}],
        }
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            reply = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return str(reply["choices"][0]["message"]["content"])


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def service(tmp_path: Path, authority: trustme.CA) -> Iterator[Service]:
    running = Service(tmp_path, Identity(tmp_path / "identity", authority))
    try:
        running.until("serving ")
        family = psutil.Process(running.process.pid).children(recursive=True)
        yield running
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(LIMIT_S) == 0, "".join(running.lines)
    finally:
        running.process.kill()
    psutil.wait_procs(family, timeout=LIMIT_S)
    assert not [member for member in family if still_runs(member)]


def health(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode | None:
    """What stops a caller; None: it got an answer."""
    channel = (
        grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
    )
    with channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        except grpc.RpcError as error:
            return error.code()
    return None


def test_the_whole_service_under_tls_and_a_renewal_under_load(
    service: Service, authority: trustme.CA
) -> None:
    answer = service.ask(authority)
    pem = {name: (service.identity.folder / name).read_bytes() for name in ("cert", "key", "ca")}
    member = grpc.ssl_channel_credentials(pem["ca"], pem["key"], pem["cert"])
    nameless = grpc.ssl_channel_credentials(pem["ca"])
    workers = {
        stage: service.until(rf"{stage}-0 ready .*address=(\S+) metrics=(\S+)")
        for stage in ("encode", "prefill", "decode")
    }
    for found in workers.values():
        assert health(found[1], member) is None
        assert health(found[1], nameless) is grpc.StatusCode.UNAVAILABLE
        assert health(found[1], None) is grpc.StatusCode.UNAVAILABLE
        assert request(found[2], "/ready").status == 200

    # Another authority altogether, while answers are made; then a worker starts anew.
    renewed = trustme.CA()
    service.identity.renew(renewed)
    assert service.ask(renewed) == answer
    with pytest.raises(ssl.SSLError):
        service.ask(authority)
    (decode,) = [
        child
        for child in psutil.Process(service.process.pid).children()
        if "decode" in child.cmdline()
    ]
    decode.kill()
    service.until("decode-0 is back")
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            assert service.ask(renewed) == answer
            break
        except KeyError:  # 503 until the gateway has seen it
            assert time.monotonic() < deadline
            time.sleep(0.2)
    back = service.until(r"decode-0 is back, .*address=(\S+) ")[1]
    assert health(back, member) is grpc.StatusCode.UNAVAILABLE, "the former authority is out"
