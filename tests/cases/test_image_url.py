"""Cases URL-*: data URLs in every spelling, and URLs that must or must not be fetched."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cases.pictures import (
    URL_PARAM,
    ask,
    body,
    data_url,
    distance,
    file,
    noise,
    part,
    quad,
    refused,
    text,
)
from tests.cases.site import Site, fetching_gateway, ok, redirect, status
from tests.e2e.cluster import Cluster
from tests.e2e.member import Reply, Worker, request
from tests.waiting import promised

PICTURE = file(quad())
SAME = 1e-3
URL_CODE = "invalid_image_url"


def spellings() -> dict[str, str]:
    plain = base64.b64encode(PICTURE).decode()
    lines = "\r\n".join(plain[at : at + 76] for at in range(0, len(plain), 76))
    return {
        "lines of 76": f"data:image/png;base64,{lines}",
        "URL-safe letters": f"data:image/png;base64,{plain.translate(str.maketrans('+/', '-_'))}",
        "no padding": f"data:image/png;base64,{plain.rstrip('=')}",
        "upper case": f"DATA:IMAGE/PNG;BASE64,{plain}",
        "leading blanks": f"  \n data:image/png;base64, {plain}",
        "escaped": f"data:image/png;base64,{plain.replace('+', '%2B').replace('=', '%3D')}",
        "percent-encoded": "data:image/png," + "".join(f"%{byte:02x}" for byte in PICTURE),
        "no type": f"data:;base64,{plain}",
        "a parameter": f"data:image/png;name=a.png;base64,{plain}",
        "a tree of subtypes": f"data:image/vnd.mozilla.apng;base64,{plain}",
        "a suffix": f"data:image/svg+xml;base64,{plain}",
    }


def test_url_02_base64_as_clients_send_it(cluster: Cluster) -> None:
    plain = ask(cluster, PICTURE)
    for name, url in spellings().items():
        assert distance(ask(cluster, part(url)), plain) < SAME, name


@pytest.mark.parametrize("payload", ["!!!!", "iVBORw0KGgo\u00e9", "A", "AA=A", "iVBO*w0K"])
def test_url_02_invalid_letters_are_named(cluster: Cluster, payload: str) -> None:
    refused(ask(cluster, part(f"data:image/png;base64,{payload}")), "base64 is damaged")


def test_url_03_subtypes_and_commas(cluster: Cluster) -> None:
    plain = base64.b64encode(PICTURE).decode()
    reply = ask(cluster, part(f"data:image/x-icon;base64,{plain}"))
    assert distance(reply, ask(cluster, PICTURE)) < SAME
    refused(ask(cluster, part(f"data:image/png;name=a,b;base64,{plain}")), "comma")
    refused(ask(cluster, part("data:image/png;base64")), "comma")


def test_url_04_no_prefix_or_two(cluster: Cluster, site: Site) -> None:
    plain = base64.b64encode(PICTURE).decode()
    bare = "expected a data: URL or an http(s) URL"
    refused(ask(cluster, part(plain)), bare, code=URL_CODE)
    refused(ask(cluster, part("")), bare, code=URL_CODE)
    twice = f"data:image/png;base64,data:image/png;base64,{plain}"
    refused(ask(cluster, part(twice)), "payload is itself a data: URL")
    assert site.connections == 0


# --- what is never dialled ----------------------------------------------------------------


@pytest.fixture(scope="module")
def public(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    gateway = fetching_gateway(tmp_path_factory.mktemp("public"), site.port)
    yield gateway
    assert gateway.end() == 0


def ask_public(gateway: Worker, url: str) -> Reply:
    model = request(gateway.report["http"], "/v1/models").json["data"][0]["id"]
    asked = body(part(url), text("?")) | {"model": model}
    return request(gateway.report["http"], "/v1/chat/completions", asked)


INSIDE = {
    "loopback": "127.0.0.1",
    "its name": "localhost",
    "IPv6": "[::1]",
    "mapped": "[::ffff:127.0.0.1]",
    "mapped, in hex": "[::ffff:7f00:1]",
    "translated": "[64:ff9b::7f00:1]",
    "any": "0.0.0.0",
    "another loopback": "127.1.2.3",
}
ODD = ["2130706433", "127.1", "0x7f.1", "0x7f000001", "017700000001", "0177.0.0.1", "127.0.0.1."]


@pytest.mark.parametrize("name", INSIDE)
def test_url_05_nothing_inside_is_reached(public: Worker, site: Site, name: str) -> None:
    site.reset()
    reply = ask_public(public, site.url("/x.png", INSIDE[name]))
    refused(reply, "not on the public internet", code=URL_CODE)
    assert site.connections == 0


@pytest.mark.parametrize("host", ODD)
def test_url_05_odd_spellings(public: Worker, site: Site, host: str) -> None:
    site.reset()
    refused(ask_public(public, site.url("/x.png", host)), "a number", code=URL_CODE)
    assert site.connections == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[fd00:ec2::254]/latest/meta-data/",
        "http://10.0.0.1/",
        "http://192.168.1.1/",
        "https://100.100.100.200/",
        "http://224.0.0.1/",
    ],
)
def test_url_05_addresses_of_clouds_and_houses(public: Worker, url: str) -> None:
    reply = ask_public(public, url)
    refused(reply, "not on the public internet", code=URL_CODE)
    assert reply.seconds < promised(2), "it was dialled"


def test_url_05_ports_are_limited(public: Worker) -> None:
    refused(ask_public(public, "http://8.8.8.8:22/"), "not fetched from port 22", code=URL_CODE)


def test_url_05_an_explicit_allowance(cluster: Cluster, site: Site) -> None:
    site.answers["/x.png"] = ok(PICTURE)
    url = site.url("/x.png")
    assert distance(ask(cluster, part(url)), ask(cluster, PICTURE)) < SAME
    assert site.paths == ["/x.png"]
    # Twice in one request is one fetch; a later request fetches again.
    assert ask(cluster, part(url), part(url)).status == 200
    assert site.paths == ["/x.png"] * 2
    for other in ("http://localhost:{}/x.png", "http://[::1]:{}/x.png", "http://127.0.0.2:{}/"):
        reply = ask(cluster, part(other.format(site.port)))
        refused(reply, "not on the list", code=URL_CODE)
    assert site.connections == 2


def test_url_05_off_unless_turned_on(site: Site, tmp_path: Path) -> None:
    from epd.config_sources import load_config

    assert load_config(environ={}).fetch.mode == "off"


def test_url_06_each_redirect_is_checked(cluster: Cluster, site: Site) -> None:
    with Site() as inner:
        inner.answers["/x.png"] = ok(PICTURE)
        site.answers |= {
            "/away": redirect(inner.url("/x.png")),
            "/file": redirect("file:///etc/hostname"),
            "/odd": redirect(site.url("/x.png", "127.1")),
            "/user": redirect(f"http://a@127.0.0.1:{site.port}/x.png"),
            "/loop": redirect("/loop"),
            "/once": redirect("/x.png"),
            "/x.png": ok(PICTURE),
        }
        for path, words in (
            ("/away", "not on the list"),
            ("/file", "scheme file: is not allowed"),
            ("/odd", "a number"),
            ("/user", "user name"),
            ("/loop", "redirects more than 3 times"),
        ):
            refused(ask(cluster, part(site.url(path))), words, code=URL_CODE)
        assert inner.connections == 0
    assert site.paths.count("/loop") == 4
    assert "/x.png" not in site.paths
    assert distance(ask(cluster, part(site.url("/once"))), ask(cluster, PICTURE)) < SAME


def test_url_07_one_reading_of_a_url(cluster: Cluster, site: Site) -> None:
    port = site.port
    for url, words in (
        (f"http://127.0.0.1:{port}\\@allowed.example/x.png", "backslash"),
        (f"http://allowed.example\\@127.0.0.1:{port}/x.png", "backslash"),
        (f"http://allowed.example#@127.0.0.1:{port}/", "user name"),
        (f"http://allowed.example?@127.0.0.1:{port}/", "user name"),
        (f"http://allowed.example@127.0.0.1:{port}/", "user name"),
        (f"http://u:p@127.0.0.1:{port}/x.png", "user name"),
        (f"http://127.0.\t0.1:{port}/x.png", "white space"),
        (f"http://127.0.\n0.1:{port}/x.png", "white space"),
        (f"http://127.0.0.1:{port}/x.png\r\nX: y", "white space"),
        (f"http://127.0.0.1%3a{port}/x.png", "host"),
        (f"http://[127.0.0.1]:{port}/x.png", "can't be read"),
    ):
        refused(ask(cluster, part(url)), words, code=URL_CODE)
    assert site.connections == 0


@pytest.mark.parametrize(
    "url", ["file:///etc/hostname", "FILE:///etc/hostname", "ftp://a/b", "gopher://a", "blob:x"]
)
def test_url_08_other_schemes(cluster: Cluster, url: str) -> None:
    reply = ask(cluster, part(url))
    refused(reply, "is not allowed", code=URL_CODE)
    assert Path("/etc/hostname").read_text().strip() not in reply.error["message"]


def test_url_08_a_path_is_no_url(cluster: Cluster) -> None:
    refused(ask(cluster, part("/etc/hostname")), "expected a data: URL", code=URL_CODE)
    refused(ask(cluster, part("//127.0.0.1/x")), "expected a data: URL", code=URL_CODE)


def test_url_09_servers_that_drip(cluster: Cluster, site: Site) -> None:
    """64 of them hold up nobody, and all end at one deadline of 4 s."""
    site.answers["/drip"] = ok(b"\x89PNG", content_length="100000")
    site.drip.add("/drip")
    normal = max(ask(cluster, PICTURE).seconds for _ in range(3))
    with ThreadPoolExecutor(64) as pool:
        slow = [pool.submit(ask, cluster, part(site.url("/drip"))) for _ in range(64)]
        time.sleep(1)  # into the 4 s of the others
        other = ask(cluster, PICTURE)
        replies = [reply.result() for reply in slow]
    assert other.status == 200
    assert other.seconds < normal + promised(2)
    assert {reply.status for reply in replies} <= {400, 429}
    late = [reply for reply in replies if reply.status == 400]
    assert late
    for reply in late:
        refused(reply, "within 4 s", code=URL_CODE)
    assert all("retry-after" in r.headers for r in replies if r.status == 429)
    assert max(reply.seconds for reply in replies) < promised(9)


TROUBLE: dict[str, tuple[bytes, str, str]] = {
    "403": (status("403 Forbidden"), "status 403", URL_CODE),
    "404 with a page": (status("404 Not Found", b"<html>"), "status 404", URL_CODE),
    "500": (status("500 Oh"), "status 500", URL_CODE),
    "200 with a page": (ok(b"<!doctype html><html>"), "a web page", "invalid_image"),
    "200 with nothing": (ok(b""), "empty body", URL_CODE),
    "cut in the body": (ok(PICTURE[:50], content_length="5000"), "cut the body", URL_CODE),
    "gzip": (ok(b"\x1f\x8b\x08", content_encoding="gzip"), "compressed body", URL_CODE),
    "a picture cut short": (ok(PICTURE[:-60]), "cut short", "invalid_image"),
    "no HTTP": (b"220 ready\r\n", "proper HTTP", URL_CODE),
    "nothing": (b"", "broke the connection", URL_CODE),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", TROUBLE)
def test_url_10_trouble_is_the_clients_400(
    cluster: Cluster, site: Site, name: str, stream: bool
) -> None:
    answer, words, code = TROUBLE[name]
    site.answers["/x.png"] = answer
    refused(ask(cluster, part(site.url("/x.png")), stream=stream), words, code=code)


def test_url_10_bodies_without_end(cluster: Cluster, site: Site) -> None:
    """Declared or found out, the cap of 1 MiB holds."""
    zeros = b"80000\r\n" + bytes(0x80000) + b"\r\n"
    site.answers["/chunks"] = ok(zeros * 3, transfer_encoding="chunked")
    site.answers["/huge"] = ok(b"", content_length=str(1 << 40))
    site.hold |= {"/chunks", "/huge"}
    for path in ("/chunks", "/huge"):
        reply = ask(cluster, part(site.url(path)))
        refused(reply, "more than 1048576 bytes", code="image_too_large")
        assert reply.seconds < promised(3)
    site.answers["/fits"] = ok(file(noise(500, 500)))
    assert ask(cluster, part(site.url("/fits"))).status == 200


def test_url_10_the_part_at_fault_is_named(cluster: Cluster, site: Site) -> None:
    site.answers["/good"] = ok(PICTURE)
    good, bad = part(site.url("/good")), part(site.url("/bad"))
    reply = ask(cluster, good, part(data_url(PICTURE)), bad)
    refused(reply, "status 404", URL_PARAM.replace("content[0]", "content[2]"), URL_CODE)
