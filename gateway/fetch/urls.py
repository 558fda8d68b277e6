"""Reading of http(s) URLs, strict: what two parsers could read differently is refused. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import quote, urljoin

import idna

from epd.errors import EpdError, ErrorKind
from gateway.fetch.addresses import Address, parse_literal

_MOST_CHARACTERS = 8192
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_REST = re.compile(r"(?P<authority>[^/?#]*)(?P<path>[^?#]*)(?P<query>\?[^#]*)?(?:#.*)?", re.DOTALL)
_AUTHORITY = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f]*:[0-9A-Fa-f:.]*)\]|(?P<host>[^\[\]:]+))(?::(?P<port>\d{1,5}))?"
)
_HOST = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*"
    r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.?"
)
_PORTS = {"http": 80, "https": 443}
_KEEP = "!$&'()*+,;=:@/%-._~?[]"
_REDIRECTS_SHOWN = "a redirect leads to a URL that is refused: "


@dataclass(frozen=True, slots=True)
class Target:
    """One URL, taken apart once. What is checked here is what is dialled and asked for."""

    scheme: str
    host: str
    """Lower case, ASCII; an IPv6 address without brackets."""
    address: Address | None
    """Where the host is an address and no name."""
    port: int
    path: str
    """Path and query, percent-encoded, as it is sent."""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def parse(text: str, param: str) -> Target:
    """Take an http or https URL apart.

    Raises:
        EpdError: INVALID_IMAGE_URL saying which part is refused.
    """
    if len(text) > _MOST_CHARACTERS:
        refuse(f"the URL has {len(text)} characters; {_MOST_CHARACTERS} are allowed", param)
    if any(ord(c) <= 0x20 or 0x7F <= ord(c) <= 0x9F or c.isspace() for c in text):
        refuse("the URL holds white space or control characters; percent-encode them", param)
    if "\\" in text:
        refuse("the URL holds a backslash; percent-encode it", param)
    url = _URL.fullmatch(text)
    if url is None:
        refuse("expected a data: URL or an http(s) URL", param)
    scheme = url["scheme"].lower()
    if scheme not in _PORTS:
        refuse(f"the scheme {scheme}: is not allowed; http or https", param)
    # Up to the first slash, so that no reader of URLs can find a user in it.
    if "@" in url["rest"].partition("/")[0]:
        refuse("the URL holds a user name or a password (or an @ in its host)", param)
    rest = _REST.fullmatch(url["rest"])
    assert rest is not None
    host, address, port = _host_and_port(rest["authority"], scheme, param)
    path = quote((rest["path"] or "/") + (rest["query"] or ""), safe=_KEEP)
    return Target(scheme, host, address, port, path)


def follow(here: Target, location: str, param: str) -> Target:
    """Where a redirect leads, as strictly read as the first URL.

    Raises:
        EpdError: as `parse`; also for a step from https down to http.
    """
    try:
        there = parse(urljoin(here.url, location), param)
    except (EpdError, ValueError) as error:
        message = error.message if isinstance(error, EpdError) else "it can't be read"
        refuse(f"{_REDIRECTS_SHOWN}{message}", param)
    if here.scheme == "https" and there.scheme == "http":
        refuse(f"{_REDIRECTS_SHOWN}from https to http", param)
    return there


def _host_and_port(authority: str, scheme: str, param: str) -> tuple[str, Address | None, int]:
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        refuse("the URL has no host, or one that can't be read", param)
    host = found["six"] or _ascii(found["host"], param)
    port = int(found["port"] or _PORTS[scheme])
    if not 0 < port <= 65535:
        refuse(f"there is no port {port}", param)
    try:
        address = parse_literal(host)
    except ValueError:
        refuse("the URL's host is a number, but not an address in its usual spelling", param)
    if address is not None:
        host = str(address)
    elif _HOST.fullmatch(host) is None:
        refuse("the URL's host can't be a host's name", param)
    else:
        host = host.removesuffix(".")
    return host, address, port


def _ascii(host: str, param: str) -> str:
    """Names in other scripts as the DNS spells them (IDNA 2008 with UTS 46's mapping)."""
    if host.isascii():
        return host.lower()
    try:
        return idna.encode(host, uts46=True).decode("ascii").lower()
    except (idna.IDNAError, UnicodeError):
        refuse("the URL's host can't be a host's name", param)


def refuse(message: str, param: str) -> NoReturn:
    raise EpdError(ErrorKind.INVALID_IMAGE_URL, message, param=param)
