"""Server-sent events, however the stream is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.bench import sse
from epd.bench.sse import EventParser

STREAM = (
    b': comment\n\ndata: {"a": 1}\n\nevent: x\r\ndata: one\r\ndata:two\r\n\r\nid: 7\n\n'
    b"data: caf\xc3\xa9\r\rdata:\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"one\ntwo", b"caf\xc3\xa9", b"", b"[DONE]"]


@given(st.sets(st.integers(0, len(STREAM))))
def test_cuts_anywhere_change_nothing(cuts: set[int]) -> None:
    parser, places = EventParser(), [0, *sorted(cuts), len(STREAM)]
    found = [event for a, b in pairwise(places) for event in parser.feed(STREAM[a:b])]
    assert found == EVENTS
    assert not parser.pending


def test_an_event_comes_with_the_byte_that_ends_it() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.pending
    assert parser.feed(b"\n") == [b"x"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    parser.feed(b"data: " + b"x" * 60 + b"\n")
    with pytest.raises(ValueError, match="100 bytes"):
        parser.feed(b"data: " + b"x" * 60)
