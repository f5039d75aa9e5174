"""BlockingHook: objects with plain methods, each call in a worker thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import anyio.from_thread
import pytest

import aiohooks as ah
from tests.support.checks import refused
from tests.support.sessions import counting, counting_graph, doubling
from tests.support.waiting import forever


def plain(**methods: Callable[..., Any]) -> ah.hooks.BlockingHook:
    """Make a hook of an object with these plain methods."""
    return ah.hooks.BlockingHook(
        type("Plain", (), {name: staticmethod(method) for name, method in methods.items()})()
    )


def slow_graph() -> tuple[ah.Graph, asyncio.Event]:
    """Make a graph with `one`, and with `slow`, which never ends; the event says that it was
    started.
    """
    graph = ah.Graph()
    started = asyncio.Event()

    @graph.operation
    async def slow() -> None:
        started.set()
        await forever()

    graph.operation(name="one")(lambda: 1)
    return graph, started


async def test_the_session_of_a_thread_is_plain() -> None:
    """In every method the thread runs the raw session with a plain call, which waits for the
    result; the loop continues.
    """
    seen: list[Any] = []

    class Plain:
        def begin(self) -> None:  # the session's graph is the default one
            ah.graph.get_default_graph().operation(name="added")(lambda total: total + 5)

        def after_create_session(self, session: Any, coord: ah.Coordinator) -> None:
            seen.append(session.run(["total", "added"]))

        def before_run(self, run_context: Any) -> None:
            seen.append(run_context.session.run({"total": "total"}))
            seen.append(
                (run_context.global_step, run_context.attempt, run_context.session.graph is graph)
            )

        def after_run(self, run_context: Any, run_values: ah.SessionRunValues) -> None:
            seen.append(run_context.session.run("loss", feed_dict={"x": 7}))
            with pytest.raises(ah.errors.FetchError):
                run_context.session.run("lost")
            run_context.request_stop("seen enough")

        def end(self, session: Any) -> None:
            seen.append(session.run("total"))
            seen.append(repr(session))

    graph = counting_graph()
    async with ah.AsyncMonitoredSession(graph, [ah.hooks.BlockingHook(Plain())]) as session:
        await session.run("train")
        assert session.should_stop()
    assert seen[:-1] == [[0, 5], {"total": 0}, (1, 1, True), 70, 1]
    assert "Session" in seen[-1]


async def test_plain_methods_are_called_in_the_event_loop() -> None:
    """What is not made for several threads is called in the event loop's thread, with the other
    work of the loop.
    """
    threads: list[threading.Thread] = []

    class ThreadVariables(ah.Variables):
        def assign(self, values: Any) -> None:
            threads.append(threading.current_thread())
            super().assign(values)

    def before_run(run_context: Any) -> None:
        run_context.session.variables.assign({"total": 3})
        with pytest.raises(ah.errors.FetchError):
            run_context.session.variables.assign({"totl": 3})

    hooks = [plain(before_run=before_run)]
    async with counting(*hooks, variables=ThreadVariables()) as session:
        assert await session.run(["train", "total"]) == [1, 3]
    assert threads == [threading.current_thread()] * 2


@pytest.mark.every_python
@pytest.mark.parametrize("of_session", [False, True], ids=["the run", "the task of the session"])
async def test_a_cancel_ends_what_a_thread_waits_for(of_session: bool) -> None:
    """Also with a session and a coordinator that were kept from an earlier method, and at each
    further call.
    """
    ended: list[str] = []

    class Plain:
        def after_create_session(self, session: Any, coord: Any) -> None:
            self.session = session
            self.coord = coord

        def before_run(self, run_context: Any) -> None:
            try:
                (self.session if of_session else run_context.session).run("slow")
            except concurrent.futures.CancelledError:
                ended.append("run")
            while len(ended) < 50:  # it ignores the cancel, and every further one
                try:
                    self.coord.wait_for_stop()
                except concurrent.futures.CancelledError:
                    ended.append("wait")

    graph, started = slow_graph()

    async def train() -> None:
        async with ah.AsyncMonitoredSession(graph, [ah.hooks.BlockingHook(Plain())]) as session:
            running = (
                asyncio.current_task() if of_session else asyncio.create_task(session.run("one"))
            )
            assert running is not None
            canceller = asyncio.create_task(cancel(running))
            await (session.run("one") if of_session else asyncio.wait([running, canceller]))

    async def cancel(task: asyncio.Task[Any]) -> None:
        await started.wait()
        task.cancel()

    if of_session:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(train())
    else:
        await train()
    assert ended == ["run", *["wait"] * 49]


@pytest.mark.every_python
@pytest.mark.parametrize("with_close", [False, True])
async def test_the_end_of_a_session_ends_what_own_threads_wait_for(with_close: bool) -> None:
    """A thread of the object's own that waits for a run is released when the hook is closed; later
    calls are refused.
    """
    outcomes: list[type[BaseException]] = []
    threads: list[threading.Thread] = []

    def wait(session: Any) -> None:
        for _ in range(2):
            try:
                session.run("slow")
            except (concurrent.futures.CancelledError, ah.errors.SessionClosedError) as error:
                outcomes.append(type(error))

    def after_create_session(session: Any, coord: Any) -> None:
        threads.append(threading.Thread(target=wait, args=(session,)))
        threads[0].start()

    alive: list[bool] = []
    methods: dict[str, Any] = (
        {"close": lambda exc: alive.append(threads[0].is_alive())} if with_close else {}
    )
    graph, started = slow_graph()
    async with ah.AsyncMonitoredSession(
        graph, [plain(after_create_session=after_create_session, **methods)]
    ):
        await started.wait()
    await asyncio.to_thread(threads[0].join)
    assert alive == [True] * with_close
    assert outcomes == [concurrent.futures.CancelledError, ah.errors.SessionClosedError]


async def test_a_plain_call_in_the_event_loops_thread_is_refused() -> None:
    """There it would wait for itself: it is an error that says so, for the session as for its
    parts; a stop can be requested.
    """
    kept: list[Any] = []
    hook = plain(after_create_session=lambda session, coord: kept.extend([session, coord]))
    async with counting(hook) as session:
        raw, coord = kept
        for call, name in (
            (lambda: raw.run("loss"), "Session.run"),
            (raw.variables.snapshot, "Variables.snapshot"),
        ):
            with refused(
                ah.errors.WrongLoopError,
                f"{name} was called in the event loop's own thread",
                "wait for itself",
            ):
                call()
        assert not coord.should_stop()
        coord.request_stop("from the loop")
        assert session.stop_reason == "from the loop"


async def test_a_plain_run_of_the_monitored_session_is_refused() -> None:
    """A thread that runs the monitored session, which waits for it, gets an error and not a
    deadlock.
    """
    hook = plain(before_run=lambda run_context: anyio.from_thread.run(session.run, "loss"))
    with pytest.raises(ah.errors.NestedRunError):
        async with doubling(hook) as session:
            await session.run("loss")


def raising(error: Exception) -> Callable[..., None]:
    """Return a function that raises."""

    def fail(*_: object) -> None:
        raise error

    return fail


async def test_attributes_of_the_object() -> None:
    """`order`, `timeout` and `on_error` of the object are the hook's; its repr names the object."""

    class Logs:
        order = -5
        timeout = 30.0
        on_error = "log"
        after_run = raising(OSError("only logged"))

        def __repr__(self) -> str:
            return "Logs()"

    hook = ah.hooks.BlockingHook(Logs())
    assert (hook.order, hook.timeout, hook.on_error) == (-5, 30.0, "log")
    assert repr(hook) == "BlockingHook(Logs())"
    async with doubling(hook) as session:
        assert await session.run("loss") == 2
