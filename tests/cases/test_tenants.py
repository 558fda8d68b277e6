"""Case KEY-06: tenants find nothing of each other in any cache, whatever they send.

That both APIs give each key its salt is tested in `tests/e2e/test_gateway_access.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3

from decode.ticket import Admitted as DecodeAdmitted
from epd.jobs import SampledToken
from gateway.checkpoint import Loaded
from prefill.ticket import Admitted, FirstToken
from tests.cases.kv_model import KvLm, Prompt
from tests.cases.test_cache_fuzz import Prefills, announced, embedding
from tests.e2e.gateway_house import CHAT, body, opened
from tests.e2e.http_client import post
from tests.unit import decode_bench, prefill_bench
from tests.unit.fake_stage import decode_job, prefill_job

PROMPT = Prompt((20, 20, 21, "A", 22, 23, "B", 24, 20))
ALICE, BOB = b"alice" * 6, b"bob" * 10


async def test_key_06_prefill_finds_nothing_of_another_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = Prefills(0, monkeypatch)

    async def ask(salt: bytes) -> Admitted:
        items = tuple(replace(i, digest=blake3(salt + i.digest).digest()) for i in PROMPT.items)
        job = prefill_job(PROMPT.ids, items=items, salt=salt)
        ticket = await many.bench.worker.submit(job)
        (admitted,) = [
            event
            for event in await prefill_bench.until_event(ticket, Admitted)
            if isinstance(event, Admitted)
        ]
        for index in admitted.missing_items:
            picture = PROMPT.pictures[index]
            memory = many.memories.setdefault(picture, embedding(picture))
            many.bench.worker.embedding_ready(ticket, index, announced(many.bench, memory))
        (first,) = [
            event
            for event in await prefill_bench.until_event(ticket, FirstToken)
            if isinstance(event, FirstToken)
        ]
        assert first.token.id == PROMPT.after(1)[0]
        many.bench.worker.close(ticket, clean=True)
        return admitted

    assert (await ask(ALICE)).cached_tokens == 0
    assert (await ask(ALICE)).cached_tokens > 0
    for stranger in (BOB, b"", ALICE + b"\0", ALICE[:-1]):
        found = await ask(stranger)
        assert (found.cached_tokens, found.missing_items) == (0, (0, 1))
    await many.bench.worker.shut_down()
    many.bench.idle()


async def test_key_06_decode_finds_nothing_of_another_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_bench, "FakeLm", KvLm)
    bench, ids = decode_bench.Bench(), [20, 21, 22, 23, 24, 20, 21, 22, 23]

    async def ask(salt: bytes) -> int:
        bench.compute(ids)
        ticket = await bench.worker.submit(decode_job(ids, max_tokens=3, salt=salt))
        bench.worker.kv_ready(ticket, 0, bench.handle(range(3)), len(ids))
        bench.worker.begin(ticket, SampledToken(50), len(ids))
        events = await decode_bench.drain(ticket)
        bench.worker.close(ticket)
        (admitted,) = [event for event in events if isinstance(event, DecodeAdmitted)]
        return admitted.cached_tokens

    assert [await ask(salt) for salt in (ALICE, ALICE, BOB, b"")] == [0, 8, 0, 0]
    await bench.close()


KEYS = ("key-of-alice", "key-of-bob")
ROUTES: dict[str, Any] = {
    CHAT: body(),
    "/v1/completions": {"model": "demo", "prompt": "what is it?", "max_tokens": 8},
    "/v1/responses": {"model": "demo", "input": "what is it?"},
}


async def test_key_06_every_route_knows_its_tenant_and_no_client_names_one(loaded: Loaded) -> None:
    async with opened(loaded, api_keys=KEYS) as house:
        salts: dict[str, set[bytes]] = {}
        for key in KEYS:
            bearer = {"authorization": f"Bearer {key}"}
            for route, asked in ROUTES.items():
                before = len(house.script.jobs)
                assert (await post(house.http, route, asked, **bearer)).status == 200, route
                found = {job.salt for stage, job in house.script.jobs[before:]}
                salts.setdefault(key, set()).update(found)
                for field in ("salt", "cache_salt"):
                    named = await post(house.http, route, asked | {field: "alice"}, **bearer)
                    assert named.status == 400, (route, field)
        assert all(len(found) == 1 and b"" not in found for found in salts.values()), salts
        assert salts[KEYS[0]].isdisjoint(salts[KEYS[1]])
