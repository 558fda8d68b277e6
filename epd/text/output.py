"""Sampled tokens to pieces of text that may be sent, each with its own tokens.

    token ──> Detokenizer ──> group: tokens that complete some text ──> StopFinder
                                                                          │
      Piece: whole groups whose text belongs to no stop string  <─────────┘

A piece's tokens cover exactly its text. The token that completes a stop string
counts as sampled, but of its text (and its bytes, in logprobs) only what stands
before the stop string is let out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from epd.jobs import SampledToken
from epd.text.detokenizer import Detokenizer
from epd.text.stops import StopFinder
from epd.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TextToken:
    """A sampled token and the bytes of it that are in the text."""

    token: SampledToken
    raw: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    tokens: tuple[TextToken, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    end: int
    """Characters from the output's beginning to the end of this group's text."""
    text: str
    tokens: tuple[TextToken, ...]


class OutputText:
    """Text of one output. Feed tokens in order, then `finish` once.

    `stopped` turns true when a stop string is complete: generation is to be
    cancelled and what comes later is not to be fed. `sampled` counts the tokens
    up to there, the ending one included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        stops: Sequence[str],
        ending_ids: Collection[int],
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._vocabulary = vocabulary
        self._finder = StopFinder(stops) if stops else None
        self._ending_ids = ending_ids
        self._open: list[TextToken] = []
        self._groups: deque[_Group] = deque()
        self._length = 0
        self.sampled = 0
        self.stopped = False

    def push(self, token: SampledToken) -> Piece | None:
        """Take the next token; returns what may now be sent, if anything."""
        assert not self.stopped
        self.sampled += 1
        if token.id in self._ending_ids:
            return None
        self._open.append(TextToken(token, self._vocabulary.raw(token.id)))
        if self._vocabulary.is_skipped(token.id):
            return None
        return self._extend(self._detokenizer.push(token.id))

    def push_all(self, tokens: Iterable[SampledToken]) -> Piece | None:
        """Take tokens that came together: one piece for all. Those after the end of a
        stop string are dropped."""
        pieces: list[Piece] = []
        for token in tokens:
            if (piece := self.push(token)) is not None:
                pieces.append(piece)
            if self.stopped:
                break
        return _joined(pieces)

    def finish(self) -> Piece | None:
        """The output ended by itself: everything held back is let out."""
        if self.stopped:
            return None
        piece = self._extend(self._detokenizer.finish())
        return piece if self._stopped_now() else _joined([piece, self._flush()])

    def _stopped_now(self) -> bool:
        return self.stopped

    def _flush(self) -> Piece | None:
        if self._open:
            self._close_group("")
        return self._release(self._length)

    def _extend(self, text: str) -> Piece | None:
        if not text:
            return None
        if self._finder is None:  # then only incomplete characters are held back
            piece, self._open = Piece(text, tuple(self._open)), []
            return piece
        self._close_group(text)
        scan = self._finder.feed(text)
        if scan.match is None:
            return self._release(scan.safe)
        self.stopped = True
        return _joined([self._release(scan.match), self._cut(scan.match)])

    def _close_group(self, text: str) -> None:
        self._length += len(text)
        self._groups.append(_Group(self._length, text, tuple(self._open)))
        self._open = []

    def _release(self, end: int) -> Piece | None:
        """All groups that end at or before `end`."""
        ready: list[_Group] = []
        while self._groups and self._groups[0].end <= end:
            ready.append(self._groups.popleft())
        if not ready:
            return None
        return Piece(
            "".join(group.text for group in ready),
            tuple(token for group in ready for token in group.tokens),
        )

    def _cut(self, end: int) -> Piece | None:
        """The part before `end` of the group that a stop string begins in."""
        if not self._groups:
            return None
        group = self._groups[0]
        text = group.text[: len(group.text) - (group.end - end)]
        if not text:
            return None
        left = len(text.encode())
        tokens = []
        for token in group.tokens:
            if left <= 0:
                break
            raw = token.raw[:left]
            left -= len(raw)
            tokens.append(TextToken(token.token, raw))
        return Piece(text, tuple(tokens))


def _joined(pieces: Sequence[Piece | None]) -> Piece | None:
    found = [piece for piece in pieces if piece is not None]
    if len(found) <= 1:
        return found[0] if found else None
    return Piece(
        "".join(piece.text for piece in found),
        tuple(token for piece in found for token in piece.tokens),
    )
