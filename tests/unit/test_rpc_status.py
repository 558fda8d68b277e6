"""Errors on the wire: nothing is lost on the way, and nothing leaks."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from epd.errors import TABLE, EpdError, ErrorKind
from epd.rpc.status import from_rpc_error, internal, to_status


def over_the_wire(error: EpdError) -> EpdError:
    code, message, metadata = to_status(error)
    pairs = [(key, value) for key, value in metadata]
    return from_rpc_error(
        grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*pairs), message)
    )


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_kind_message_param_and_retry_survive(kind: ErrorKind) -> None:
    error = EpdError(kind, "what is wrong", param="messages[1]", retry_after_s=1.5)
    back = over_the_wire(error)
    assert (back.kind, back.message, back.param, back.retry_after_s) == (
        kind,
        "what is wrong",
        "messages[1]",
        1.5,
    )


def test_a_bad_field_is_a_bad_request() -> None:
    _, _, metadata = to_status(EpdError(ErrorKind.INVALID_IMAGE, "no image", param="a[1].b"))
    status = status_pb2.Status.FromString(dict(metadata)["grpc-status-details-bin"])
    bad = error_details_pb2.BadRequest()
    assert status.details[1].Unpack(bad)
    assert [(v.field, v.description) for v in bad.field_violations] == [("a[1].b", "no image")]


def test_absent_param_and_retry_stay_absent() -> None:
    back = over_the_wire(EpdError(ErrorKind.INTERNAL, "x"))
    assert back.param is None
    assert back.retry_after_s is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, ErrorKind.STAGE_UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ErrorKind.DEADLINE_EXCEEDED),
        (grpc.StatusCode.CANCELLED, ErrorKind.CANCELLED),
        (grpc.StatusCode.UNKNOWN, ErrorKind.INTERNAL),
    ],
)
def test_a_status_without_our_details_is_read_by_its_code(
    code: grpc.StatusCode, kind: ErrorKind
) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "socket closed")
    assert from_rpc_error(error).kind is kind


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b""])
def test_foreign_details_are_ignored(garbage: bytes) -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", garbage))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, "x")
    assert from_rpc_error(error).kind is ErrorKind.STAGE_UNAVAILABLE


def test_every_kind_has_its_code() -> None:
    for kind in ErrorKind:
        assert to_status(EpdError(kind, "x"))[0] is TABLE[kind].grpc_code


def test_an_internal_error_tells_where_to_look_and_nothing_else() -> None:
    error = internal("req-1")
    assert error.kind is ErrorKind.INTERNAL
    assert "req-1" in error.message


@pytest.mark.parametrize("letter", ["x", "é", "語", "😀", "%", "\n"])
def test_what_quotes_megabytes_fits_into_a_status(letter: str) -> None:
    """8 KiB of last metadata at most, with every byte of the message escaped."""
    error = EpdError(ErrorKind.MODEL_NOT_FOUND, f"the model {letter * 999_999} is not here")
    error.param = letter * 1000
    _, message, metadata = to_status(error)
    assert message.startswith("the model")
    assert message.endswith("is not here")
    details = dict(metadata)["grpc-status-details-bin"]
    assert 3 * len(message.encode()) + len(details) * 4 / 3 < 7500
    assert over_the_wire(error).kind is error.kind


def test_a_long_message_keeps_both_its_ends() -> None:
    error = EpdError(ErrorKind.INVALID_REQUEST, "a" + "x" * 10_000 + "b", param="c" * 1000 + "d")
    assert len(error.message) == 2000
    assert (error.message[0], error.message[-1]) == ("a", "b")
    assert len(error.param or "") == 256
    assert "..." in error.message
