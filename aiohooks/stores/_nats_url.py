"""The URL of a NATS server or cluster, and who one says one is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from aiohooks._errors import InvalidArgumentError

_PORT = 4222


@dataclass(frozen=True, slots=True)
class Address:
    """Servers of one cluster, and what their URL says of the user; its text shows no secret."""

    servers: tuple[str, ...]
    """As host:port."""
    needs_tls: bool
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{'tls' if self.needs_tls else 'nats'}://{','.join(self.servers)}"


def parse_address(url: str) -> Address:
    """Reads `nats://user:password@host:port,host:port`, or `tls://...`; a user without a password is a token.

    Raises:
        InvalidArgumentError: it is not such a URL.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("nats", "tls") or not rest:
        raise InvalidArgumentError(
            f'the URL of a NATS step store begins with nats:// or tls://, not with {scheme[:20]!r}: give "nats://host:4222"'
        )
    servers: list[str] = []
    user = password = token = None
    for each in rest.split(","):
        try:
            parts = urlsplit(f"//{each.rpartition('://')[2]}")
            host, port = parts.hostname, parts.port or _PORT
        except ValueError as error:
            wrong = f"a server in the {scheme}:// URL has a port that is no number below 65536"
            raise InvalidArgumentError(f"{wrong}: give host:4222") from error
        if not host or parts.path.strip("/") or parts.query:
            # Without what was given: there may be a password in it.
            raise InvalidArgumentError(f"a server in the {scheme}:// URL is not of the form user:password@host:port")
        servers.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        if parts.username and user is None and token is None:
            if parts.password is None:
                token = unquote(parts.username)
            else:
                user, password = unquote(parts.username), unquote(parts.password)
    return Address(tuple(servers), scheme == "tls", user, password, token)
