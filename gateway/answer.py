"""One answer, whatever the API in front of it: text pieces, calls, usage, how it ended."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from epd.errors import EpdError
from epd.jobs import FinishReason
from epd.obs import metrics
from epd.text.output import OutputText, Piece, TextToken
from gateway.budget import Hold
from gateway.outcomes import STAGE, count, outcome_of, typed
from gateway.pipeline import Run
from gateway.request import Accepted, Ended, Event, NewTokens, PlannedRequest, joined
from gateway.schema import ChatCall
from gateway.timeline import Timeline
from gateway.toolcalls import CallDelta, CallParser, Delta
from gateway.waste import Visit

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer. The prompt's include text and image placeholders, always."""

    prompt: int
    completion: int
    image: int
    cached: int


@dataclass(frozen=True, slots=True)
class Part:
    """Some more of one choice: text that may be sent, or why it ended."""

    choice: int
    piece: Piece | None = None
    """Its text is content; its tokens are those of the calls as well."""
    calls: tuple[CallDelta, ...] = ()
    reason: FinishReason | None = None
    called: bool = False
    """With `reason`: the model ended with tool calls."""


class Answer:
    """The output of one request as it comes. `reason` (of the first choice) is set after
    the last part."""

    def __init__(
        self,
        call: ChatCall,
        request: PlannedRequest,
        run: Run,
        texts: Sequence[OutputText],
        *,
        timeline: Timeline,
        hold: Hold,
        visit: Visit,
        let_go: Callable[[], None],
    ) -> None:
        """`texts`: one for each choice. `let_go` is called once, when its place is free."""
        self.call = call
        self.request_id = request.request_id
        self.timeline = timeline
        self.reason: FinishReason | None = None
        self._request = request
        self._run = run
        self._hold = hold
        self._visit = visit
        self._place_is_free = let_go
        self._cached = 0
        self._open = True
        self._begun = False
        """Accepted; until then `ChatService.open` knows how it ended."""
        self._has_output = False
        self._fault: EpdError | None = None
        self._handed_over = False
        self._counted = False
        self._texts = texts
        self._parsers = [CallParser(call.tools.single) if call.tools else None for _ in self._texts]
        self._reasons: dict[int, FinishReason] = {}

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt=len(self._request.token_ids),
            completion=sum(text.sampled for text in self._texts),
            image=self._request.image_tokens,
            cached=self._cached,
        )

    async def accepted(self) -> None:
        """Wait until prefill has reserved memory for the request."""
        try:
            event = await self._run.next()
        except EpdError as error:
            self._fault = error
            raise
        assert isinstance(event, Accepted)
        self._cached = event.cached_tokens
        self._begun = True

    @contextmanager
    def served(self) -> Iterator[None]:
        """While it is read and encoded: how it fails in here is how it ended.

        Raises:
            EpdError: the fault; INTERNAL for one that is no `EpdError`.
        """
        try:
            with self.call.names.used(), typed(self.request_id):
                yield
        except EpdError as error:
            self._fault = error
            raise

    async def parts(self) -> AsyncIterator[Part]:
        """Text that may be sent, each piece with its tokens; choices take turns as they
        come. One part with a reason for each choice. Tokens that wait together, because
        the client or this process lags, are one part.

        Raises:
            EpdError: the answer ends here with a fault; see `served`.
        """
        while len(self._reasons) < len(self._texts):
            for event in joined(await self._run.ready()):
                for part in self._take(event):
                    yield part
                    if self.call.stream:
                        self._visit.delivered()

    def _take(self, event: Event) -> Iterator[Part]:
        assert not isinstance(event, Accepted)
        self._on_output()
        choice = event.choice
        if choice in self._reasons:
            return  # it was ended before; this was on its way
        for piece in self._pieces(choice, event):
            yield from self._parsed(choice, piece)
        if self._complete(choice):
            yield from self._ended(choice, FinishReason.STOP)
        elif isinstance(event, Ended):
            yield from self._ended(choice, event.reason)

    def _on_output(self) -> None:
        if not self._has_output:
            self._has_output = True
            metrics.FIRST_TOKEN_SECONDS.labels(STAGE).observe(self.timeline.elapsed_s)

    def _pieces(self, choice: int, event: NewTokens | Ended) -> Iterator[Piece]:
        text, parser = self._texts[choice], self._parsers[choice]
        if isinstance(event, NewTokens) and parser is not None and parser.single:
            # One by one: what came in one message with the call's end is not counted.
            for token in event.tokens:
                if (piece := text.push(token)) is not None:
                    yield piece
                if self._complete(choice):
                    return
            return
        found = text.push_all(event.tokens) if isinstance(event, NewTokens) else text.finish()
        if found is not None:
            yield found

    def _complete(self, choice: int) -> bool:
        """It ends here, whatever the model has in mind: by a stop string, or with the only
        call that is wanted."""
        parser = self._parsers[choice]
        return self._texts[choice].stopped or (parser is not None and parser.done)

    def _parsed(self, choice: int, piece: Piece) -> Iterator[Part]:
        """Content and calls apart, where the model may call."""
        parser = self._parsers[choice]
        if parser is None:
            yield Part(choice, piece)
        else:
            yield _part(choice, parser.push(piece.text), piece.tokens)

    def _ended(self, choice: int, reason: FinishReason) -> Iterator[Part]:
        parser = self._parsers[choice]
        if parser is not None and (rest := parser.finish()):
            yield _part(choice, rest, ())
        self._reasons[choice] = reason
        if len(self._reasons) == len(self._texts):
            self.timeline.end("decode")
            self.reason = self._reasons[0]
            self._let_go("the output is complete")
        elif self._complete(choice):
            self._run.stop(choice)
        called = parser is not None and parser.called and reason is FinishReason.STOP
        yield Part(choice, reason=reason, called=called)

    def finish(self) -> None:
        """All of it was handed over: only now it has ended well, and `cancel` does nothing
        more."""
        self._handed_over = True
        metrics.ANSWER_SECONDS.labels(STAGE).observe(self.timeline.elapsed_s)
        self.cancel("the output is complete")

    def cancel(self, reason: str = "the client is gone") -> None:
        """Let go of everything, and count how it ended; stages tear down in the background.
        Idempotent."""
        if self._fault is not None:
            reason = str(self._fault.kind)  # nobody left: the answer failed
        self._let_go(reason)
        if self._counted:
            return
        self._counted = True
        if self._begun:
            count(self._outcome())
        _log.info(
            "answer ended",
            extra={
                "outcome": str(self.reason if self._handed_over else reason),
                "prompt_tokens": len(self._request.token_ids),
                "completion_tokens": self.usage.completion,
            },
        )

    def _outcome(self) -> str:
        if self._fault is not None:
            return outcome_of(self._fault)
        return "ok" if self._handed_over else "cancelled"

    def _let_go(self, reason: str) -> None:
        """Of stages, bytes and this request's place: already when the output is complete,
        however long its last words then take to the client."""
        if not self._open:
            return
        self._open = False
        self._run.cancel(reason)
        self._hold.release()
        # By its own deadline, too: it leaves then, whichever clock is the first to see it.
        left = self._fault is None or outcome_of(self._fault) == "cancelled"
        self._visit.end(given_up=self.reason is None and left, answered=self.reason is not None)
        self._place_is_free()
        for phase in self.timeline.phases:
            name = phase.name.partition("[")[0]
            metrics.PHASE_SECONDS.labels(STAGE, name).observe(phase.duration_ms / 1e3)


def _part(choice: int, deltas: Sequence[Delta], tokens: tuple[TextToken, ...]) -> Part:
    text = "".join(delta for delta in deltas if isinstance(delta, str))
    calls = tuple(delta for delta in deltas if isinstance(delta, CallDelta))
    return Part(choice, Piece(text, tokens), calls)
