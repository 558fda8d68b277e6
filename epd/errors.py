"""Domain errors, and the one table that maps them to gRPC, HTTP and OpenAI.

Raise `EpdError` with a kind; servicers and the HTTP app translate it here and
nowhere else. What is the user's fault is 4xx / INVALID_ARGUMENT and names the
field (`param`); what is ours is typed, counted and logged with the request id.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import grpc

Error = TypeVar("Error", bound=BaseException)


class ErrorKind(StrEnum):
    """Reason of a failed request; on the wire it is ErrorInfo.reason."""

    INVALID_REQUEST = "invalid_request"
    INVALID_IMAGE = "invalid_image"
    INVALID_IMAGE_URL = "invalid_image_url"
    IMAGE_TOO_LARGE = "image_too_large"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    UNAUTHENTICATED = "invalid_api_key"
    REQUEST_TOO_LARGE = "request_too_large"
    REQUEST_TIMEOUT = "request_timeout"
    OVERLOADED = "overloaded"
    STAGE_UNAVAILABLE = "stage_unavailable"
    NOT_STARTED = "not_started"
    TRANSFER_FAILED = "transfer_failed"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    CONTRACT_MISMATCH = "contract_mismatch"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    INTERNAL = "internal_error"


_MOST_MESSAGE, _MOST_PARAM = 2000, 256
"""Characters."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """How one kind looks to gRPC clients, HTTP clients and OpenAI libraries."""

    grpc_code: grpc.StatusCode
    http_status: int
    openai_type: str
    users_fault: bool
    retryable: bool = False


_BAD = "invalid_request_error"
_SERVER = "server_error"
_Code = grpc.StatusCode

TABLE: dict[ErrorKind, Mapping] = {
    ErrorKind.INVALID_REQUEST: Mapping(_Code.INVALID_ARGUMENT, 400, _BAD, True),
    ErrorKind.INVALID_IMAGE: Mapping(_Code.INVALID_ARGUMENT, 400, _BAD, True),
    ErrorKind.INVALID_IMAGE_URL: Mapping(_Code.INVALID_ARGUMENT, 400, _BAD, True),
    ErrorKind.IMAGE_TOO_LARGE: Mapping(_Code.INVALID_ARGUMENT, 400, _BAD, True),
    ErrorKind.CONTEXT_LENGTH_EXCEEDED: Mapping(_Code.INVALID_ARGUMENT, 400, _BAD, True),
    ErrorKind.MODEL_NOT_FOUND: Mapping(_Code.INVALID_ARGUMENT, 400, _BAD, True),
    ErrorKind.UNAUTHENTICATED: Mapping(_Code.UNAUTHENTICATED, 401, "authentication_error", True),
    ErrorKind.REQUEST_TOO_LARGE: Mapping(_Code.INVALID_ARGUMENT, 413, _BAD, True),
    ErrorKind.REQUEST_TIMEOUT: Mapping(_Code.DEADLINE_EXCEEDED, 408, "timeout_error", True),
    ErrorKind.OVERLOADED: Mapping(_Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", False, True),
    ErrorKind.STAGE_UNAVAILABLE: Mapping(_Code.UNAVAILABLE, 503, _SERVER, False, True),
    ErrorKind.NOT_STARTED: Mapping(_Code.UNAVAILABLE, 503, _SERVER, False, True),
    ErrorKind.TRANSFER_FAILED: Mapping(_Code.UNAVAILABLE, 503, _SERVER, False, True),
    ErrorKind.CHECKSUM_MISMATCH: Mapping(_Code.DATA_LOSS, 500, _SERVER, False),
    ErrorKind.CONTRACT_MISMATCH: Mapping(_Code.FAILED_PRECONDITION, 500, _SERVER, False),
    ErrorKind.DEADLINE_EXCEEDED: Mapping(_Code.DEADLINE_EXCEEDED, 504, "timeout_error", False),
    ErrorKind.CANCELLED: Mapping(_Code.CANCELLED, 499, "cancelled", True),
    ErrorKind.INTERNAL: Mapping(_Code.INTERNAL, 500, _SERVER, False),
}


class EpdError(Exception):
    """A request failed for a reason that its sender can be told.

    `by_client`: its sender has brought it about, as with all kinds that are the user's fault;
    of others this one is: a deadline or a limit of the sender's own.
    `param` names the field at fault as the client wrote it, e.g.
    ``messages[1].content[0]``. `retry_after_s` becomes Retry-After / RetryInfo.
    Both quote the client, who may have sent megabytes: what is long loses its middle.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        by_client: bool = False,
    ) -> None:
        message = shortened(message, _MOST_MESSAGE)
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = None if param is None else shortened(param, _MOST_PARAM)
        self.retry_after_s = retry_after_s
        self.by_client = by_client or self.mapping.users_fault

    @property
    def mapping(self) -> Mapping:
        return TABLE[self.kind]

    @property
    def for_log(self) -> str:
        """The message, but of what is wrong with a request: it quotes what is in no log."""
        return str(self.kind) if self.mapping.http_status == 400 else self.message

    @property
    def log_level(self) -> int:
        """What clients bring about is no matter for whoever runs the service."""
        return logging.INFO if self.by_client else logging.WARNING

    def as_json(self) -> dict[str, str | None]:
        """For another process of ours: `from_json` makes it again."""
        return {"kind": str(self.kind), "message": self.message, "param": self.param}

    @classmethod
    def from_json(cls, said: Any) -> EpdError:
        return cls(ErrorKind(said["kind"]), said["message"], param=said["param"])

    def openai_body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body that OpenAI's clients turn into an exception."""
        return {
            "error": {
                "message": self.message,
                "type": self.mapping.openai_type,
                "param": self.param,
                "code": str(self.kind),
            }
        }


def shortened(text: str, most: int) -> str:
    """At most so many characters: of a longer text its beginning and its end."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 3]}...{text[-end:]}"


def crowded() -> EpdError:
    """For who gives way in a full queue."""
    reason = "the queue is full, and most of it is this client's: its last one gives way"
    return EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)


def too_many(param: str, value: int, limit: int, what: str) -> EpdError:
    """Shorthand for more than is allowed: the field, the value and the limit."""
    return invalid(f"{param}: {value} {what}, at most {limit} are allowed", param)


def invalid(message: str, param: str | None = None) -> EpdError:
    """Shorthand for the commonest user fault."""
    return EpdError(ErrorKind.INVALID_REQUEST, message, param=param)


def without_frames(error: Error) -> Error:
    """The same, once it is dealt with: it, and what led to it, forget the frames that they
    passed.

    Those refer to the tasks, futures and queues that brought the error here, and these to the
    error: a circle, which keeps all of it alive, request bodies, calls and connections, until
    Python looks for circles.
    """
    led: BaseException | None = error
    while led is not None:
        led.__traceback__ = None
        led = led.__cause__ or led.__context__
    return error
