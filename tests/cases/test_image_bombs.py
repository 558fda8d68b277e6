"""Cases IMG-*: files that would cost time or memory: bombs, lies in headers, endless decoding."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from epd import images
from epd.config import LimitsConfig
from epd.errors import EpdError
from tests.cases.memory import peak_growth
from tests.cases.pictures import (
    another,
    ask,
    body,
    chunk,
    counter,
    file,
    noise,
    png,
    quad,
    refused,
    scan_bomb,
    solid,
    text,
)
from tests.e2e.cluster import Cluster
from tests.e2e.member import Reply
from tests.waiting import promised

LIMITS = LimitsConfig()


def damaged(seed: int) -> bytes:
    """One bit of the compressed pixels is wrong; no two files are alike."""
    good = file(noise(64, 64, seed))
    at = good.index(b"IDAT") + 40
    return good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :]


def broken_stream(seed: int) -> bytes:
    """The pixels' chunk is whole by its length and sum, and no zlib stream."""
    good = file(noise(64, 64, seed))
    start = good.index(b"IDAT") - 4
    return good[:start] + chunk(b"IDAT", bytes([seed]) * 500) + chunk(b"IEND", b"")


def unknown() -> bytes:
    """A small picture that no cache has seen, in another try of a test, either."""
    return file(noise(72, 56, 20_000 + another()))


def cpu_s(family: Sequence[psutil.Process], seconds: float) -> float:
    """CPU time that these processes take while nothing is asked of them."""

    def used() -> float:
        times = [process.cpu_times() for process in family]
        return sum(one.user + one.system for one in times)

    start = used()
    time.sleep(seconds)
    return used() - start


@pytest.mark.parametrize("broken", [damaged, broken_stream])
@pytest.mark.parametrize("stream", [False, True])
def test_img_02_broken_data_does_not_spin(
    cluster: Cluster, broken: Callable[[int], bytes], stream: bool
) -> None:
    """400 within a second, no second try, nothing goes on afterwards; good pictures that come
    at the same time are answered as usual."""
    encode = psutil.Process(cluster.worker("encode").pid)
    family = [encode, *encode.children(recursive=True)]
    pids, idle = {process.pid for process in family}, cpu_s(family, 1.5)
    tried, first = "epd_requests_total", 2 * stream + (broken is damaged)

    def good() -> Reply:
        return ask(cluster, unknown(), stream=stream)

    usual = sorted(good().seconds for _ in range(5))[2]
    cluster.assert_clean()  # a call is counted when it has ended, after its answer
    before = counter(cluster.worker("encode").metrics(), tried)
    beside: list[Reply] = []
    bad: list[Reply] = []
    for at in range(3):
        with ThreadPoolExecutor(2) as pool:
            wrong = pool.submit(ask, cluster, broken(10 * first + at), stream=stream)
            beside.append(pool.submit(good).result())
            bad.append(wrong.result())
    for reply in bad:
        refused(reply, "damaged")
    assert {reply.status for reply in beside} == {200}
    # The quickest of three: what else this machine does is no fault of the file.
    assert min(reply.seconds for reply in bad) < promised(1)
    assert min(reply.seconds for reply in beside) < 2 * usual + promised(1)
    cluster.assert_clean()
    assert counter(cluster.worker("encode").metrics(), tried) == before + 6, "tried again"
    assert cpu_s(family, 1.5) < idle + 0.15, "something goes on with a request that has failed"
    assert {p.pid for p in (encode, *encode.children(recursive=True))} == pids


@pytest.mark.parametrize("stream", [False, True])
def test_img_13_aspect_ratio_is_checked_in_the_header(cluster: Cluster, stream: bool) -> None:
    for size in ((1093, 5), (5, 1093), (1, 10000)):
        refused(ask(cluster, file(noise(*size)), stream=stream), "more than 200 times the other")
    assert ask(cluster, file(noise(2000, 10))).status == 200, "exactly 200 is allowed"
    assert ask(cluster, file(noise(332, 27))).status == 200


