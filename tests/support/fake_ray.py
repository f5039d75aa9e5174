"""The step actor in this process and loop; it can die before a call or before its reply."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorUnavailableError

from aiohooks.stores import SharedStepStore
from aiohooks.stores.ray import RayEngine, StepActor


class Call:
    """What a call returns, in place of Ray's `ObjectRef`. As in Ray, a call whose future was
    cancelled ignores its answer.
    """

    def __init__(self) -> None:
        self._future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def future(self) -> concurrent.futures.Future[Any]:
        return self._future

    def answer(self, value: Any) -> None:
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class Method:
    """A method of a handle, whose calls are started by `start`: with its name, arguments and
    result.
    """

    def __init__(self, start: Callable[[str, tuple[Any, ...], Call], None], name: str) -> None:
        self._start = start
        self._name = name

    def remote(self, *args: Any) -> Call:
        call = Call()
        self._start(self._name, args, call)
        return call


class FakeActor:
    """An actor and its handle (`actor.method.remote(...)`); `decide` chooses the outcome of each
    call.
    """

    def __init__(self) -> None:
        self.instance = StepActor()
        self.decide: Callable[[str], str] = lambda name: ""
        """Takes the method's name, and returns "dies before" (the call), "dies after" (it, before
        the reply), or "" (lives).
        """
        self._calls: dict[asyncio.Task[Any], Call] = {}

    def __getattr__(self, name: str) -> Method:
        return Method(self.start_call, name)

    def start_call(self, name: str, args: tuple[Any, ...], call: Call) -> None:
        outcome = self.decide(name)
        if outcome == "dies before":
            call.fail(_unavailable())
            self.die()
            return
        copied = pickle.loads(pickle.dumps(args))
        task = asyncio.get_running_loop().create_task(getattr(self.instance, name)(*copied))
        self._calls[task] = call

        def done(task: asyncio.Task[Any]) -> None:
            if self._calls.pop(task, None) is None:
                return  # it died meanwhile
            if outcome == "dies after":
                call.fail(_unavailable())
                self.die()
            elif (error := task.exception()) is not None:
                call.fail(error)
            else:
                call.answer(pickle.loads(pickle.dumps(task.result())))

        task.add_done_callback(done)

    def die(self) -> None:
        """Kill its process; Ray starts another one."""
        self.stop()
        self.instance = StepActor()

    def stop(self) -> None:
        """Kill it."""
        calls, self._calls = self._calls, {}
        for task, call in calls.items():
            task.cancel()
            call.fail(_unavailable())


def _unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("the fake actor died", b"0" * 16)


class FakeCluster:
    """The actors of all runs."""

    def __init__(self) -> None:
        self.actors: dict[str, FakeActor] = {}

    def actor(self, run: str) -> FakeActor:
        return self.actors.setdefault(run, FakeActor())

    def store(self, run: str = "fake", **options: Any) -> SharedStepStore:
        """Return a store, as of another process."""
        return SharedStepStore(FakeRayEngine(self), run=run, **options)


class FakeRayEngine(RayEngine):
    """The store's engine, with the cluster replaced."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__("fake")
        self._cluster = cluster

    def _get_or_create_actor(self) -> Any:
        return self._cluster.actor(self.link.run)

    def _existing_actor(self) -> Any:
        return self._cluster.actors.get(self.link.run)

    async def delete(self) -> None:
        self._cluster.actors.pop(self.link.run).stop()
