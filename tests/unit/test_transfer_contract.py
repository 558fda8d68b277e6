"""Contracts and identity pages: every field is compared, and named when it differs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from epd.errors import EpdError, ErrorKind
from epd.transfer.contract import Contract, Handle, Peer, Span
from epd.transfer.identity import IDENTITY_BYTES, Identity

CONTRACT = Contract("f00d", "bfloat16", "kv-block-major/1", (32, 2, 4), 7)
PEER = Peer("10.0.0.1:15000", 0xE, 4096)
SPAN = Span(8192, 512, 1)

OTHER = {
    "fingerprint": "beef",
    "dtype": "float32",
    "layout": "kv-block-major/2",
    "shape": (32, 4, 2),
    "nonce": 8,
}


def handle(*spans: Span) -> Handle:
    return Handle(PEER, CONTRACT, spans, 5000)


@pytest.mark.parametrize("field", [field.name for field in fields(Contract)])
def test_any_field_that_differs_is_refused_with_both_values(field: str) -> None:
    other: dict[str, Any] = {field: OTHER[field]}
    announced = replace(CONTRACT, **other)
    with pytest.raises(EpdError) as refused:
        announced.check(CONTRACT)
    assert refused.value.kind is ErrorKind.CONTRACT_MISMATCH
    for part in (field, repr(OTHER[field]), repr(getattr(CONTRACT, field))):
        assert part in refused.value.message


def test_equal_contracts_pass() -> None:
    CONTRACT.check(replace(CONTRACT))
    handle(SPAN, SPAN).check(CONTRACT, spans=2)


def test_span_bytes_follow_dtype_and_shape() -> None:
    assert CONTRACT.span_bytes == 32 * 2 * 4 * 2
    assert replace(CONTRACT, dtype="float32").span_bytes == 32 * 2 * 4 * 4
    with pytest.raises(EpdError, match="dtype is 'int7'"):
        _ = replace(CONTRACT, dtype="int7").span_bytes


def test_number_and_length_of_spans_are_checked() -> None:
    with pytest.raises(EpdError, match="number of spans is 1, expected 2"):
        handle(SPAN).check(CONTRACT, spans=2)
    with pytest.raises(EpdError, match="length of span 1 is 511, expected 512"):
        handle(SPAN, replace(SPAN, length=511)).check(CONTRACT, spans=2)


def test_handle_checks_the_contract_first() -> None:
    with pytest.raises(EpdError, match="nonce"):
        handle(SPAN).check(replace(CONTRACT, nonce=9))


def test_identity_page_survives_the_wire() -> None:
    identity = Identity.of(PEER.epoch, "f00d")
    page = identity.pack()
    assert len(page) == IDENTITY_BYTES
    read = Identity.unpack(page, PEER.session)
    assert read == identity
    read.check(PEER, "f00d")


@pytest.mark.parametrize(
    ("epoch", "fingerprint", "named"),
    [(0xF, "f00d", "epoch of 10.0.0.1:15000"), (0xE, "beef", "fingerprint digest")],
)
def test_identity_of_another_life_or_model_is_refused(
    epoch: int, fingerprint: str, named: str
) -> None:
    with pytest.raises(EpdError, match=named) as refused:
        Identity.of(epoch, fingerprint).check(PEER, "f00d")
    assert refused.value.kind is ErrorKind.CONTRACT_MISMATCH


@pytest.mark.parametrize(("at", "named"), [(0, "identity page of"), (8, "identity page version")])
def test_what_is_no_identity_page_is_refused(at: int, named: str) -> None:
    page = bytearray(Identity.of(1, "f00d").pack())
    page[at] ^= 0xFF
    with pytest.raises(EpdError, match=named):
        Identity.unpack(bytes(page), PEER.session)
