"""What a client calls the fields that errors name.

Inside there is one set of names, that of the chat API (a prompt's is `prompt`). A request
that came in another form calls some of them otherwise; its `Names` say how, so that an error
names the field as its client wrote it, however late the fault is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from epd.errors import EpdError

_MESSAGE = re.compile(r"\Amessages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Names:
    """Plain values: a request may be read by another process, and is sent back from there.
    What was renamed once isn't renamed again."""

    pairs: tuple[tuple[str, str], ...] = ()
    """Applied in turn: a regular expression for a name's beginning, and what replaces it."""
    before: int = 0
    """Messages in front of those that the client wrote. Its first one is number 0 for
    `pairs`; what stands before it has numbers below."""

    def of(self, param: str) -> str:
        """The client's name of a field."""
        name = param
        if self.before:
            name = _MESSAGE.sub(lambda at: f"messages[{int(at[1]) - self.before}]", name)
        for pattern, new in self.pairs:
            name = re.sub(rf"\A(?:{pattern})", new, name, count=1)
        return name

    def renamed(self, error: EpdError) -> EpdError:
        """The same error in the client's words."""
        old = error.param
        if old is None or (new := self.of(old)) == old:
            return error
        message = error.message
        if message.startswith(f"{old}:"):
            message = new + message[len(old) :]
        return EpdError(
            error.kind,
            message,
            param=new,
            retry_after_s=error.retry_after_s,
            by_client=error.by_client,
        )

    @contextmanager
    def used(self) -> Iterator[None]:
        """Errors from in here are in the client's words."""
        try:
            yield
        except EpdError as error:
            if (told := self.renamed(error)) is error:
                raise
            raise told from error
