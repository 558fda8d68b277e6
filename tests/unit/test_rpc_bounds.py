"""Every field of a message that can grow has a bound, and what is over it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from epd.errors import EpdError
from epd.jobs import SamplingParams
from epd.rpc import convert, jobs
from epd.sampling import grammar, params
from gateway.membership import card_from_hello
from protos.epd.v1 import common_pb2, decode_pb2, encode_pb2, membership_pb2, prefill_pb2
from tests.unit.test_rpc_convert import FACTS, decode_job, item, prefill_job

TAKEN_IN = (
    encode_pb2.EncodeRequest,
    prefill_pb2.PrefillRequest,
    decode_pb2.DecodeRequest,
    membership_pb2.WorkerReport,
)
"""What others send to us; each message as a whole is bounded by `rpc.*_bytes`."""
_STRING, _BYTES = 9, 12


def growing(descriptor: Any, seen: set[str]) -> Iterator[str]:
    """ "Message.field" of all that is repeated, text or bytes, in it and below."""
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from growing(field.message_type, seen)
        if field.is_repeated or field.type in (_STRING, _BYTES):
            yield f"{descriptor.name}.{field.name}"


def prefill(**changes: Any) -> Any:
    message: Any = jobs.prefill_job_to_proto(prefill_job(), FACTS.fingerprint)
    return jobs.prefill_job_from_proto(_set(message, changes), FACTS)


def decode(**changes: Any) -> Any:
    message: Any = jobs.decode_job_to_proto(decode_job(), FACTS.fingerprint)
    return jobs.decode_job_from_proto(_set(message, changes), FACTS)


def encode(**changes: Any) -> Any:
    message = encode_pb2.EncodeJob(request_id="r", fingerprint=FACTS.fingerprint, image=b"x")
    message.item.CopyFrom(convert.item_to_proto(item()))
    return jobs.encode_job_from_proto(_set(message, changes), FACTS)


def image(**changes: Any) -> Any:
    return convert.item_from_proto(_set(convert.item_to_proto(item()), changes), "item")


def handle(**changes: Any) -> Any:
    message = common_pb2.Handle(spans=[common_pb2.Span()])
    message.owner.session = "h:1"
    for name, value in changes.items():
        part, _, field = name.rpartition("__")
        _set(getattr(message, part) if part else message, {field: value})
    return convert.handle_from_proto(message, "handle")


def sampling(**changes: Any) -> Any:
    message = _set(convert.sampling_to_proto(SamplingParams()), changes)
    params.validate(convert.sampling_from_proto(message), vocab_size=4096)


def hello(**changes: Any) -> Any:
    return card_from_hello(membership_pb2.Hello(**changes))


def _set(message: Any, changes: dict[str, Any]) -> Any:
    for name, value in changes.items():
        field = getattr(message, name)
        if isinstance(value, list):
            del field[:]
            field.extend(value)
        elif isinstance(value, dict):
            field.update(value)
        else:
            setattr(message, name, value)
    return message


LONG, MANY = "x" * 2000, list(range(2000))
REFUSED: dict[str, Callable[[], Any]] = {
    "EncodeJob.request_id": lambda: encode(request_id=LONG),
    "EncodeJob.fingerprint": lambda: encode(fingerprint=LONG),
    "EncodeJob.salt": lambda: encode(salt=LONG.encode()),
    "ImageItem.digest": lambda: image(digest=LONG.encode()),
    "ImageItem.grid": lambda: image(grid=MANY),
    "PrefillJob.request_id": lambda: prefill(request_id=LONG),
    "PrefillJob.fingerprint": lambda: prefill(fingerprint=LONG),
    "PrefillJob.token_ids": lambda: prefill(token_ids=[1] * 2000),
    "PrefillJob.items": lambda: prefill(items=[convert.item_to_proto(item())] * 2000),
    "PrefillJob.salt": lambda: prefill(salt=LONG.encode()),
    "SamplingParams.logit_bias": lambda: sampling(logit_bias=dict.fromkeys(MANY, 1.0)),
    "SamplingParams.stop_token_ids": lambda: sampling(stop_token_ids=MANY),
    "SamplingParams.eos_token_ids": lambda: sampling(eos_token_ids=MANY),
    "Peer.session": lambda: handle(owner__session=LONG),
    "Contract.fingerprint": lambda: handle(contract__fingerprint=LONG),
    "Contract.dtype": lambda: handle(contract__dtype=LONG),
    "Contract.layout": lambda: handle(contract__layout=LONG),
    "Contract.shape": lambda: handle(contract__shape=MANY),
    "Handle.spans": lambda: handle(spans=[common_pb2.Span()] * ((1 << 16) + 1)),
    "DecodeJob.request_id": lambda: decode(request_id=LONG),
    "DecodeJob.fingerprint": lambda: decode(fingerprint=LONG),
    "DecodeJob.token_ids": lambda: decode(token_ids=[1] * 2000),
    "DecodeJob.items": lambda: decode(items=[convert.item_to_proto(item())] * 2000),
    "DecodeJob.salt": lambda: decode(salt=LONG.encode()),
    "Token.top": lambda: convert.token_from_proto(
        common_pb2.Token(top=[common_pb2.TokenLogprob()] * 2000)
    ),
    "Hello.stages": lambda: hello(stages=[1] * 2000),
    "Hello.address": lambda: hello(address=LONG),
    "Hello.fingerprint": lambda: hello(fingerprint=LONG),
    "Hello.kv_layout": lambda: hello(kv_layout=LONG),
    "Hello.kv_block_shape": lambda: hello(kv_block_shape=MANY),
    "Hello.dtype": lambda: hello(dtype=LONG),
    "Hello.numerics_id": lambda: hello(numerics_id=LONG),
    "Hello.version": lambda: hello(version=LONG),
}
BOUNDED_ELSEWHERE = {
    "EncodeJob.image": "rpc.encode_bytes: it is the message",
    "Cancel.reason": "rpc.control_bytes; read by nobody",
    "Grammar.json_schema": "epd/sampling/grammar.py",
    "Grammar.regex": "epd/sampling/grammar.py",
    "Grammar.lark": "epd/sampling/grammar.py",
}


def test_every_field_that_can_grow_is_in_one_of_the_tables() -> None:
    seen: set[str] = set()
    found = {name for message in TAKEN_IN for name in growing(message.DESCRIPTOR, seen)}
    assert found == REFUSED.keys() | BOUNDED_ELSEWHERE.keys()


@pytest.mark.parametrize("field", REFUSED)
def test_more_than_the_bound_is_a_typed_error(field: str) -> None:
    with pytest.raises(EpdError):
        REFUSED[field]()


def test_what_the_builders_send_is_good_without_the_change() -> None:
    for build in (prefill, decode, encode, image, handle, sampling, hello):
        build()


def test_grammars_have_a_bound() -> None:
    assert grammar.MAX_GRAMMAR_BYTES <= 1 << 20