def whole_bomb(width: int, height: int, depth: int) -> bytes:
    """A valid gray PNG: small to send, huge to decode."""
    packer = zlib.compressobj(9)
    line = bytes(1 + width * depth // 8)
    data = b"".join(packer.compress(line * 1000) for _ in range(height // 1000)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_img_15_too_many_pixels_cost_nothing(cluster: Cluster) -> None:
    """169 megapixels, valid, a few hundred KB: eight at once, and a small picture beside."""
    bomb = whole_bomb(13000, 13000, 8)
    assert len(bomb) < 400_000
    asked = body(bomb, text("What is it?"))
    usual = sorted(ask(cluster, unknown()).seconds for _ in range(5))[2]
    cluster.assert_clean()
    encoded = counter(cluster.worker("encode").metrics(), "epd_requests_total")
    rounds: list[tuple[float, float]] = []
    for _ in range(3):
        with peak_growth(cluster) as growth, ThreadPoolExecutor(9) as pool:
            bombs = [pool.submit(cluster.chat, asked) for _ in range(8)]
            small = pool.submit(ask, cluster, unknown())
            for reply in bombs:
                refused(reply.result(), "13000 x 13000", code="image_too_large")
            assert small.result().status == 200
            rounds.append((max(bomb.result().seconds for bomb in bombs), small.result().seconds))
            assert growth() < 100 << 20
    # The quickest of three: nine clients of this very process wait for each other, too.
    assert min(slowest for slowest, _ in rounds) < promised(1)
    assert min(beside for _, beside in rounds) < 2 * usual + promised(1)
    cluster.assert_clean()
    after = counter(cluster.worker("encode").metrics(), "epd_requests_total")
    assert after == encoded + 3, "a bomb was sent on"


def gif_header(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + frame(width, height)


def frame(width: int, height: int) -> bytes:
    return b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\0;"


def bmp_header(width: int, height: int) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info + bytes(100)


BOMBS = {
    "png, one bit": whole_bomb(20000, 20000, 1),
    "png, only a header": png(1 << 30, 1 << 30, 8, 0, b""),
    "gif": gif_header(65535, 65535),
    "bmp": bmp_header(1_000_000, 6_000_000),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_img_16_claimed_sizes_are_never_allocated(cluster: Cluster, bomb: str) -> None:
    with peak_growth(cluster) as growth:
        refused(ask(cluster, BOMBS[bomb]), "pixels", code="image_too_large")
        assert growth() < 64 << 20


def test_img_16_icons_and_text_bombs(cluster: Cluster) -> None:
    refused(ask(cluster, b"\0\0\1\0\1\0" + bytes(60)), "an icon")
    packed = zlib.compress(bytes(64 << 20), 9)
    text_bomb = file(quad())
    text_bomb = text_bomb[:33] + chunk(b"zTXt", b"a\0\0" + packed) + text_bomb[33:]
    with peak_growth(cluster) as growth:
        refused(ask(cluster, text_bomb), "png")
        assert growth() < 64 << 20


def test_img_02_a_file_that_decodes_for_minutes_dies_alone(cluster: Cluster) -> None:
    """150 KB, 55 s of CPU, all of it legal JPEG. Its decoder is killed after 3 s of CPU."""
    bomb = scan_bomb(1000)
    encode = cluster.worker("encode")
    lost = counter(encode.metrics(), "epd_decoders_lost_total")
    usual = max(ask(cluster, file(quad())).seconds for _ in range(3))
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(ask, cluster, bomb)
        time.sleep(0.5)  # into the 3 s of its decoder
        beside = [ask(cluster, file(quad())) for _ in range(5)]
        refused(slow.result(), "takes more than 3 s to decode")
    assert {reply.status for reply in beside} == {200}
    # Its decoder spins for 3 s of CPU.
    assert sorted(reply.seconds for reply in beside)[2] < 5 * usual + 1.5, "others waited for it"
    assert counter(encode.metrics(), "epd_decoders_lost_total") == lost + 1
    assert ask(cluster, file(quad())).status == 200


def test_img_02_a_header_that_takes_seconds_to_read(cluster: Cluster) -> None:
    """A million empty chunks before the picture: the gateway goes on as if nothing was."""
    picture = file(quad())
    endless = picture[:33] + chunk(b"teSt", b"") * 1_500_000 + picture[33:]
    asked = body(endless)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(cluster.chat, asked)
        others = [ask(cluster, picture) for _ in range(5)]
        refused(slow.result(), "header takes more than 1 s to read")
    assert {reply.status for reply in others} == {200}
    assert ask(cluster, picture).status == 200


def test_img_15_scans_are_counted_in_the_header() -> None:
    with pytest.raises(EpdError, match=r"has 106 scans; 64 are allowed"):
        images.read_header(scan_bomb(100, 64), LIMITS, "test")
    images.read_header(file(noise(500, 500), "JPEG", progressive=True), LIMITS, "test")


def test_img_a_file_can_not_hold_up_others(cluster: Cluster) -> None:
    """While large pictures are decoded, a small one is answered as usual."""
    large = file(solid("red", (4800, 4800)), compress_level=1)
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(ask, cluster, large, max_tokens=1) for _ in range(2)]
        small = pool.submit(ask, cluster, file(quad()), max_tokens=1)
        assert small.result().status == 200
        assert all(reply.result().status == 200 for reply in slow)
