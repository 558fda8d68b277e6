"""What a client is told when a stage failed its request: the one place where a stage's
words may go out.

A stage speaks to the gateway and to the log: of peers' addresses, sums, pools, fields of
the inner protocol. Of that a client gets

- where the fault is its own (a picture that can't be decoded, a grammar that leads
  nowhere): the stage's text, with the field under the name that the client knows;
- where it is the service's: a text that says which stage and what to do, and the id under
  which the log has the rest.
"""

from __future__ import annotations

from dataclasses import fields

from epd.errors import EpdError, ErrorKind
from epd.jobs import SamplingParams
from epd.rpc.status import internal
from gateway.request import PlannedRequest
from gateway.streams import StageFault

_CLIENTS = frozenset(
    {
        ErrorKind.INVALID_REQUEST,
        ErrorKind.INVALID_IMAGE,
        ErrorKind.IMAGE_TOO_LARGE,
        ErrorKind.CONTEXT_LENGTH_EXCEEDED,
    }
)
"""Kinds that a stage finds in what the client sent; it says so in words for the client."""
_TEXTS = {
    ErrorKind.OVERLOADED: "the {stage} stage has no room for this request now; try again",
    ErrorKind.STAGE_UNAVAILABLE: "the {stage} stage is not available now; try again",
    ErrorKind.NOT_STARTED: "the {stage} stage took no new requests; try again",
    ErrorKind.TRANSFER_FAILED: "the {stage} stage could not fetch this request's data; try again",
    ErrorKind.CHECKSUM_MISMATCH: "this request's data arrived damaged at the {stage} stage",
    ErrorKind.CONTRACT_MISMATCH: "the {stage} stage does not fit the other parts of the service",
    ErrorKind.DEADLINE_EXCEEDED: "the request's deadline has passed",
    ErrorKind.CANCELLED: "the request was cancelled",
}
_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


def told(fault: StageFault, request: PlannedRequest) -> EpdError:
    """The error for the client; the caller logs the fault itself."""
    error = fault.error
    # Without our details the text is gRPC's, or a proxy's, and no stage has said it.
    if error.kind in _CLIENTS and not fault.lost:
        param = _client_name(error.param, request)
        if param or error.kind is not ErrorKind.INVALID_REQUEST:
            return EpdError(error.kind, error.message, param=param)
    if (text := _TEXTS.get(error.kind)) is None:
        return internal(request.request_id)
    message = f"{text.format(stage=fault.stage)} (request {request.request_id})"
    return EpdError(error.kind, message, retry_after_s=error.retry_after_s)


def _client_name(param: str | None, request: PlannedRequest) -> str | None:
    """The client's field for one of the inner protocol; None: there is none."""
    if param is None or param in request.image_params or param in _SAMPLING - {"grammar"}:
        return param
    if param in ("job.token_ids", "job.items"):
        return request.prompt_param
    if param == "grammar":
        return request.grammar_param
    inner = param.removeprefix("job.sampling.")
    return inner if inner in _SAMPLING else None
