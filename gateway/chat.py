"""The door of the gateway, whatever the API: room, deadline, planning; behind it an `Answer`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from tokenizers import Tokenizer

from epd.config import Config
from epd.errors import EpdError, ErrorKind, invalid
from epd.jobs import Stage
from epd.text.output import OutputText
from epd.text.vocabulary import Vocabulary
from gateway.answer import Answer
from gateway.budget import Budget, Hold
from gateway.deadline import Deadline
from gateway.outcomes import beginning, outcome_of
from gateway.pipeline import Pipeline
from gateway.prepare import Preparer
from gateway.request import PlannedRequest
from gateway.schema import ChatCall
from gateway.timeline import Timeline
from gateway.waste import Door, Visit


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
        self._deadlines: set[Deadline] = set()
        """Of all that is received or in flight."""

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """While a request's body is read: it is one of those in flight already.

        Raises:
            EpdError: no room for another request, or its time is over.
        """
        self._check_room()
        self._receiving += 1
        deadline = Deadline.of(self.config.limits.request_deadline_s)
        self._deadlines.add(deadline)
        try:
            async with deadline.kept():
                yield
        finally:
            self._receiving -= 1
            self._deadlines.discard(deadline)

    def end_all(self) -> None:
        """The gateway ends: whoever still waits for an answer, or for the rest of one, is
        told so, and may ask another gateway."""
        for deadline in list(self._deadlines):
            deadline.end(_shutting_down())

    async def open(
        self, call: ChatCall, request_id: str, hold: Hold, deadline_s: float | None = None
    ) -> Answer:
        """Check, plan, and get the request admitted. The caller must `cancel` the answer
        in the end, whatever happens; that releases `hold`, too.

        Raises:
            EpdError: nothing was begun, or all of it was given up.
        """
        with beginning(), call.names.used():
            return await self._open(call, request_id, hold, deadline_s)

    async def _open(
        self, call: ChatCall, request_id: str, hold: Hold, deadline_s: float | None
    ) -> Answer:
        self.check_model(call.model)
        self._check_images(call)
        timeline = Timeline()
        deadline = Deadline.of(self.config.limits.request_deadline_s, deadline_s)
        self._check_room()
        self.inflight += 1
        self._deadlines.add(deadline)
        visit: Visit | None = None
        try:
            async with deadline.kept():
                visit = await self.door.enter(call.salt)
            timeline.begin("plan")
            with self.pipeline.ahead(request_id, deadline) as ahead:
                meanwhile = partial(ahead.open, Stage.PREFILL)
                request = await self.plan(call, request_id, hold, deadline, meanwhile)
                timeline.end("plan")
                run = self.pipeline.start(request, deadline, timeline, ahead)
        except BaseException as error:
            self._place_is_free(deadline)
            if visit is not None:
                visit.end(given_up=outcome_of(error) == "cancelled")
            raise
        answer = Answer(
            call,
            request,
            run,
            self._texts(call, request),
            timeline=timeline,
            hold=hold,
            visit=visit,
            let_go=partial(self._place_is_free, deadline),
        )
        try:
            await answer.accepted()
        except BaseException:
            answer.cancel()
            raise
        return answer

    def _place_is_free(self, deadline: Deadline) -> None:
        self.inflight -= 1
        self._deadlines.discard(deadline)

    def _texts(self, call: ChatCall, request: PlannedRequest) -> list[OutputText]:
        stop, ending = call.generation.stop, request.sampling.ending_ids
        return [
            OutputText(self.tokenizer, self.vocabulary, stop, ending)
            for _ in range(request.choices)
        ]

    async def plan(
        self,
        call: ChatCall,
        request_id: str,
        hold: Hold,
        deadline: Deadline | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> PlannedRequest:
        """What the stages would be asked; none is. Without a `deadline` it is the gateway's.
        `meanwhile` is done while the prompt is built.

        Raises:
            EpdError: the user's fault, or the deadline has passed.
        """
        until = deadline or Deadline.of(self.config.limits.request_deadline_s)
        with call.names.used():
            async with until.kept():
                return await self.preparer.plan(call, request_id, hold, meanwhile)

    def check_model(self, name: str) -> None:
        """Raises EpdError for another model than ours; an empty name is none."""
        if name not in ("", self.model):
            reason = f"the model {name!r} is not served here; it is {self.model!r}"
            raise EpdError(ErrorKind.MODEL_NOT_FOUND, reason, param="model")

    @property
    def takes_images(self) -> bool:
        """Not where the service was started for text alone (``epd serve --encode 0``), unless
        an encoder has joined it all the same."""
        serve = self.config.serve
        text_only = serve.encode == 0 and not serve.stages
        return not text_only or bool(self.pipeline.stages.registry.live(Stage.ENCODE))

    @property
    def input_modalities(self) -> list[str]:
        return ["text", "image"] if self.takes_images else ["text"]

    def _check_images(self, call: ChatCall) -> None:
        images = call.conversation.images
        if images and not self.takes_images:
            raise invalid("this service is for text alone: it has no encoders", images[0].param)

    def _check_room(self) -> None:
        if self.draining:
            raise _shutting_down()
        busy = self.inflight + self._receiving
        if busy >= (most := self.config.limits.max_inflight):
            reason = f"{busy} requests are in flight, {most} are allowed"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)


def _shutting_down() -> EpdError:
    reason = "the gateway is shutting down"
    return EpdError(ErrorKind.STAGE_UNAVAILABLE, reason, retry_after_s=1.0)
