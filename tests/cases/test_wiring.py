"""Cases HND-20, HND-21, HND-22, HND-25, HND-31: who is connected to whom, and how it starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from epd.config import GatewayConfig, RpcConfig, TransferConfig
from epd.errors import EpdError, ErrorKind
from epd.handoff import kv_contract
from epd.jobs import Stage
from epd.kv.layout import KvLayout, LayerShape
from epd.models.encoder import VisionEncoder
from epd.models.lm import LanguageModel
from epd.rpc.server import Server
from epd.transfer.contract import Handle
from epd.transfer.engine import Engine
from epd.transfer.pieces import Piece
from gateway.streams import Connections
from gateway.workers import Registry
from tests.cases.pictures import body, file, quad, text
from tests.e2e.cluster import DEMO_CHECKPOINT, ROOT, Cluster
from tests.e2e.peer_process import Memory, PeerProcess
from tests.unit.decode_bench import Bench
from tests.unit.fake_stage import BLOCK, FakeLm, FakeMemory, decode_job
from tests.unit.test_gateway_workers import Clock, card
from tests.waiting import LIMIT_S, promised, soon

# -- first contacts ------------------------------------------------------------------


@pytest.fixture
def owner() -> Iterator[PeerProcess]:
    process = PeerProcess(seed=3)
    yield process
    process.kill()


async def test_hnd_20_twelve_readers_meet_one_owner_at_once(owner: PeerProcess) -> None:
    """Twelve engines that have never spoken to it, two reads each, in the same moment."""
    size = 1 << 16
    engines = [Engine(TransferConfig(), "f00d", epoch=10 + n) for n in range(12)]
    memories = [Memory(2 * size) for _ in engines]
    for engine, memory in zip(engines, memories, strict=True):
        engine.start()
        engine.register(memory.address, memory.nbytes, memory)

    async def first_reads(engine: Engine, memory: Memory) -> None:
        pieces = [Piece(memory.address + n * size, owner.address + n * size, size) for n in (0, 1)]
        await asyncio.gather(
            *(engine.read(owner.peer, "f00d", [one], memory, LIMIT_S) for one in pieces)
        )

    with soon(promised(10.0), instead_of="each other"):
        await asyncio.gather(*(first_reads(e, m) for e, m in zip(engines, memories, strict=True)))
    assert len({bytes(memory.bytes) for memory in memories}) == 1
    assert bytes(memories[0].bytes) != bytes(2 * size)
    # One by one: Mooncake's destructor holds the interpreter, and with twelve in one process
    # the threads of the others would not come to their end in time.
    assert all([await engine.close() for engine in engines])


# -- shares ----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
async def test_hnd_21_a_fresh_worker_gets_no_more_than_the_others_have(stage: Stage) -> None:
    """Nothing is stored at a worker for others to fetch; what is left of the case is a burst
    of requests just when an empty worker has joined."""
    registry, calls = Registry("f", "float32", 2.0, Clock()), Connections(RpcConfig())
    busy = [registry.join(card(f"127.0.0.1:{n}", stage)) for n in (1, 2)]
    for worker in busy:
        worker.running = 6
    fresh = registry.join(card("127.0.0.1:3", stage))
    opened = []
    for _ in range(30):  # nobody listens there; what counts is what was sent
        opened.append(calls.open(stage, registry.choose(stage), LIMIT_S, "burst"))
        assert fresh.load <= max(worker.load for worker in busy) + 1
    loads = [worker.load for worker in (*busy, fresh)]
    assert max(loads) - min(loads) <= 1
    await asyncio.gather(*(stream.settle(LIMIT_S) for stream in opened))
    await calls.close()


def test_hnd_21_a_fresh_encoder_takes_its_share_of_pictures() -> None:
    registry = Registry("f", "float32", 2.0, Clock())
    for number in range(3):
        registry.join(card(f"old:{number}", Stage.ENCODE))
    registry.join(card("new:1", Stage.ENCODE))
    sent = Counter(
        registry.choose_encoder(number.to_bytes(32), 16).card.address for number in range(200)
    )
    assert sent["new:1"] <= 2 * 200 / 4


def test_hnd_21_a_fresh_encoder_is_given_as_many_rows_as_wait_at_the_others() -> None:
    """In a burst, of which no heartbeat has told yet."""
    registry = Registry("f", "float32", 2.0, Clock())
    old = registry.join(card("old:1", Stage.ENCODE))
    old.queued_rows = 160
    registry.join(card("new:1", Stage.ENCODE))
    sent = [registry.choose_encoder(n.to_bytes(32), 16).card.address for n in range(40)]
    assert set(sent[:9]) == {"new:1"}
    assert sent.count("old:1") == pytest.approx(15, abs=2)


# -- addresses -------------------------------------------------------------------------


async def test_hnd_22_a_port_that_is_taken_is_an_error_and_0_says_which_it_got() -> None:
    servers = [Server("decode", ["epd.v1.Decode"], RpcConfig(), 1 << 20) for _ in range(3)]
    first = await servers[0].start("127.0.0.1", 0)
    port = int(first.rpartition(":")[2])
    with pytest.raises(EpdError, match=str(port)):
        await servers[1].start("127.0.0.1", port)
    other = await servers[2].start("127.0.0.1", 0)
    assert port not in (0, int(other.rpartition(":")[2]))
    for server in servers:
        await server.stop(0)


def test_hnd_22_two_engines_in_one_narrow_range() -> None:
    """Each says the address that it has bound, or does not start."""
    ports = {"port_min": 18_710, "port_max": 18_711, "nbytes": 4096}
    first = PeerProcess(seed=1, **ports)
    try:
        assert int(first.peer.session.rpartition(":")[2]) in (18_710, 18_711)
        second = PeerProcess(seed=2, **ports)
        assert "18710-18711" in second.info["error"]
    finally:
        first.kill()


# -- pairs -----------------------------------------------------------------------------

LAYER = LayerShape(1, 2, 2)
STRANGERS: list[tuple[str, KvLayout]] = [
    ("shape", KvLayout(BLOCK * 2, "float32", (LAYER,))),
    ("dtype", KvLayout(BLOCK, "bfloat16", (LAYER,))),
    ("shape", KvLayout(BLOCK, "float32", (LAYER, LAYER))),
    ("shape", KvLayout(BLOCK, "float32", (LayerShape(2, 2, 2),))),
    ("shape", KvLayout(BLOCK, "float32", (LayerShape(1, 4, 2),))),
]


@pytest.mark.parametrize(("field", "layout"), STRANGERS)
async def test_hnd_25_decode_refuses_another_layout_by_name(field: str, layout: KvLayout) -> None:
    """Block size, dtype, layers, heads, head size; weights below."""
    bench = Bench()
    ticket = await bench.worker.submit(decode_job(range(20, 30)))
    spans = bench.handle(range(3)).spans
    handle = Handle(FakeMemory.peer, kv_contract(FakeLm().spec, layout, 5), spans, 1000)
    with pytest.raises(EpdError, match=field) as caught:
        bench.worker.kv_ready(ticket, 0, handle, 10)
    assert caught.value.kind is ErrorKind.CONTRACT_MISMATCH
    bench.worker.close(ticket)
    await bench.worker.shut_down()
    assert bench.used == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "other weights"),
        ("dtype", "bfloat16"),
        ("kv_layout", "kv/2"),
        ("kv_block_shape", (8, 2)),
    ],
)
def test_hnd_25_the_gateway_pairs_no_strangers(field: str, value: Any) -> None:
    registry = Registry("f", "float32", GatewayConfig().dead_s)
    registry.join(card("a:1", Stage.PREFILL))
    with pytest.raises(EpdError, match=field) as caught:
        registry.join(card("b:1", Stage.DECODE, **{field: value}))
    assert caught.value.kind is ErrorKind.CONTRACT_MISMATCH
    with pytest.raises(EpdError) as none:
        registry.choose(Stage.DECODE)
    assert none.value.kind is ErrorKind.STAGE_UNAVAILABLE


# -- starting --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "environ", "named"),
    [
        (["--set=transfer.protocol=tpc"], {}, "transfer.protocol"),
        (["--set=transfr.protocol=tcp"], {}, "transfr"),
        (["--set=kv.block_tokens=0"], {}, "kv.block_tokens"),
        ([], {"EPD_KV__BLOCKS": "3"}, "kv.blocks"),
    ],
)
def test_hnd_31_a_slip_in_the_configuration_is_a_message(
    settings: list[str], environ: dict[str, str], named: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "epd.cli", "decode", str(DEMO_CHECKPOINT), *settings],
        cwd=ROOT,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (1, 2)
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert "READY" not in done.stdout


@pytest.mark.parametrize("device", ["abacus", "cpuu", "meta:x", "xla"])
def test_hnd_31_a_device_that_is_not_here_is_a_message(device: str) -> None:
    for load in (LanguageModel.load, VisionEncoder.load):
        with pytest.raises(EpdError, match=device) as caught:
            load(DEMO_CHECKPOINT, device=device)
        assert caught.value.param == "model.device"


def test_hnd_31_what_the_documentation_starts_answers(cluster: Cluster) -> None:
    for parts in ((text("What can you do?"),), (file(quad()), text("Describe the image."))):
        reply = cluster.chat(body(*parts, max_tokens=8))
        assert reply.status == 200, reply.body
        assert reply.text
