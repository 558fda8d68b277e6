"""Prefill and decode workers with a real model, in one process: caches change no bit.

Exact mode in bfloat16. What each prompt is answered is computed once where nothing is kept,
then asked of a pair of workers with caches and small pools, in random order and company.
The processes themselves, over Mooncake: test_pipeline_caches.py.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.ticket import TokenMade
from decode.worker import DecodeWorker
from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.handoff import embedding_contract
from epd.jobs import ImageItem, Stage
from epd.models.lm import LanguageModel
from epd.runtime.kv import make_store
from epd.transfer.checksum import checksum
from epd.transfer.contract import Handle, Span
from prefill.ticket import Admitted, FirstToken, KvReady
from prefill.worker import PrefillWorker
from tests.conftest import TinyCheckpoint
from tests.unit.fake_stage import FakeMemory, config, decode_job, prefill_job

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


class Pair:
    """One worker of each stage around the same model; bytes go by copying."""

    def __init__(self, lm: LanguageModel, **settings: Any) -> None:
        self.lm = lm
        self.memories = [FakeMemory(), FakeMemory()]
        made: Config = config(kv__block_tokens=BLOCK, **settings)
        owned: Any = self.memories
        self.prefill = PrefillWorker(
            made, lm, owned[0], make_store(made, [Stage.PREFILL], lm, owned[0]), 1000
        )
        self.decode = DecodeWorker(
            made, lm, owned[1], make_store(made, [Stage.DECODE], lm, owned[1]), 120
        )
        generator = torch.Generator().manual_seed(3)
        shape = (lm.spec.planes, ROWS, lm.spec.hidden)
        self.rows = {
            name.encode() * 32: torch.randn(shape, generator=generator).bfloat16() for name in "ab"
        }
        self.cached = 0

    def start(self) -> Pair:
        self.prefill.start()
        self.decode.start()
        return self

    def embedding(self, digest: bytes) -> Handle:
        rows = self.rows[digest]
        span = Span(rows.data_ptr(), rows.nbytes, checksum(rows))
        contract = embedding_contract(self.lm.spec, ROWS, 5)
        return Handle(FakeMemory.peer, contract, (span,), 1000)

    async def ask(self, prompt: Prompt, generated: tuple[int, ...] = ()) -> list[Any]:
        """Tokens with their logprobs; one that decode pushes out goes on as a gateway would."""
        ids, items = (*prompt[0], *generated), prompt[1]
        job = prefill_job(ids, TOKENS, items, prompt=len(prompt[0]))
        sampling = replace(job.sampling, logprobs=True, top_logprobs=8)
        ticket = await self.prefill.submit(replace(job, sampling=sampling))
        reader = await self.decode.submit(
            replace(
                decode_job(ids, TOKENS, prompt=len(prompt[0]), items=items),
                sampling=sampling,
                position_delta=ticket.delta,
            )
        )
        said: list[Any] = []
        try:
            said.append(await self._prefill(ticket, reader, items))
            while events := await reader.events.take():
                said += [event.token for event in events if isinstance(event, TokenMade)]
        except EpdError as error:
            if error.kind is not ErrorKind.OVERLOADED:
                raise
        finally:
            self.decode.close(reader)
            self.prefill.close(ticket, clean=True)
        if len(generated) + len(said) < TOKENS:
            await asyncio.sleep(0.01)
            said += await self.ask(prompt, (*generated, *(token.id for token in said)))
        return said

    async def _prefill(self, ticket: Any, reader: Any, items: tuple[ImageItem, ...]) -> Any:
        while True:
            for event in await ticket.events.take():
                if isinstance(event, Admitted):
                    self.cached += event.cached_tokens
                    for index in event.missing_items:
                        handle = self.embedding(items[index].digest)
                        self.prefill.embedding_ready(ticket, index, handle)
                elif isinstance(event, KvReady):
                    self.decode.kv_ready(reader, event.first_block, event.handle, event.tokens)
                elif isinstance(event, FirstToken):
                    self.decode.begin(reader, event.token, event.kv_tokens)
                    return event.token

    async def shut_down(self) -> None:
        for worker in (self.prefill, self.decode):
            await asyncio.sleep(0.02)
            await worker.shut_down()
            worker.check_integrity()
            assert worker.state()["kv_blocks_used"] == 0


@pytest.fixture(scope="module")
def lm(tiny_checkpoint: TinyCheckpoint) -> LanguageModel:
    path: Path = tiny_checkpoint("qwen3_vl", "bfloat16")
    return LanguageModel.load(path, exact=True, block_tokens=BLOCK)


@pytest.mark.timeout(120)
async def test_caches_change_no_bit_in_any_order(lm: LanguageModel) -> None:
    asked = prompts(lm.spec.image_token_id)
    cold = Pair(lm, kv__prefill_tokens=512, kv__decode_tokens=512, **COLD).start()
    right = [await cold.ask(prompt) for prompt in asked]
    await cold.shut_down()
    assert cold.cached == 0
    assert len({repr(tokens) for tokens in right}) == len(asked), "pictures must matter"

    warm = Pair(lm, kv__prefill_tokens=200, kv__decode_tokens=240, prefill__chunk_tokens=11)
    warm.start()
    chance = random.Random(11)
    for _ in range(12):
        numbers = [chance.randrange(len(asked)) for _ in range(4)]
        answers = await asyncio.gather(*(warm.ask(asked[number]) for number in numbers))
        for number, answer in zip(numbers, answers, strict=True):
            assert answer == right[number], asked[number]
    assert warm.cached > 200
    for worker in (warm.prefill, warm.decode):
        assert worker._kv.blocks.kept > 10
    await warm.shut_down()
