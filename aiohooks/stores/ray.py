"""The step store on a Ray cluster: the actor that keeps a run, its messages, and RayEngine."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import Any, ClassVar, NamedTuple

from aiohooks._core.clock import wait_until_woken, wake
from aiohooks._core.waits import ANY_CHANGE, retrieve_exception, to_thread, wait_done
from aiohooks.errors import (
    StoreDamagedError,
    StoreRefusedError,
    StoreUnavailableError,
    missing_extra,
)
from aiohooks.stores._protocol import Answer, Position, Report, Request, Snapshot, damaged_error
from aiohooks.stores.engine import Engine, EngineLink, RunState

__all__ = ["RayEngine"]


class LongPoll(NamedTuple):
    """A request for the run. The actor answers it as soon as the run has news for the process."""

    process: str
    threshold: int
    """The lowest step that the process waits for. Without a wait it is above all steps."""
    epoch: int
    """The latest epoch that the process knows."""
    revision: int
    """The revision of the latest snapshot that the process knows."""
    secs: float
    """The seconds after which the poll is answered in any case."""


class StepActor:
    """Keeps a run in memory: its state, and a long poll of each process.

    Ray starts the actor again when its process or its node dies, and the memory is lost. So each
    call except `connect` has the `incarnation` that the caller knows. If this is not the current
    one, the call returns None. The caller then connects again, with its last snapshot of the lost
    run.
    """

    def __init__(self) -> None:
        self.incarnation: str = secrets.token_hex(8)
        """A random word, new after each start. It is the `run_id` of the snapshots."""
        self.polls: dict[str, tuple[LongPoll, asyncio.Future[None]]] = {}
        """The parked polls by process, each with the future that its answer waits for."""
        self._state = RunState()

    # Remote calls.

    async def connect(self, known_run: Snapshot) -> Snapshot:
        """Connect a process, and return the snapshot of the run.

        The id of a run is the incarnation of the actor that keeps it. If the run that the process
        knows was lost with an earlier incarnation, continue that run first. Its id is empty if the
        process has not connected before.
        """
        has_connected_before = known_run.run_id != ""
        if has_connected_before and known_run.run_id != self.incarnation:
            self._state.follow(known_run)
            self._answer_satisfied_polls()
        return self._state.snapshot(self.incarnation)

    async def apply(self, incarnation: str, request: Request) -> Answer | None:
        """Apply a request to the run, and answer the polls that wait for its effect.

        Return None if the request is for an earlier incarnation, as all calls do.
        """
        if incarnation != self.incarnation:
            return None
        answer = self._state.apply(request)
        if self._answer_satisfied_polls():
            # Let the answers to the polls leave before the answer to this request, because other
            # processes wait for them.
            await asyncio.sleep(0)
        return answer

    async def read(self, incarnation: str) -> Snapshot | None:
        """Return the run."""
        if incarnation != self.incarnation:
            return None
        return self._state.snapshot(incarnation)

    async def long_poll(self, incarnation: str, poll: LongPoll) -> Snapshot | Position | None:
        """Return the run, or only the position if nothing else is new.

        The answer comes when the poll is satisfied, when its time is up, or when the process sends
        another poll.
        """
        if incarnation != self.incarnation:
            return None
        await self.leave(poll.process)  # this poll replaces an earlier poll of the process
        if not self._satisfies(poll):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            parked = (poll, waiter)
            self.polls[poll.process] = parked
            try:
                await wait_until_woken(waiter, poll.secs)
            finally:
                # A later poll of the process may have replaced this poll.
                if self.polls.get(poll.process) is parked:
                    del self.polls[poll.process]
        if self._state.revision == poll.revision:
            return self._state.position
        return self._state.snapshot(incarnation)

    async def leave(self, process: str) -> None:
        """Answer the parked poll of a process, if there is one. A store that closes calls this."""
        if process in self.polls:
            _, waiter = self.polls[process]
            wake(waiter)

    async def statistics(self) -> dict[str, int]:
        """Return the id of the actor's process, and the number of parked polls."""
        return {"pid": os.getpid(), "waiting": len(self.polls)}

    # Polls.

    def _satisfies(self, poll: LongPoll) -> bool:
        """Return whether the run has changed, or has reached the step that the poll waits for."""
        state = self._state
        epoch, step = state.position
        return epoch != poll.epoch or state.revision != poll.revision or step >= poll.threshold

    def _answer_satisfied_polls(self) -> bool:
        """Answer the polls that are satisfied now. Return whether there were any."""
        satisfied = [
            waiter
            for poll, waiter in self.polls.values()
            if not waiter.done() and self._satisfies(poll)
        ]
        for waiter in satisfied:
            wake(waiter)
        return bool(satisfied)


