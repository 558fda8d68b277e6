"""The encode worker's own logic: one encode for many readers, with fake pictures and tower."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from encode.ticket import Ticket
from encode.work import Work, content_key
from encode.worker import EncodeWorker
from epd.errors import EpdError, ErrorKind
from epd.jobs import EncodeJob, ImageItem
from epd.models.processor import PreparedImage
from epd.obs import metrics
from epd.transfer.checksum import checksum_at
from epd.transfer.contract import Handle
from tests.readings import reading
from tests.uncollected import uncollected
from tests.unit.fake_stage import FakeLm, FakeMemory, config
from tests.waiting import LIMIT_S, a_moment, until

ROWS = 20_000
"""Of 16 bytes: three pictures fill the arena of 1 MiB."""
BAD, POISON = 66, 67
"""Pictures that can't be decoded, and that the tower raises at."""


def job(picture: int, request: str = "r", salt: bytes = b"", **item: Any) -> EncodeJob:
    facts: dict[str, Any] = {
        "index": 0, "digest": bytes([picture]) * 32, "rows": ROWS, "grid": (), "width": 8,
        "height": 8, "images_in_request": 1,
    }  # fmt: skip
    return EncodeJob(request, 1, 5, ImageItem(**facts | item), bytes([picture]) * 100, salt)


