"""Token ids to text, one at a time, never breaking a character."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Incremental text of one output. The prompt is never part of it.

    The pieces joined are ``tokenizer.decode(ids, skip_special_tokens=True)``, for
    every sequence of ids. An incomplete character is held back; if the output
    ends in the middle of one, `finish` decides once (U+FFFD, as the whole decode).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._length = 0

    def push(self, token_id: int) -> str:
        """Text that this token completes; "" while a character is incomplete."""
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._length += len(text)
        return text

    def finish(self) -> str:
        """Whatever was held back. Nothing is to be pushed afterwards."""
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        rest, self._length = whole[self._length :], len(whole)
        return rest