try:
    import ray
    from ray.exceptions import RayError, RaySystemError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as _missing:
    raise missing_extra("ray://", "ray") from _missing

_ray: Any = ray  # Ray's own types are incomplete
_GRACE_SECS = 1.0
"""How long after its time limit a reply may still arrive."""
_ACTOR_OPTIONS = {
    # The actor outlives the process that has created it. When its own process dies, Ray starts it
    # again, on another node if need be. Ray must not repeat calls, because the store repeats them.
    "lifetime": "detached",
    "max_restarts": -1,
    "max_task_retries": 0,
    "max_concurrency": 100_000,
    "num_cpus": 0,
    "get_if_exists": True,
}


class RayEngine(Engine):
    """A run in the memory of an actor of the Ray cluster that this process is a member of.

    The first process that opens the run creates the actor on its own node. It lives until `forget`.
    When it dies, Ray starts it again without its memory: the run continues in a later epoch, and
    writes raise `StoreResetError`.
    """

    # A node may have to start a process for the actor.
    connect_timeout: ClassVar[float] = 60.0

    def __init__(self, namespace: str = "") -> None:
        """Create the engine. `connect` gets the actor.

        Args:
            namespace: the namespace of the actor in the cluster, by default "aiohooks".
        """
        self._namespace = namespace or "aiohooks"
        self._actor: Any = None
        # The incarnation of the connected actor. Whenever Ray starts the actor again, it changes.
        self._incarnation = ""
        # The revision of the latest snapshot that was reported.
        self._reported_revision = 0
        # The replies to all calls that are not answered yet.
        self._replies: set[asyncio.Future[Any]] = set()
        # The reply to the long poll of `watch`. It is None before the first poll, and from the time
        # when `subscribe` ends a poll to the next poll.
        self._poll_reply: asyncio.Future[Any] | None = None
        # The lowest step that the long poll waits for.
        self._poll_threshold = 0

    def attach(self, link: EngineLink) -> None:
        super().attach(link)
        self._name = f"aiohooks step {link.run}"

    # The connection.

    async def connect(self) -> Snapshot:
        actor = await to_thread(self._get_or_create_actor, grace_secs=_GRACE_SECS)
        try:
            call = actor.connect.remote(self.link.waits.known_run)
        except (AttributeError, TypeError) as error:
            # The actor has no method `connect`, or it has other parameters.
            raise self._foreign_actor_error(error) from error
        reply = await self._wait_reply(call, self.link.connect_timeout)
        if not isinstance(reply, Snapshot):
            raise self._foreign_actor_error(reply)
        self._actor = actor
        self._incarnation = reply.run_id
        self._reported_revision = reply.revision
        return reply

    def _foreign_actor_error(self, found: object) -> StoreDamagedError:
        """Return the error for an actor of another program, or of another version."""
        return damaged_error(
            self.link.run,
            f"the actor {self._name!r} in the namespace {self._namespace!r}",
            found=f"{found!r:.100}",
            expected="a step actor of this version of aiohooks",
            delete="kill that actor",
        )

    def _get_or_create_actor(self) -> Any:
        """Return the actor of the run. If there is none, create it on this node. Blocks."""
        check_membership()
        this_node = _ray.get_runtime_context().get_node_id()
        # Prefer this node. `soft` allows another node if this one has no room, or dies.
        near = NodeAffinitySchedulingStrategy(this_node, soft=True)
        options = {"name": self._name, "namespace": self._namespace, "scheduling_strategy": near}
        try:
            return _ray.remote(**options, **_ACTOR_OPTIONS)(StepActor).remote()
        except Exception as error:
            raise self._explain(error) from error

    def _existing_actor(self) -> Any:
        """Return the actor of the run, or None if there is none. Blocks."""
        check_membership()
        try:
            return _ray.get_actor(self._name, namespace=self._namespace)
        except ValueError:
            return None

    async def disconnect(self) -> None:
        self._actor = None
        for reply in self._replies:
            reply.cancel()

    async def close(self) -> None:
        if self._actor is not None:
            self._send(self._actor.leave.remote(self.link.process))
        # Wait for all replies: Ray ends a process in which a reply arrives during `ray.shutdown`.
        await wait_done(self._replies, _GRACE_SECS)
        await self.disconnect()

    async def delete(self) -> None:
        actor = self._actor or await to_thread(self._existing_actor, grace_secs=_GRACE_SECS)
        self._actor = None
        if actor is not None:
            await to_thread(_ray.kill, actor, grace_secs=_GRACE_SECS)

    # Reports.

    async def watch(self) -> None:
        """Send one long poll after another, and report each reply.

        A reply is a snapshot, or a position if only the position is new. If a wait for a lower step
        than the threshold of the current poll begins, `subscribe` ends the poll.
        """
        link = self.link
        waits = link.waits
        while True:
            threshold = waits.waiters.lowest  # above all steps without a waiter
            if threshold == ANY_CHANGE:
                # ANY_CHANGE is 0, a step that is always reached: the actor would answer the poll
                # immediately, again and again.
                threshold = waits.latest.step + 1
            self._poll_threshold = threshold
            poll = LongPoll(
                process=link.process,
                threshold=threshold,
                epoch=waits.latest.epoch,
                revision=self._reported_revision,
                secs=link.heartbeat,
            )
            reply = self._send(self._connected_actor().long_poll.remote(self._incarnation, poll))
            self._poll_reply = reply
            await wait_done([reply], link.heartbeat + _GRACE_SECS)
            if self._poll_reply is not reply:
                # `subscribe` has ended this poll. The next poll requests the same changes again.
                continue
            report: Report = self._result_of(reply)
            if isinstance(report, Snapshot):
                self._reported_revision = report.revision
            link.observe(report)

    def subscribe(self, step: int | None) -> None:
        reply = self._poll_reply
        # The actor would not answer the poll at a step that is lower than its threshold.
        if reply is not None and step is not None and step < self._poll_threshold:
            reply.cancel()  # ends the wait of `watch`, which sends another poll
            self._poll_reply = None

    # Calls.

    async def request(self, request: Request) -> Answer:
        answer: Answer = await self._wait_reply(
            self._connected_actor().apply.remote(self._incarnation, request)
        )
        return answer

    async def read(self) -> Snapshot:
        snapshot: Snapshot = await self._wait_reply(
            self._connected_actor().read.remote(self._incarnation)
        )
        return snapshot

    def _connected_actor(self) -> Any:
        """Return the actor. Raise `StoreUnavailableError` without a connection."""
        if self._actor is None:
            raise StoreUnavailableError(f"the actor {self._name!r} is not connected")
        return self._actor

    async def _wait_reply(self, call: Any, secs: float | None = None) -> Any:
        """Wait for the reply to a call, `secs` seconds at most, and return its result."""
        reply = self._send(call)
        await wait_done([reply], secs)
        return self._result_of(reply)

    def _send(self, call: Any) -> asyncio.Future[Any]:
        """Return a future for the reply to a call. `disconnect` cancels it."""
        reply = asyncio.wrap_future(call.future())
        self._replies.add(reply)
        reply.add_done_callback(self._replies.discard)
        reply.add_done_callback(retrieve_exception)
        return reply

    def _result_of(self, reply: asyncio.Future[Any]) -> Any:
        """Return the result of a reply, or raise the store's error for it."""
        if not reply.done():
            raise StoreUnavailableError(f"the actor {self._name!r} has not answered in time")
        if reply.cancelled():
            raise StoreUnavailableError(f"the actor {self._name!r} was disconnected")
        try:
            result = reply.result()
        except RayError as error:
            raise self._explain(error) from error
        if result is None:  # the actor was started again, see `StepActor`
            raise StoreUnavailableError(f"the actor {self._name!r} has lost its memory")
        return result

    def _explain(self, error: Exception) -> StoreUnavailableError:
        """Return the store's error for an error of Ray.

        If the actor has failed, the engine rejects the call. If the actor does not answer, the
        engine is unavailable.
        """
        # In a remote traceback, the last line has the error.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if isinstance(error, (RayTaskError, RaySystemError)):
            return StoreRefusedError(
                f"the actor {self._name!r} has failed: {lines[-1]}. All nodes must have the same"
                " version of aiohooks and of Python"
            )
        return StoreUnavailableError(f"the actor {self._name!r} does not answer: {lines[0]}")


def check_membership() -> None:
    """Raise an error unless this process is connected to a cluster.

    Otherwise Ray would start a cluster of its own.
    """
    if not _ray.is_initialized():
        raise StoreRefusedError(
            "this process is not part of a Ray cluster: call ray.init(address=...) before the store"
            " is used"
        )
