"""Sessions: one attempt shared, proof before use, back-off, names per life."""

from __future__ import annotations

import asyncio

import pytest

from epd.config import TransferConfig
from epd.errors import EpdError, ErrorKind
from epd.transfer.contract import Peer
from epd.transfer.handshake import Description
from epd.transfer.identity import Identity
from epd.transfer.sessions import MOST_LINKS, SessionNames, Sessions

CONFIG = TransferConfig(backoff_s=1.0, connect_timeout_s=0.2)
PEER = Peer("10.0.0.1:15000", 0xA, 4096)


class World:
    """A network with one peer, whose answers the test chooses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.probes = 0
        self.names: list[str] = []
        self.description: Description | Exception = Description("tcp", b"life 1")
        self.page: bytes | Exception = Identity.of(PEER.epoch, "f00d").pack()
        self.hang = False
        self.sessions = Sessions(CONFIG, self.read_page, probe=self.probe, clock=lambda: self.now)

    async def probe(self, session: str, timeout_s: float) -> Description:
        self.probes += 1
        await asyncio.sleep(60 if self.hang else 0.01)
        if isinstance(self.description, Exception):
            raise self.description
        return self.description

    async def read_page(self, name: str, peer: Peer) -> bytes:
        self.names.append(name)
        if isinstance(self.page, Exception):
            raise self.page
        return self.page

    async def refused(self, peer: Peer = PEER, fingerprint: str = "f00d") -> EpdError:
        with pytest.raises(EpdError) as refused:
            await self.sessions.connect(peer, fingerprint)
        return refused.value


@pytest.fixture
def world() -> World:
    return World()


async def test_callers_at_once_share_one_attempt_and_then_none_is_needed(world: World) -> None:
    names = await asyncio.gather(*(world.sessions.connect(PEER, "f00d") for _ in range(5)))
    assert names == ["10.0.0.1:15000"] * 5
    await world.sessions.connect(PEER, "f00d")
    assert world.probes == 1


async def test_cancelling_one_caller_does_not_end_the_attempt_for_others(world: World) -> None:
    first = asyncio.create_task(world.sessions.connect(PEER, "f00d"))
    second = asyncio.create_task(world.sessions.connect(PEER, "f00d"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == "10.0.0.1:15000"
    assert world.probes == 1


async def test_an_unreachable_peer_is_left_alone_for_the_backoff(world: World) -> None:
    world.description = ConnectionRefusedError("refused")
    error = await world.refused()
    assert error.kind is ErrorKind.TRANSFER_FAILED
    assert "10.0.0.1:15000 can't be reached: refused" in error.message
    world.now += 0.6
    error = await world.refused()
    assert error.retry_after_s == pytest.approx(0.4)
    assert world.probes == 1
    world.now += 0.41
    world.description = Description("tcp", b"life 1")
    assert await world.sessions.connect(PEER, "f00d")
    assert world.probes == 2


async def test_a_silent_peer_costs_the_connect_timeout_once(world: World) -> None:
    world.hang = True
    loop = asyncio.get_running_loop()
    start = loop.time()
    assert "no answer within 0.2 s" in (await world.refused()).message
    assert loop.time() - start < 1.0
    start = loop.time()
    await world.refused()
    assert loop.time() - start < 0.1


async def test_another_epoch_is_refused_for_good(world: World) -> None:
    world.page = Identity.of(0xB, "f00d").pack()
    assert (await world.refused()).kind is ErrorKind.CONTRACT_MISMATCH
    world.now += 1e6
    assert "epoch of 10.0.0.1:15000" in (await world.refused()).message
    assert world.probes == 1


async def test_another_model_is_refused_but_the_session_serves_the_right_one(
    world: World,
) -> None:
    error = await world.refused(fingerprint="beef")
    assert error.kind is ErrorKind.CONTRACT_MISMATCH
    assert await world.sessions.connect(PEER, "f00d")
    assert world.probes == 1


async def test_another_transport_is_refused(world: World) -> None:
    world.description = Description("rdma", b"life 1")
    error = await world.refused()
    assert error.kind is ErrorKind.CONTRACT_MISMATCH
    assert "transport of 10.0.0.1:15000 is 'rdma', expected 'tcp'" in error.message
    assert world.names == [], "nothing is read before the transport is known"


async def test_after_a_failed_read_the_peer_is_proven_again(world: World) -> None:
    await world.sessions.connect(PEER, "f00d")
    world.sessions.doubt(PEER)
    world.page = Identity.of(0xB, "f00d").pack()
    assert (await world.refused()).kind is ErrorKind.CONTRACT_MISMATCH
    assert world.probes == 2


async def test_a_read_that_fails_while_the_peer_is_proven_means_proving_it_once_more(
    world: World,
) -> None:
    """Between the proof and whoever waited for it: an earlier read of the same peer."""
    read_page, failing = world.read_page, [world.sessions.doubt]

    async def page(name: str, peer: Peer) -> bytes:
        if failing:
            asyncio.get_running_loop().call_soon(failing.pop(), peer)
        return await read_page(name, peer)

    world.sessions._read_page = page
    assert await world.sessions.connect(PEER, "f00d") == "10.0.0.1:15000"
    assert world.probes == 2


async def test_a_caller_that_comes_late_to_a_failure_tries_again(world: World) -> None:
    """The event loop was busy for longer than the back-off."""
    probe = world.probe

    async def late(session: str, timeout_s: float) -> Description:
        try:
            return await probe(session, timeout_s)
        finally:
            if world.probes == 1:
                asyncio.get_running_loop().call_soon(pass_time)

    def pass_time() -> None:
        world.now += CONFIG.backoff_s
        world.description = Description("tcp", b"life 1")

    world.sessions._probe = late
    world.description = ConnectionRefusedError("refused")
    assert await world.sessions.connect(PEER, "f00d") == "10.0.0.1:15000"


async def test_a_peer_that_was_silent_for_a_whole_read_is_left_alone(world: World) -> None:
    await world.sessions.connect(PEER, "f00d")
    world.sessions.doubt(PEER, waited_s=CONFIG.read_deadline_s)
    error = await world.refused()
    assert error.kind is ErrorKind.TRANSFER_FAILED
    assert error.retry_after_s == pytest.approx(CONFIG.backoff_s)
    assert "silent for 5.0 s" in error.message
    assert world.probes == 1, "nobody waits for another probe"
    world.now += CONFIG.backoff_s + 0.01
    await world.sessions.connect(PEER, "f00d")
    assert world.probes == 2


async def test_a_read_that_ran_out_of_its_callers_time_says_nothing_of_the_peer(
    world: World,
) -> None:
    await world.sessions.connect(PEER, "f00d")
    world.sessions.doubt(PEER, waited_s=CONFIG.read_deadline_s / 2)
    await world.sessions.connect(PEER, "f00d")
    assert world.probes == 2


async def test_a_new_life_on_the_same_address_gets_a_name_of_its_own(world: World) -> None:
    await world.sessions.connect(PEER, "f00d")
    world.description = Description("tcp", b"life 2")
    world.page = Identity.of(0xB, "f00d").pack()
    assert await world.sessions.connect(Peer(PEER.session, 0xB, 1), "f00d") == "10.0.0.1:015000"


async def test_remembered_peers_are_bounded(world: World) -> None:
    world.description = ConnectionRefusedError("refused")
    for epoch in range(MOST_LINKS + 20):
        link = world.sessions._link(Peer(PEER.session, epoch, 1))
        assert link.opening is None
    assert len(world.sessions._links) == MOST_LINKS


async def test_links_that_are_being_opened_are_not_forgotten(world: World) -> None:
    world.hang = True
    peers = [Peer(PEER.session, epoch, 1) for epoch in range(MOST_LINKS + 1)]
    opening = [asyncio.create_task(world.sessions.connect(peer, "f00d")) for peer in peers]
    errors = await asyncio.gather(*opening, return_exceptions=True)
    kinds = {error.kind for error in errors if isinstance(error, EpdError)}
    assert kinds == {ErrorKind.TRANSFER_FAILED}
    assert all(isinstance(error, EpdError) for error in errors)


def test_names_differ_per_life_and_are_stable() -> None:
    names = SessionNames()
    assert names.name("h:15000", b"1") == "h:15000"
    assert names.name("h:15000", b"2") == "h:015000"
    assert names.name("h:15000", b"3") == "h:0015000"
    assert names.name("h:15000", b"1") == "h:15000"
    assert names.name("[::1]:15001", b"2") == "[::1]:15001"


OTHERS = [Peer(f"10.0.0.{host}:15000", 0xA, 64) for host in (2, 3)]


async def silent(world: World, peer: Peer) -> None:
    world.hang = True
    assert "no answer" in (await world.refused(peer)).message
    world.hang = False


async def test_isolated_is_several_silent_peers_and_none_that_answers(world: World) -> None:
    await silent(world, PEER)
    world.now += 2.0
    await silent(world, PEER)
    assert not world.sessions.isolated, "one bad edge is the router's business"
    await silent(world, OTHERS[0])
    assert world.sessions.isolated
    world.now += 10.1
    assert not world.sessions.isolated, "it is tried again"


async def test_an_answer_ends_isolation(world: World) -> None:
    await silent(world, OTHERS[0])
    await silent(world, OTHERS[1])
    assert world.sessions.isolated
    await world.sessions.connect(PEER, "f00d")
    assert not world.sessions.isolated


async def test_a_refused_connection_is_an_answer(world: World) -> None:
    await silent(world, OTHERS[0])
    await silent(world, OTHERS[1])
    world.description = ConnectionRefusedError("refused")
    await world.refused()
    assert not world.sessions.isolated


async def test_reads_that_nobody_answers_count(world: World) -> None:
    await world.sessions.connect(PEER, "f00d")
    await silent(world, OTHERS[0])
    world.sessions.doubt(PEER, waited_s=CONFIG.read_deadline_s)
    assert world.sessions.isolated
