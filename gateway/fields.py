"""Typed reading of a JSON object: every field is checked, none is ignored.

`null` equals absent for every field. What was never asked for is an error, so a
field that we don't know can't be dropped in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from epd.errors import EpdError, invalid

_MOST_SHOWN = 3
"""Values that a refusal names as fine."""


class Fields:
    """One JSON object at `path` ("" is the body). Call `done` after the last field."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, Mapping):
            raise invalid(f"must be an object, not {kind_of(value)}", path or None)
        self._left = {key: item for key, item in value.items() if item is not None}
        self._path = path

    def param(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def wrong(self, name: str, reason: str) -> EpdError:
        return invalid(f"{self.param(name)}: {reason}", self.param(name))

    def has(self, name: str) -> bool:
        """Whether there is a value that was not taken yet."""
        return name in self._left

    def take(self, name: str) -> Any:
        """The raw value, or None."""
        return self._left.pop(name, None)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, not {kind_of(value)}")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, f"must be an integer, not {kind_of(value)}")
        if not low <= value <= high:
            raise self.wrong(name, f"{value} is not between {low} and {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A finite number with low <= value <= high."""
        value = self.take(name)
        if value is None:
            return default
        return self.check_number(name, value, low, high)

    def check_number(self, name: str, value: Any, low: float, high: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"must be a number, not {kind_of(value)}")
        if not (math.isfinite(value) and low <= value <= high):
            raise self.wrong(name, f"{value} is not between {low:g} and {high:g}")
        return float(value)

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, f"must be a string, not {kind_of(value)}")

    def required_string(self, name: str) -> str:
        value = self.string(name)
        if value is None:
            raise self.wrong(name, "is missing")
        return value

    def array(self, name: str) -> Sequence[Any] | None:
        value = self.take(name)
        if value is None or isinstance(value, list):
            return value
        raise self.wrong(name, f"must be an array, not {kind_of(value)}")

    def refuse(self, table: Mapping[str, Sequence[Any]]) -> None:
        """Known fields that we don't serve: only the values that change nothing pass."""
        for name in [name for name in self._left if name in table]:
            value = self.take(name)
            if not any(type(value) is type(ok) and value == ok for ok in table[name]):
                harmless = " or ".join(map(_shown, table[name][:_MOST_SHOWN]))
                others = f"; {harmless} is" if harmless else ""
                raise self.wrong(name, f"{_shown(value)} is not supported{others}")

    def done(self) -> None:
        if self._left:
            name = next(iter(self._left))
            raise self.wrong(name, "is unknown")


def as_json(value: Any, param: str) -> str:
    """A value of the request as compact JSON.

    Raises:
        EpdError: it is nested deeper than anything here can write (about 250 levels).
    """
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise invalid(f"{param}: is nested too deeply", param) from error


def _shown(value: Any) -> str:
    """A value as the client wrote it, or as good as that."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # nested too deeply
        return kind_of(value)


def kind_of(value: Any) -> str:
    """JSON's name of a value's type."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    return "an array" if isinstance(value, list | tuple) else "null"
