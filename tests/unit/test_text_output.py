"""Streamed text: whole characters, no stop string, the same for every cut into tokens."""

from __future__ import annotations

import functools
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from epd.jobs import SampledToken
from epd.text.detokenizer import Detokenizer
from epd.text.output import OutputText, Piece
from epd.text.stops import StopFinder
from epd.text.vocabulary import Vocabulary, _byte_level_alphabet

EOS = "<eos>"
WORDS = ["ab", "abc", "bc", " hello", "D", "EFG", "ld", "漢", "👩", "\u200d", "🚀", "é"]


@functools.cache
def byte_level() -> Tokenizer:
    """All 256 bytes, some words, and a special token."""
    stand_in = {byte: char for char, byte in _byte_level_alphabet().items()}
    tokens = [stand_in[byte] for byte in range(256)]
    tokens += ["".join(stand_in[byte] for byte in word.encode()) for word in WORDS]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """The other large family: metaspace words and <0xHH> bytes (Llama, Gemma)."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁", "a", "b", "漢"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return tokenizer


def id_of(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_to_id(name)
    assert found is not None, name
    return found


def spelled(*parts: str | int) -> list[int]:
    """Words of `WORDS` as one token, other strings and numbers byte by byte."""
    tokenizer = byte_level()
    table = {byte: char for char, byte in _byte_level_alphabet().items()}
    ids: list[int] = []
    for part in parts:
        raw = bytes([part]) if isinstance(part, int) else part.encode()
        stand_ins = [table[byte] for byte in raw]
        if part in WORDS:
            ids.append(id_of(tokenizer, "".join(stand_ins)))
        elif part == EOS:
            ids.append(id_of(tokenizer, EOS))
        else:
            ids += [id_of(tokenizer, char) for char in stand_ins]
    return ids


# --- detokenizer -----------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=60))
def test_pieces_joined_are_the_whole_decode(numbers: list[int]) -> None:
    """Any ids at all, invalid UTF-8 too; long enough for the window to slide."""
    tokenizer = byte_level()
    ids = [number % tokenizer.get_vocab_size() for number in numbers]
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(["▁hello", "▁", "a", "b", "漢", EOS, "é", "👩", "ก"]), max_size=40))
def test_pieces_joined_are_the_whole_decode_with_byte_fallback(words: list[str]) -> None:
    """Valid UTF-8, where one character is one token or up to four."""
    tokenizer = byte_fallback()
    ids: list[int] = []
    for word in words:
        one = tokenizer.token_to_id(word)
        names = [f"<0x{byte:02X}>" for byte in word.encode()]
        ids += [one] if one is not None else [id_of(tokenizer, name) for name in names]
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_space_after_a_long_text_and_a_special_token_is_kept() -> None:
    tokenizer = byte_fallback()
    ids = [id_of(tokenizer, word) for word in ["a"] * 20 + [EOS] * 20 + ["▁hello"]]
    stream = Detokenizer(tokenizer)
    assert "".join(stream.push(token_id) for token_id in ids) == "a" * 20 + " hello"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 10**6), max_size=40))
def test_invalid_bytes_spoil_no_character_that_was_sent(numbers: list[int]) -> None:
    tokenizer = byte_fallback()
    stream = Detokenizer(tokenizer)
    ids = [number % tokenizer.get_vocab_size() for number in numbers]
    for token_id in (*ids, *(id_of(tokenizer, f"<0x{b:02X}>") for b in "👩".encode())):
        stream.push(token_id)
    stream.finish()


def test_an_invalid_byte_after_a_whole_character() -> None:
    """The case that DecodeStream raises on."""
    tokenizer = byte_fallback()
    names = [*(f"<0x{b:02X}>" for b in "👩".encode()), "<0x80>", "a"]
    stream = Detokenizer(tokenizer)
    text = "".join(stream.push(id_of(tokenizer, name)) for name in names)
    assert text.startswith("👩\ufffd")
    assert (text + stream.finish()).endswith("a")


def test_endless_garbage_is_let_out() -> None:
    stream = Detokenizer(byte_level())
    pieces = [stream.push(spelled(0x80)[0]) for _ in range(1000)]
    assert sum(map(len, pieces)) >= 900


@given(st.text(alphabet="aé漢👩🚀\u200dก", min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_a_character_is_never_broken(text: str) -> None:
    stream = Detokenizer(byte_level())
    pieces = [stream.push(token_id) for token_id in spelled(*text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_decided_once() -> None:
    stream = Detokenizer(byte_level())
    assert [stream.push(token_id) for token_id in spelled("a", *"é".encode()[:1])][1] == ""
    assert stream.finish() == "\ufffd"


# --- stop strings ----------------------------------------------------------------------


def first_complete(text: str, stops: list[str]) -> int | None:
    """The definition, character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


@given(st.text(alphabet="abc", max_size=20), STOPS, st.data())
@settings(max_examples=500, deadline=None)
def test_stops_are_found_the_same_for_every_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    finder, match, safe = StopFinder(stops), None, 0
    for start, end in itertools.pairwise([0, *cuts, len(text)]):
        scan = finder.feed(text[start:end])
        safe, match = scan.safe, scan.match
        if match is not None:
            break
    expected = first_complete(text, stops)
    assert match == expected
    if expected is not None:
        assert safe == expected


