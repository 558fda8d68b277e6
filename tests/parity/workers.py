"""Workers with a real model in one process: what passes between them goes by copying."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from hypothesis import HealthCheck, Phase, settings
from PIL import Image

from decode.ticket import TokenMade
from decode.worker import DecodeWorker
from encode.worker import EncodeWorker
from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.handoff import embedding_contract
from epd.jobs import EncodeJob, ImageItem, Stage
from epd.models.encoder import VisionEncoder
from epd.models.lm import LanguageModel
from epd.models.processor import PreparedImage, Processor
from epd.runtime.kv import make_store
from epd.transfer.checksum import checksum
from epd.transfer.contract import Handle, Span
from prefill.ticket import Admitted, EmbeddingFetched, FirstToken, KvReady
from prefill.worker import PrefillWorker
from tests.unit.fake_stage import FakeMemory, config, decode_job, prefill_job
from tests.unit.pictures import noise
from tests.waiting import LIMIT_S, until

T = TypeVar("T")

BLOCK, TOKENS, ROWS = 8, 14, 4
COLD = {"prefill__prefix_cache": False, "prefill__embedding_cache": False}
COLD |= {"decode__prefix_cache": False}
Prompt = tuple[tuple[int, ...], tuple[ImageItem, ...]]


def prompts(image_id: int, count: int = 9) -> list[Prompt]:
    """Beginnings that many share, pictures of one size in some of them; then the same words
    with the pictures exchanged."""
    chance = random.Random(5)
    words = [i for i in range(20, 60) if i != image_id]
    shared = [chance.choices(words, k=24) for _ in range(2)]
    made: list[Prompt] = []
    for number in range(count):
        names = chance.choices("ab", k=number % 3)
        ids = list(shared[number % 2][: chance.choice([8, 19, 24])])
        for _ in names:
            ids += [*[image_id] * ROWS, *chance.choices(words, k=3)]
        ids += chance.choices(words[:3], k=chance.randrange(1, 20))
        made.append((tuple(ids), pictures(names)))
        if names:
            made.append((tuple(ids), pictures(["ab"[name == "a"] for name in names])))
    return made


def pictures(names: list[str]) -> tuple[ImageItem, ...]:
    return tuple(
        ImageItem(i, name.encode() * 32, ROWS, (1, 4, 4), 8, 8, len(names))
        for i, name in enumerate(names)
    )


@dataclass(eq=False)
class Visit:
    """One request on its way through the workers."""

    prompt: Prompt
    ticket: Any
    reader: Any
    waits: Sequence[float] = ()
    """Seconds before each picture is asked for."""
    encodes: dict[int, Any] = field(default_factory=dict)
    """Encode's open tickets, by image."""
    asking: set[asyncio.Task[None]] = field(default_factory=set)


