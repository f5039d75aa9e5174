"""A step store on a Ray cluster, where a named actor keeps the run."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, ClassVar, TypeVar

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.clock import call_later
from aiohooks._validate import check_instance
from aiohooks.errors import StoreDamagedError, StoreUnavailableError
from aiohooks.stores._protocol import (
    Answer,
    Mark,
    Position,
    Request,
    RunReport,
    Snapshot,
    damaged_error,
    report_of,
)
from aiohooks.stores.engine import Engine, EngineLink
from aiohooks.stores.ray import _cluster
from aiohooks.stores.ray._actor import LongPoll, StepActor

T = TypeVar("T")
_GRACE_SECS = 1.0
"""How much later than its time a reply may arrive."""
_LEAVE_SECS = 1.0
_REPLACED = object()
"""Ends a long poll that a newer one replaces."""


class RayEngine(Engine):
    """A run in the memory of an actor of a Ray cluster.

    The first process that opens the run creates the actor on its own node; it lives until `forget`.
    When it dies, Ray starts it again without its memory: the run continues in a later epoch, and
    writes raise `StoreResetError`.
    """

    connect_timeout: ClassVar[float] = 60.0  # joining a cluster takes seconds

    def __init__(self, namespace: str = "", *, address: str | None = None) -> None:
        """Connect later.

        Args:
            namespace: the namespace of the actor in the cluster; "aiohooks", if left out.
            address: `host:port` of the cluster, for a process that is not a member of one yet; None
                is RAY_ADDRESS, or the cluster that runs on this machine. Processes that Ray has
                started need none.
        """
        check_instance(address, str, "address=", optional=True)
        self._namespace = namespace or "aiohooks"
        self._address = address
        self._joined = False
        self._closed = False
        self._deleted = False
        self._actor: Any = None
        self._incarnation = ""  # of the actor
        self._revision = 0  # of the snapshot that was reported last
        self._replies: set[asyncio.Future[Any]] = set()
        self._poll_count = 0
        self._current_poll: tuple[LongPoll, asyncio.Future[Any]] | None = None

    def attach(self, link: EngineLink) -> None:
        super().attach(link)
        self._name = f"aiohooks step {link.run}"
        self._what = f"the step actor of {link.run}"

    # The connection.

    async def connect(self, known: Mark) -> Snapshot:
        if self._deleted:
            raise StoreUnavailableError(f"the run {self.link.run} was forgotten: close its store")
        actor = await to_thread(self._find_actor, grace_secs=_GRACE_SECS)
        snapshot = await self._connect(actor, self._incarnation, known)
        self._actor = actor
        self._incarnation = snapshot.run_id
        self._revision = snapshot.revision
        return snapshot

    async def _connect(self, actor: Any, known_incarnation: str, known: Mark) -> Snapshot:
        try:
            call = actor.connect.remote(known_incarnation, known)
        except (AttributeError, TypeError) as error:  # Ray compares the arguments here
            raise self._foreign_error(error) from error
        reply = await self._wait_reply(_cluster.result_of(call), self.link.connect_timeout)
        return self._checked(reply, Snapshot)

    def _find_actor(self) -> Any:
        self._join_cluster()
        try:
            return _cluster.named_actor(StepActor, self._name, self._namespace)
        except Exception as error:
            raise _cluster.explain_error(error, f"cannot reach {self._what}") from error

    def _join_cluster(self) -> None:
        if not self._joined:
            _cluster.join(self._address, timeout=self.link.connect_timeout, log_to_driver=False)
            if self._closed:  # meanwhile, without waiting for this thread
                _cluster.leave()
                raise StoreUnavailableError(f"the store of run {self.link.run} was closed")
            self._joined = True

    def _existing_actor(self) -> Any:
        """Return the actor of the run, or None if there is none; blocks."""
        self._join_cluster()
        return _cluster.existing_actor(self._name, self._namespace)

    async def inspect(self) -> RunReport | None:
        actor = await to_thread(self._existing_actor, grace_secs=_GRACE_SECS)
        if actor is None:
            return None
        # A process that knows no incarnation changes nothing.
        snapshot = await self._connect(actor, "", Mark(self.link.waits.latest))
        return report_of(self.link.run, snapshot)

    async def watch(self) -> None:
        link = self.link
        while True:
            self._poll_count += 1
            poll = LongPoll(
                link.process,
                self._poll_count,
                link.waits.threshold,
                link.waits.latest.epoch,
                self._revision,
                link.heartbeat,
            )
            reply = _cluster.result_of(self._actor.long_poll.remote(self._incarnation, poll))
            self._current_poll = poll, reply
            try:
                answer = await self._wait_reply(reply, link.heartbeat + _GRACE_SECS)
            finally:
                self._current_poll = None
            if isinstance(answer, Position):
                link.observe(answer)
            elif answer is not _REPLACED:
                snapshot = self._checked(answer, Snapshot)
                self._revision = snapshot.revision
                link.observe(snapshot)

    def subscribe(self, step: int | None) -> None:
        if self._current_poll is None or step is None:
            return
        poll, reply = self._current_poll
        if not reply.done() and (poll.threshold is None or step < poll.threshold):
            reply.set_result(_REPLACED)  # the next poll replaces it in the actor, too

    async def disconnect(self) -> None:
        actor, self._actor = self._actor, None
        for reply in self._replies:
            _fail(reply, StoreUnavailableError(f"{self._what} is not connected any more"))
        if actor is not None and not self._deleted:
            left = _cluster.result_of(actor.leave.remote(self.link.process))
            if self._closed:  # otherwise the actor is probably gone
                with contextlib.suppress(
                    StoreUnavailableError
                ):  # its poll there ends after a heartbeat anyway
                    await self._wait_reply(left, _LEAVE_SECS)

    async def close(self) -> None:
        self._closed = True
        await self.disconnect()
        if self._joined:
            self._joined = False
            await to_thread(_cluster.leave, grace_secs=_GRACE_SECS)

    # Calls.

    async def request(self, request: Request) -> Answer:
        call = self._connected_actor().apply.remote(self._incarnation, request)
        return self._checked(await self._wait_reply(_cluster.result_of(call)), Answer)

    async def read(self) -> Snapshot:
        call = self._connected_actor().read.remote(self._incarnation)
        return self._checked(await self._wait_reply(_cluster.result_of(call)), Snapshot)

    def _connected_actor(self) -> Any:
        if self._actor is None:
            raise StoreUnavailableError(f"{self._what} is not connected")
        return self._actor

    async def _wait_reply(self, reply: asyncio.Future[Any], secs: float | None = None) -> Any:
        """Wait for a reply, `secs` seconds at most; `disconnect` ends all of these waits."""
        self._replies.add(reply)
        silent = StoreUnavailableError(f"{self._what} has been silent for {secs} s")
        timer = call_later(secs, lambda: _fail(reply, silent), self.link.clock)
        try:
            return await reply
        except Exception as error:
            if not _cluster.is_ray_error(error):
                raise
            raise _cluster.explain_error(error, f"{self._what} does not answer") from error
        finally:
            self._replies.discard(reply)
            timer.cancel()

    def _checked(self, reply: Any, kind: type[T]) -> T:
        """Return the actor's reply, which must be of this kind."""
        if reply is None:
            raise StoreUnavailableError(f"{self._what} was started again without its memory")
        if not isinstance(reply, kind):
            raise self._foreign_error(reply)
        return reply

    def _foreign_error(self, found: object) -> StoreDamagedError:
        return damaged_error(
            self.link.run,
            f"the actor {self._name!r} in the namespace {self._namespace!r}",
            found=f"{found!r:.100}",
            expected="a step actor of this version of aiohooks",
            delete="kill that actor",
        )

    async def delete(self) -> None:
        self._deleted = True
        actor = self._actor or await to_thread(self._find_actor, grace_secs=_GRACE_SECS)
        await to_thread(_cluster.kill_actor, actor, grace_secs=_GRACE_SECS)


def _fail(reply: asyncio.Future[Any], error: StoreUnavailableError) -> None:
    if not reply.done():
        reply.set_exception(error)
        reply.exception()  # its waiter may be gone: do not log it as never retrieved
