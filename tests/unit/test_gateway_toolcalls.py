"""Calls in a model's text: for every way of cutting it the same calls, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.toolcalls import CallDelta, CallParser

ONE = (
    "<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Bern {\\"}", "days": [1, {}]}}'
    "\n</tool_call>"
)
TWO = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'

UNCLOSED = ONE.removesuffix("\n</tool_call>")

Read = tuple[str, list[tuple[str, str]], bool]


def read(pieces: Sequence[str], single: bool = False) -> Read:
    """Content, (name, arguments) of each call, and whether the calls are whole."""
    parser = CallParser(single)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, CallDelta):
            if delta.id:
                assert delta.index == len(calls)
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    content = "".join(delta for delta in deltas if isinstance(delta, str))
    return content, [(name, arguments) for name, arguments in calls], parser.called


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text < tool", "just text < tool", []),
        (ONE, "", ["weather"]),
        (f"Let me see.\n{ONE}\n{TWO}\n", "Let me see.", ["weather", "stop"]),
        (ONE.replace('"arguments"', '"parameters"'), "", ["weather"]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "swapped"}</tool_call>', "", ["swapped"]),
        ("<tool_call>no JSON</tool_call> so", "<tool_call>no JSON</tool_call> so", []),
        ("<tool_call>\nnever closed", "<tool_call>\nnever closed", []),
        ("Write <tool_call> first.", "Write <tool_call> first.", []),
        ("a \n<tool_call>b</tool_call>\n c", "a \n<tool_call>b</tool_call>\n c", []),
        ("\n<tool_call>b", "\n<tool_call>b", []),
        (f"{ONE}\n<tool_call>b</tool_call> c", "<tool_call>b</tool_call> c", ["weather"]),
        (f"a <tool_call>b</tool_call>\n{ONE}", "a <tool_call>b</tool_call>", ["weather"]),
        (f"By <tool_call> I say:\n{ONE}\n{TWO}", "By <tool_call> I say:", ["weather", "stop"]),
        (f"<tool_call>\n{ONE}", "<tool_call>", ["weather"]),
        (f"<tool_call>\n{UNCLOSED}", "<tool_call>", ["weather"]),
        ("<tool_call> <tool_call> a", "<tool_call> <tool_call> a", []),
        ("<tool_call> <tool_call>a</tool_call> b", "<tool_call> <tool_call>a</tool_call> b", []),
        ("a <tool_call", "a <tool_call", []),
        ("a <tool_call>", "a <tool_call>", []),
        (f"{UNCLOSED}\n{TWO}", "", ["weather", "stop"]),
        (f"{UNCLOSED}\nAlso:\n{TWO}", "Also:", ["weather", "stop"]),
        (f"{UNCLOSED}\nThat is all.", "That is all.", ["weather"]),
        (UNCLOSED, "", ["weather"]),
        ("text \n", "text \n", []),
    ],
)
def test_content_and_calls(text: str, content: str, calls: list[str], size: int) -> None:
    found = read(cut(text, size))
    assert (found[0], [name for name, _ in found[1]]) == (content, calls)
    assert found[2] == bool(calls)
    for _, arguments in found[1]:
        json.loads(arguments)


@given(st.text(alphabet="a <>{/\n"), st.text(alphabet="a <>{/\n"))
def test_a_text_without_a_call_is_content_to_the_letter(before: str, after: str) -> None:
    for text in (f"{before}<tool_call>{after}", f"{before}<tool_call>{after}</tool_call> so"):
        assert read([text])[0] == text


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", ONE, "{", '"', "}", " x", "\n"])))
def test_every_cut_gives_the_same(parts: list[str]) -> None:
    text = "".join(parts)
    whole = read([text])
    for size in (1, 2, 5):
        assert read(cut(text, size)) == whole


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser()
    head = parser.push('<tool_call>\n{"name": "f", "arguments": {"long": "')
    assert [type(delta) for delta in head] == [CallDelta, CallDelta]
    assert parser.push("text that ") == [CallDelta(0, "text that ")]
    assert not parser.called
    parser.push('goes on"}')
    assert parser.called, "the closing tag may be cut off by max_tokens"


def test_a_call_cut_short_keeps_what_there_is() -> None:
    content, calls, whole = read([ONE[: ONE.index("Bern") + 3]])
    assert content == ""
    assert calls == [("weather", '{"city": "Ber')]
    assert not whole


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    "first", [ONE, '<tool_call>{"arguments": {}, "name": "weather"}</tool_call>']
)
def test_a_single_call_is_the_last_thing(first: str, size: int) -> None:
    text = f"So:\n{first}\n{TWO} and more <tool_call>"
    content, calls, whole = read(cut(text, size), single=True)
    assert content == "So:"
    assert [name for name, _ in calls] == ["weather"]
    assert whole
    parser = CallParser(single=True)
    assert not parser.done
    parser.push("no call <tool_call>none</tool_call>")
    assert not parser.done
    parser.push(first)
    assert parser.done
    assert parser.push(TWO) == parser.finish() == []