class Pair:
    """One worker of each stage around the same model; bytes go by copying. Pictures' rows
    are noise, there from the start."""

    def __init__(self, lm: LanguageModel, **settings: Any) -> None:
        self.lm = lm
        self.memories = [FakeMemory(), FakeMemory()]
        self.config: Config = config(kv__block_tokens=BLOCK, **settings)
        owned: Any = self.memories
        stores = [
            make_store(self.config, [stage], lm, memory)
            for stage, memory in zip((Stage.PREFILL, Stage.DECODE), owned, strict=True)
        ]
        self.prefill = PrefillWorker(self.config, lm, owned[0], stores[0], 1000)
        self.decode = DecodeWorker(self.config, lm, owned[1], stores[1], 120)
        generator = torch.Generator().manual_seed(3)
        shape = (lm.spec.planes, ROWS, lm.spec.hidden)
        self.rows = {
            name.encode() * 32: torch.randn(shape, generator=generator).bfloat16() for name in "ab"
        }
        self.cached = 0

    @property
    def workers(self) -> list[Any]:
        return [self.prefill, self.decode]

    def start(self) -> Pair:
        for worker in self.workers:
            worker.start()
        return self

    async def ask(
        self,
        prompt: Prompt,
        generated: tuple[int, ...] = (),
        waits: Sequence[float] = (),
        clean: bool = True,
    ) -> list[Any]:
        """Tokens with their logprobs; one that decode pushes out goes on as a gateway would.
        Cancelled, it leaves: after the stages' last word, or (not `clean`) without."""
        visit = await self._enter(prompt, generated, waits)
        said: list[Any] = []
        ended = False
        try:
            said.append(await self._prefill(visit))
            while events := await visit.reader.events.take():
                said += [event.token for event in events if isinstance(event, TokenMade)]
            ended = True
        except EpdError as error:
            if error.kind is not ErrorKind.OVERLOADED:
                raise
            ended = True
        finally:
            await (self._end(visit) if ended else self._leave(visit, clean))
        if len(generated) + len(said) < TOKENS:
            await asyncio.sleep(0.01)
            more = (*generated, *(token.id for token in said))
            said += await self.ask(prompt, more, waits, clean)
        return said

    async def _enter(
        self, prompt: Prompt, generated: tuple[int, ...], waits: Sequence[float]
    ) -> Visit:
        ids, items = (*prompt[0], *generated), prompt[1]
        job = prefill_job(ids, TOKENS, items, prompt=len(prompt[0]))
        sampling = replace(job.sampling, logprobs=True, top_logprobs=8)
        ticket = await self.prefill.submit(replace(job, sampling=sampling))
        later = decode_job(ids, TOKENS, prompt=len(prompt[0]), items=items)
        try:
            reader = await self.decode.submit(
                replace(later, sampling=sampling, position_delta=ticket.delta)
            )
        except BaseException:
            self.prefill.close(ticket, clean=True)  # nothing of it was announced to anybody
            raise
        return Visit(prompt, ticket, reader, waits)

    async def _prefill(self, visit: Visit) -> Any:
        while True:
            for event in await visit.ticket.events.take():
                if isinstance(event, Admitted):
                    self.cached += event.cached_tokens
                    for index in event.missing_items:
                        self._encode(visit, index)
                elif isinstance(event, EmbeddingFetched):
                    self._fetched(visit, event.index)
                elif isinstance(event, KvReady):
                    self.decode.kv_ready(
                        visit.reader, event.first_block, event.handle, event.tokens
                    )
                elif isinstance(event, FirstToken):
                    self.decode.begin(visit.reader, event.token, event.kv_tokens)
                    return event.token

    def _encode(self, visit: Visit, index: int) -> None:
        rows = self.rows[visit.prompt[1][index].digest]
        span = Span(rows.data_ptr(), rows.nbytes, checksum(rows))
        contract = embedding_contract(self.lm.spec, ROWS, 5)
        handle = Handle(FakeMemory.peer, contract, (span,), 1000)
        self.prefill.embedding_ready(visit.ticket, index, handle)

    def _fetched(self, visit: Visit, index: int) -> None:
        pass

    async def _end(self, visit: Visit) -> None:
        self.decode.close(visit.reader)
        self.prefill.close(visit.ticket, clean=True)

    async def _leave(self, visit: Visit, clean: bool) -> None:
        """Readers first, then owners, as the gateway does."""
        if clean:
            self.decode.cancel(visit.reader)
            await _until_terminal(visit.reader)
        self.decode.close(visit.reader)
        if clean:
            self.prefill.cancel(visit.ticket)
            await _until_terminal(visit.ticket)
        self.prefill.close(visit.ticket, clean=clean)

    async def settle(self) -> None:
        """Until nothing runs: a request that left in the middle of a step is held till the
        step's end, and its lost blocks only then begin to wait for their reader."""
        busy = lambda worker: worker.steps.in_step or worker.state()["tickets"]  # noqa: E731
        await until(lambda: not any(map(busy, self.workers)))

    async def pass_time(self) -> None:
        """What lost readers withheld is free again."""
        await self.settle()
        for memory, worker in zip(self.memories, self.workers, strict=True):
            memory.now += 2
            worker.tick()

    async def shut_down(self) -> None:
        await self.settle()
        for worker in self.workers:
            await worker.shut_down()
            worker.check_integrity()
            state = worker.state()
            left = {name: state.get(name, 0) for name in ("kv_blocks_used", "arena_bytes_used")}
            assert not any(left.values()), f"{worker.stage} still holds {left}"


