"""One answer, whatever the API in front of it: text pieces, usage, timeline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tokenizers import Tokenizer

from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason
from epd.obs import metrics
from epd.text.output import OutputText, Piece, TextToken
from epd.text.vocabulary import Vocabulary
from gateway.budget import Budget, Hold
from gateway.outcomes import STAGE, beginning, count, outcome_of, typed
from gateway.pipeline import Pipeline, Run
from gateway.prepare import Preparer
from gateway.request import Accepted, Ended, Event, NewTokens, PlannedRequest, joined
from gateway.schema import ChatCall
from gateway.timeline import Timeline
from gateway.toolcalls import CallDelta, CallParser, Delta
from gateway.waste import Door, Visit

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer. The prompt's include text and image placeholders, always."""

    prompt: int
    completion: int
    image: int
    cached: int


class ChatService:
    """What the HTTP and the gRPC API share. One per gateway."""

    def __init__(
        self,
        model: str,
        config: Config,
        preparer: Preparer,
        pipeline: Pipeline,
        tokenizer: Tokenizer,
    ) -> None:
        self.model = model
        self.config = config
        self.preparer = preparer
        self.pipeline = pipeline
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        several = len(config.gateway.api_keys) > 1
        self.budget = Budget(config.limits.max_inflight_mib << 20, several)
        self.door = Door(config.gateway.hold_s)
        self.draining = False
        self.inflight = 0
        self._receiving = 0

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While a request's body is read: it is one of those in flight already.

        Raises:
            EpdError: no room for another request.
        """
        self._check_room()
        self._receiving += 1
        try:
            yield
        finally:
            self._receiving -= 1

    async def open(
        self, call: ChatCall, request_id: str, hold: Hold, deadline_s: float | None = None
    ) -> Answer:
        """Check, plan, and get the request admitted. The caller must `cancel` the answer
        in the end, whatever happens; that releases `hold`, too.

        Raises:
            EpdError: nothing was begun, or all of it was given up.
        """
        with beginning():
            return await self._open(call, request_id, hold, deadline_s)

    async def _open(
        self, call: ChatCall, request_id: str, hold: Hold, deadline_s: float | None
    ) -> Answer:
        self.check_model(call.model)
        timeline = Timeline()
        longest = self.config.limits.request_deadline_s
        allowed = longest if deadline_s is None else min(deadline_s, longest)
        deadline = asyncio.get_running_loop().time() + allowed
        self._check_room()
        self.inflight += 1
        visit: Visit | None = None
        try:
            async with asyncio.timeout_at(deadline):
                visit = await self.door.enter(call.salt)
            timeline.begin("plan")
            request = await self.plan(call, request_id, hold, deadline)
            timeline.end("plan")
            run = self.pipeline.start(request, deadline, timeline)
        except BaseException as error:
            self.inflight -= 1
            if visit is not None:
                visit.end(given_up=outcome_of(error) == "cancelled")
            if isinstance(error, TimeoutError):
                reason = "the request's deadline has passed"
                raise EpdError(ErrorKind.DEADLINE_EXCEEDED, reason) from None
            raise
        answer = Answer(self, call, request, run, timeline, deadline, hold, visit)
        try:
            await answer.accepted()
        except BaseException:
            answer.cancel()
            raise
        return answer

    async def plan(
        self, call: ChatCall, request_id: str, hold: Hold, deadline: float | None = None
    ) -> PlannedRequest:
        """What the stages would be asked; none is. `deadline` is on the loop's clock.

        Raises:
            EpdError: the user's fault, or the deadline has passed.
        """
        longest = asyncio.get_running_loop().time() + self.config.limits.request_deadline_s
        try:
            async with asyncio.timeout_at(longest if deadline is None else deadline):
                return await self.preparer.plan(call, request_id, hold)
        except TimeoutError:
            reason = "the request's deadline has passed"
            raise EpdError(ErrorKind.DEADLINE_EXCEEDED, reason) from None

    def check_model(self, name: str) -> None:
        """Raises EpdError for another model than ours; an empty name is none."""
        if name not in ("", self.model):
            reason = f"the model {name!r} is not served here; it is {self.model!r}"
            raise EpdError(ErrorKind.MODEL_NOT_FOUND, reason, param="model")

    def _check_room(self) -> None:
        if self.draining:
            raise EpdError(
                ErrorKind.STAGE_UNAVAILABLE, "the gateway is shutting down", retry_after_s=1.0
            )
        busy = self.inflight + self._receiving
        if busy >= (most := self.config.limits.max_inflight):
            reason = f"{busy} requests are in flight, {most} are allowed"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)


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
        service: ChatService,
        call: ChatCall,
        request: PlannedRequest,
        run: Run,
        timeline: Timeline,
        deadline: float,
        hold: Hold,
        visit: Visit,
    ) -> None:
        self.call = call
        self.request_id = request.request_id
        self.deadline = deadline
        self.timeline = timeline
        self.reason: FinishReason | None = None
        self._service = service
        self._request = request
        self._run = run
        self._hold = hold
        self._visit = visit
        self._cached = 0
        self._open = True
        self._begun = False
        """Accepted; until then `ChatService.open` knows how it ended."""
        self._fault: EpdError | None = None
        self._handed_over = False
        self._counted = False
        self._texts = [
            OutputText(
                service.tokenizer,
                service.vocabulary,
                call.generation.stop,
                request.sampling.ending_ids,
            )
            for _ in range(request.choices)
        ]
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
            with typed(self.request_id):
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
        choice = event.choice
        if choice in self._reasons:
            return  # it was ended before; this was on its way
        for piece in self._pieces(choice, event):
            yield from self._parsed(choice, piece)
        if self._complete(choice):
            yield from self._ended(choice, FinishReason.STOP)
        elif isinstance(event, Ended):
            yield from self._ended(choice, event.reason)

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
        self._visit.end(
            given_up=self.reason is None and self._fault is None, answered=self.reason is not None
        )
        self._service.inflight -= 1
        for phase in self.timeline.phases:
            name = phase.name.partition("[")[0]
            metrics.PHASE_SECONDS.labels(STAGE, name).observe(phase.duration_ms / 1e3)


def _part(choice: int, deltas: Sequence[Delta], tokens: tuple[TextToken, ...]) -> Part:
    text = "".join(delta for delta in deltas if isinstance(delta, str))
    calls = tuple(delta for delta in deltas if isinstance(delta, CallDelta))
    return Part(choice, Piece(text, tokens), calls)
