"""Which URLs may be fetched, and as what they are read: no two readings of one text."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import EpdError, ErrorKind
from gateway.fetch.addresses import is_public, parse_literal
from gateway.fetch.urls import follow, parse


def read(text: str) -> str:
    return parse(text, "there").url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://example.com", "http://example.com/"),
        ("HTTPS://Example.COM:443/a%20b?c=d#e", "https://example.com/a%20b?c=d"),
        ("http://example.com.:8080/x", "http://example.com:8080/x"),
        ("http://example.com?x=1", "http://example.com/?x=1"),
        ("http://93.184.215.14/a", "http://93.184.215.14/a"),
        ("http://[2606:2800:0220:0001::1]:81/a", "http://[2606:2800:220:1::1]:81/a"),
        ("https://bücher.example/ü", "https://xn--bcher-kva.example/%C3%BC"),
        ("https://example.com/a@b?c=@d", "https://example.com/a@b?c=@d"),
        ("https://example.com/%2e%2e/a", "https://example.com/%2e%2e/a"),
    ],
)
def test_a_url_has_one_reading(text: str, url: str) -> None:
    assert read(text) == url
    assert read(url) == url


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ftp://example.com/a", "scheme ftp: is not allowed"),
        ("gopher://example.com", "scheme gopher: is not allowed"),
        ("file:///etc/hostname", "scheme file: is not allowed"),
        ("/etc/hostname", "expected a data: URL"),
        ("//example.com/a", "expected a data: URL"),
        ("http:/example.com", "expected a data: URL"),
        ("http:example.com", "expected a data: URL"),
        ("http://", "no host"),
        ("http:///a", "no host"),
        ("http://:80/a", "no host"),
        ("http://127.0.0.1:99\\@allowed.example/x.png", "backslash"),
        ("http://allowed.example#@127.0.0.1/", "user name"),
        ("http://allowed.example?@127.0.0.1/", "user name"),
        ("http://user:secret@example.com/", "user name"),
        ("http://@example.com/", "user name"),
        ("http://exam\tple.com/", "white space"),
        ("http://exam\nple.com/", "white space"),
        (" http://example.com/", "white space"),
        ("http://example.com/a b", "white space"),
        ("http://example.com/\u2028", "white space"),
        ("http://example.com/\x00", "white space"),
        ("http://2130706433:80/", "a number"),
        ("http://127.1/", "a number"),
        ("http://0x7f.1/", "a number"),
        ("http://0x7f000001/", "a number"),
        ("http://0177.0.0.1/", "a number"),
        ("http://127.0.0.1./", "a number"),
        ("http://127.0.0.256/", "a number"),
        ("http://1.2.3.4.5/", "a number"),
        ("http://a.1/", "a number"),
        ("http://[::1%25lo]/", "can't be read"),
        ("http://[fe80::1%eth0]/", "can't be read"),
        ("http://[::g]/", "can't be read"),
        ("http://[127.0.0.1]/", "can't be read"),
        ("http://[::127.0.0.1.1]/", "a number"),
        ("http://[::1/", "can't be read"),
        ("http://::1/", "can't be read"),
        ("http://example.com:0/", "no port 0"),
        ("http://example.com:65536/", "no port 65536"),
        ("http://example.com:8o/", "can't be read"),
        ("http://exa%6dple.com/", "can't be a host's name"),
        ("http://exam,ple.com/", "can't be a host's name"),
        ("http://-a.com/", "can't be a host's name"),
        ("http://a..com/", "can't be a host's name"),
        ("http://" + "a" * 64 + ".com/", "can't be a host's name"),
        ("http://example.com/" + "a" * 9000, "9019 characters; 8192 are allowed"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(text: str, words: str) -> None:
    with pytest.raises(EpdError) as caught:
        read(text)
    assert caught.value.kind is ErrorKind.INVALID_IMAGE_URL
    assert words in caught.value.message
    assert caught.value.param == "there"


def test_letters_of_other_scripts_that_mean_digits_are_seen_as_digits() -> None:
    """UTS 46 maps full-width digits and the ideographic full stop: the number is checked."""

    def wide(text: str) -> str:
        return "".join("\u3002" if c == "." else chr(0xFF10 + int(c)) for c in text)

    assert parse(f"http://{wide('127.0.0.1')}/", "there").address == ip_address("127.0.0.1")
    with pytest.raises(EpdError, match="a number"):
        read(f"http://{wide('127.1')}/")


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for url in (text, f"http://{text}", f"http://example.com/{text}"):
        try:
            target = parse(url, "there")
        except EpdError:
            continue
        assert target.url.isascii()
        assert parse(target.url, "there") == target


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/b", "https://example.com/b"),
        ("c?d", "https://example.com/a/c?d"),
        ("//other.example/x", "https://other.example/x"),
        ("https://other.example:444/x", "https://other.example:444/x"),
    ],
)
def test_redirects_are_read_relative_to_the_page(location: str, url: str) -> None:
    here = parse("https://example.com/a/b", "there")
    assert follow(here, location, "there").url == url


@pytest.mark.parametrize(
    "location",
    ["http://example.com/", "file:///etc/hostname", "https://u@example.com/", "https://127.1/", ""],
)
def test_redirects_are_read_as_strictly(location: str) -> None:
    here = parse("https://example.com/a/b", "there")
    if not location:
        assert follow(here, location, "there") == here
        return
    with pytest.raises(EpdError, match="a redirect leads to"):
        follow(here, location, "there")


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "169.254.169.254",
        "172.31.255.255",
        "192.0.0.1",
        "192.0.2.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.7",
        "203.0.113.7",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:5db8:d70e::1",
        "3fff::1",
        "4000::1",
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
    ],
)
def test_addresses_that_are_not_public(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize(
    "text",
    ["93.184.215.14", "8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::808:808", "2606:4700:4700::1111"],
)
def test_addresses_that_are_public(text: str) -> None:
    assert is_public(ip_address(text))


@given(st.ip_addresses())
def test_public_is_never_more_than_python_says(address: IPv4Address | IPv6Address) -> None:
    inner = getattr(address, "ipv4_mapped", None) or address
    if is_public(address):
        assert inner.is_global
        assert not inner.is_multicast


def test_a_name_is_no_literal() -> None:
    assert parse_literal("example.com") is None
    assert parse_literal("1.example") is None
    assert parse_literal("0xample.com") is None
