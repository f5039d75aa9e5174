"""Hostile requests, as bytes for a socket, and the behaviour of their sender."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

Behaviour = Literal["reads", "leaves", "resets", "stops halfway", "does not read", "sends slowly"]
MARK = "hostile-position"
"""Part of every invented header; it must not be in a header of the reply."""

ENDPOINTS = ("health", "ready", "progress", "events", "steps/0", "steps/1", "", "page.js", "page.css", "nowhere")
PATHS = (
    "../../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/", "....//....//etc/passwd", "/etc/passwd",
    "\\..\\..\\windows", "page.js/../../app.py", "page.js%00.html", "_page/index.html", "steps/1/../../health", "steps/",
    "steps", "steps//1", "steps/1/", "steps/1;a=b", "steps/%31", "health%0d%0aX-Injected:%20" + MARK, "%0d%0a%0d%0a<script>",
    "steps/%3Cscript%3Ealert(1)%3C/script%3E", "%ff%fe", "%c0%ae%c0%ae/", "%u002e", "?" * 2000, "a" * 50_000, "/" * 3000,
    ".git/config", "__class__", "{0.__class__}", "%s%s%n", "$(id)", "`id`", "' OR 1=1 --", "server-status", "favicon.ico",
)  # fmt: skip
STEPS = (
    "-1", "-0", "+1", "1e3", "1.5", "0x10", "NaN", "inf", "null", "true", "9" * 17, "9" * 4301, "9" * 30_000,
    "9007199254740992",
    "18446744073709551616", "-9223372036854775809", "٣", "²", "Ⅷ", "\uff11\uff12", "\u202e1", "1\u0000",
    "😀", "1_000",
    " 1", "1 ", "[1]", "{}", "1,2", "%00", "1\n", "1\r\nX-Injected: " + MARK,
)  # fmt: skip
QUERIES = (
    "timeout=-1", "timeout=nan", "timeout=inf", "timeout=1e309", "timeout=", "timeout=x", "timeout=1&timeout=2", "timeout=٣",
    "timeout=" + "9" * 5000, "timeout=0x1", "timeout=1;drop", "timeout[]=1", "timeout=0", "timeout=0.0",
    "timeout=%00", "&" * 5000,
    "a=b&" * 5000, "=" * 3000, "timeout=1%0d%0aX-Injected: " + MARK, "%", "%%%", "timeout=86401",
)  # fmt: skip
METHODS = (
    "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "GETT", "G", "X" * 3000, "PRI", "MKCOL",
)  # fmt: skip
HOSTS = (
    "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil.example", "evil.example#localhost",
    "localhost:80:80", "localhost:", "localhost:99999999", "2130706433", "0x7f000001", "127.1", "[::1", "::1", "",
    " ", "*", "null",
    "localhost/../", "localhost\tx", "localhost,evil.example", "a" * 5000, "ⓛocalhost", "xn--lcalhost-",
    ".localhost", "localhost.",
)  # fmt: skip
HEADERS = (
    "Origin: http://evil.example", "Origin: null", "Origin: http://localhost.evil.example", "Sec-Fetch-Site: cross-site",
    "Sec-Fetch-Site: same-site", "Sec-Fetch-Site: Same-Origin", "Host: evil.example", "Host: localhost", "Content-Length: -1",
    "Content-Length: 99999999999999999999", "Content-Length: 5\r\nContent-Length: 6", "Transfer-Encoding: chunked",
    "Transfer-Encoding: chunked, identity\r\nContent-Length: 3", "Expect: 100-continue",
    "Upgrade: websocket\r\nConnection: Upgrade",
    "Upgrade: h2c", "Range: bytes=0-0,1-1,2-2," * 100, "X-Forwarded-For: 127.0.0.1", "X-Forwarded-Host: evil.example",
    "X-Forwarded-Proto: https", "X-HTTP-Method-Override: DELETE", "Cookie: " + "a=b; " * 3000, "Authorization: Bearer ",
    "Authorization: Basic dGVzdDp0ZXN0", "Authorization: Bearer " + "x" * 5000, "Accept: " + "*/*, " * 3000,
    "X-Big: " + "b" * 70_000,
    "X-Nul: a\0b", "X-Bare: a\rb", " folded", "NoColon", ": empty", "X-Space : a", "If-None-Match: *",
    "TE: trailers", "Via: " + MARK,
    "User-Agent: \x1b[31m" + MARK, "X-Latin: \xe9\xff", "X-Many: a\r\n" * 90 + "X-Many: b",
    "Referer: http://evil.example/" + MARK,
)  # fmt: skip
RAW = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /\r\n\r\n",
    b"\0" * 200, b"\r\n" * 500,
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\xff" * 1000,
    b"GET / HTTP/1.1 HTTP/1.1\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"*1\r\n$4\r\nINFO\r\n",
    b"GET  /  HTTP/1.1\r\n\r\n", b"A" * 100_000,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """The bytes to send, and the behaviour of the sender."""

    kind: str
    data: bytes
    behaviour: Behaviour = "reads"


def _head(method: str, path: str, *, host: str = "localhost", more: tuple[str, ...] = (), close: bool = True) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *more, *(["Connection: close"] if close else [])]
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n"


def _path(order: random.Random, base: str) -> Request:
    text = order.choice(PATHS)
    if order.random() < 0.3:
        text = quote(bytes(order.randrange(256) for _ in range(order.randrange(1, 60))))
    return Request("path", _head(order.choice(("GET", "HEAD")), base + text))


def _step(order: random.Random, base: str) -> Request:
    text = order.choice(STEPS)
    return Request("step", _head("GET", f"{base}steps/{text if order.random() < 0.3 else quote(text)}"))


def _timeout(order: random.Random, base: str) -> Request:
    # The step is reached already, so a query that is accepted is answered immediately as well.
    return Request("query", _head("GET", f"{base}steps/{order.choice(('0', '1'))}?{quote(order.choice(QUERIES), safe='=&%')}"))


def _method(order: random.Random, base: str) -> Request:
    body = order.choice(("", "Content-Length: 4"))
    more = (body,) if body else ()
    return Request("method", _head(order.choice(METHODS), base + order.choice(ENDPOINTS), more=more) + b"body" * bool(body))


def _host(order: random.Random, base: str) -> Request:
    return Request("host", _head(order.choice(("GET", "HEAD", "POST")), base + order.choice(ENDPOINTS), host=order.choice(HOSTS)))


def _header(order: random.Random, base: str) -> Request:
    more = tuple(order.sample(HEADERS, order.randrange(1, 4)))
    endpoint = order.choice([one for one in ENDPOINTS if one != "events"])
    # A header may announce a body, which is not sent: then the client leaves.
    return Request("header", _head("GET", base + endpoint, more=more), "leaves" if "Length" in "".join(more) else "reads")


def _raw(order: random.Random, base: str) -> Request:
    data = order.choice(RAW)
    if order.random() < 0.3:
        data = order.randbytes(order.randrange(1, 3000))
    return Request("raw", data, "stops halfway")


def _broken(order: random.Random, base: str) -> Request:
    data = bytearray(_head("GET", base + order.choice(ENDPOINTS), more=tuple(order.sample(HEADERS, 1))))
    for _ in range(order.randrange(1, 6)):
        data[order.randrange(len(data))] = order.randrange(256)
    return Request("broken", bytes(data), "stops halfway")


def _waiter(order: random.Random, base: str) -> Request:
    behaviour: Behaviour = order.choice(("leaves", "resets", "does not read"))
    return Request("waiter", _head("GET", f"{base}steps/{order.randrange(10**9, 2**53)}"), behaviour)


def _follower(order: random.Random, base: str) -> Request:
    behaviour: Behaviour = order.choice(("leaves", "resets", "does not read"))
    return Request("follower", _head("GET", f"{base}events"), behaviour)


def _half(order: random.Random, base: str) -> Request:
    data = _head("GET", base + order.choice(ENDPOINTS))
    return Request("half", data[: order.randrange(1, len(data) - 1)], "stops halfway")


def _slow(order: random.Random, base: str) -> Request:
    return Request("slow", _head("GET", f"{base}steps/0"), "sends slowly")


def _pipelined(order: random.Random, base: str) -> Request:
    first = b"".join(_head("GET", base + order.choice(("health", "steps/0", "page.js")), close=False) for _ in range(20))
    return Request("pipelined", first + _head("GET", f"{base}health"), order.choice(("reads", "leaves")))


MAKERS: tuple[Callable[[random.Random, str], Request], ...] = (
    _path, _step, _timeout, _method, _host, _header, _raw, _broken, _waiter, _follower, _half, _slow, _pipelined,
)  # fmt: skip


def requests(count: int, seed: int, bases: tuple[str, ...]) -> list[Request]:
    """Return `count` requests, equally many of each kind, in random order."""
    order = random.Random(seed)
    made = [MAKERS[number % len(MAKERS)](order, order.choice(bases)) for number in range(count)]
    order.shuffle(made)
    return made
