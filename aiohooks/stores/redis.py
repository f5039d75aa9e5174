"""The step store on a Redis or Valkey server: its connections, requests, and errors.

`redis.lua` carries out the requests in the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import hashlib
import pathlib
import re
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from aiohooks._core.clock import sleep
from aiohooks._core.validate import check_instance, check_secs
from aiohooks._core.waits import Backoff
from aiohooks.errors import (
    InvalidArgumentError,
    StoreRefusedError,
    StoreUnavailableError,
    copy_error,
    missing_extra,
)
from aiohooks.stores._protocol import (
    Answer,
    EngineError,
    Position,
    Request,
    Snapshot,
    Write,
    damaged_error,
)
from aiohooks.stores.engine import Engine, RunState

__all__ = ["RedisEngine"]


try:
    from redis.asyncio import Redis
    from redis.exceptions import NoScriptError, RedisError
except ImportError as _missing:
    raise missing_extra("redis://", "redis") from _missing

SCRIPT = pathlib.Path(__file__).with_name("redis.lua").read_text(encoding="utf-8")
_SCRIPT_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()

_GRACE_SECS = 1.0
"""How long after the heartbeat the reply to a blocking read may still arrive."""
_RACE_BACKOFF = Backoff(initial_secs=0.004, max_secs=0.1)
"""The pauses after another process was faster to change the run."""
_CONNECT_ROUNDS = 10
"""The maximal number of attempts to read or make a run that other processes change meanwhile."""

# The store has its own timeouts and reconnects by itself, so redis-py must do neither. Its timeouts
# cost a task for each request, and on Python 3.11 they lose cancellations (python/cpython#86296).
_CLIENT_DEFAULTS: dict[str, Any] = {
    "protocol": 2,
    "single_connection_client": True,
    "socket_timeout": None,
    "decode_responses": True,
    "encoding_errors": "backslashreplace",
    "retry": None,
}

# The pattern of an error of a command or of the script that has found foreign or damaged data.
_DAMAGE = (
    "ResponseError.*(WRONGTYPE|FOREIGN|attempt to |bad argument #|not an integer|Expected "
    "|The ID specified)|is not the state of a run"
)
_DATA_LOST = "the data of the run is gone from the server"
_OTHER_NODE = "the run is on that node of the cluster: give its address, or client= a RedisCluster"
# For each kind of error: a pattern, the class of the store's error, and a hint. The first pattern
# counts that matches the error's classes and text. The classes alone are not enough: Redis 6.2 puts
# the error of a command into the text of the script's error, which has no class of its own.
_HINTS = (
    (
        "NoPermissionError|no permissions|can't run this command|can't access at least one",
        StoreRefusedError,
        "give the user the rights in docs/guides/engines.md (ACL SETUSER)",
    ),
    (
        "AuthenticationError",
        StoreRefusedError,
        "give user and password in the URL, redis://user:password@host:6379, if it has them",
    ),
    (
        "CERTIFICATE|WRONG_VERSION_NUMBER",
        StoreRefusedError,
        "rediss:// needs the TLS port, and a name in its certificate as the host; ssl_ca_certs= is"
        " the authority that signed it, ssl_certfile= and ssl_keyfile= are for this client",
    ),
    (
        "[Uu]nknown (Redis )?command",
        StoreRefusedError,
        "Redis 6.2 or later, or Valkey, is needed; for a Sentinel, give client= its master_for",
    ),
    ("AskError|ASK |MOVED ", StoreRefusedError, _OTHER_NODE),
    (
        "(Type|Value|Index|Attribute)Error",
        StoreRefusedError,
        "is that a Redis server? A client= needs decode_responses=True",
    ),
    (
        "ReadOnly|READONLY|TryAgain|TRYAGAIN|MasterDown|ClusterDown|OutOfMemory|MISCONF"
        "|used memory >|NOREPLICAS|good replicas|BUSY|UNBLOCKED",
        StoreUnavailableError,
        "requests wait until it accepts them",
    ),
    ("ResponseError", StoreRefusedError, "it would reject the request again"),
    ("Timeout reading", StoreUnavailableError, "a client= needs socket_timeout=None"),
    (
        "",
        StoreUnavailableError,
        "is a server running (redis-server), and with TLS (rediss://) or without (redis://)?",
    ),
)


class RedisEngine(Engine):
    """A run on a Redis server (6.2 or later) or a Valkey server.

    A process has two connections. The first waits in a blocking read, which the server ends when
    the lowest step that this process waits for is reached, and not before. The second sends
    requests: each request is a call of the same script, and takes effect exactly once.
    docs/guides/engines.md lists the rights that a user needs.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        client: Callable[[], Any] | None = None,
        answer_timeout: float = 5.0,
        **options: Any,
    ) -> None:
        """Connect later.

        Args:
            url: `redis://user:password@host:6379/0`, `rediss://...` with TLS, or
                `unix:///path/to/socket`.
            client: in place of `url`, a function that returns a new client of `redis.asyncio`: a
                `RedisCluster`, or the client of `Sentinel.master_for`. Create the client with
                `decode_responses=True, socket_timeout=None`.
            answer_timeout: after how many seconds without an answer the connection counts as dead.
            options: keyword arguments of redis-py's `Redis.from_url`, such as `ssl_ca_certs`.

        Raises:
            InvalidArgumentError: the URL or an option is invalid.
        """
        if client is not None and (url is not None or options):
            raise InvalidArgumentError(
                "client= takes the place of the URL and its options: give them to the client"
            )
        check_secs(answer_timeout, "answer_timeout", positive=True)
        self._address = "redis"
        self._answer_timeout = answer_timeout
        self._new_client = client or self._client_factory(url, options)
        self._request_client: Any = None
        self._read_client: Any = None
        # The timeouts of all pending calls. `_end_calls` ends the calls by them.
        self._call_timeouts: dict[asyncio.Timeout, None] = {}
        # The error that calls raise since `_end_calls`, or None while connected.
        self._disconnect_error: StoreUnavailableError | None = None
        # The run as it was when this process connected last. The id is empty before that.
        self._run = FoundRun("", 0, RunState())
        # The newest version of the run that this process has read or made.
        self._newest_version = 0
        # The step at which the blocking read ends, or 0 if there is no read, or it is about to end.
        self._awaited_step = 0

    @functools.cached_property
    def _keys(self) -> Keys:
        """The keys of the run."""
        return run_keys(self.link.run, self.link.process)

    # The connections.

    async def connect(self) -> Snapshot:
        try:
            self._request_client = self._new_client()
            self._read_client = self._new_client()
        except Exception as error:  # any error, because `client=` is a function of the user
            raise self._explain(error, "") from error
        self._disconnect_error = None
        secs = min(self._answer_timeout, self.link.connect_timeout)
        # This read returns immediately. If the user has no right to read, it fails now and not at
        # the first wait.
        await self._execute(self._read_client, secs, "XREAD", "STREAMS", self._keys.positions, "$")
        self._run = await self._find_run()
        self._newest_version = self._run.version
        return self._run.state.snapshot(self._run.run_id)

    async def _find_run(self) -> FoundRun:
        """Return the run on the server. If it is another run than this process knows, merge both.

        If the run is missing, or older than the run that this process knows, write a new run, which
        continues the known run, if there is one. If another process has done so already, the run on
        the server has another id: add to it what this process knows.
        """
        for attempt in range(1, _CONNECT_ROUNDS + 1):
            found = await self._read_run()
            is_lost = not found.run_id or self._is_older(found)
            if not is_lost and self._run.run_id in ("", found.run_id):
                return found
            run_id, state = self._merged(found, is_lost)
            version = await self._swap(found, run_id, state)
            if version:  # otherwise another process was faster
                return FoundRun(run_id, version, state)
            await sleep(_RACE_BACKOFF.pause_secs(attempt), self.link.clock)
        raise StoreUnavailableError(
            f"{self._address}: another process was faster in each of {_CONNECT_ROUNDS} attempts to"
            " write the run"
        )

    def _merged(self, found: FoundRun, is_lost: bool) -> tuple[str, RunState]:
        """Return the id and the state of a run that continues both the known and the found run."""
        run_id = found.run_id
        state = copy.deepcopy(found.state)
        if is_lost:
            run_id = secrets.token_hex(8)
            state = RunState()
        if self._run.run_id:
            state.follow(self.link.waits.known_run)
        if is_lost and found.state.position > RunState().position:
            # The server still has a part of the lost run. Its position may be later than the one
            # that this process knows.
            state.follow(found.state.snapshot())
        return run_id, state

    def _is_older(self, found: FoundRun) -> bool:
        """Return whether the server has an older copy of the run than this process knows.

        A run with another id is no copy.
        """
        if found.run_id != self._run.run_id:
            return False
        is_older_version = found.version < self._newest_version
        return is_older_version or found.state.position < self.link.waits.latest

    def _end_calls(self, reason: str) -> None:
        """End all calls, also the call of `watch`, with an error: the store connects again."""
        self._disconnect_error = StoreUnavailableError(reason)
        for call_timeout in self._call_timeouts:
            if not call_timeout.expired():
                call_timeout.reschedule(0.0)  # a time in the past: time out immediately

    async def disconnect(self) -> None:
        self._end_calls("the connections are closed on this side")
        # Do not close a connection that a call still uses: wait for the ends of the calls, which
        # come in the next turns of the event loop.
        while self._call_timeouts:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for client in filter(None, (self._request_client, self._read_client)):
            with contextlib.suppress(Exception):  # a broken connection needs no closing
                await client.aclose()

    # The blocking read.

    async def watch(self) -> None:
        # The ids of the last entries that were seen. The first read also returns the changes since
        # `connect`.
        seen_ids = {self._keys.changes: f"{self._run.version}-0", self._keys.wake: "0-0"}
        while True:
            # Let tasks that were just woken run first: if they wait again, this read already blocks
            # for their next step.
            await asyncio.sleep(0)
            streams = await self._read_streams(seen_ids)
            for key, entries in streams.items():
                entry_id, fields = _last_entry(entries)
                if key != self._keys.positions:
                    seen_ids[key] = entry_id
                elif fields == {"run": self._run.run_id}:
                    epoch, step = entry_id.split("-")
                    self.link.observe(Position(int(epoch), int(step)))
                else:
                    raise StoreUnavailableError(_DATA_LOST)
            # Read the state after a change of it, and after a heartbeat without an entry, to check
            # whether the run is still there.
            if not streams or self._keys.changes in streams:
                self.link.observe(await self.read())

    async def _read_streams(self, seen_ids: dict[str, str]) -> dict[str, Any]:
        """Block until a stream has a new entry. Return the new entries by the key of the stream.

        Return an empty dictionary if there is none within a heartbeat.
        """
        heartbeat_secs = self.link.heartbeat
        waits = self.link.waits
        latest = waits.latest
        # The lowest step with a waiter. Without a waiter it is above all steps, and only an entry
        # of a later epoch ends the read. When a wait for a lower step begins, `subscribe` ends it.
        self._awaited_step = waits.waiters.lowest
        # XREAD returns the entries after an id, so give it the step before the awaited step.
        seen_step = max(self._awaited_step - 1, latest.step)
        ids = {self._keys.positions: f"{latest.epoch}-{seen_step}", **seen_ids}
        block_ms = max(1, round(heartbeat_secs * 1000))  # 0 would block indefinitely
        # XREAD expects all keys first, then all ids.
        reply = await self._execute(
            self._read_client,
            heartbeat_secs + _GRACE_SECS,
            "XREAD",
            "BLOCK",
            block_ms,
            "STREAMS",
            *ids,
            *ids.values(),
        )
        self._awaited_step = 0
        return dict(reply or ())

    def subscribe(self, step: int | None) -> None:
        # The blocking read would not end at a step that is lower than the one it waits for.
        if step is not None and step < self._awaited_step:
            self._awaited_step = 0  # the read is about to end: do not end it twice
            self.link.tasks.spawn(self._end_blocking_read(), "waiting for a lower step")

    async def _end_blocking_read(self) -> None:
        """Add an entry to the stream by which this process ends its own blocking read."""
        # CLIENT UNBLOCK would do nothing if it arrived before the read.
        try:
            await self._call_script("wake")
        except StoreUnavailableError as error:
            self._end_calls(str(error))

    # Requests.

    async def request(self, request: Request) -> Answer:
        if isinstance(request, Write):
            reply = await self._call_script("write", write_argument(request))
            answer = parse_answer(reply)
            if answer.status == "lost":
                raise StoreUnavailableError(_DATA_LOST)
            return answer
        # The script makes only writes. Apply any other request to the state here, and replace the
        # state on the server. If another process has changed it meanwhile, begin again.
        lost_races = 0
        while True:
            found = await self._read_known_run()
            state = copy.deepcopy(found.state)
            answer = state.apply(request)
            version = await self._swap(found, found.run_id, state)
            if version:  # otherwise another process was faster
                return answer
            lost_races += 1
            await sleep(_RACE_BACKOFF.pause_secs(lost_races), self.link.clock)

    async def read(self) -> Snapshot:
        found = await self._read_known_run()
        return found.state.snapshot(found.run_id)

    async def _read_known_run(self) -> FoundRun:
        """Read the run. Raise an error if it is not the run that this process knows."""
        # Compare with the newest version before the read: during the read, another request of this
        # process may make a newer version.
        newest_version = self._newest_version
        found = await self._read_run()
        if found.run_id != self._run.run_id or found.version < newest_version:
            raise StoreUnavailableError(_DATA_LOST)
        self._newest_version = max(self._newest_version, found.version)
        return found

    async def _swap(self, found: FoundRun, run_id: str, state: RunState) -> int:
        """Replace the state of a run that was read.

        Return the new version, or 0 if another process was faster.
        """
        arguments = swap_arguments(found, run_id, state)
        version: int = await self._call_script("swap", *arguments)
        self._newest_version = max(self._newest_version, version)
        return version

    async def delete(self) -> None:
        async with contextlib.aclosing(self._new_client()) as client:
            await self._execute(client, self._answer_timeout, "DEL", *self._keys)

    async def _read_run(self) -> FoundRun:
        """Read the run, even if it is not the run that this process knows."""
        reply = await self._call_script("read")
        try:
            return parse_read(reply)
        except Exception as error:  # any error, because the reply comes from outside
            raise self._explain(error, "") from error

    async def _call_script(self, request: str, *arguments: Any) -> Any:
        """Return the script's reply to a request: "read", "write", "swap" or "wake"."""
        # The request and the id of the run are one argument, because redis-py takes 2 µs for each.
        head = f"{request} {self._run.run_id}"
        command = (len(self._keys), *self._keys, head, *arguments)
        client = self._request_client
        secs = self._answer_timeout
        try:
            return await self._execute(client, secs, "EVALSHA", _SCRIPT_SHA, *command)
        except NoScriptError:  # the server is new, or has lost the script
            return await self._execute(client, secs, "EVAL", SCRIPT, *command)

    async def _execute(self, client: Any, secs: float, *command: Any) -> Any:
        """Return the reply to a command, which may take `secs` seconds.

        If the caller is cancelled, redis-py closes the connection, and opens another for the next
        call.
        """
        # The client of `delete` is not one of these, and works without a connection of the store.
        is_own = client in (self._request_client, self._read_client)
        try:
            if is_own and self._disconnect_error is not None:
                raise self._disconnect_error  # the handler below raises a copy
            async with asyncio.timeout(secs) as call_timeout:
                self._call_timeouts[call_timeout] = None
                try:
                    return await client.execute_command(*command)
                finally:
                    del self._call_timeouts[call_timeout]
        except NoScriptError:
            raise
        except Exception as error:
            # If `_end_calls` has let this call time out, raise the reason for that.
            if is_own and self._disconnect_error is not None:
                raise copy_error(self._disconnect_error) from error
            raise self._explain(error, f"no answer within {secs:g} s") from error

    def _explain(self, error: Exception, default_text: str) -> EngineError:
        """Return the store's error for an error of redis-py, or of `RunState.load`.

        An error without a text, such as that of a timeout, gets `default_text`. If the run has
        moved to another node of a cluster, all waits end with the error, too.
        """
        text = str(error).rstrip(".") or default_text
        # The patterns match the names of classes and words of the text.
        classes_and_text = f"{type(error).__mro__} {text}"
        if re.search(_DAMAGE, classes_and_text):
            keys = f"{self._keys.positions}*"
            return damaged_error(
                self.link.run,
                f"{self._address}, {keys}",
                # Leave out the words that the server adds to an error of the script.
                found=re.sub("FOREIGN | script:.*", "", text),
                expected="the keys of a run, of layout 3",
                delete=f"delete the keys {keys}",
            )
        error_class, hint = _find_hint(classes_and_text)
        explained = error_class(f"{self._address}: {text}: {hint}")
        if hint == _OTHER_NODE and self._run.run_id:  # this process has connected before
            self.link.observe(explained)
        return explained

    def _client_factory(self, url: Any, options: dict[str, Any]) -> Callable[[], Any]:
        """Return a function that makes a new client for the URL. Check the options now."""
        check_instance(url, str, "url")
        options["socket_connect_timeout"] = self._answer_timeout
        options = {name: value for name, value in options.items() if value is not None}
        is_tls = url.startswith("rediss:")
        if is_tls:
            options.setdefault("ssl_check_hostname", True)  # redis-py 5 would not check it
        client_class: Any = Redis
        new_client = functools.partial(client_class.from_url, url, **(_CLIENT_DEFAULTS | options))
        try:
            # Both steps raise errors for unknown and invalid options, and for missing files.
            connection = new_client().connection_pool.make_connection()
            if is_tls:
                connection.ssl_context.get()
        except (TypeError, ValueError, OSError, RedisError) as error:
            _, is_unknown, option = str(error).partition("an unexpected keyword argument ")
            problem = f"there is no option {option}" if is_unknown else error
            # Do not show the URL itself, because it may contain a password.
            raise InvalidArgumentError(
                f"this URL or an option is invalid for Redis: {problem}; give redis://host:6379,"
                " rediss:// for TLS, or unix:///path/to/socket, and files that exist; options are"
                " those of redis-py and, outside of the URL, on_lost, lease_secs, heartbeat and"
                " connect_timeout (store_options of a launcher)"
            ) from error
        place = [str(value) for name, value in connection.repr_pieces() if name != "db"]
        self._address = f"redis at {':'.join(place)}"
        return new_client