@dataclass
class Pictures:
    """Stands in for the sandbox: a file's first byte is its picture."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    decoded: Counter[int] = field(default_factory=Counter)

    async def prepare(self, wanted: EncodeJob) -> PreparedImage:
        picture = wanted.image[0]
        self.decoded[picture] += 1
        await self.gate.wait()
        if picture == BAD:
            raise EpdError(ErrorKind.INVALID_IMAGE, "no picture", param="job.image")
        return PreparedImage({"picture": torch.tensor(picture)}, ROWS, (), ROWS, 0)

    def close(self) -> None:
        pass


class Tower:
    weights_bytes = 0

    def __init__(self) -> None:
        self.spec = FakeLm().spec
        self.encoded: Counter[int] = Counter()
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def report_layers(self, done: Callable[[], None]) -> None:
        pass

    def encode(self, images: Sequence[PreparedImage]) -> list[torch.Tensor]:
        assert self.gate.wait(LIMIT_S)
        pictures = [int(image.tensors["picture"]) for image in images]
        self.batches.append(pictures)
        if POISON in pictures:
            raise ZeroDivisionError("poison")
        self.encoded.update(pictures)
        shape = (self.spec.planes, ROWS, self.spec.hidden)
        return [torch.full(shape, float(picture)) for picture in pictures]


class Bench:
    def __init__(self, **flags: Any) -> None:
        self.memory, self.pictures, self.tower = FakeMemory(), Pictures(), Tower()
        self.pictures.gate.set()
        limits = {"encode__arena_mib": 1, "encode__cache_mib": 1, "encode__max_queue": 20}
        made: Any = (config(**limits | flags), self.tower, self.pictures, self.memory)
        self.worker = EncodeWorker(*made)
        self.worker.start()

    def state(self, name: str) -> Any:
        return self.worker.state()[name]

    @property
    def prepared(self) -> int:
        """Pictures that could be in the next batch."""
        waiting = self.worker._works.batcher._waiting.values()
        return sum(image.patches > 0 for image in waiting)

    async def ready(self, wanted: EncodeJob) -> tuple[Ticket, Handle]:
        ticket = self.worker.submit(wanted)
        await asyncio.wait_for(asyncio.shield(ticket.finished), LIMIT_S)
        return ticket, self.worker.announce(ticket)

    async def close(self) -> None:
        self.pictures.gate.set()
        held = self.worker._works.batcher._held
        await until(lambda: not self.state("tickets") and not held())
        self.memory.now += 10
        self.worker.tick()
        self.worker.check_integrity()
        assert self.state("tickets") == 0
        assert self.state("arena_bytes_used") == 0
        assert self.state("cache_bytes_pinned") == 0
        await self.worker.shut_down()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.close()


def looked_up(outcome: str) -> float:
    return reading(metrics.CACHE_LOOKUPS.labels("embedding", outcome))


def value_at(handle: Handle) -> float:
    """The picture whose rows a reader of this handle gets; its sum is checked."""
    import ctypes

    (span,) = handle.spans
    assert checksum_at(span.address, span.length) == span.checksum, "the rows changed"
    return float(ctypes.c_float.from_address(span.address).value)


async def test_a_picture_asked_for_again_is_neither_decoded_nor_encoded(bench: Bench) -> None:
    hits = looked_up("hit")
    first, handle = await bench.ready(job(1, "a"))
    bench.worker.close(first, clean=True)
    again, second = await bench.ready(job(1, "b"))
    assert handle.spans == second.spans, "the same bytes, summed once"
    assert bench.pictures.decoded == bench.tower.encoded == Counter({1: 1})
    assert looked_up("hit") == hits + 1
    assert again.timing.run_ms == again.timing.preprocess_ms == 0
    bench.worker.close(again, clean=True)


async def test_many_who_want_it_at_once_wait_for_one_encode(bench: Bench) -> None:
    joined = looked_up("joined")
    bench.pictures.gate.clear()
    tickets = [bench.worker.submit(job(1, f"r{i}")) for i in range(5)]
    await until(lambda: bench.pictures.decoded)
    bench.worker.close(tickets[0], clean=False)  # the first leaves: the work goes on
    bench.worker.close(tickets[3], clean=False)
    bench.pictures.gate.set()
    rest = [tickets[i] for i in (1, 2, 4)]
    for ticket in rest:
        await asyncio.wait_for(ticket.finished, LIMIT_S)
        assert value_at(bench.worker.announce(ticket)) == 1
    assert bench.tower.encoded == Counter({1: 1})
    assert looked_up("joined") == joined + 4
    for ticket in rest:
        bench.worker.close(ticket, clean=True)


async def test_nothing_is_kept_of_a_picture_that_nobody_waits_for(bench: Bench) -> None:
    """Its file is megabytes."""
    bench.pictures.gate.clear()
    with uncollected(Work) as alive:
        ticket = bench.worker.submit(job(1))
        await until(lambda: bench.pictures.decoded)
        bench.worker.close(ticket, clean=False)
        await until(lambda: not alive(), limit_s=10)


async def test_the_last_to_leave_ends_the_work(bench: Bench) -> None:
    bench.pictures.gate.clear()
    tickets = [bench.worker.submit(job(1)) for _ in range(2)]
    await until(lambda: bench.pictures.decoded)
    for ticket in tickets:
        bench.worker.close(ticket, clean=False)
    bench.pictures.gate.set()
    await a_moment()
    assert not bench.tower.encoded
    assert bench.state("cache_bytes") == 0


@pytest.mark.parametrize(
    ("picture", "kind"), [(BAD, ErrorKind.INVALID_IMAGE), (POISON, ErrorKind.INTERNAL)]
)
async def test_a_failed_encode_fails_all_who_wait_and_leaves_nothing(
    bench: Bench, picture: int, kind: ErrorKind
) -> None:
    for _ in range(3):
        tickets = [bench.worker.submit(job(picture)) for _ in range(3)]
        good, handle = await bench.ready(job(1))
        assert value_at(handle) == 1
        for ticket in tickets:
            with pytest.raises(EpdError) as caught:
                await asyncio.wait_for(ticket.finished, LIMIT_S)
            assert caught.value.kind is kind
            bench.worker.close(ticket, clean=False)
        bench.worker.close(good, clean=True)
    assert bench.pictures.decoded[picture] == 3, "tried again each time: no entry was left"
    assert bench.tower.encoded == Counter({1: 1})


async def test_rows_that_a_lost_reader_may_read_are_kept_and_given_to_nobody(bench: Bench) -> None:
    lost, handle = await bench.ready(job(1))
    other, _ = await bench.ready(job(1))
    bench.worker.close(lost, clean=False)
    bench.worker.close(other, clean=False)
    quarantined = bench.memory.leases.quarantined_bytes
    assert quarantined == lost.nbytes, "the same bytes count once"
    again, fresh = await bench.ready(job(1))
    assert fresh.spans[0].address != handle.spans[0].address
    assert bench.tower.encoded == Counter({1: 2})
    for picture in (2, 3):  # room for one more only: the quarantined place is taken
        ticket, _ = await bench.ready(job(picture))
        assert value_at(handle) == 1
        bench.worker.close(ticket, clean=True)
    bench.worker.close(again, clean=True)


async def test_kept_pictures_give_way_to_new_ones(bench: Bench) -> None:
    for picture in (1, 2, 3, 1, 4, 1):
        ticket, handle = await bench.ready(job(picture))
        assert value_at(handle) == picture
        bench.worker.close(ticket, clean=True)
    assert bench.tower.encoded == Counter([1, 2, 3, 4]), "2 went, not 1"
    ticket, _ = await bench.ready(job(2))
    assert bench.tower.encoded[2] == 2
    bench.worker.close(ticket, clean=True)


async def test_switched_off_each_is_encoded_on_its_own() -> None:
    bench = Bench(encode__cache_mib=0)
    bench.pictures.gate.clear()
    tickets = [bench.worker.submit(job(1)) for _ in range(2)]
    bench.pictures.gate.set()
    for ticket in tickets:
        await asyncio.wait_for(ticket.finished, LIMIT_S)
        bench.worker.close(ticket, clean=True)
    assert bench.tower.encoded == Counter({1: 2})
    assert bench.worker._arena.used_bytes == 0
    await bench.close()


async def test_waiting_for_others_work_is_bounded_too(bench: Bench) -> None:
    """For each client by itself: who waits for a picture that is made already is no burden."""
    bench.pictures.gate.clear()
    tickets = [bench.worker.submit(job(1, salt=b"burst")) for _ in range(20)]
    with pytest.raises(EpdError) as caught:
        bench.worker.submit(job(1, salt=b"burst"))
    assert caught.value.kind is ErrorKind.OVERLOADED
    tickets += [bench.worker.submit(job(2, salt=b"one")) for _ in range(2)]
    for ticket in tickets:
        bench.worker.close(ticket, clean=False)


async def test_pictures_that_are_being_read_keep_nobody_from_joining(bench: Bench) -> None:
    """They wait for nothing here, however many they are."""
    read = [(await bench.ready(job(1)))[0] for _ in range(20)]
    bench.pictures.gate.clear()
    waiting = [bench.worker.submit(job(2)) for _ in range(2)]
    bench.pictures.gate.set()
    for ticket in (*read, *waiting):
        await asyncio.wait_for(asyncio.shield(ticket.finished), LIMIT_S)
        bench.worker.close(ticket, clean=True)


@pytest.mark.parametrize(
    "other",
    [
        job(2),
        job(1, rows=10),
        job(1, width=9),
        job(1, grid=(1, 2, 4)),
        job(1, max_pixels=9),
        job(1, digest=b"x" * 32),  # another tenant, processor, decode rule, ...
    ],
    ids=["bytes", "rows", "size", "grid", "detail", "digest"],
)
def test_what_differs_is_another_key(other: EncodeJob) -> None:
    assert content_key(other) != content_key(job(1))


def test_place_request_and_attempt_are_no_part_of_the_key() -> None:
    assert content_key(job(1, "a", index=3)) == content_key(job(1, "b"))


async def test_the_next_pictures_are_decoded_while_the_tower_runs() -> None:
    """And then share a batch, within the budget of patches."""
    bench = Bench(encode__batch_patches=2 * ROWS)
    bench.tower.gate.clear()
    first = bench.worker.submit(job(1))
    await until(lambda: bench.worker.steps.in_step)
    others = [bench.worker.submit(job(picture)) for picture in (2, 3)]
    await until(lambda: set(bench.pictures.decoded) == {1, 2, 3})
    await until(lambda: bench.prepared == 2)
    assert bench.worker.steps.in_step, "the tower is at picture 1 still"
    assert not any(ticket.finished.done() for ticket in (first, *others))
    bench.tower.gate.set()
    for ticket in (first, *others):
        await asyncio.wait_for(ticket.finished, LIMIT_S)
    assert bench.tower.batches == [[1], [2, 3]]
    for ticket in (first, *others):
        bench.worker.close(ticket, clean=True)
    await bench.close()


async def test_a_requests_first_picture_is_decoded_and_encoded_first(bench: Bench) -> None:
    bench.pictures.gate.clear()
    tickets = [bench.worker.submit(job(picture, "a")) for picture in (1, 2, 3)]
    tickets.append(bench.worker.submit(job(4, "b")))
    await until(lambda: set(bench.pictures.decoded) == {1, 4})  # that waits for nobody
    await a_moment()
    assert set(bench.pictures.decoded) == {1, 4}, "2 and 3 wait for 1"
    bench.worker.close(tickets[0], clean=True)
    await until(lambda: set(bench.pictures.decoded) == {1, 2, 3, 4})  # it left
    bench.pictures.gate.set()
    for ticket in tickets[1:]:
        await asyncio.wait_for(ticket.finished, LIMIT_S)
        bench.worker.close(ticket, clean=True)


async def test_a_clients_burst_does_not_hold_up_another_clients_picture() -> None:
    """Pictures of one client fill the queue; another's one comes second."""
    bench = Bench(encode__batch_patches=1, encode__cache_mib=0)
    bench.tower.gate.clear()
    burst = [bench.worker.submit(job(n, f"b{n}", salt=b"burst")) for n in range(1, 16)]
    await until(lambda: bench.worker.steps.in_step)
    other = bench.worker.submit(job(20, "o", salt=b"other"))
    await until(lambda: bench.pictures.decoded[20])
    bench.tower.gate.set()
    for ticket in (other, *burst):
        await asyncio.wait_for(asyncio.shield(ticket.finished), LIMIT_S)
        bench.worker.close(ticket, clean=True)
    assert [20] in bench.tower.batches[:3]
    await bench.close()


