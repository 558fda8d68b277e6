"""Protobuf <-> domain: inverse on good messages, a named field on bad ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.errors import EpdError, ErrorKind
from epd.jobs import (
    DecodeJob,
    EncodeJob,
    FinishReason,
    Grammar,
    GrammarKind,
    ImageItem,
    PrefillJob,
    SampledToken,
    SamplingParams,
    StageTiming,
)
from epd.rpc import convert, jobs
from epd.rpc.jobs import ModelFacts
from epd.transfer.contract import Contract, Handle, Peer, Span

FACTS = ModelFacts(
    fingerprint="f" * 64, vocab_size=100, image_token_id=9, max_context=32, max_images=2
)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
REAL = st.floats(allow_nan=False, allow_infinity=False)

sampling = st.builds(
    SamplingParams,
    temperature=REAL,
    top_k=U32,
    top_p=REAL,
    min_p=REAL,
    repetition_penalty=REAL,
    presence_penalty=REAL,
    frequency_penalty=REAL,
    seed=U64,
    choice=U32,
    logit_bias=st.dictionaries(U32, REAL, max_size=3),
    stop_token_ids=st.lists(U32, max_size=3).map(tuple),
    eos_token_ids=st.lists(U32, max_size=3).map(tuple),
    max_tokens=U32,
    min_tokens=U32,
    ignore_eos=st.booleans(),
    logprobs=st.booleans(),
    top_logprobs=U32,
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), st.text()),
)
handles = st.builds(
    Handle,
    owner=st.builds(Peer, session=st.text(min_size=1), epoch=U64, identity_address=U64),
    contract=st.builds(
        Contract,
        fingerprint=st.text(),
        dtype=st.text(),
        layout=st.text(),
        shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(tuple),
        nonce=U64,
    ),
    spans=st.lists(
        st.builds(Span, address=U64, length=U64, checksum=U64), min_size=1, max_size=4
    ).map(tuple),
    read_deadline_ms=U32,
)


@given(sampling)
def test_sampling_survives_the_wire(params: SamplingParams) -> None:
    assert convert.sampling_from_proto(convert.sampling_to_proto(params)) == params


@given(handles)
def test_handles_survive_the_wire(handle: Handle) -> None:
    assert convert.handle_from_proto(convert.handle_to_proto(handle), "h") == handle


@given(st.floats(width=32, allow_nan=False), st.booleans())
def test_tokens_survive_the_wire(logprob: float, wanted: bool) -> None:
    token = SampledToken(7, logprob if wanted else None, ((7, logprob), (8, -1.0)))
    assert convert.token_from_proto(convert.token_to_proto(token)) == token


def test_finish_reasons_and_timings_survive_the_wire() -> None:
    for reason in (None, *FinishReason):
        assert convert.finish_from_proto(convert.finish_to_proto(reason)) == reason
    timing = StageTiming(1.5, 2.5, 3.5, 4, 5.5)
    message = convert.timing_to_proto(timing)
    assert {field.name: value for field, value in message.ListFields()} == asdict(timing)


def item(index: int = 0, rows: int = 3, of: int = 1) -> ImageItem:
    return ImageItem(index, bytes(range(32)), rows, (1, 4, 6), 64, 48, of)


def prefill_job(**changes: Any) -> PrefillJob:
    fields: dict[str, Any] = {
        "request_id": "r1",
        "attempt": 1,
        "nonce": 5,
        "token_ids": (1, 9, 9, 9, 2, 3),
        "prompt_length": 5,
        "items": (item(),),
        "sampling": SamplingParams(),
        "decode_follows": True,
        "salt": b"s",
    }
    return PrefillJob(**(fields | changes))


def decode_job(**changes: Any) -> DecodeJob:
    job = prefill_job(**changes)
    return DecodeJob(
        job.request_id,
        job.attempt,
        job.nonce,
        job.token_ids,
        job.prompt_length,
        job.items,
        job.sampling,
        position_delta=-3,
        salt=job.salt,
        arrival_ms=17,
    )


def test_jobs_survive_the_wire() -> None:
    encode = EncodeJob("r1", 2, 5, item(), b"image", b"salt")
    sent: Any = jobs.encode_job_to_proto(encode, FACTS.fingerprint)
    assert jobs.encode_job_from_proto(sent, FACTS) == encode
    sent = jobs.prefill_job_to_proto(prefill_job(), FACTS.fingerprint)
    assert jobs.prefill_job_from_proto(sent, FACTS) == prefill_job()
    sent = jobs.decode_job_to_proto(decode_job(), FACTS.fingerprint)
    assert jobs.decode_job_from_proto(sent, FACTS) == decode_job()


def two(first: dict[str, Any], second: dict[str, Any]) -> tuple[ImageItem, ...]:
    base = {"rows": 1, "of": 2}
    return (item(**(base | {"index": 0} | first)), item(**(base | {"index": 1} | second)))


BAD: list[tuple[dict[str, Any], str, ErrorKind]] = [
    ({"request_id": ""}, "job.request_id", ErrorKind.INVALID_REQUEST),
    ({"request_id": "a\nb"}, "job.request_id", ErrorKind.INVALID_REQUEST),
    ({"request_id": "x" * 200}, "job.request_id", ErrorKind.INVALID_REQUEST),
    ({"token_ids": ()}, "job.token_ids", ErrorKind.INVALID_REQUEST),
    ({"token_ids": (1, 9, 9, 9, 100)}, "job.token_ids", ErrorKind.INVALID_REQUEST),
    ({"token_ids": (1,) * 33, "items": ()}, "job.token_ids", ErrorKind.CONTEXT_LENGTH_EXCEEDED),
    ({"prompt_length": 0}, "job.prompt_length", ErrorKind.INVALID_REQUEST),
    ({"prompt_length": 7}, "job.prompt_length", ErrorKind.INVALID_REQUEST),
    ({"prompt_length": 3}, "job.items", ErrorKind.INVALID_REQUEST),
    ({"items": ()}, "job.items", ErrorKind.INVALID_REQUEST),
    ({"items": (item(rows=2),)}, "job.items", ErrorKind.INVALID_REQUEST),
    ({"items": (item(rows=0),)}, "job.items[0].rows", ErrorKind.INVALID_REQUEST),
    ({"items": (item(index=1, of=2),)}, "job.items[0].index", ErrorKind.INVALID_REQUEST),
    ({"items": (item(of=2),)}, "job.items[0].images_in_request", ErrorKind.INVALID_REQUEST),
    ({"items": (item(index=3),)}, "job.items[0].index", ErrorKind.INVALID_REQUEST),
    ({"items": two({}, {"index": 0})}, "job.items[1].index", ErrorKind.INVALID_REQUEST),
    ({"items": (*two({}, {}), item(2, 1, 3))}, "job.items", ErrorKind.INVALID_REQUEST),
    ({"salt": b"x" * 300}, "job.salt", ErrorKind.INVALID_REQUEST),
]


@pytest.mark.parametrize(("changes", "param", "kind"), BAD)
def test_a_bad_job_names_its_field(changes: dict[str, Any], param: str, kind: ErrorKind) -> None:
    made: list[tuple[Callable[..., Any], Any]] = [
        (
            jobs.prefill_job_from_proto,
            jobs.prefill_job_to_proto(prefill_job(**changes), FACTS.fingerprint),
        ),
        (
            jobs.decode_job_from_proto,
            jobs.decode_job_to_proto(decode_job(**changes), FACTS.fingerprint),
        ),
    ]
    for read, message in made:
        with pytest.raises(EpdError) as caught:
            read(message, FACTS)
        assert (caught.value.param, caught.value.kind) == (param, kind)


def test_a_job_for_another_model_is_a_broken_contract() -> None:
    message = jobs.prefill_job_to_proto(prefill_job(), "e" * 64)
    with pytest.raises(EpdError) as caught:
        jobs.prefill_job_from_proto(message, FACTS)
    assert caught.value.kind is ErrorKind.CONTRACT_MISMATCH
    assert caught.value.param == "job.fingerprint"


def test_an_encode_job_needs_bytes_and_a_full_digest() -> None:
    message = jobs.encode_job_to_proto(EncodeJob("r", 1, 5, item(), b""), FACTS.fingerprint)
    with pytest.raises(EpdError) as caught:
        jobs.encode_job_from_proto(message, FACTS)
    assert caught.value.param == "job.image"
    message.image = b"x"
    message.item.digest = b"short"
    with pytest.raises(EpdError) as caught:
        jobs.encode_job_from_proto(message, FACTS)
    assert caught.value.param == "job.item.digest"


def test_a_handle_without_owner_or_spans_is_refused() -> None:
    handle = Handle(Peer("h:1", 2, 3), Contract("f", "float32", "l", (1,), 4), (), 5)
    message = convert.handle_to_proto(handle)
    with pytest.raises(EpdError) as caught:
        convert.handle_from_proto(message, "handle")
    assert caught.value.param == "handle.spans"
    message.owner.session = ""
    with pytest.raises(EpdError) as caught:
        convert.handle_from_proto(message, "handle")
    assert caught.value.param == "handle.owner.session"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_job_or_a_typed_error(data: bytes) -> None:
    from google.protobuf.message import DecodeError

    from protos.epd.v1 import prefill_pb2

    message = prefill_pb2.PrefillJob()
    try:
        message.ParseFromString(data)
        jobs.prefill_job_from_proto(message, FACTS)
    except (DecodeError, EpdError):
        pass
