"""Jobs: protobuf <-> domain, with the checks that untrusted messages get.

The user's or the peer's fault is an EpdError that names the field as it is
called in the proto ("job.items[1].rows"); nothing of a job that fails here
reaches a scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epd.config import LimitsConfig
from epd.errors import EpdError, ErrorKind, invalid, too_many
from epd.jobs import DecodeJob, EncodeJob, ImageItem, PrefillJob
from epd.models.spec import ModelSpec
from epd.rpc.convert import (
    item_from_proto,
    item_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from epd.transfer.contract import mismatch
from protos.epd.v1 import common_pb2, decode_pb2, encode_pb2, prefill_pb2

MAX_REQUEST_ID = 128
MAX_CHOICES = 128
_MAX_SALT = 256


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a job must fit."""

    fingerprint: str
    vocab_size: int
    image_token_id: int
    max_context: int
    """Most tokens of prompt and output of one request."""
    max_images: int

    @classmethod
    def of(cls, spec: ModelSpec, max_context: int, limits: LimitsConfig) -> ModelFacts:
        return cls(
            spec.fingerprint, spec.vocab_size, spec.image_token_id, max_context, limits.max_images
        )


class _Head(Protocol):
    """Fields that every job has."""

    @property
    def request_id(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


def encode_job_from_proto(message: encode_pb2.EncodeJob, facts: ModelFacts) -> EncodeJob:
    """Raises EpdError naming the field."""
    _check_head(message, facts)
    _check_salt(message.salt)
    if not message.image:
        raise invalid("no image bytes", "job.image")
    return EncodeJob(
        request_id=message.request_id,
        attempt=message.attempt,
        nonce=message.nonce,
        item=item_from_proto(message.item, "job.item"),
        image=message.image,
        salt=message.salt,
    )


def encode_job_to_proto(job: EncodeJob, fingerprint: str) -> encode_pb2.EncodeJob:
    return encode_pb2.EncodeJob(
        request_id=job.request_id,
        attempt=job.attempt,
        fingerprint=fingerprint,
        nonce=job.nonce,
        item=item_to_proto(job.item),
        image=job.image,
        salt=job.salt,
    )


def prefill_job_from_proto(message: prefill_pb2.PrefillJob, facts: ModelFacts) -> PrefillJob:
    """Raises EpdError naming the field."""
    _check_head(message, facts)
    token_ids = tuple(message.token_ids)
    _check_tokens(token_ids, message.prompt_length, facts)
    _check_salt(message.salt)
    choices = message.choices or 1
    if choices > MAX_CHOICES:
        raise too_many("job.choices", choices, MAX_CHOICES, "choices")
    if choices > 1 and message.prompt_length != len(token_ids):
        raise invalid("several choices can't share generated ids", "job.choices")
    return PrefillJob(
        request_id=message.request_id,
        attempt=message.attempt,
        nonce=message.nonce,
        token_ids=token_ids,
        prompt_length=message.prompt_length,
        items=_items(message.items, token_ids[: message.prompt_length], facts),
        sampling=sampling_from_proto(message.sampling),
        decode_follows=message.decode_follows,
        salt=message.salt,
        choices=choices,
    )


def prefill_job_to_proto(job: PrefillJob, fingerprint: str) -> prefill_pb2.PrefillJob:
    return prefill_pb2.PrefillJob(
        request_id=job.request_id,
        attempt=job.attempt,
        fingerprint=fingerprint,
        nonce=job.nonce,
        token_ids=job.token_ids,
        prompt_length=job.prompt_length,
        items=[item_to_proto(item) for item in job.items],
        sampling=sampling_to_proto(job.sampling),
        decode_follows=job.decode_follows,
        salt=job.salt,
        choices=job.choices,
    )


def decode_job_from_proto(message: decode_pb2.DecodeJob, facts: ModelFacts) -> DecodeJob:
    """Raises EpdError naming the field."""
    _check_head(message, facts)
    token_ids = tuple(message.token_ids)
    _check_tokens(token_ids, message.prompt_length, facts)
    _check_salt(message.salt)
    if not message.HasField("position_delta"):
        raise mismatch("position_delta", "nothing", "what prefill's Admitted says")
    return DecodeJob(
        request_id=message.request_id,
        attempt=message.attempt,
        nonce=message.nonce,
        token_ids=token_ids,
        prompt_length=message.prompt_length,
        items=_items(message.items, token_ids[: message.prompt_length], facts),
        sampling=sampling_from_proto(message.sampling),
        position_delta=message.position_delta,
        salt=message.salt,
        arrival_ms=message.arrival_ms,
    )


def decode_job_to_proto(job: DecodeJob, fingerprint: str) -> decode_pb2.DecodeJob:
    return decode_pb2.DecodeJob(
        request_id=job.request_id,
        attempt=job.attempt,
        fingerprint=fingerprint,
        nonce=job.nonce,
        token_ids=job.token_ids,
        prompt_length=job.prompt_length,
        items=[item_to_proto(item) for item in job.items],
        sampling=sampling_to_proto(job.sampling),
        position_delta=job.position_delta,
        salt=job.salt,
        arrival_ms=job.arrival_ms,
    )


def _check_head(message: _Head, facts: ModelFacts) -> None:
    name = message.request_id
    if not 1 <= len(name) <= MAX_REQUEST_ID or not name.isprintable():
        raise invalid(f"must be 1 to {MAX_REQUEST_ID} printable characters", "job.request_id")
    if message.fingerprint != facts.fingerprint:
        raise EpdError(
            ErrorKind.CONTRACT_MISMATCH,
            f"fingerprint: the job is for {message.fingerprint[:16] or 'no model'!r}, "
            f"this worker serves {facts.fingerprint[:16]!r}",
            param="job.fingerprint",
        )


def _check_tokens(token_ids: Sequence[int], prompt_length: int, facts: ModelFacts) -> None:
    if not token_ids:
        raise invalid("no tokens", "job.token_ids")
    if not 1 <= prompt_length <= len(token_ids):
        raise invalid(f"must be 1 to {len(token_ids)} (token_ids)", "job.prompt_length")
    if len(token_ids) > facts.max_context:
        raise EpdError(
            ErrorKind.CONTEXT_LENGTH_EXCEEDED,
            f"{len(token_ids)} tokens, the context holds {facts.max_context}",
            param="job.token_ids",
        )
    if max(token_ids) >= facts.vocab_size:
        raise invalid(
            f"{max(token_ids)} is not in the vocabulary of {facts.vocab_size}", "job.token_ids"
        )


def _check_salt(salt: bytes) -> None:
    if len(salt) > _MAX_SALT:
        raise too_many("job.salt", len(salt), _MAX_SALT, "bytes")


def _items(
    messages: Sequence[common_pb2.ImageItem], prompt_ids: Sequence[int], facts: ModelFacts
) -> tuple[ImageItem, ...]:
    if len(messages) > facts.max_images:
        raise too_many("job.items", len(messages), facts.max_images, "images")
    items = tuple(item_from_proto(m, f"job.items[{i}]") for i, m in enumerate(messages))
    for place, item in enumerate(items):
        if item.index != place:
            raise invalid(f"is {item.index}, must be {place}", f"job.items[{place}].index")
        if item.images_in_request != len(items):
            param = f"job.items[{place}].images_in_request"
            raise invalid(f"is {item.images_in_request}, must be {len(items)}", param)
    rows, places = sum(item.rows for item in items), prompt_ids.count(facts.image_token_id)
    if rows != places:
        raise invalid(f"{rows} rows for {places} placeholders in token_ids", "job.items")
    return items
