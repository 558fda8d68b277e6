"""Errors in the words of a client whose API has other names for the fields."""

from __future__ import annotations

from epd.errors import EpdError, ErrorKind
from gateway.naming import Names


def test_a_renamed_error_differs_in_the_name_alone() -> None:
    error = EpdError(
        ErrorKind.OVERLOADED,
        "messages: no room",
        param="messages",
        retry_after_s=2.5,
        by_client=True,
    )
    told = Names(((r"messages", "input"),)).renamed(error)
    assert (told.message, told.param) == ("input: no room", "input")
    assert (told.kind, told.retry_after_s, told.by_client) == (error.kind, 2.5, True)