async def test_the_last_of_a_burst_gives_its_place_to_another_client() -> None:
    bench = Bench(encode__max_queue=6, encode__cache_mib=0)
    bench.pictures.gate.clear()
    burst = [bench.worker.submit(job(n, f"b{n}", salt=b"burst")) for n in range(1, 7)]
    with pytest.raises(EpdError):
        bench.worker.submit(job(7, "b7", salt=b"burst"))
    other = bench.worker.submit(job(20, "o", salt=b"other"))
    with pytest.raises(EpdError) as caught:
        await burst[-1].finished
    assert caught.value.kind is ErrorKind.OVERLOADED
    bench.pictures.gate.set()
    for ticket in (*burst[:-1], other):
        await asyncio.wait_for(asyncio.shield(ticket.finished), LIMIT_S)
        bench.worker.close(ticket, clean=True)
    bench.worker.close(burst[-1], clean=True)
    await bench.close()


async def test_several_of_a_burst_give_way_to_one_large_file() -> None:
    """Of 200 KiB each, where 1 MiB may wait; the other's has 400."""
    bench = Bench(encode__max_queue_mib=1, encode__decode_workers=1)
    bench.pictures.gate.clear()

    def sized(number: int, kib: int, salt: bytes) -> EncodeJob:
        wanted = job(number, f"{salt!r}{number}", salt=salt)
        return replace(wanted, image=bytes([number]) * (kib << 10))

    burst = [bench.worker.submit(sized(n, 200, b"burst")) for n in range(1, 6)]
    await until(lambda: bench.pictures.decoded[2])
    with pytest.raises(EpdError, match="max_queue_mib"):
        bench.worker.submit(sized(6, 200, b"burst"))
    other = bench.worker.submit(sized(20, 400, b"other"))
    for ticket in burst[3:]:
        with pytest.raises(EpdError) as caught:
            await ticket.finished
        assert caught.value.kind is ErrorKind.OVERLOADED
    bench.pictures.gate.set()
    for ticket in (*burst[:3], other):
        await asyncio.wait_for(asyncio.shield(ticket.finished), LIMIT_S)
        bench.worker.close(ticket, clean=True)
    for ticket in burst[3:]:
        bench.worker.close(ticket, clean=True)
    await bench.close()