class Keys(NamedTuple):
    """The keys of a run, in the order in which the script expects them."""

    positions: str
    """A stream with a single entry, whose id is the position of the run. See the script."""
    changes: str
    """A stream that gets an entry with each change of a field other than the position."""
    state: str
    """A hash with the other fields of the run."""
    answers: str
    """A hash with the last answer to each writer."""
    wake: str
    """A stream by which a process ends its own blocking read."""


def run_keys(run: str, process: str) -> Keys:
    """Return the keys of a run for a process."""
    # A brace in the name would end the hash tag, and a cluster could put the keys on different
    # nodes.
    tag = run.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    positions = f"aiohooks:{{{tag}}}"
    names = ("changes", "state", "answers", f"wake:{process}")
    return Keys(positions, *(f"{positions}:{name}" for name in names))


class FoundRun(NamedTuple):
    """A run as it was read from the server."""

    run_id: str
    """The id of the run, empty if the run or a part of it is missing. The state then has the part
    that is left.
    """
    version: int
    """A number that grows with each change other than a move of the step, 0 without a state."""
    state: RunState


def _last_entry(entries: Any) -> tuple[str, dict[str, str]]:
    """Return the id and the fields of the last of the entries of a stream."""
    entry: Any = entries[-1]
    if isinstance(entry[0], tuple):  # redis-py nests the entries of RESP3 deeper
        entry = entry[-1]
    entry_id, fields = entry
    return entry_id, fields


