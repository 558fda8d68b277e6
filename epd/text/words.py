"""Text to ids: what is open for control tokens, and what is text whatever it looks like.

The work is bounded by what fits the context, not by what a client sent: a text that is much
too long is refused by its beginning, and of a text in a million pieces no more are tokenised
than there is room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from epd.errors import EpdError, ErrorKind, invalid

_BATCH = 512
"""Pieces that are tokenised in one call: each costs more than its tokens do."""
_LONG, _SAMPLE = 32, 8
"""Characters for each token that fits: of a text that is tried out first, and of how much of
it. Usual texts have 4; only what repeats itself has 32."""
_SEAM = 64
"""More tokens than a text can have more because it ends here and doesn't go on."""
_REMEMBERED = 4096
"""Control tokens as text; no tokenizer has as many that people write."""


class TextTokenizer:
    """The Rust tokenizer within transformers' fast one, without the checks and the copies
    around it, which take longer than a short text. Not thread-safe where that isn't."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = backend = tokenizer.backend_tokenizer
        # As transformers does before each call that says nothing of these.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        self._plain: dict[str, list[int]] = {}

    def ids(
        self,
        pieces: Sequence[tuple[str, bool]],
        add_special: bool,
        max_tokens: int | None,
        param: str,
    ) -> list[int]:
        """Ids of (text, whether it is text only) pieces, one after the other; with what the
        tokenizer itself puts around a text if `add_special`.

        Raises:
            EpdError: it is sure that there are more than `max_tokens`; or this tokenizer
                can't write a control token as text.
        """
        if len(pieces) == 1 and not pieces[0][1]:
            self._check_fits(pieces[0][0], max_tokens, param)
            return self._encoded([pieces[0][0]], add_special)[0]
        ids = []
        for at in range(0, len(pieces), _BATCH):
            ids += self._batch(pieces[at : at + _BATCH], max_tokens, param)
            if max_tokens is not None and len(ids) > max_tokens:
                raise _too_long(max_tokens, param)
        before, after = self._frame() if add_special else ([], [])
        return [*before, *ids, *after]

    def _batch(
        self, pieces: Sequence[tuple[str, bool]], max_tokens: int | None, param: str
    ) -> list[int]:
        texts = [text for text, plain in pieces if not plain]
        for text in texts:
            self._check_fits(text, max_tokens, param)
        left = iter(self._encoded(texts))
        return [
            i
            for text, plain in pieces
            for i in (self._plain_ids(text, param) if plain else next(left))
        ]

    def _check_fits(self, text: str, max_tokens: int | None, param: str) -> None:
        """A text that is much too long, as most are that don't fit, need not be tokenised to
        its end."""
        if max_tokens is None or len(text) <= _LONG * max_tokens:
            return
        beginning = text[: _SAMPLE * max_tokens]
        if len(self._encoded([beginning])[0]) > max_tokens + _SEAM:
            raise _too_long(max_tokens, param)

    def _encoded(self, texts: list[str], add_special: bool = False) -> list[list[int]]:
        found = self._backend.encode_batch_fast(texts, add_special_tokens=add_special)
        return [one.ids for one in found]

    def _plain_ids(self, text: str, param: str) -> list[int]:
        if (known := self._plain.get(text)) is not None:
            return known
        ids = _model_ids(self._backend, text)
        if self._tokenizer.convert_tokens_to_ids(text) in ids:
            raise invalid(f"this tokenizer can't write {text!r} as plain text", param)
        if len(self._plain) < _REMEMBERED:
            self._plain[text] = ids
        return ids

    def _frame(self) -> tuple[list[int], list[int]]:
        """Special ids that the tokenizer itself puts before and after a text."""
        (bare,), (framed,) = self._encoded(["a"]), self._encoded(["a"], add_special=True)
        start = next(at for at in range(len(framed)) if framed[at : at + len(bare)] == bare)
        return framed[:start], framed[start + len(bare) :]


def check_could_fit(texts: Iterable[str], max_tokens: int, longest_token: int, param: str) -> None:
    """Raises EpdError: all tokens could be as long as the vocabulary's longest, and there
    would still be too many."""
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    if size > max_tokens * longest_token:
        raise EpdError(
            ErrorKind.CONTEXT_LENGTH_EXCEEDED,
            f"the text of {size} bytes can't fit a context of {max_tokens} tokens",
            param=param,
        )


def _model_ids(backend: Any, text: str) -> list[int]:
    """Ids of `text` from the tokenizer's model alone, without its added tokens."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    splits = [text]
    if backend.pre_tokenizer is not None:
        splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for split in splits for token in backend.model.tokenize(split)]


def _too_long(max_tokens: int, param: str) -> EpdError:
    reason = f"the text makes more than {max_tokens} tokens, all that the context holds"
    return EpdError(ErrorKind.CONTEXT_LENGTH_EXCEEDED, reason, param=param)
