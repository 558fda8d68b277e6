"""What of a stage's fault reaches a client: never the inside of the service, over no API."""

from __future__ import annotations

import re
from typing import Any

import pytest

from epd.client import AsyncClient, user
from epd.errors import TABLE, EpdError, ErrorKind
from epd.jobs import Stage
from epd.obs import logs
from tests.e2e.fake_stages import Call
from tests.e2e.gateway_house import House

INSIDE = ("10.1.2.3", ":15438", "/srv/weights", "worker-7", "0xfeed", "job.")
SAID = "peer 10.1.2.3:15438 (worker-7) can't be reached for /srv/weights at 0xfeed"
FOR_CLIENTS = {
    ErrorKind.INVALID_REQUEST,
    ErrorKind.INVALID_IMAGE,
    ErrorKind.IMAGE_TOO_LARGE,
    ErrorKind.CONTEXT_LENGTH_EXCEEDED,
}
"""Kinds whose text a stage writes for the client; the others it writes for us."""


def failing(kind: ErrorKind, message: str, param: str | None = None, token: int = 0) -> Any:
    """A hook that raises; with `token`, from that one on."""

    async def hook(call: Call) -> None:
        if call.token >= token:
            raise EpdError(kind, message, param=param, retry_after_s=0.1)

    return hook


async def over_grpc(house: House) -> EpdError:
    async with AsyncClient(house.grpc) as client:
        with pytest.raises(EpdError) as caught:
            await client.chat([user("what is it?")], max_tokens=64)
    return caught.value


def check(message: str, param: str | None = None) -> None:
    assert len(message) > 10
    assert not [inside for inside in INSIDE if inside in f"{message} {param}"]
    assert not re.search(r"\d+\.\d+\.\d+\.\d+", message)


# A sequence that decode pushes out goes on elsewhere: no client hears of it.
OURS = sorted(set(TABLE) - FOR_CLIENTS)
PREEMPTED = ("decode.fetch", ErrorKind.OVERLOADED)


@pytest.mark.parametrize(
    ("point", "kind"),
    [
        (point, kind)
        for point in ("prefill.job", "decode.fetch")
        for kind in OURS
        if (point, kind) != PREEMPTED
    ],
)
async def test_of_the_services_own_faults_only_the_kind_goes_out(
    house: House, caplog: pytest.LogCaptureFixture, point: str, kind: ErrorKind
) -> None:
    caplog.set_level("INFO")
    house.script.hooks[point] = failing(kind, SAID, "job.token_ids")
    reply = await house.chat()
    error = reply.json()["error"]
    assert reply.status == TABLE[ErrorKind(error["code"])].http_status
    check(error["message"], error["param"])
    if point == "decode.fetch":
        again = await over_grpc(house)
        check(again.message, again.param)
    # Whoever runs the service finds the rest under the id that the client was given.
    found = [r for r in caplog.records if SAID in r.getMessage()]
    assert reply.headers["x-request-id"] in {getattr(r, "request", "") for r in found}
    if kind is not ErrorKind.DEADLINE_EXCEEDED and error["code"] == kind:
        assert reply.headers["x-request-id"] in error["message"] or kind is ErrorKind.CANCELLED


@pytest.mark.parametrize("kind", [kind for kind in OURS if kind is not ErrorKind.OVERLOADED])
async def test_nor_does_more_in_mid_stream(house: House, kind: ErrorKind) -> None:
    house.script.hooks["decode.token"] = failing(kind, SAID, token=4)
    events = await house.stream()
    (error,) = [event["error"] for event in events if event != "[DONE]" and "error" in event]
    check(error["message"], error["param"])


@pytest.mark.parametrize(
    ("kind", "inner", "shown"),
    [
        (ErrorKind.CONTEXT_LENGTH_EXCEEDED, "job.token_ids", "messages"),
        (ErrorKind.IMAGE_TOO_LARGE, "job.items", "messages"),
        (ErrorKind.IMAGE_TOO_LARGE, "job.no_such_field", None),
        (ErrorKind.INVALID_REQUEST, "logit_bias", "logit_bias"),
        (ErrorKind.INVALID_REQUEST, "job.sampling.max_tokens", "max_tokens"),
    ],
)
async def test_a_clients_fault_has_the_stages_words_and_the_clients_field(
    house: House, kind: ErrorKind, inner: str, shown: str | None
) -> None:
    house.script.hooks["prefill.job"] = failing(kind, "9 are too many, 8 may be", inner)
    error = (await house.chat()).json()["error"]
    assert (error["code"], error["param"]) == (str(kind), shown)
    assert error["message"] == "9 are too many, 8 may be"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_stage_refuses_is_logged_once(
    house: House, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """With the id that the client has, and without words, which may quote it. (The fake stage
    has a log of its own.)"""
    caplog.set_level("INFO")
    caplog.handler.addFilter(logs._add_request)
    said = "the picture is no picture"
    house.script.hooks["encode.job"] = failing(ErrorKind.INVALID_IMAGE, said, "job.items")

    def refusals() -> list[str]:
        lines = [record for record in caplog.records if record.name.startswith("gateway")]
        assert not [line for line in lines if said in line.getMessage()]
        found = [line for line in lines if ErrorKind.INVALID_IMAGE in line.getMessage()]
        return [getattr(line, "request", "") for line in found]

    reply = await house.chat(images=1, stream=stream)
    assert reply.status == 400
    assert refusals() == [reply.headers["x-request-id"]]


@pytest.mark.parametrize(
    ("inner", "code"),
    [
        ("job.request_id", "internal_error"),
        (None, "internal_error"),
        # Words of another stage, which the gateway only passed on.
        ("embedding_ready.index", "contract_mismatch"),
        ("kv_ready", "contract_mismatch"),
    ],
)
async def test_a_fault_in_the_inner_protocol_is_ours(
    house: House, inner: str | None, code: str
) -> None:
    """A stage calls it invalid, since the gateway sent it; the client has no such field."""
    house.script.hooks["prefill.job"] = failing(ErrorKind.INVALID_REQUEST, SAID, inner)
    reply = await house.chat()
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (500, code, None)
    check(error["message"])


async def test_a_lost_worker_has_no_address(house: House) -> None:
    for stage in (Stage.PREFILL, Stage.DECODE):
        worker = next(fake for fake in house.fakes if fake.stage is stage)
        host, _, port = worker.address.rpartition(":")

        async def die(call: Call) -> None:
            await call.worker.stop()

        house.script.hooks = {f"{stage}.job": die}
        error = (await house.chat()).json()["error"]
        assert error["code"] == "stage_unavailable"
        assert host not in error["message"]
        assert port not in error["message"].partition("(request")[0]
        house.script.hooks = {}
        await house.add(stage)


@pytest.mark.parametrize("path", ["/ready", "/health", "/version", "/metrics"])
async def test_what_needs_no_key_names_no_worker(house: House, path: str) -> None:
    from tests.e2e.http_client import get

    text = (await get(house.http, path)).body.decode()
    assert not [fake.address for fake in house.fakes if fake.address in text]
