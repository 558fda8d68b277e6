"""Every cache and every overlap, in schedules that hypothesis draws: no bit changes.

Encode, prefill and decode workers with real models, in one process, exact mode in bfloat16.
What each prompt is answered is computed once without caches, one after another, with overlap
off. Then waves of requests: when each comes, when its pictures are asked for, who leaves and
how, how large chunks, pools and caches are (small ones evict and push out), overlap on or off.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.models.encoder import VisionEncoder
from epd.models.lm import LanguageModel
from tests.conftest import TinyCheckpoint
from tests.parity.workers import BLOCK, COLD, Prompt, Trio, prompts, schedules, unless_it_leaves

FAMILY = "qwen3_vl"
_PROMPTS = 14


@dataclass(frozen=True)
class House:
    lm: LanguageModel
    encoder: VisionEncoder
    asked: list[Prompt]
    right: list[list[Any]]


@pytest.fixture(scope="module")
def house(tiny_checkpoint: TinyCheckpoint) -> House:
    """The models, the prompts, and what is right."""
    path = tiny_checkpoint(FAMILY, "bfloat16")
    lm = LanguageModel.load(path, exact=True, block_tokens=BLOCK)
    encoder = VisionEncoder.load(path, exact=True)
    asked = prompts(lm.spec.image_token_id)
    assert len(asked) >= _PROMPTS

    async def alone() -> list[list[Any]]:
        off = {"prefill__overlap": False, "encode__cache_mib": 0}
        pools = {"kv__prefill_tokens": 512, "kv__decode_tokens": 512}
        cold = Trio(lm, encoder, **pools, **off, **COLD)
        cold.start()
        answers = [await cold.ask(prompt) for prompt in asked]
        await cold.shut_down()
        return answers

    right = asyncio.run(alone())
    assert len({repr(tokens) for tokens in right}) == len(asked), "pictures must matter"
    return House(lm, encoder, asked, right)


milliseconds = st.sampled_from([0, 0, 1, 3, 8, 20])


@dataclass(frozen=True)
class Guest:
    case: int
    comes_ms: int
    pictures_ms: tuple[int, ...]
    leaves_ms: int | None
    clean: bool


guests = st.builds(
    Guest,
    case=st.integers(0, _PROMPTS - 1),
    comes_ms=milliseconds,
    pictures_ms=st.tuples(milliseconds, milliseconds),
    leaves_ms=st.one_of(st.none(), st.none(), st.none(), st.sampled_from([0, 2, 5, 12, 30, 80])),
    clean=st.booleans(),
)
waves = st.lists(st.lists(guests, min_size=1, max_size=6), min_size=1, max_size=3)
houses = st.fixed_dictionaries(
    {
        "prefill__overlap": st.booleans(),
        "prefill__chunk_tokens": st.sampled_from([3, 8, 11, 64]),
        "prefill__step_tokens": st.sampled_from([11, 40, 200]),
        "prefill__step_ms": st.just(0),
        "prefill__embedding_cache": st.booleans(),
        "encode__batch_patches": st.sampled_from([1, 1024]),
        "kv__prefill_tokens": st.sampled_from([96, 160, 400]),
        "kv__decode_tokens": st.sampled_from([120, 200, 400]),
        "decode__max_running": st.sampled_from([2, 16]),
    }
)


async def play(house: House, drawn: dict[str, Any], together: list[list[Guest]]) -> None:
    trio = Trio(house.lm, house.encoder, **drawn)
    trio.start()
    async with asyncio.timeout(200):
        for wave in together:
            answers = await asyncio.gather(*(_visit(trio, house, guest) for guest in wave))
            for guest, answer in zip(wave, answers, strict=True):
                if answer is not None:
                    assert answer == house.right[guest.case], guest
            await trio.pass_time()
        await trio.shut_down()


async def _visit(trio: Trio, house: House, guest: Guest) -> list[Any] | None:
    """What was said, or None to one that left."""
    await asyncio.sleep(guest.comes_ms / 1e3)
    waits = [wait / 1e3 for wait in guest.pictures_ms]
    asking = trio.ask(house.asked[guest.case], waits=waits, clean=guest.clean)
    return await unless_it_leaves(asking, guest.leaves_ms)


@schedules(12)
@given(houses, waves)
def test_no_schedule_changes_a_bit(
    house: House, drawn: dict[str, Any], together: list[list[Guest]]
) -> None:
    asyncio.run(play(house, drawn, together))


@pytest.mark.long
@pytest.mark.timeout(900)
@schedules(200)
@given(houses, waves)
def test_no_schedule_of_many_changes_a_bit(
    house: House, drawn: dict[str, Any], together: list[list[Guest]]
) -> None:
    asyncio.run(play(house, drawn, together))
