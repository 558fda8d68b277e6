"""EpdError <-> gRPC status, with google.rpc details.

On the wire an error is code + message + ErrorInfo{reason = kind, domain =
"epd", metadata{param}}, BadRequest where a field is at fault and, where a retry
makes sense, RetryInfo. What is not
an EpdError is ours: INTERNAL, without its text (it may hold a prompt).
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from epd.errors import EpdError, ErrorKind, shortened

DOMAIN = "epd"
_DETAILS_KEY = "grpc-status-details-bin"
_MOST_MESSAGE, _MOST_PARAM = 1000, 160
"""Bytes. The message goes out three times, once with each byte outside of ASCII as three, the
field twice, and a client may drop a call whose last metadata have more than 8 KiB."""
Metadata = Sequence[tuple[str, str | bytes]]

_FROM_CODE: dict[grpc.StatusCode, ErrorKind] = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind.INVALID_REQUEST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind.OVERLOADED,
    grpc.StatusCode.UNAVAILABLE: ErrorKind.STAGE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: ErrorKind.CANCELLED,
}


def to_status(error: EpdError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, message and trailing metadata for `context.abort`."""
    code = error.mapping.grpc_code
    message = _fitting(error.message, _MOST_MESSAGE)
    param = _fitting(error.param or "", _MOST_PARAM)
    info = error_details_pb2.ErrorInfo(reason=str(error.kind), domain=DOMAIN)
    if param:
        info.metadata["param"] = param
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(info)
    if param and code is grpc.StatusCode.INVALID_ARGUMENT:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=param, description=message)
        status.details.add().Pack(bad)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return code, message, ((_DETAILS_KEY, status.SerializeToString()),)


def _fitting(text: str, most: int) -> str:
    """At most so many bytes of UTF-8."""
    if len(text.encode("utf-8", "replace")) <= most:
        return text
    while len(text.encode("utf-8", "replace")) > most:
        text = shortened(text, max(len(text) * 3 // 4, 8))
    return text


def from_rpc_error(error: grpc.aio.AioRpcError) -> EpdError:
    """What a failed call means to its caller.

    Without our details (a dead peer, a proxy) the code decides; a code that we
    never send is INTERNAL.
    """
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            found = _from_details(value)
            if found is not None:
                return found
    kind = _FROM_CODE.get(error.code(), ErrorKind.INTERNAL)
    return EpdError(kind, error.details() or error.code().name)


def _from_details(raw: bytes) -> EpdError | None:
    status = status_pb2.Status()
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    found, delay = False, None
    try:
        status.ParseFromString(raw)
        for detail in status.details:
            if detail.Unpack(info):
                found = info.domain == DOMAIN and info.reason in set(ErrorKind)
            elif detail.Unpack(retry):
                delay = retry.retry_delay.ToNanoseconds() / 1e9
    except DecodeError:  # a peer that isn't ours
        return None
    if not found:
        return None
    return EpdError(
        ErrorKind(info.reason),
        status.message,
        param=info.metadata.get("param"),
        retry_after_s=delay,
    )


def internal(request: str) -> EpdError:
    """What the sender is told of a fault of ours: where to find it, not its text."""
    return EpdError(ErrorKind.INTERNAL, f"internal error; see the log of request {request or '?'}")