async def _until_terminal(ticket: Any) -> None:
    """Its last word, or its end."""
    async with asyncio.timeout(LIMIT_S):
        while events := await ticket.events.take():
            if any(type(event).__name__ == "ReadsTerminal" for event in events):
                return


class Trio(Pair):
    """With an encode worker, too: the tower itself makes the rows, when they are asked for."""

    def __init__(self, lm: LanguageModel, encoder: VisionEncoder, **settings: Any) -> None:
        super().__init__(lm, **settings)
        self.memories.append(FakeMemory())
        owned: Any = self.memories[2]
        files: Any = Files(encoder.spec.path)
        self.encode = EncodeWorker(self.config, encoder, files, owned)

    @property
    def workers(self) -> list[Any]:
        return [*super().workers, self.encode]

    def _encode(self, visit: Visit, index: int) -> None:
        wait_s = visit.waits[index % len(visit.waits)] if visit.waits else 0.0
        visit.asking.add(asyncio.create_task(self._encoded(visit, index, wait_s)))

    async def _encoded(self, visit: Visit, index: int, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        item = visit.prompt[1][index]
        ticket = self.encode.submit(EncodeJob("r", 1, 5, item, item.digest))
        visit.encodes[index] = ticket
        await asyncio.shield(ticket.finished)
        self.prefill.embedding_ready(visit.ticket, index, self.encode.announce(ticket))

    def _fetched(self, visit: Visit, index: int) -> None:
        self.encode.close(visit.encodes.pop(index), clean=True)

    async def _end(self, visit: Visit) -> None:
        assert not visit.encodes, "prefill gave a token before it had all pictures"
        await super()._end(visit)

    async def _leave(self, visit: Visit, clean: bool) -> None:
        for task in visit.asking:
            task.cancel()
        await asyncio.gather(*visit.asking, return_exceptions=True)
        await super()._leave(visit, clean)
        for ticket in visit.encodes.values():
            self.encode.close(ticket, clean=clean)


async def unless_it_leaves(asking: Coroutine[Any, Any, T], leaves_ms: int | None) -> T | None:
    """What was said, or None to a client that left before."""
    task = asyncio.create_task(asking)
    if leaves_ms is not None:
        await asyncio.wait({task}, timeout=leaves_ms / 1e3)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            return None
    return await task


def schedules(examples: int) -> settings:
    """So many of them. No shrinking: what fails by an unlucky moment doesn't fail again, after
    minutes of it."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    phases = set(Phase) - {Phase.shrink}
    return settings(max_examples=examples, phases=phases, suppress_health_check=checks)


class Files:
    """Stands in for the sandbox: a file's first byte says which picture it is."""

    def __init__(self, path: str) -> None:
        self._processor = Processor.load(path)
        sides = (side for side in range(28, 200, 4) if self._rows(side) == ROWS)
        self._side = next(sides)

    def _rows(self, side: int) -> int:
        return self._processor.plan(side, side).rows

    async def prepare(self, wanted: EncodeJob) -> PreparedImage:
        picture: Image.Image = noise(self._side, self._side, seed=wanted.image[0])
        prepared = self._processor.prepare(picture, wanted.item.images_in_request)
        assert (prepared.rows, prepared.grid) == (wanted.item.rows, wanted.item.grid)
        return prepared

    def close(self) -> None:
        pass
