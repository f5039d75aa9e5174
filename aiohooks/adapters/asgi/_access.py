"""Texts of others, made fit to be shown: one line, printable, of limited length, without passwords."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohooks.errors import InvalidArgumentError

METHODS = ("GET", "HEAD")
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")
_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_TOKEN = re.compile(r"[!-~]{32,}")


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a request is told that is not served."""

    status: int
    error: str
    message: str


_NOT_READ_ONLY = Refusal(405, "method_not_allowed", "everything here is read-only: use GET or HEAD")
_BAD_HOST = Refusal(403, "host_not_allowed", "the Host header names neither an address nor localhost nor an allowed host")
_FOREIGN = Refusal(403, "foreign_origin", "the request comes from a page of another origin")
_REMOTE = Refusal(
    403, "not_local", "only the service's own machine is answered, unless there are a token and TLS, or allow_remote=True"
)
_NO_TOKEN = Refusal(401, "token_needed", "send the header Authorization: Bearer TOKEN; the page takes it from #TOKEN")


class Guard:
    """The rules of one service."""

    def __init__(self, *, allowed_hosts: Iterable[str], token: str | None, allow_remote: bool) -> None:
        """Keeps the rules.

        Raises:
            InvalidArgumentError: a host that is none, or a token that could be guessed.
        """
        names = [allowed_hosts] if isinstance(allowed_hosts, str) else list(allowed_hosts)
        for name in names:
            given: object = name
            if not isinstance(given, str) or not _NAME.fullmatch(given):
                raise InvalidArgumentError(f"allowed_hosts has {given!r}; give plain host names, without port or pattern")
        checked: object = token
        if checked is not None and not (isinstance(checked, str) and _TOKEN.fullmatch(checked)):
            raise InvalidArgumentError(
                "token is too easy to guess, or no header can hold it; give secrets.token_urlsafe(32), or leave it out"
            )
        self._hosts = frozenset(name.lower() for name in names)
        self._bearer = None if token is None else f"Bearer {token}".encode()
        self._allow_remote = allow_remote

    def refusal(self, scope: Mapping[str, Any]) -> Refusal | None:
        """Why nobody may ask in this way, if so: another method, host or origin."""
        if scope["method"] not in METHODS:
            return _NOT_READ_ONLY
        headers = _headers(scope)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self._knows(hosts[0].decode("latin-1")):
            return _BAD_HOST
        own = scope.get("scheme", "http").encode() + b"://" + hosts[0].lower()
        if any(origin.lower() != own for origin in headers.get(b"origin", [])):
            return _FOREIGN
        if any(site not in (b"same-origin", b"none") for site in headers.get(b"sec-fetch-site", [])):
            return _FOREIGN
        return None

    def _knows(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found["name"].lower()
        return name == "localhost" or name in self._hosts or _address(name) is not None

    def remote(self, scope: Mapping[str, Any]) -> Refusal | None:
        """Why it is not served over this connection, if so: it was not made on this machine."""
        safe = self._allow_remote or (self._bearer is not None and scope.get("scheme") == "https")
        return None if safe or _is_local(scope) else _REMOTE

    def unknown(self, scope: Mapping[str, Any]) -> Refusal | None:
        """Why this one may not look inside, if so: from elsewhere, or without the token."""
        if self._bearer is not None:
            given = _headers(scope).get(b"authorization", [])
            if len(given) != 1 or not hmac.compare_digest(given[0], self._bearer):
                return self.remote(scope) or _NO_TOKEN
        return self.remote(scope)

    def __repr__(self) -> str:
        return f"<Guard, {'with' if self._bearer else 'without'} a token>"


def _headers(scope: Mapping[str, Any]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        found.setdefault(bytes(name).lower(), []).append(bytes(value))
    return found


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return None


def _is_local(scope: Mapping[str, Any]) -> bool:
    """Whether the connection came in at a loopback address or a unix socket.

    It is the server's own side that counts: the client's may have been put there by a proxy's header.
    """
    at = scope.get("server") or scope.get("client")
    if at is None or str(at[0]).startswith("/") or at[0] == "localhost":
        return True
    address = _address(str(at[0]))
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and address.is_loopback


_LONGEST = 500
_USERINFO = re.compile(r"(?<=://)[^\s/@'\"]+@")
_SECRET = re.compile(
    r"(?P<name>[\w-]*(?:password|passwd|secret|token|api[_-]?key|authorization)[\w-]*['\"]?\s*[=:]\s*)"
    r"(?P<value>(?:bearer|basic)\s+\S+|'[^']*'|\"[^\"]*\"|[^\s,;)}\]&]+)",
    re.IGNORECASE,
)
_PLACE = re.compile(r" \([^()\n]*\.py:[0-9]+\)")


def safe_text(text: str, longest: int = _LONGEST) -> str:
    """The text for an answer or a log line.

    What is not printable (control and escape characters, line ends, characters that turn the direction of reading) is
    written as its code. Lines of files, which a stall names, are left out, and so is what looks like a password in a URL or is
    assigned to a name that says so. That is a net for accidents, not a promise: errors are better made without secrets.
    """
    shown = _SECRET.sub(r"\g<name>***", _USERINFO.sub("***@", _PLACE.sub("", text[: 4 * longest])))
    shown = "".join(one if one.isprintable() else _code(one) for one in shown)
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def safe_error(error: BaseException) -> str:
    """An error in one line: its class and what it says; no traceback."""
    try:
        said = str(error)
    except Exception:  # an error whose own __str__ fails
        said = "(it cannot say what happened)"
    return safe_text(f"{type(error).__name__}: {said}" if said else type(error).__name__)


def _code(one: str) -> str:
    number = ord(one)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
