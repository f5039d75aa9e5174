"""A step store on a Redis or Valkey server."""

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
from aiohooks.stores._run_state import RunState
from aiohooks.stores.engine import Engine

try:
    from redis.asyncio import Redis
    from redis.exceptions import NoScriptError, RedisError
except ImportError as _missing:
    raise missing_extra("redis://", "redis") from _missing

SCRIPT = pathlib.Path(__file__).with_name("script.lua").read_text(encoding="utf-8")
_SCRIPT_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()

_GRACE_SECS = 1.0  # for the reply to a blocking read, after its heartbeat
_RACE_BACKOFF = Backoff(initial_secs=0.004, max_secs=0.1)
_MOST_ROUNDS = 10  # of finding a run that other processes, or the server, change meanwhile
_NEVER = 2**64 - 1  # the highest second half of an id: only a later epoch comes after it

# The store has its own timeouts, and reconnects by itself: redis-py's timeouts cost a task for each
# request, and on Python 3.11 they lose cancellations (python/cpython#86296).
_DEFAULTS: dict[str, Any] = {
    "protocol": 2,
    "single_connection_client": True,
    "socket_timeout": None,
    "decode_responses": True,
    "encoding_errors": "backslashreplace",
    "retry": None,
}

# A command, or the script, has found something else than a run.
_DAMAGE = (
    "ResponseError.*(WRONGTYPE|FOREIGN|attempt to |bad argument #|not an integer|Expected "
    "|The ID specified)|is not the state of a run"
)
_DATA_LOST = "the data of the run is gone from the server"
_OTHER_NODE = "the run is on that node of the cluster: give its address, or client= a RedisCluster"
# The first of these whose pattern is found in the classes of an error, or in its text, tells what
# it means. Redis 6.2 puts the error of a command into that of the script: it has no class then.
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

    A process has two connections. One waits in a blocking read, which the server ends when the
    lowest step that this process waits for is reached, and not before; the other sends requests.
    Each request is one call of one script, done exactly once. docs/guides/engines.md lists the
    rights that a user needs.
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
                `RedisCluster`, or that of `Sentinel.master_for`. Create the client with
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
        self._requests: Any = None
        self._reads: Any = None
        self._calls: dict[asyncio.Timeout, None] = {}
        self._lost_by: StoreUnavailableError | None = None  # the connections, or closed
        # As found by the latest connection; the one before, while a connection is made.
        self._run = FoundRun("", 0, RunState())
        self._newest_version = 0  # that this process has read or made
        self._threshold: int | None = None
        # The step that the blocking read waits for; 0 if it is about to end.
        self._blocked_for = 0

    @functools.cached_property
    def _keys(self) -> Keys:
        return run_keys(self.link.run, self.link.process)

    # The connections.

    async def connect(self) -> Snapshot:
        try:
            self._requests = self._new_client()
            self._reads = self._new_client()
        except Exception as error:  # of a `client=`
            raise self._explain(error, "") from error
        self._lost_by = None
        secs = min(self._answer_timeout, self.link.connect_timeout)
        # A user without the right to read is rejected now, not at the first wait.
        await self._execute(self._reads, secs, "XREAD", "STREAMS", self._keys.positions, "$")
        self._run = await self._find_run()
        self._newest_version = self._run.version
        return self._run.state.snapshot(self._run.run_id)

    async def _find_run(self) -> FoundRun:
        """Read the run, or make one if there is none, or an older copy than this process knows."""
        for attempt in range(1, _MOST_ROUNDS + 1):
            found = await self._read_state()
            run_id = found.run_id
            state = copy.deepcopy(found.state)
            if not run_id or self._is_older(found):
                run_id = secrets.token_hex(8)
                state = RunState()
            elif self._run.run_id in ("", run_id):
                return found
            if self._run.run_id:
                state.follow(self.link.waits.known_run)
            if run_id != found.run_id and found.state.position > RunState().position:
                # A part of a run may be left, which this process does not know.
                state.follow(found.state.snapshot())
            if version := await self._swap(found, run_id, state):
                return FoundRun(run_id, version, state)
            await sleep(_RACE_BACKOFF.pause_secs(attempt), self.link.clock)
        raise StoreUnavailableError(f"{self._address}: the run does not stay as it was written")

    def _is_older(self, found: FoundRun) -> bool:
        """Return whether the server has an older copy of the run than this process knows."""
        return found.run_id == self._run.run_id and (
            found.version < self._newest_version or found.state.position < self.link.waits.latest
        )

    def _end_calls(self, reason: str) -> None:
        """End all calls, and with them `watch`: the store connects again."""
        self._lost_by = StoreUnavailableError(reason)
        for call in self._calls:
            if not call.expired():
                call.reschedule(0.0)

    async def disconnect(self) -> None:
        self._end_calls("the connections are closed on this side")
        # They have been ended, and are over after a few rounds of the loop.
        while self._calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for client in filter(None, (self._requests, self._reads)):
            with contextlib.suppress(Exception):  # it is broken already
                await client.aclose()

    # The blocking read.

    async def watch(self) -> None:
        # After these entries come the changes since `connect`.
        seen_ids = {self._keys.changes: f"{self._run.version}-0", self._keys.wake: "0-0"}
        while True:
            # A waiter that was just woken may wait again: let it, so that this read already blocks
            # for its next step.
            await asyncio.sleep(0)
            streams = await self._read_streams(seen_ids)
            for key, entries in streams.items():
                last: Any = entries[-1]
                # redis-py puts the entries of RESP3 into one more list.
                entry_id, fields = last[-1] if isinstance(last[0], tuple) else last
                if key != self._keys.positions:
                    seen_ids[key] = entry_id
                elif fields == {"run": self._run.run_id}:
                    self.link.waits.observe(Position(*map(int, entry_id.split("-"))))
                else:
                    raise StoreUnavailableError(_DATA_LOST)
            if not streams or self._keys.changes in streams:
                self.link.observe(await self.read())

    async def _read_streams(self, seen_ids: dict[str, str]) -> dict[str, Any]:
        """Return the streams with a new entry, or none after a heartbeat."""
        secs = self.link.heartbeat
        latest = self.link.waits.latest
        # `subscribe` ends this read if a lower threshold comes.
        self._blocked_for = _NEVER if self._threshold is None else self._threshold
        # The server returns entries behind these ids: no position below the threshold.
        seen_step = max(self._blocked_for - 1, latest.step)
        ids = {self._keys.positions: f"{latest.epoch}-{seen_step}", **seen_ids}
        block_ms = max(1, round(secs * 1000))  # 0 would block indefinitely
        reply = await self._execute(
            self._reads,
            secs + _GRACE_SECS,
            "XREAD",
            "BLOCK",
            block_ms,
            "STREAMS",
            *ids,
            *ids.values(),
        )
        self._blocked_for = 0
        return dict(reply or ())

    def subscribe(self, step: int | None) -> None:
        self._threshold = step
        if step is not None and step < self._blocked_for:
            self._blocked_for = 0
            self.link.spawn(self._end_blocking_read(), "waiting for a lower step")

    async def _end_blocking_read(self) -> None:
        # By an entry in a stream that it reads: CLIENT UNBLOCK could arrive before the read, and
        # would do nothing.
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
        lost_races = 0
        while True:
            found = await self._read_known()
            state = copy.deepcopy(found.state)
            answer = state.apply(request)
            if await self._swap(found, found.run_id, state):
                return answer
            lost_races += 1
            await sleep(_RACE_BACKOFF.pause_secs(lost_races), self.link.clock)

    async def read(self) -> Snapshot:
        found = await self._read_known()
        return found.state.snapshot(found.run_id)

    async def _read_known(self) -> FoundRun:
        """Read the run that this process knows."""
        newest_version = self._newest_version
        found = await self._read_state()
        if found.run_id != self._run.run_id or found.version < newest_version:
            raise StoreUnavailableError(_DATA_LOST)
        self._newest_version = max(self._newest_version, found.version)
        return found

    async def _swap(self, found: FoundRun, run_id: str, state: RunState) -> int:
        """Replace the state of the run that was found.

        Return its new version, or 0 if another process was faster.
        """
        arguments = swap_arguments(found, run_id, state)
        version: int = await self._call_script("swap", *arguments)
        self._newest_version = max(self._newest_version, version)
        return version

    async def delete(self) -> None:
        async with contextlib.aclosing(self._new_client()) as client:
            await self._execute(client, self._answer_timeout, "DEL", *self._keys)

    async def _read_state(self) -> FoundRun:
        """Read the run, whichever it is."""
        reply = await self._call_script("read")
        try:
            return parse_read(reply)
        except Exception as error:  # whatever is wrong: the reply comes from outside
            raise self._explain(error, "") from error

    async def _call_script(self, request: str, *arguments: Any) -> Any:
        # redis-py takes 2 µs for each argument.
        head = f"{request} {self._run.run_id}"
        command = (len(self._keys), *self._keys, head, *arguments)
        within = self._answer_timeout
        try:
            return await self._execute(self._requests, within, "EVALSHA", _SCRIPT_SHA, *command)
        except NoScriptError:  # the server is new, or has lost the script
            return await self._execute(self._requests, within, "EVAL", SCRIPT, *command)

    async def _execute(self, client: Any, within: float, *command: Any) -> Any:
        """Return the reply to a command.

        If the caller is cancelled, redis-py closes the connection, and opens one for the next call.
        """
        is_shared = client in (self._requests, self._reads)
        try:
            if is_shared and self._lost_by is not None:
                raise self._lost_by
            async with asyncio.timeout(within) as call:
                self._calls[call] = None
                try:
                    return await client.execute_command(*command)
                finally:
                    del self._calls[call]
        except NoScriptError:
            raise
        except Exception as error:
            if is_shared and self._lost_by is not None:
                raise copy_error(self._lost_by) from error
            raise self._explain(error, f"no answer within {within:g} s") from error

    def _explain(self, error: Exception, timed_out: str) -> EngineError:
        """Return the store's error for one of redis-py's, or of `RunState.load`."""
        text = str(error).rstrip(".") or timed_out
        signs = f"{type(error).__mro__} {text}"
        if re.search(_DAMAGE, signs):
            keys = f"{self._keys.positions}*"
            return damaged_error(
                self.link.run,
                f"{self._address}, {keys}",
                found=re.sub("FOREIGN | script:.*", "", text),
                expected="the keys of a run, of layout 3",
                delete=f"delete the keys {keys}",
            )
        kind, hint = next(
            (kind, hint) for pattern, kind, hint in _HINTS if re.search(pattern, signs)
        )
        explained = kind(f"{self._address}: {text}: {hint}")
        if hint == _OTHER_NODE and self._run.run_id:
            self.link.fail(explained)
        return explained

    def _client_factory(self, url: Any, options: dict[str, Any]) -> Callable[[], Any]:
        """Return a function that returns a new client for the URL."""
        check_instance(url, str, "url")
        options["socket_connect_timeout"] = self._answer_timeout
        options = {name: value for name, value in options.items() if value is not None}
        is_tls = url.startswith("rediss:")
        if is_tls:
            options.setdefault("ssl_check_hostname", True)  # redis-py 5 does not
        client_class: Any = Redis
        new_client = functools.partial(client_class.from_url, url, **(_DEFAULTS | options))
        try:
            # Find unknown and invalid options, and missing files, now.
            connection = new_client().connection_pool.make_connection()
            if is_tls:
                connection.ssl_context.get()
        except (TypeError, ValueError, OSError, RedisError) as error:
            # Not the URL itself: there may be a password in it.
            raise InvalidArgumentError(
                f"this URL or an option is not one for Redis: {error}; give redis://host:6379,"
                " rediss:// for TLS, or unix:///path/to/socket, and files that exist"
            ) from error
        place = [str(value) for name, value in connection.repr_pieces() if name != "db"]
        self._address = f"redis at {':'.join(place)}"
        return new_client


