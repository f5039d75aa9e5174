"""Access control of a service: which requests are answered, and what text may be shown.

scope    the description of a request, a mapping of ASGI
local    said of a client if both sides of its connection are on this machine, without a proxy
origin   scheme, host and port of a page, which a browser sends with the requests of the page
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohooks.errors import InvalidArgumentError, printable, safe_str


@dataclass(frozen=True, slots=True)
class JsonReply:
    """A status, a JSON body and headers."""

    status: int
    body: dict[str, Any] = field(default_factory=dict[str, Any])
    headers: Mapping[str, str] | None = None


def encode_json(report: dict[str, Any]) -> bytes:
    """Encode a report as one line of ASCII without characters that have a meaning in HTML."""
    text = json.dumps(report, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("ascii")


def error_reply(
    status: int,
    error: str,
    message: str,
    headers: Mapping[str, str] | None = None,
) -> JsonReply:
    """Return a reply with an error code for programs and a message for people."""
    return JsonReply(status, {"error": error, "message": message}, headers)


RETRY = {"retry-after": "1"}
"""The header of a reply that asks the client to try again after a second."""

_HOST_HEADER = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")

_PROXY_HEADERS = re.compile(
    r"forwarded|via|x-forwarded-.+|x-original-.+|x-envoy-.+"
    r"|.*-client-ip|.*-connecting-ip|x-real-ip"
)
"""Headers that proxies and tunnels add. They are rejected without `allow_remote`, because a proxy
on this machine forwards requests of remote clients. A proxy that adds none looks like a local
client.
"""
_TEST_CLIENT = "testclient"
_TEST_SERVER = "testserver"
"""The client and the server of a request of the `TestClient` of Starlette and FastAPI. No socket
has such an address.
"""


class AccessPolicy:
    """The access rules of one service.

    Each check returns the reply that rejects the request, or None if the request is allowed.
    """

    def __init__(
        self,
        *,
        allowed_hosts: Iterable[str],
        allow_remote: bool,
    ) -> None:
        hosts: list[object] = list(allowed_hosts)
        if isinstance(allowed_hosts, str):
            hosts = [allowed_hosts]
        for host in hosts:
            if not isinstance(host, str) or not _HOST_NAME.fullmatch(host):
                raise InvalidArgumentError(
                    f"allowed_hosts has {host!r}; give plain host names, without port or pattern"
                )
        self._hosts = {"localhost", *(str(host).lower() for host in hosts)}
        self._allow_remote = allow_remote

    def check_request(
        self, scope: Mapping[str, Any], *, controls: bool = False
    ) -> JsonReply | None:
        """Check method, host and origin: the rules for every path.

        The check of the host protects against pages of others whose host name resolves to this
        machine (DNS rebinding).

        Args:
            scope: the request.
            controls: whether the path changes the session.
        """
        allowed = "POST" if controls else "GET, HEAD"
        if scope["method"] not in allowed.split(", "):
            message = f"this path has the methods {allowed}"
            return error_reply(405, "method_not_allowed", message, {"allow": allowed})
        headers = _headers(scope)
        hosts = headers.get("host", [])
        # The origin of the service's own pages, or None if it is unknown: then each Origin is
        # rejected.
        own_origin: str | None = None
        # Some probes use HTTP/1.0, which has no Host header. That is allowed, because no browser
        # does so, and no page can have sent the request.
        if hosts or scope.get("http_version") != "1.0":
            if len(hosts) != 1 or not self._is_own_host(hosts[0], scope):
                return _host_reply(hosts)
            own_origin = f"{scope.get('scheme', 'http')}://{hosts[0].lower()}"
        return _check_origin(headers, own_origin)

    def _is_own_host(
        self,
        host: str,
        scope: Mapping[str, Any],
    ) -> bool:
        """Return whether the value of a Host header names this service."""
        match = _HOST_HEADER.fullmatch(host)
        if match is None:
            return False
        name = match["name"].lower()
        # An address needs no check: a page of others could get here only by a host name.
        if name in self._hosts or _parse_address(name) is not None:
            return True
        return name == _TEST_SERVER and _name_of(scope, "client") == _TEST_CLIENT

    def check_client(self, scope: Mapping[str, Any]) -> JsonReply | None:
        """Return the reply that rejects a client, or None if the client may be served.

        Clients of other machines are rejected, unless the service has `allow_remote=True`.
        """
        if self._allow_remote:
            return None
        reason = _reason_not_local(scope)
        if reason is None:
            return None
        rule = "only clients on the service's local machine are served, without allow_remote=True"
        return error_reply(403, "not_local", f"{reason}: {rule}")


def _headers(scope: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the values of each header of a request, by its name in lower case."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        values = headers.setdefault(name.decode("latin-1").lower(), [])
        values.append(value.decode("latin-1"))
    return headers


def _parse_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _host_reply(hosts: list[str]) -> JsonReply:
    """Return the reply to a request whose Host does not belong to the service."""
    text = ", ".join(hosts)
    value = safe_text(text, 200) or "missing"
    message = (
        f"the Host header is {value}, which is neither localhost, an address nor in allowed_hosts"
    )
    # Add the advice only for a plain host name, which `allowed_hosts` can have.
    name = text.partition(":")[0]
    if _HOST_NAME.fullmatch(name):
        message += f"; to serve it, SessionService(..., allowed_hosts=[{name!r}])"
    return error_reply(403, "host_not_allowed", message)


def _check_origin(headers: Mapping[str, list[str]], own_origin: str | None) -> JsonReply | None:
    """Reject a request that a browser has sent for a page of another origin."""
    for origin in headers.get("origin", []):
        if origin.lower() != own_origin:
            return _origin_reply(f"Origin: {origin}")
    for site in headers.get("sec-fetch-site", []):
        if site not in ("same-origin", "none"):
            return _origin_reply(f"Sec-Fetch-Site: {site}")
    return None


def _origin_reply(header: str) -> JsonReply:
    message = f"the request comes from a page of another origin ({safe_text(header, 200)})"
    return error_reply(403, "foreign_origin", message)


def _name_of(scope: Mapping[str, Any], side: str) -> str:
    # A side is a pair of address and port. The client of a unix socket has none, which gives "".
    return str((scope.get(side) or ("",))[0])


def _reason_not_local(scope: Mapping[str, Any]) -> str | None:
    """Return why the client may not be local, or None if it is."""
    forwarded = [name for name in _headers(scope) if _PROXY_HEADERS.fullmatch(name)]
    # The connection shows only the proxy, which may be on this machine while the client is not.
    if forwarded:
        return f"the request was forwarded (it has {safe_text(', '.join(forwarded), 200)})"
    local_names = {"", "localhost"}
    if _name_of(scope, "client") == _TEST_CLIENT:
        local_names |= {_TEST_CLIENT, _TEST_SERVER}
    # The client alone is not enough: some servers take its address from a header, which a remote
    # client can set. The address of the server is that of the connection.
    for side in ("server", "client"):
        name = _name_of(scope, side)
        if name not in local_names and not _is_loopback(name):
            return f"the {side}'s address is {safe_text(name, 100)}"
    return None


def _is_loopback(name: str) -> bool:
    """Return whether this is a loopback address, or the path of a unix socket."""
    if name.startswith("/"):
        return True
    address = _parse_address(name)
    # An IPv6 socket shows an IPv4 client as "::ffff:127.0.0.1".
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and address.is_loopback


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
    """Return text as one printable line of limited length, without passwords.

    Characters that are not printable (control and escape characters, line ends, bidirectional
    marks) are escaped. Source lines, which the message of a stall names, are left out, and so are
    the user info of URLs and values that are assigned to a name such as `password`. This catches
    accidents and is no guarantee: errors should be made without secrets.
    """
    # The text is cut before the patterns search it, to limit their time. `printable` cuts the rest.
    shown = _SOURCE_LINE.sub("", text[: 4 * max_length])
    shown = _USERINFO.sub("***@", shown)
    shown = _SECRET.sub(r"\g<name>***", shown)
    return printable(shown, max_length)


def safe_error(error: BaseException) -> str:
    """Return the error's class and message in one safe line, without traceback."""
    return safe_text(f"{type(error).__name__}: {safe_str(error)}".removesuffix(": "))
