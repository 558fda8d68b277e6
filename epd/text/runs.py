"""Runs of an image's rows in a prompt: tokenised as one row each, and made long again.

A picture is hundreds of equal tokens in a row, each of which the tokenizer would look for and
cut out of the text. Between two of them there is no text, so how many there are changes
nothing of what stands around them; whether that holds for a tokenizer is tried out first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from epd.text.words import TextTokenizer

_REMEMBERED = 4096
_PROBES = ("a{}b", " a {} b ", "{}", "a\n\n{}\n\nb{}{} c")


class RowRuns:
    """For one tokenizer. `row_id` is the token that stands for a row."""

    def __init__(self, words: TextTokenizer, tokenizer: Any, row_id: int) -> None:
        self._row_id = row_id
        self._row: str = tokenizer.convert_ids_to_tokens(row_id)
        self._run = re.compile(f"(?:{re.escape(self._row)})+")
        self._longer = self._independent(words)
        self.shortened = lru_cache(_REMEMBERED)(self._shortened)

    def _independent(self, words: TextTokenizer) -> bool:
        """Whether the tokens around a run are the same however long it is."""
        for probe in _PROBES:
            one, three = (
                words.ids([(probe.replace("{}", self._row * rows), False)], False, None, "")
                for rows in (1, 3)
            )
            if _lengthened(one, self._row_id, [3] * probe.count("{}")) != three:
                return False
        return True

    def _shortened(self, text: str) -> tuple[str, tuple[int, ...]]:
        """A text with one row in place of each run, and how many there were, in order."""
        if not self._longer:
            return text, (1,) * text.count(self._row)
        runs = tuple(len(found[0]) // len(self._row) for found in self._run.finditer(text))
        return self._run.sub(lambda _: self._row, text), runs

    def lengthened(self, ids: Sequence[int], runs: Sequence[int]) -> list[int] | None:
        """Ids with each row of them as many times as `runs` says; None if there are not as
        many rows as runs."""
        return _lengthened(ids, self._row_id, runs)


def _lengthened(ids: Sequence[int], row_id: int, runs: Sequence[int]) -> list[int] | None:
    places = [at for at, token in enumerate(ids) if token == row_id]
    if len(places) != len(runs):
        return None
    found: list[int] = []
    done = 0
    for at, rows in zip(places, runs, strict=True):
        found += ids[done:at]
        found += [row_id] * rows
        done = at + 1
    found += ids[done:]
    return found