def _find_hint(classes_and_text: str) -> tuple[type[StoreUnavailableError], str]:
    """Return the store's error class and the hint for the first pattern that matches."""
    for pattern, error_class, hint in _HINTS:
        if re.search(pattern, classes_and_text):
            return error_class, hint
    raise AssertionError("the last pattern matches every text")


def write_argument(write: Write) -> str:
    """Return the argument of the script for a write."""
    kind, amount, (epoch, step), term, writer, seq = write
    return f"{kind} {amount} {epoch} {step} {term} {seq} {writer}"


def swap_arguments(found: FoundRun, run_id: str, state: RunState) -> tuple[Any, ...]:
    """Return the arguments of the script to replace the state of a run that was read.

    If `run_id` is not the id of the found run, a new run replaces the found run. The last argument
    is 1 if the script must notify the other processes of a change.
    """
    return (
        found.run_id,
        found.version,
        run_id,
        state.dump(),
        *state.position,
        state.term,
        state.leader,
        int(state.revision != found.state.revision),
    )


def parse_answer(reply: Any) -> Answer:
    """Return the answer in the script's reply to a write."""
    status, epoch, step, term = reply.split()
    return Answer(status, Position(int(epoch), int(step)), int(term))


def parse_read(reply: Any) -> FoundRun:
    """Return the run in the script's reply to "read"."""
    run_id, version, data, epoch, step, term, leader = reply
    state = RunState.load(data.encode()) if data else RunState()
    state.position = Position(epoch, step)
    state.term = term
    state.leader = leader
    return FoundRun(run_id, version, state)
