"""The step store on a Ray cluster: a named actor keeps the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

from aiohooks._aio.cancel import to_thread
from aiohooks.errors import InvalidArgumentError, StoreUnavailableError
from aiohooks.stores._protocol import Answer, Position, Request, Snapshot, damaged_error
from aiohooks.stores._waiting import NO_WAITER
from aiohooks.stores.ray import _cluster
from aiohooks.stores.ray._actor import StepKeeper, Wish, answer_of, kind_of, packed, snapshot_of, unpacked
from aiohooks.stores.ray._counter import Ledger, Pages
from aiohooks.stores.remote import RemoteStepStore

_GRACE_SECS = 1.0
"""How much later than its time an answer may be."""
_LEAVE_SECS = 1.0


class RayStepStore(RemoteStepStore):
    """A step kept by an actor of a Ray cluster; see `RemoteStepStore` for what it does about lost connections.

    The first process that opens the run makes the actor, on its node; it lives until `forget`. When it dies, Ray starts
    it again with nothing, and the processes tell it what they know: as long as one of them lives that has heard of a write, the
    write counts, and once only.
    """

    def __init__(
        self,
        namespace: str = "",
        *,
        run: str = "default",
        address: str | None = None,
        connect_timeout: float = 60.0,
        **remote: Any,
    ) -> None:
        """Does not connect yet.

        Args:
            namespace: the namespace of the actor in the cluster; "aiohooks", if left out.
            run: the name of the run.
            address: `host:port` of the _cluster, for a process that is not part of one yet; left out, RAY_ADDRESS says it, or
                it is the cluster that runs on this machine. Processes that Ray has started need none.
            connect_timeout: see `RemoteStepStore`; to join a cluster takes seconds.
            remote: see `RemoteStepStore`.
        """
        super().__init__(run=run, connect_timeout=connect_timeout, **remote)
        given: object = address
        if given is not None and not isinstance(given, str):
            raise InvalidArgumentError(f"address={address!r}: give host:port of a Ray _cluster, or leave it out")
        self._namespace = namespace or "aiohooks"
        self._name = f"aiohooks step {self.run}"
        self._address = address
        self._joined = False
        self._keeper: Any = None
        self._life = ""
        self._ledger = Ledger()
        self._since = 0
        self._replies: set[asyncio.Future[Any]] = set()
        self._wishes = 0
        self._wish: asyncio.Future[Any] | None = None
        self._wished: Wish | None = None

    # The connection.

    async def _open_connection(self) -> None:
        self._keeper = await to_thread(self._find_keeper, grace_secs=_GRACE_SECS)

    async def _connect(self) -> Snapshot:
        if self._forgotten:
            raise StoreUnavailableError(f"the run {self.run} was forgotten: close {self!r}")
        keeper = await to_thread(self._find_keeper, grace_secs=_GRACE_SECS)
        with self._expecting():
            reply = _cluster.reply_to(keeper.hello.remote(packed(self._snapshot, self._ledger.since(0))))
        answer = await self._answer(reply, self._connect_timeout)
        with self._expecting():
            life, *told = unpacked(answer)
            self._keeper, self._life, self._since = keeper, life, 0
            snapshot = self._learn(*told)
        assert isinstance(snapshot, Snapshot)
        return snapshot

    def _find_keeper(self) -> Any:
        if not self._joined:
            _cluster.join(self._address, timeout=self._connect_timeout, log_to_driver=False)
            if self._waits.closed:  # meanwhile, and nobody waited for this thread any more
                _cluster.leave()
                raise StoreUnavailableError(f"{self!r} was closed")
            self._joined = True
        try:
            return _cluster.named_actor(StepKeeper, self._name, self._namespace)
        except Exception as error:
            raise _cluster.unavailable(error, f"cannot reach the step actor of {self.run}") from error

    async def _watch(self) -> None:
        while True:
            snapshot, position, due = self._snapshot, self._waits.latest, self._waits.next_threshold
            self._wishes += 1
            wish = Wish(
                self._process, self._wishes, None if due == NO_WAITER else due, position.epoch, snapshot.revision, self._heartbeat
            )
            self._wished = wish
            self._wish = _cluster.reply_to(self._keeper.watch.remote(packed(self._life, self._since, wish)))
            try:
                told = await self._answer(self._wish, self._heartbeat + _GRACE_SECS)
            finally:
                self._wish = self._wished = None
            if told is not _SUPERSEDED:
                self._report(self._told(told))

    def _report(self, payload: Snapshot | Position | Answer) -> None:
        if isinstance(payload, Snapshot):
            self._observe_snapshot(payload)
        elif isinstance(payload, Position):
            self._observe(payload)

    def _subscribe(self, step: int | None) -> None:
        super()._subscribe(step)
        wish, wished = self._wish, self._wished
        if wish is None or wished is None or wish.done() or step is None:
            return
        if wished.due is None or step < wished.due:
            wish.set_result(_SUPERSEDED)  # the next wish takes its place in the actor, too

    async def _request_once(self, request: Request) -> Answer:
        answer = await self._ask("apply", kind_of(request), request)
        assert isinstance(answer, Answer)
        return answer

    async def _read_run_once(self) -> Snapshot:
        snapshot = await self._ask("look")
        assert isinstance(snapshot, Snapshot)
        return snapshot

    async def _ask(self, what: str, *args: Any) -> Snapshot | Position | Answer:
        keeper = self._keeper
        if keeper is None:
            raise StoreUnavailableError(f"{self!r} is not connected to the step actor")
        call = getattr(keeper, what).remote(packed(self._life, self._since, *args))
        return self._told(await self._answer(_cluster.reply_to(call)))

    async def _answer(self, reply: asyncio.Future[Any], secs: float | None = None) -> Any:
        """Waits for a reply; `_close_connection` ends all of these."""
        self._replies.add(reply)
        silent = StoreUnavailableError(f"the step actor of {self.run} has been silent for {secs} s")
        timer = None
        if secs is not None:
            timer = self._clock.call_later(secs, lambda: _fail(reply, silent))
        try:
            return await reply
        except Exception as error:
            if not _cluster.is_of_ray(error):
                raise
            raise _cluster.unavailable(error, f"the step actor of {self.run} does not answer") from error
        finally:
            self._replies.discard(reply)
            if timer is not None:
                timer.cancel()

    def _told(self, message: bytes) -> Snapshot | Position | Answer:
        if not message:
            raise StoreUnavailableError(f"the step actor of {self.run} was started again, and has to be told what was")
        with self._expecting():
            return self._learn(*unpacked(message))

    @contextlib.contextmanager
    def _expecting(self) -> Generator[None]:
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            path = f"the actor {self._name!r} in the namespace {self._namespace!r}"
            found, expected = f"{type(error).__name__}: {error}", "a step actor of this version of aiohooks"
            raise damaged_error(self.run, path, found=found, expected=expected, delete="kill that actor") from error

    def _learn(self, kind: str, content: Any, version: int, pages: Any) -> Snapshot | Position | Answer:
        self._ledger.merge(Pages(*pages))
        self._since = max(self._since, version)
        if kind == "position":
            return Position(*content)
        return answer_of(content) if kind == "answer" else snapshot_of(content)

    async def _close_connection(self) -> None:
        keeper, self._keeper = self._keeper, None
        for reply in self._replies:
            _fail(reply, StoreUnavailableError(f"{self!r} lost the step actor"))
        if keeper is not None and not self._forgotten:
            left = _cluster.reply_to(keeper.leave.remote(self._process))
            if self._waits.closed:  # otherwise it is broken, as far as one knows
                with contextlib.suppress(StoreUnavailableError):  # its watch there ends by itself after a heartbeat
                    await self._answer(left, _LEAVE_SECS)

    async def _disconnect(self) -> None:
        await super()._disconnect()
        if self._joined:
            self._joined = False
            await to_thread(_cluster.leave, grace_secs=_GRACE_SECS)

    async def _delete_run_once(self) -> None:
        if self._keeper is None:
            raise StoreUnavailableError(f"{self!r} is not connected to the step actor")
        await to_thread(_cluster.kill_actor, self._keeper, grace_secs=_GRACE_SECS)


def _fail(reply: asyncio.Future[Any], error: StoreUnavailableError) -> None:
    if not reply.done():
        reply.set_exception(error)
        reply.exception()  # heard: its waiter may have gone


_SUPERSEDED = object()
