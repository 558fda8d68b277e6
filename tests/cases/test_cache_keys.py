"""Cases KEY-*: what makes two pictures, or two prompts, the same to a cache.

In exact mode: what came out of a cache is compared bit by bit with what was computed.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from blake3 import blake3
from PIL import Image

from encode.work import content_key
from epd.images import item_digest
from epd.jobs import EncodeJob, ImageItem
from epd.kv.layout import KvLayout, LayerShape
from epd.kv.prefix import BlockChain, root_hash
from epd.transfer.arena import Extents
from prefill.rows import RowTable
from tests.cases import pictures
from tests.cases.pictures import body, counter, data_url, encodes, file, noise, part, solid, text
from tests.cases.test_pressure import Leaver, at_once
from tests.e2e.cluster import Cluster
from tests.e2e.member import Reply, request

BLOCK = 16
COLOURS = ("red", "green", "blue")


def ask(cluster: Cluster, *parts: Any, **fields: Any) -> Reply:
    scores = {"logprobs": True, "top_logprobs": 10, "max_tokens": 4}
    reply = cluster.chat(body(*parts, **{**scores, **fields}))
    assert reply.status == 200, reply.body
    return reply


def said(reply: Reply) -> Any:
    """Text and every likelihood."""
    choice = reply.json["choices"][0]
    return choice["message"]["content"], choice["logprobs"]


def cached(reply: Reply) -> int:
    return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt_tokens(reply: Reply) -> int:
    return int(reply.json["usage"]["prompt_tokens"])


def fresh(words: int = 40) -> str:
    """Text that no cache has seen."""
    return pictures.fresh() + " what do you see here?" * (words // 5)


def flush(cluster: Cluster) -> None:
    """Write all over the pools and the embedding cache."""
    at_once(
        cluster,
        [
            body(file(noise(224, 224, 10_000 + pictures.another())), text(fresh()))
            for _ in range(40)
        ],
    )


def same_prompt(cluster: Cluster, pictures: list[bytes]) -> list[Reply]:
    """Each picture behind and before the same fresh text."""
    before, after = text(fresh()), text("What colour?")
    return [ask(cluster, before, picture, after) for picture in pictures]


# -- two pictures ----------------------------------------------------------------------


def test_key_01_pictures_of_one_size_behind_one_text(tight: Cluster) -> None:
    """One after another, cold and warm; then many at once."""
    pictures = [file(solid(colour, (96, 96))) for colour in COLOURS]
    before, after = text(fresh()), text("What is the dominant colour?")
    head = prompt_tokens(ask(tight, before, max_tokens=1))
    asked = [(before, picture, after) for picture in pictures]
    cold = [ask(tight, *one) for one in asked]
    assert len({str(said(reply)) for reply in cold}) == 3
    assert all(BLOCK <= cached(reply) <= head for reply in cold[1:]), [cached(r) for r in cold]
    warm = [ask(tight, *one) for one in reversed(asked)]
    assert all(cached(reply) > head for reply in warm)
    assert [said(reply) for reply in reversed(warm)] == [said(reply) for reply in cold]
    flush(tight)
    with ThreadPoolExecutor(12) as pool:
        many = list(pool.map(lambda number: ask(tight, *asked[number % 3]), range(12)))
    assert [said(reply) for reply in many] == [said(cold[number % 3]) for number in range(12)]


def jpeg(picture: Image.Image, comment: bytes = b"", unique_id: str = "") -> bytes:
    exif = Image.Exif()
    if unique_id:
        exif.get_ifd(0x8769)[0xA420] = unique_id
        exif[0x8769] = exif.get_ifd(0x8769)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", comment=comment, exif=exif.tobytes() if unique_id else b"")
    return stream.getvalue()


def palette(colours: list[int]) -> bytes:
    picture = Image.new("P", (96, 96), 1)
    picture.putpalette(colours)
    return file(picture)


TWINS: dict[str, Callable[[int], list[bytes]]] = {
    # One string of pixels, two shapes.
    "KEY-04": lambda number: [
        file(Image.frombytes("RGB", shape, noise(150, 30, number).tobytes()))
        for shape in ((30, 150), (150, 30))
    ],
    # The first kilobytes of a camera's files are alike.
    "KEY-05": lambda number: [
        jpeg(solid(colour, (96, 96)), b"camera %d " % number * 1000) for colour in ("red", "blue")
    ],
    # An id in the file is no content.
    "KEY-07": lambda number: [
        jpeg(solid(colour, (96, 96)), unique_id=f"{number:032x}") for colour in ("red", "blue")
    ],
    # Indices without their palette say nothing.
    "KEY-09": lambda number: [
        palette([number % 256, 0, 0, *used]) for used in ((220, 20, 20), (20, 20, 220))
    ],
}
"""Two files for a number: with another one the same case again, for caches that know it."""


@pytest.mark.parametrize("case", TWINS)
def test_key_04_key_05_key_07_key_09_twins_are_two_pictures(tight: Cluster, case: str) -> None:
    one, two = TWINS[case](pictures.another())
    if case == "KEY-05":
        assert one[:3000] == two[:3000]
    before = encodes(tight)
    replies = same_prompt(tight, [one, two, two])
    assert encodes(tight) - before == 2, "the second was taken for the first"
    assert said(replies[0]) != said(replies[1]) == said(replies[2])
    assert cached(replies[1]) < cached(replies[2])


def test_key_08_what_a_picture_is_reduced_to_belongs_to_its_name(tight: Cluster) -> None:
    """The same file with low and high detail: two embeddings."""
    data = data_url(file(noise(900, 900, pictures.another())))
    before, question = encodes(tight), text(fresh())
    low, high, auto = (
        ask(tight, question, part(data, detail=detail), text("?"))
        for detail in ("low", "high", "auto")
    )
    assert encodes(tight) - before == 2
    assert said(low) != said(high) == said(auto)
    common: list[Any] = [b"file", b"processor", "weights", b"salt", 0]
    names = {item_digest(*[*common, max_pixels]) for max_pixels in (0, 1000, 1001)}
    assert len(names) == 3
    for place in range(5):
        changed = [*common]
        changed[place] = 1 if place == 4 else changed[place] * 2
        assert item_digest(*changed) not in names


def _item(digest: bytes) -> ImageItem:
    """An image of three rows."""
    return ImageItem(0, digest, 3, (), 8, 8, 1)


def test_key_03_names_are_whole_wherever_they_are_used(tight: Cluster) -> None:
    """Ids that agree but for their first or last digit, in KV blocks, in landing memory and in
    the encoder; then sixty pictures."""
    layout = KvLayout(4, "float32", (LayerShape(1, 2, 2),))
    root = root_hash("f", "n", layout)

    def key(digest: bytes) -> bytes:
        ids, item = [20, 9, 9, 9], _item(digest)
        chain = BlockChain(root, ids, [item], image_token_id=9, prompt_length=4, block_tokens=4)
        return chain.hashes[0]

    names = [blake3(number.to_bytes(4)).digest() for number in range(20_000)]
    near = [bytes([1]) + bytes(31), bytes([2]) + bytes(31), bytes(31) + b"\1", bytes(31) + b"\2"]
    names += near
    assert len({key(name) for name in names}) == len(names)
    assert len({content_key(EncodeJob("a", 0, 1, _item(name), b"")) for name in names}) == len(
        names
    )
    assert len({item_digest(name, b"p", "f", b"", 0) for name in names}) == len(names)
    some = names[-5000:]
    table = RowTable(Extents(64 * len(some)), enabled=True, count=lambda event, number: None)
    assert len(set(table.reserve([(name, 64) for name in some]) or ())) == len(some)
    before = text(fresh())
    head = prompt_tokens(ask(tight, before, max_tokens=1))
    asked = [(before, file(noise(64, 64, number)), text("?")) for number in range(60)]
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda one: ask(tight, *one, max_tokens=1), asked))
    assert max(cached(reply) for reply in replies) <= head


@pytest.mark.parametrize("words", [15, 16])
def test_key_13_order_and_place_of_pictures(tight: Cluster, words: int) -> None:
    """[A,B] and [B,A], A,A and A, each after some tokens more: as if no other had been."""
    a, b = file(noise(96, 96, 1)), file(noise(96, 96, 2))
    start = text("a" + " a" * words)
    orders = [[a, b], [b, a], [a, a], [a], [b, b, a]]
    replies = [ask(tight, start, *order, text("Which?")) for order in orders]
    assert len({str(said(reply)) for reply in replies}) == len(orders)
    flush(tight)
    for order, reply in zip(reversed(orders), reversed(replies), strict=True):
        assert said(ask(tight, start, *order, text("Which?"))) == said(reply)


# -- clients -----------------------------------------------------------------------------

NAMED: list[Any] = [
    {"type": "image_url", "uuid": "doc-1"},
    {"type": "image_url", "image_url": None, "uuid": "doc-1"},
    {"type": "image_url", "image_url": {"url": data_url(file(solid("red"))), "uuid": "doc-1"}},
    {"type": "image_url", "image_url": {"url": data_url(file(solid("red")))}, "uuid": "doc-1"},
    {"type": "image_embeds", "image_embeds": "doc-1"},
]


@pytest.mark.parametrize("named", NAMED)
def test_key_06_a_clients_id_names_nothing(tight: Cluster, named: Any) -> None:
    reply = tight.chat(body(named, text("What is it?")))
    assert reply.status == 400
    assert reply.error["param"].startswith("messages[0].content[0]")


def test_key_06_salted_names_differ() -> None:
    """One tenant's names of pictures and blocks are no other's."""
    layout = KvLayout(4, "float32", (LayerShape(1, 2, 2),))
    roots = {root_hash("f", "n", layout, salt) for salt in (b"", b"a", b"b")}
    digests = {item_digest(b"x", b"p", "f", salt, 0) for salt in (b"", b"a", b"b")}
    assert len(roots) == len(digests) == 3


# -- failures ------------------------------------------------------------------------------


def test_key_10_a_picture_of_a_refused_request_is_no_promise(tight: Cluster) -> None:
    """Refused for length, for a field, left by its client: then the same picture works."""
    picture = file(noise(96, 96, 10))
    good = (picture, text("What is it?"))
    for bad in (
        body(picture, text("long " * 3000)),
        body(picture, text("What is it?"), temperature=-1),
        body(picture, text("What is it?"), max_tokens=100_000),
    ):
        assert tight.chat(bad).status == 400
        ask(tight, *good)
    for number in range(4):
        leaver = Leaver(tight, body(file(noise(96, 96, 20 + number)), text("What is it?")))
        leaver.leave()
        ask(tight, file(noise(96, 96, 20 + number)), text("What is it?"))


def test_key_11_more_pictures_than_any_cache_holds(tight: Cluster) -> None:
    """Eighty pictures, popular ones more often, then all of them, eight clients: no fault, and
    each picture has its one answer however often it was evicted."""
    chance = random.Random(11)
    pictures = [file(noise(192, 192, 500 + number)) for number in range(80)]
    order = [min(int(chance.paretovariate(0.6)) - 1, 79) for _ in range(160)]
    order += chance.sample(range(80), 80)
    caches = (("encode", '"embedding"'), ("prefill", '"landing"'))

    def given_way() -> list[float]:
        """Evictions of both caches of embeddings so far."""
        return [
            counter(tight.worker(stage).metrics(), f"epd_cache_evictions_total{{cache={name}}}")
            for stage, name in caches
        ]

    before = given_way()
    with ThreadPoolExecutor(8) as pool:
        sent = pool.map(lambda n: (n, ask(tight, pictures[n], text("?"), max_tokens=2)), order)
        answers: dict[int, set[str]] = {}
        for number, reply in sent:
            answers.setdefault(number, set()).add(str(said(reply)))
    assert len(answers) == 80
    assert all(after > least for after, least in zip(given_way(), before, strict=True))
    assert all(len(found) == 1 for found in answers.values())
    assert len({next(iter(found)) for found in answers.values()}) == len(answers)


def test_key_14_counting_tokens_touches_no_cache(tight: Cluster) -> None:
    picture = file(noise(96, 96, pictures.another()))
    asked = body(picture, text(fresh()))
    pages = [tight.worker(stage).metrics() for stage in ("encode", "prefill", "decode")]
    before = [counter(page, "epd_cache_lookups_total") for page in pages]
    fields = {"model": tight.model, "messages": asked["messages"]}
    counted = request(tight.address, "/tokenize", fields)
    assert counted.status == 200, counted.body
    pages = [tight.worker(stage).metrics() for stage in ("encode", "prefill", "decode")]
    assert [counter(page, "epd_cache_lookups_total") for page in pages] == before
    encoded = encodes(tight)
    reply = tight.chat(asked)
    assert prompt_tokens(reply) == counted.json["count"]
    assert encodes(tight) - encoded == 1


@pytest.mark.parametrize(
    "other",
    [
        ("other weights", "n", KvLayout(4, "float32", (LayerShape(1, 2, 2),))),
        ("f", "another kernel", KvLayout(4, "float32", (LayerShape(1, 2, 2),))),
        ("f", "n", KvLayout(8, "float32", (LayerShape(1, 2, 2),))),
        ("f", "n", KvLayout(4, "bfloat16", (LayerShape(1, 2, 2),))),
    ],
)
def test_key_15_blocks_of_other_weights_have_other_names(other: Any) -> None:
    """Caches live in their process's memory and no longer; between processes the contract
    of each hand-off is compared (HND-25)."""
    ours = root_hash("f", "n", KvLayout(4, "float32", (LayerShape(1, 2, 2),)))
    assert root_hash(*other) != ours
