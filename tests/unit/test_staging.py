"""Workers whose pools have a mirror, as on a device: what is carried over, and when."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from unittest.mock import patch

import torch

from decode.ticket import Finished
from prefill.ticket import FirstToken, KvReady
from tests.unit import decode_bench, prefill_bench
from tests.unit.fake_stage import prefill_job
from tests.waiting import LIMIT_S, a_moment, until

IDS = list(range(20, 30))


async def test_prefill_announces_what_it_computed() -> None:
    bench = prefill_bench.Bench(transfer__staging="always")
    ticket = await bench.worker.submit(prefill_job(IDS))
    events = await prefill_bench.until_event(ticket, FirstToken)
    (ready,) = [event for event in events if isinstance(event, KvReady)]
    pool = bench.kv.pool
    assert pool.mirrored
    for block, span in zip(ticket.blocks, ready.handle.spans, strict=True):
        seen_by_peers = ctypes.string_at(span.address, span.length)
        assert seen_by_peers == bytes(pool.bytes[block].numpy())
        assert any(seen_by_peers)
    bench.worker.close(ticket, clean=True)
    await bench.worker.shut_down()


async def test_decode_computes_with_what_it_read() -> None:
    bench = decode_bench.Bench(transfer__staging="always")
    ticket = await bench.join(IDS, max_tokens=3)
    assert isinstance((await decode_bench.drain(ticket))[-1], Finished)
    pool = bench.kv.pool
    assert pool.mirrored
    keys = pool.k(0).flatten(0, 1)  # the first blocks of an unused pool
    assert torch.equal(keys[: len(IDS), 0, 0], torch.tensor(IDS, dtype=torch.float32))
    bench.worker.close(ticket)
    await bench.worker.shut_down()


async def test_blocks_that_are_copied_to_the_device_stay_until_the_copy_ends() -> None:
    """It runs in a thread, which no cancelling ends: whoever had these blocks next would find
    another request's bytes in them."""
    bench = decode_bench.Bench(transfer__staging="always")
    pool = bench.kv.pool
    begun, gate, copy = threading.Event(), threading.Event(), pool.from_peers

    def slow(blocks: Sequence[int]) -> None:
        begun.set()
        assert gate.wait(LIMIT_S)
        copy(blocks)

    with patch.object(pool, "from_peers", slow):
        ticket = await bench.join(IDS)
        await until(begun.is_set)
        bench.worker.close(ticket)
        await a_moment()
        assert bench.used == 4
        bench.worker.check_integrity()
        gate.set()
        await until(lambda: bench.used == 0)
    await bench.close()
