"""Grammars of clients, tried out in a process that can be killed.

What compiles here in bounded time and memory, and whose masks are cheap, is safe to
compile again in the stages, where a costly one would hold up everybody's tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from epd.errors import EpdError, invalid
from epd.jobs import Grammar, GrammarKind
from epd.models.spec import ModelSpec
from epd.sampling.grammar import Grammars, Matcher
from epd.sandbox import Sandbox, SandboxLimits, WorkerDied
from epd.sandbox_worker import Buffer, Work

_CPU_S: Final = 2.0
_MEMORY: Final = 512 << 20
_WORKERS: Final = 2
_STEPS: Final = 12
"""Tokens of the trial: enough to meet recursion that never ends and masks that cost."""
_MASK_S: Final = 0.005
"""CPU time of one mask: every token of the answer costs it in the stages, and those who decode
beside it wait for it. Schemas and expressions that people write take 0.6 ms at most (150,000
tokens); what takes more counts to thousands, letter by letter: `a{9999}` 3 ms, `a{99999}` 33."""


def load(path: str, vocab_size: int, eos_ids: Sequence[int]) -> Work:
    """The work of the sandbox: the body is the grammar's text, the head says its kind."""
    grammars = Grammars(path, vocab_size, eos_ids)

    def work(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], tuple[Buffer, ...]]:
        grammar = Grammar(GrammarKind(head["kind"]), body.decode())
        _try_out(grammars.build(grammar, ()))
        return {}, ()

    return work


def _try_out(matcher: Matcher) -> None:
    """Follow the grammar for a few tokens.

    Raises:
        EpdError: it leads nowhere, or costs too much.
    """
    costs = []
    for _ in range(_STEPS):
        if matcher.complete:
            return
        began = time.process_time()
        allowed = matcher.allowed()
        costs.append(time.process_time() - began)
        ids = allowed.nonzero()[0]
        if not len(ids):
            raise invalid("grammar: no text can follow it", "grammar")
        matcher.advance(int(ids[0]))
    typical = sorted(costs)[len(costs) // 2]
    if typical > _MASK_S:
        raise invalid(
            f"grammar: too costly, {typical * 1e3:.0f} ms a token (limit {_MASK_S * 1e3:.0f})",
            "grammar",
        )


class GrammarChecker:
    """Says whether a client's grammar can be served."""

    def __init__(self, spec: ModelSpec) -> None:
        arguments = {
            "path": str(spec.path),
            "vocab_size": spec.vocab_size,
            "eos_ids": list(spec.eos_token_ids),
        }
        limits = SandboxLimits(_CPU_S, _MEMORY)
        self._sandbox = Sandbox("gateway.grammars:load", arguments, _WORKERS, limits)

    async def check(self, grammar: Grammar, param: str, client: bytes = b"") -> None:
        """Return if it can be served. Clients take turns.

        Raises:
            EpdError: INVALID_REQUEST naming `param`; STAGE_UNAVAILABLE, no process for it.
        """
        try:
            text = grammar.text.encode()
            await self._sandbox.run({"kind": str(grammar.kind)}, text, client)
        except WorkerDied as died:
            what = f"{_CPU_S:g} s" if died.timed_out else f"{_MEMORY >> 20} MiB"
            raise invalid(f"{param}: takes more than {what} to compile", param) from died
        except EpdError as error:
            if error.mapping.users_fault:
                reason = error.message.removeprefix("grammar: ")
                raise invalid(f"{param}: {reason}", param) from error
            raise

    def close(self) -> None:
        self._sandbox.close()
