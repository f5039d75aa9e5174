"""What the errors of the Redis client mean for a step store, and what to do about them."""

from __future__ import annotations

from aiohooks._errors import StoreRefusedError, StoreUnavailableError

# By the name of the client's class, or by how the server's own words begin. The first one that fits says it.
_RIGHTS = "the user may not do that; give it the rights in docs/engine-redis.md (ACL SETUSER)"
_ELSEWHERE = "it is a node of a cluster, and the run belongs to another one; give the address of that one"
_DENIALS = ("NoPermissionError", "has no permissions", "can't run this command", "can't access at least one of the keys")
_REFUSED = (
    *((sign, _RIGHTS) for sign in _DENIALS),
    ("without any password configured", "the server has no password; leave it out of the URL"),
    ("AuthenticationError", "wrong or missing password or user; put them in the URL: redis://user:password@host:6379"),
    ("AuthorizationError", "the user may not connect; look at ACL LIST on the server"),
    ("DENIED", "protected mode: a server without a password takes no connections from other machines; set one (requirepass)"),
    ("SSLCertVerificationError", "its certificate does not verify; give ssl_ca_certs= the authority that signed it"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS on this port; use redis://, or give its TLS port"),
    ("unknown command", "it is too old, or not a Redis server; Redis 6.2 or later, or Valkey, is needed"),
    ("Unknown Redis command", "a command is missing there; Redis 6.2 or later, or Valkey, is needed"),
    ("MOVED ", _ELSEWHERE),  # as clients before redis-py 6 say it
    ("MovedError", _ELSEWHERE),
    ("CROSSSLOT", "it is a proxy of a cluster that does not know hash tags; give the address of one node"),
    ("DB index is out of range", "there is no such database; leave the number out of the URL"),
    ("SELECT is not allowed", "a cluster has one database only; leave the number out of the URL"),
)
# What comes of a script that finds something else than what the script has written.
_FOREIGN = ("WRONGTYPE", "FOREIGN", "attempt to ", "bad argument #", "assertion failed", "not an integer", "Expected ")
_START = "no server is listening there; start one (redis-server --port 6379), or mend the address"
_AWAY = (
    ("BusyLoadingError", "it is still reading its data from the disk"),
    ("ReadOnlyError", "it is a replica, which cannot be written to; give the address of its master"),
    ("MASTERDOWN", "it is a replica that has lost its master"),
    ("CLUSTERDOWN", "the cluster is down"),
    ("MasterDownError", "it is a replica that has lost its master"),
    ("ClusterDownError", "the cluster is down"),
    ("OutOfMemoryError", "its memory is full (maxmemory); give it more, or delete what is not needed"),
    ("MISCONF", "it cannot write to its disk, and refuses changes until it can; look at its log"),
    ("NOREPLICAS", "it has too few replicas at the moment (min-replicas-to-write)"),
    ("max number of clients", "it has as many clients as it takes (maxclients)"),
    ("is busy running a script", "another script keeps it busy"),
    ("UNBLOCKED", "it has become a replica"),
    *((sign, _START) for sign in ("Connect call failed", "Connection refused", "ConnectionRefusedError")),
)


def _names(error: BaseException) -> set[str]:
    """The names of the classes of an error, and of what it was caused by."""
    names: set[str] = set()
    one: BaseException | None = error
    while one is not None:
        names.update(kind.__name__ for kind in type(one).__mro__)
        one = one.__cause__ or one.__context__
    return names


def is_reply(error: BaseException) -> bool:
    """Whether it was the server's answer to a request, after which the connection goes on."""
    return any(kind.__name__ == "ResponseError" for kind in type(error).__mro__)


def is_foreign(error: BaseException) -> bool:
    """Whether the server says that what is under the keys of a run is none."""
    return is_reply(error) and any(sign in str(error) for sign in _FOREIGN)


def is_no_script(error: BaseException) -> bool:
    """Whether the server does not know the script yet, or not any more."""
    return any(kind.__name__ == "NoScriptError" for kind in type(error).__mro__)


def explained(error: BaseException, address: str, *, connecting: bool = False) -> StoreUnavailableError:
    """What is raised in place of the client's error; where it came while connecting, the address may be wrong."""
    names, said = _names(error), str(error).rstrip(".") or type(error).__name__
    # An answer of the server's that nobody here knows will be the same again.
    kind: type[StoreUnavailableError] = StoreRefusedError if is_reply(error) else StoreUnavailableError
    advice = "is the server up, is this its address, and does it want TLS (rediss://) or not (redis://)?" if connecting else ""
    for possible, table in ((StoreRefusedError, _REFUSED), (StoreUnavailableError, _AWAY)):
        for sign, what_to_do in table:
            if sign in names or sign in said:
                kind, advice = possible, what_to_do
                break
        else:
            continue
        break
    found = kind(f"redis at {address}: {said}{': ' if advice else ''}{advice}")
    found.__cause__ = error
    return found
