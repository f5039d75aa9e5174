"""Access control of a service: which requests are answered, and what text may be shown."""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohooks.errors import InvalidArgumentError, printable


@dataclass(frozen=True, slots=True)
class JsonReply:
    """A status and a JSON body; `retry` tells the client that asking again soon makes sense."""

    status: int
    body: dict[str, Any] = field(default_factory=dict[str, Any])
    retry: bool = False


def encode_json(report: dict[str, Any]) -> bytes:
    """Encode a report as one line of ASCII without characters that have a meaning in HTML."""
    text = json.dumps(report, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return (
        text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").encode("ascii")
    )


def error_reply(
    status: int, error: str, message: str, *, retry: bool = False, **more: Any
) -> JsonReply:
    """Return a reply with an error code for programs and a message for people."""
    return JsonReply(status, {"error": error, "message": message, **more}, retry)


_METHOD = error_reply(
    405, "method_not_allowed", "use GET or HEAD; POST is for SessionService(controls=True)"
)
CONTROL_METHOD = error_reply(405, "method_not_allowed", "this changes the session: use POST")
_TOKEN = error_reply(
    401,
    "token_needed",
    "send the header Authorization: Bearer TOKEN; the page takes it from #TOKEN",
)

_HOST_HEADER = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_STRONG_TOKEN = re.compile(r"[!-~]{32,}")

_OF_PROXIES = re.compile(
    rb"forwarded|via|x-forwarded-.+|x-original-.+|x-envoy-.+"
    rb"|.*-client-ip|.*-connecting-ip|x-real-ip"
)
"""Headers that proxies and tunnels add. One that adds none cannot be known from a client on this
machine.
"""
_TEST_CLIENT = "testclient", "testserver"
"""What the `TestClient` of Starlette and FastAPI says that its client and server are; no socket has
such an address.
"""


class AccessPolicy:
    """The access rules of one service. Each check returns the reply that refuses the request, or
    None to let it pass.
    """

    def __init__(
        self, *, allowed_hosts: Iterable[str], token: str | None, allow_remote: bool
    ) -> None:
        names = [allowed_hosts] if isinstance(allowed_hosts, str) else list(allowed_hosts)
        for name in names:
            given: object = name
            if not isinstance(given, str) or not _HOST_NAME.fullmatch(given):
                raise InvalidArgumentError(
                    f"allowed_hosts has {given!r}; give plain host names, without port or pattern"
                )
        checked: object = token
        if checked is not None and not (
            isinstance(checked, str) and _STRONG_TOKEN.fullmatch(checked)
        ):
            raise InvalidArgumentError(
                "token is too easy to guess, or not valid in a header; give"
                " secrets.token_urlsafe(32), or leave it out"
            )
        self._hosts = frozenset(name.lower() for name in names)
        self._bearer = None if token is None else f"Bearer {token}".encode()
        self._allow_remote = allow_remote

    def check_request(
        self, scope: Mapping[str, Any], *, controls: bool = False
    ) -> JsonReply | None:
        """Check method, host and origin: the rules for every path; `controls` is for one that
        changes the session.
        """
        allowed = ("POST",) if controls else ("GET", "HEAD")
        if scope["method"] not in allowed:
            return CONTROL_METHOD if controls else _METHOD
        headers = _headers(scope)
        hosts = headers.get(b"host", [])
        own: bytes | None = None
        # Some probes use HTTP/1.0, which has no Host. No browser does, so there is no page behind
        # it.
        if hosts or scope.get("http_version") != "1.0":
            if len(hosts) != 1 or not self._is_own_host(hosts[0].decode("latin-1"), scope):
                return _host_reply([host.decode("latin-1") for host in hosts])
            own = scope.get("scheme", "http").encode() + b"://" + hosts[0].lower()
        foreign = [
            b"Origin: " + origin for origin in headers.get(b"origin", []) if origin.lower() != own
        ]
        sites = headers.get(b"sec-fetch-site", [])
        foreign += [
            b"Sec-Fetch-Site: " + site for site in sites if site not in (b"same-origin", b"none")
        ]
        if foreign:
            shown = safe_text(foreign[0].decode("latin-1"), 200)
            return error_reply(
                403, "foreign_origin", f"the request comes from a page of another origin ({shown})"
            )
        return None

    def _is_own_host(self, host: str, scope: Mapping[str, Any]) -> bool:
        found = _HOST_HEADER.fullmatch(host)
        if found is None:
            return False
        name = found["name"].lower()
        known = name == "localhost" or name in self._hosts or _parse_address(name) is not None
        return known or (name == _TEST_CLIENT[1] and _is_test_client(scope))

    def check_connection(self, scope: Mapping[str, Any]) -> JsonReply | None:
        """Check that the connection was made on this machine, by the client itself, or that remote
        clients are allowed.
        """
        if self._allow_remote or (self._bearer is not None and scope.get("scheme") == "https"):
            return None
        reason = _reason_not_local(scope)
        if reason is None:
            return None
        rule = (
            "only clients on the service's local machine are served, unless it has a token and TLS,"
            " or allow_remote=True"
        )
        return error_reply(403, "not_local", f"{reason}: {rule}")

    def check_client(self, scope: Mapping[str, Any]) -> JsonReply | None:
        """Check connection and token: the rules for details of the session."""
        if self._bearer is not None:
            given = _headers(scope).get(b"authorization", [])
            if len(given) != 1 or not hmac.compare_digest(given[0], self._bearer):
                return self.check_connection(scope) or _TOKEN
        return self.check_connection(scope)


def _headers(scope: Mapping[str, Any]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        found.setdefault(bytes(name).lower(), []).append(bytes(value))
    return found


def _parse_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return None


def _host_reply(hosts: list[str]) -> JsonReply:
    """Refuse a request whose Host is not one of the service."""
    name = hosts[0].rpartition(":")[0] or hosts[0] if len(hosts) == 1 else ""
    cure = (
        f"; to serve it, SessionService(..., allowed_hosts=[{name!r}])"
        if _HOST_NAME.fullmatch(name)
        else ""
    )
    given = safe_text(", ".join(hosts), 200) or "missing"
    message = (
        f"the Host header is {given}, which is neither localhost, an address nor in"
        f" allowed_hosts{cure}"
    )
    return error_reply(403, "host_not_allowed", message)


def _is_test_client(scope: Mapping[str, Any]) -> bool:
    return (_name_of(scope, "client"), _name_of(scope, "server")) == _TEST_CLIENT


def _name_of(scope: Mapping[str, Any], side: str) -> str:
    return str((scope.get(side) or ("",))[0])  # the client of a unix socket has none


def _reason_not_local(scope: Mapping[str, Any]) -> str | None:
    """Return why the request may come from elsewhere, or None if both sides of the connection are
    on this machine.
    """
    forwarded = [name.decode("latin-1") for name in _headers(scope) if _OF_PROXIES.fullmatch(name)]
    if forwarded:  # by a proxy, which may be on this machine, for a client anywhere
        return f"the request was forwarded (it has {safe_text(', '.join(forwarded), 200)})"
    # The server's own side counts, and the client's as well: servers replace that by what a proxy
    # says.
    for side, in_process in (("server", ""), ("client", _TEST_CLIENT[0])):
        name = _name_of(scope, side)
        if (
            name not in ("", "localhost", in_process)
            and not _is_loopback(name)
            and not _is_test_client(scope)
        ):
            return f"the {side}'s address is {safe_text(name, 100)}"
    return None


def _is_loopback(name: str) -> bool:
    """Return whether this is the address of a loopback connection, or the path of a unix socket."""
    address = _parse_address(name)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return name.startswith("/") or (address is not None and address.is_loopback)


_MAX_LENGTH = 500
_USERINFO = re.compile(r"(?<=://)[^\s/@'\"]+@")
_SECRET = re.compile(
    r"(?P<name>[\w-]*(?:password|passwd|secret|token|api[_-]?key|authorization)"
    r"[\w-]*['\"]?\s*[=:]\s*)"
    r"(?P<value>(?:bearer|basic)\s+\S+|'[^']*'|\"[^\"]*\"|[^\s,;)}\]&]+)",
    re.IGNORECASE,
)
_SOURCE_LINE = re.compile(r" \([^()\n]*\.py:[0-9]+\)")


def safe_text(text: str, max_length: int = _MAX_LENGTH) -> str:
    """Return the text as one printable line of limited length, without passwords, for a reply or a
    log line.

    Characters that are not printable (control and escape characters, line ends, bidirectional
    marks) are escaped. Source lines, which the message of a stall names, are left out, and so are
    the user info of URLs and values that are assigned to a name such as `password`. This catches
    accidents and is no guarantee: errors should be made without secrets.
    """
    shown = _SECRET.sub(
        r"\g<name>***", _USERINFO.sub("***@", _SOURCE_LINE.sub("", text[: 4 * max_length]))
    )
    return printable(shown, max_length)


def safe_error(error: BaseException) -> str:
    """Return the error's class and message in one safe line, without traceback."""
    try:
        message = str(error)
    except Exception:  # an error whose own __str__ fails
        message = "(its message cannot be shown)"
    return safe_text(f"{type(error).__name__}: {message}" if message else type(error).__name__)