async def test_what_waits_is_handed_back_as_not_started(bench: Bench) -> None:
    """Pictures that are not being encoded yet, decoded or not; whoever shares them with
    another hears it too. Those in the running step end here."""
    bench.tower.gate.clear()
    running = [bench.worker.submit(job(1, f"r{number}")) for number in range(2)]
    await until(lambda: bench.worker.steps.in_step)
    bench.pictures.gate.clear()
    waiting = [bench.worker.submit(job(picture, f"w{picture}")) for picture in range(2, 9)]
    waiting.append(bench.worker.submit(job(2, "shared")))
    await until(lambda: 2 in bench.pictures.decoded)
    bench.worker.hand_back()
    for ticket in waiting:
        with pytest.raises(EpdError) as caught:
            await ticket.finished
        assert caught.value.kind is ErrorKind.NOT_STARTED
        bench.worker.close(ticket, clean=False)
    bench.tower.gate.set()
    for ticket in running:
        await asyncio.wait_for(asyncio.shield(ticket.finished), LIMIT_S)
        bench.worker.close(ticket, clean=True)
    assert bench.tower.batches == [[1]]


async def test_a_batch_holds_no_more_patches_than_allowed() -> None:
    bench = Bench(encode__batch_patches=2 * ROWS - 1)
    bench.tower.gate.clear()
    tickets = [bench.worker.submit(job(picture)) for picture in (1, 2, 3)]
    await until(lambda: bench.worker.steps.in_step and bench.prepared == 2)
    bench.tower.gate.set()
    for ticket in tickets:
        await asyncio.wait_for(ticket.finished, LIMIT_S)
        bench.worker.close(ticket, clean=True)
    assert bench.tower.batches == [[1], [2], [3]]
    await bench.close()


async def test_the_router_is_told_of_rows_and_what_they_cost(bench: Bench) -> None:
    assert (bench.worker.load().queued_rows, bench.worker.load().us_per_row) == (0, 0.0)
    bench.pictures.gate.clear()
    tickets = [bench.worker.submit(job(picture)) for picture in (1, 1, 2)]
    assert bench.worker.load().queued_rows == 2 * ROWS, "one picture twice is encoded once"
    assert (bench.state("queued_rows"), bench.state("backlog_ms")) == (2 * ROWS, 0.0)
    bench.pictures.gate.set()
    for ticket in tickets:
        await asyncio.wait_for(ticket.finished, LIMIT_S)
        bench.worker.close(ticket, clean=True)
    assert bench.worker.load().queued_rows == bench.state("backlog_ms") == 0
    assert bench.worker.load().us_per_row > 0
    bench.pictures.gate.clear()
    ticket = bench.worker.submit(job(3))
    assert bench.state("backlog_ms") == ROWS * bench.worker.load().us_per_row / 1e3
    bench.pictures.gate.set()
    await asyncio.wait_for(ticket.finished, LIMIT_S)
    bench.worker.close(ticket, clean=True)