@given(st.text(alphabet="abc", max_size=12), STOPS)
@settings(max_examples=300, deadline=None)
def test_what_is_safe_begins_no_stop_string(text: str, stops: list[str]) -> None:
    """Whatever follows, text before `safe` is in no stop string, and no more is held."""
    if first_complete(text, stops) is not None:
        return
    safe = StopFinder(stops).feed(text).safe
    held = text[safe:]
    assert all(not s.startswith(text[at:]) for s in stops for at in range(safe))
    assert held == "" or any(s.startswith(held) for s in stops)


# --- text and tokens together ------------------------------------------------------------


def run(
    ids: list[int], stops: list[str], ending: set[int] | None = None
) -> tuple[OutputText, list[Piece]]:
    tokenizer = byte_level()
    output = OutputText(tokenizer, Vocabulary(tokenizer), stops, ending or set())
    pieces: list[Piece] = []
    for token_id in ids:
        piece = output.push(SampledToken(token_id))
        if piece is not None:
            pieces.append(piece)
        if output.stopped:
            return output, pieces
    if (last := output.finish()) is not None:
        pieces.append(last)
    return output, pieces


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_nothing_of_a_stop_string_is_sent() -> None:
    output, pieces = run(spelled("abc", " hello", "D", "EFG", "H"), ["DEFGH"])
    assert [piece.text for piece in pieces] == ["abc", " hello"]
    assert output.stopped
    assert output.sampled == 5


def test_held_text_is_let_out_when_the_match_fails() -> None:
    _, pieces = run(spelled("D", "EFG", "ab", "D"), ["DEFGH"])
    assert [piece.text for piece in pieces] == ["DEFGab", "D"]


def test_a_stop_string_inside_a_token_cuts_it() -> None:
    output, pieces = run(spelled("abc", " hello", "ld"), ["llo"])
    assert text_of(pieces) == "abc he"
    assert output.sampled == 2
    assert pieces[-1].tokens[-1].raw == b" he"


def test_an_ending_token_counts_but_has_no_text() -> None:
    end = spelled("D")[0]
    output, pieces = run([*spelled("ab"), end], [], {end})
    assert text_of(pieces) == "ab"
    assert output.sampled == 2
    assert [token.token.id for piece in pieces for token in piece.tokens] == spelled("ab")


def test_a_special_token_in_the_middle_has_no_text() -> None:
    output, pieces = run(spelled("ab", EOS, "D"), [])
    assert text_of(pieces) == "abD"
    assert output.sampled == 3
    assert [token.raw for piece in pieces for token in piece.tokens] == [b"ab", b"", b"D"]


PARTS = st.lists(st.sampled_from(["ab", "abc", "bc", "D", "é", "漢", "👩", "x"]), max_size=12)


@given(PARTS, st.lists(st.sampled_from(["bca", "bD", "D漢", "xa", "👩"]), max_size=2))
@settings(max_examples=400, deadline=None)
def test_each_piece_has_the_bytes_of_its_tokens(parts: list[str], stops: list[str]) -> None:
    output, pieces = run(spelled(*parts), stops)
    for piece in pieces:
        assert piece.text.encode() == b"".join(token.raw for token in piece.tokens)
    text = "".join(parts)
    expected = first_complete(text, stops)
    assert text_of(pieces) == (text if expected is None else text[:expected])
    assert output.stopped == (expected is not None)


@given(PARTS, st.lists(st.sampled_from(["bca", "bD", "D漢"]), max_size=2), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_tokens_that_come_together_say_the_same(
    parts: list[str], stops: list[str], size: int
) -> None:
    alone, pieces = run(spelled(*parts), stops)
    tokenizer = byte_level()
    output = OutputText(tokenizer, Vocabulary(tokenizer), stops, set())
    tokens = [SampledToken(token_id) for token_id in spelled(*parts)]
    together = [
        output.push_all(tokens[i : i + size])
        for i in range(0, len(tokens), size)
        if not output.stopped
    ]
    together.append(output.finish())
    assert text_of([piece for piece in together if piece is not None]) == text_of(pieces)
    assert output.sampled == alone.sampled


@given(st.text(alphabet="abD漢é", min_size=1, max_size=10), st.sampled_from(["bD", "漢a", "abD"]))
@settings(max_examples=200, deadline=None)
def test_text_is_the_same_for_bytes_and_words(text: str, stop: str) -> None:
    """Single bytes or one token a character: the stream says the same."""
    by_byte = [i for char in text for i in spelled(*char.encode())] if text else []
    _, first = run(by_byte, [stop])
    _, second = run(spelled(*text), [stop])
    assert text_of(first) == text_of(second)


# --- vocabulary --------------------------------------------------------------------------


def test_bytes_of_tokens() -> None:
    words = Vocabulary(byte_level())
    assert words.raw(spelled(" hello")[0]) == b" hello"
    assert words.raw(spelled(0xF0)[0]) == b"\xf0"
    assert words.raw(spelled(EOS)[0]) == b""
    assert words.name(spelled(EOS)[0]) == EOS.encode()
    assert words.raw(10**6) == b""


def test_bytes_of_fallback_tokens() -> None:
    tokenizer = byte_fallback()
    words = Vocabulary(tokenizer)
    assert words.raw(id_of(tokenizer, "<0xE6>")) == b"\xe6"
    assert words.raw(id_of(tokenizer, "▁hello")) == b" hello"