class Keys(NamedTuple):
    """The keys of a run, in the order in which the script expects them."""

    positions: str
    """A stream with one entry, whose id is the position of the run; see the script."""
    changes: str
    """A stream that gets an entry with each change of anything but the position."""
    state: str
    answers: str
    wake: str
    """A stream by which a process ends its own blocking read."""


def run_keys(run: str, process: str) -> Keys:
    """Return the keys of a run for a process."""
    # A brace in the name would end the hash tag, and the keys could come to lie on different nodes
    # of a cluster.
    tag = run.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    positions = f"aiohooks:{{{tag}}}"
    names = ("changes", "state", "answers", f"wake:{process}")
    return Keys(positions, *(f"{positions}:{name}" for name in names))


class FoundRun(NamedTuple):
    """A run as it was read."""

    run_id: str
    """Empty if the run is missing, or a part of it. The state then has the part that is left."""
    version: int
    """Grows with each change of anything but the step; 0 without a state."""
    state: RunState


def write_argument(write: Write) -> str:
    """Return the argument of the script for a write."""
    kind, amount, (epoch, step), term, writer, seq = write
    return f"{kind} {amount} {epoch} {step} {term} {seq} {writer}"


def swap_arguments(found: FoundRun, run_id: str, state: RunState) -> tuple[Any, ...]:
    """Return the arguments of the script to replace the state of a run that was found.

    With another id, they replace the run as well.
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
    """Read the script's reply to a write."""
    status, epoch, step, term = reply.split()
    return Answer(status, Position(int(epoch), int(step)), int(term))


def parse_read(reply: Any) -> FoundRun:
    """Read the script's reply to "read"."""
    run_id, version, data, epoch, step, term, leader = reply
    state = RunState.load(data.encode()) if data else RunState()
    state.position = Position(epoch, step)
    state.term = term
    state.leader = leader
    return FoundRun(run_id, version, state)
