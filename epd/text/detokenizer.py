"""Token ids to text, one at a time, never breaking a character.

Not tokenizers' `DecodeStream`: with byte-fallback vocabularies (Llama, Gemma) it
raises "Invalid prefix" once a byte follows that makes its run of bytes invalid
UTF-8, since such a run is decoded as one.

    ids   . . . . . . . | . . . . . .        window: decoded anew for each token,
                    start ^    shown ^       short, with at least one old token
"""

from __future__ import annotations

from tokenizers import Tokenizer

_UNKNOWN = "\ufffd"
_WINDOW = 16
_MOST_HELD = 64
"""Tokens without a whole character before they count as garbage, which is let out."""


class Detokenizer:
    """Incremental text of one output. The prompt is never part of it.

    The pieces joined are ``tokenizer.decode(ids, skip_special_tokens=True)``. An
    incomplete character is held back; if the output ends in the middle of one,
    `finish` decides once (U+FFFD, as the whole decode does). A character that was
    complete stays what it was, also where a later invalid byte would spoil it in
    the whole decode of a byte-fallback vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        """Of the window only."""
        self._shown = 0
        """Characters of the window's text that were given out."""
        self._clean = 0
        """Tokens of the window up to the last one that ended with a whole character."""

    def push(self, token_id: int) -> str:
        """Text that this token completes; "" while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode()
        garbage = len(self._ids) - self._clean > _MOST_HELD
        stable = len(text) if garbage else len(text.rstrip(_UNKNOWN))
        piece = text[self._shown : stable]
        self._shown = max(self._shown, stable)
        if stable == len(text):
            self._slide()
        return piece

    def finish(self) -> str:
        """Whatever was held back. Nothing is to be pushed afterwards."""
        return self._decode()[self._shown :]

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text

    def _slide(self) -> None:
        """Every character is whole here: forget old tokens if there are many."""
        if len(self._ids) >= _WINDOW:
            whole, self._ids = self._ids, self._ids[self._clean :]
            text = self._decode()
            if text:
                self._shown = len(text)
            else:
                # Some decoders strip the first space of what they get: a window must
                # begin with text that was given out.
                self._ids = whole
        self._clean = len(self._ids)
