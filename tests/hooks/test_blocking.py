"""BlockingHook: objects with plain methods, each call in a worker thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

import anyio.from_thread
import pytest

import aiohooks as ah
from aiohooks.testing import RecordingHook
from tests.support.checks import refused
from tests.support.sessions import counting_graph, double
from tests.support.waiting import HANG_SECS, until_true

PHASES = ["begin", "after_create_session", "before_run", "after_run", "end", "close"]


class Observer:
    """A plain object that records its calls and their threads; it requests the loss."""

    def __init__(self) -> None:
        self.record: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.results: list[Any] = []
        self.closed_with: list[BaseException | None] = []

    def _called(self, phase: str) -> None:
        self.record.append(phase)
        self.threads.add(threading.current_thread())

    def begin(self) -> None:
        self._called("begin")

    def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self._called("after_create_session")

    def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        self._called("before_run")
        return ah.SessionRunArgs("loss", {"batch": 21})

    def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        self._called("after_run")
        self.results.append(run_values.results)

    def end(self, session: ah.Session) -> None:
        self._called("end")

    def close(self, exc: BaseException | None) -> None:
        self._called("close")
        self.closed_with.append(exc)


def slow_graph() -> tuple[ah.Graph, asyncio.Event]:
    """Make a graph with `one`, and with `slow`, which never ends; the event says that it was started."""
    graph, started = ah.Graph(), asyncio.Event()

    @graph.operation
    async def slow() -> None:
        started.set()
        await asyncio.Event().wait()

    graph.operation(name="one")(lambda: 1)
    return graph, started


async def test_all_methods_are_called_in_worker_threads() -> None:
    """Each method is called as a hook's would be, never in the loop's thread; results are passed on."""
    observer = Observer()
    async with ah.AsyncMonitoredSession(double, [ah.BlockingHook(observer)]) as session:
        assert await session.run("loss") == 42
    assert observer.record == PHASES
    assert observer.results == [42]
    assert observer.closed_with == [None]
    assert threading.current_thread() not in observer.threads


async def test_missing_methods_are_not_called() -> None:
    """The object may have any of the methods; missing ones are skipped."""

    class Ends:
        ended = 0

        def end(self, session: ah.Session) -> None:
            self.ended += 1

    ends = Ends()
    async with ah.AsyncMonitoredSession(double, [ah.BlockingHook(ends)]) as session:
        assert await session.run("loss") == 2
    assert ends.ended == 1


async def test_begin_adds_to_the_sessions_graph() -> None:
    """In the thread of `begin` the session's graph is the default one."""

    class Adds:
        def begin(self) -> None:
            ah.get_default_graph().operation(name="added")(lambda total: total + 5)

    async with ah.AsyncMonitoredSession(counting_graph(), [ah.BlockingHook(Adds())]) as session:
        assert await session.run("added") == 5


async def test_the_session_of_a_thread_is_plain() -> None:
    """In every method the thread runs the raw session with a plain call, which waits for the result; the loop continues."""
    seen: list[Any] = []

    class Plain:
        def after_create_session(self, session: Any, coord: ah.Coordinator) -> None:
            seen.append(session.run("total"))

        def before_run(self, run_context: Any) -> None:
            seen.append(run_context.session.run({"total": "total"}))
            seen.append((run_context.global_step, run_context.attempt, run_context.session.graph is graph))

        def after_run(self, run_context: Any, run_values: ah.SessionRunValues) -> None:
            seen.append(run_context.session.run("loss", feed_dict={"x": 7}))
            with pytest.raises(ah.errors.FetchError):
                run_context.session.run("lost")
            run_context.request_stop("seen enough")

        def end(self, session: Any) -> None:
            seen.append(session.run("total"))
            seen.append(repr(session))

    graph = counting_graph()
    async with ah.AsyncMonitoredSession(graph, [ah.BlockingHook(Plain())]) as session:
        await session.run("train")
        assert session.should_stop()
    assert seen[:-1] == [0, {"total": 0}, (1, 1, True), 70, 1]
    assert "Session" in seen[-1]


async def test_a_cancel_ends_the_plain_run_of_a_thread() -> None:
    """A cancelled run cancels what the thread waits for, so that the thread ends, also if it runs the session once more."""
    errors: list[Exception] = []

    class Plain:
        def before_run(self, run_context: Any) -> None:
            for _ in range(2):
                try:
                    run_context.session.run("slow")
                except concurrent.futures.CancelledError as error:
                    errors.append(error)

    graph, started = slow_graph()
    async with ah.AsyncMonitoredSession(graph, [ah.BlockingHook(Plain())]) as session:
        running = asyncio.create_task(session.run("one"))
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert len(errors) == 2


class RateHook:
    """As written for TensorFlow: plain methods that keep what they were given, and a thread of its own."""

    def __init__(self) -> None:
        self.record: list[Any] = []

    def begin(self) -> None:
        graph = ah.get_default_graph()
        self._half = graph.operation(name=graph.unique_name("half"))(lambda rate: rate / 2)

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._session, self._coord = session, coord
        session.variables.assign({"rate": 8.0})
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        while not self._coord.should_stop():
            self._coord.wait_for_stop()
        self.record.append("stopped")

    def before_run(self, run_context: Any) -> ah.SessionRunArgs:
        return ah.SessionRunArgs([self._half, ah.get_default_graph().global_step])

    def after_run(self, run_context: Any, run_values: ah.SessionRunValues) -> None:
        self.record.append((run_values.results, self._session.run("global_step"), run_context.session.variables.snapshot()))
        self._session.variables.assign({"rate": run_values.results[0]})
        if run_context.global_step == 2:
            self._coord.request_stop("rate is low")
        assert run_context.stop_requested == run_context.coord.should_stop() == (run_context.global_step == 2)

    def end(self, session: Any) -> None:
        self.record.append(session.run("rate"))
        self._thread.join()

    def close(self, exc: BaseException | None) -> None:
        self.record.append((self._session.global_step.latest.step, self._session.global_step.value().step))


def rate_graph() -> ah.Graph:
    """Make a graph with a variable `rate`."""
    graph = ah.Graph()
    graph.variable("rate", 0.0)
    graph.train_op(name="train")(lambda rate: rate)
    return graph


@pytest.mark.every_python
async def test_a_hook_that_was_written_for_tensorflow_runs_unchanged() -> None:
    """The session, the coordinator, variables and the step have plain methods, also when they are kept, and in own threads."""
    hook = RateHook()
    async with ah.AsyncMonitoredSession(rate_graph(), [ah.BlockingHook(hook)]) as session:
        values = [one async for one in session.steps("train")]
    assert values == [8.0, 4.0]
    assert session.stop_reason == "rate is low"
    assert [one for one in hook.record if one != "stopped"] == [
        ([4.0, 0], 1, {"rate": 8.0}),
        ([2.0, 1], 2, {"rate": 4.0}),
        2.0,
        (2, 2),
    ]
    assert hook.record.count("stopped") == 1


async def test_plain_methods_are_called_in_the_event_loop() -> None:
    """What is not made for several threads is called in the event loop's thread, with the other work of the loop."""
    threads: list[threading.Thread] = []

    class ThreadVariables(ah.Variables):
        def assign(self, values: Any) -> None:
            threads.append(threading.current_thread())
            super().assign(values)

    class Plain:
        def before_run(self, run_context: Any) -> None:
            run_context.session.variables.assign({"total": 3})
            with pytest.raises(ah.errors.FetchError):
                run_context.session.variables.assign({"totl": 3})

    graph = counting_graph()
    async with ah.AsyncMonitoredSession(graph, [ah.BlockingHook(Plain())], variables=ThreadVariables()) as session:
        assert await session.run(["train", "total"]) == [1, 3]
    assert threads == [threading.current_thread()] * 2


@pytest.mark.every_python
async def test_a_cancel_ends_what_a_kept_session_waits_for() -> None:
    """A session that was kept from an earlier method belongs to the call that uses it, and a cancel of that ends its wait."""
    ended: list[str] = []

    class Plain:
        def after_create_session(self, session: Any, coord: Any) -> None:
            self.session, self.coord = session, coord

        def before_run(self, run_context: Any) -> None:
            try:
                self.session.run("slow")
            except concurrent.futures.CancelledError:
                ended.append("run")
            while len(ended) < 50:  # it ignores the cancel, and every further one
                try:
                    self.coord.wait_for_stop()
                except concurrent.futures.CancelledError:
                    ended.append("wait")

    graph, started = slow_graph()

    async def train() -> None:
        async with ah.AsyncMonitoredSession(graph, [ah.BlockingHook(Plain())]) as session:
            await session.run("one")

    running = asyncio.create_task(train())
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == ["run", *["wait"] * 49]


@pytest.mark.every_python
@pytest.mark.parametrize("with_close", [False, True])
async def test_the_end_of_a_session_ends_what_own_threads_wait_for(with_close: bool) -> None:
    """A thread of the object's own that waits for a run is released when the hook is closed; later calls are refused."""
    outcomes: list[type[BaseException]] = []
    threads: list[threading.Thread] = []

    def wait(session: Any) -> None:
        for _ in range(2):
            try:
                session.run("slow")
            except (concurrent.futures.CancelledError, ah.errors.SessionClosedError) as error:
                outcomes.append(type(error))

    class Plain:
        def after_create_session(self, session: Any, coord: Any) -> None:
            threads.append(threading.Thread(target=wait, args=(session,)))
            threads[0].start()

    class Closes(Plain):
        def close(self, exc: BaseException | None) -> None:
            assert threads[0].is_alive()

    graph, started = slow_graph()
    hook = ah.BlockingHook(Closes() if with_close else Plain())
    async with ah.AsyncMonitoredSession(graph, [hook]):
        await started.wait()
    await asyncio.to_thread(threads[0].join)
    assert outcomes == [concurrent.futures.CancelledError, ah.errors.SessionClosedError]


async def test_a_plain_call_in_the_event_loops_thread_is_refused() -> None:
    """There it would wait for itself: it is an error that says so, for the session as for its parts; a stop can be requested."""
    kept: list[Any] = []

    class Plain:
        def after_create_session(self, session: Any, coord: Any) -> None:
            kept.extend([session, coord])

    async with ah.AsyncMonitoredSession(counting_graph(), [ah.BlockingHook(Plain())]) as session:
        plain, coord = kept
        for call, name in ((lambda: plain.run("loss"), "Session.run"), (plain.variables.snapshot, "Variables.snapshot")):
            with refused(ah.errors.WrongLoopError, f"{name} was called in the event loop's own thread", "wait for itself"):
                call()
        assert not coord.should_stop()
        coord.request_stop("from the loop")
        assert session.stop_reason == "from the loop"


async def test_a_hook_is_used_again() -> None:
    """A hook that was closed can be used in another session, with what that gives to it."""
    hook = ah.BlockingHook(RateHook())
    for _ in range(2):
        async with ah.AsyncMonitoredSession(rate_graph(), [hook]) as session:
            assert len([one async for one in session.steps("train")]) == 2


async def test_a_plain_run_of_the_monitored_session_is_refused() -> None:
    """A thread that runs the monitored session, which waits for it, gets an error and not a deadlock."""

    class Plain:
        def before_run(self, run_context: Any) -> None:
            anyio.from_thread.run(session.run, "loss")

    with pytest.raises(ah.errors.NestedRunError):
        async with ah.AsyncMonitoredSession(double, [ah.BlockingHook(Plain())]) as session:
            await session.run("loss")


async def test_errors_in_the_thread() -> None:
    """An error of a method is the hook's error: the same object, with a note that names it."""
    error = OSError("disk full")

    class Saves:
        def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
            raise error

    with pytest.raises(OSError, match="disk full") as caught:
        async with ah.AsyncMonitoredSession(double, [ah.BlockingHook(Saves())]) as session:
            await session.run("loss")
    assert caught.value is error
    assert caught.value.__notes__ == ["raised by BlockingHook.after_run at step 1"]


@pytest.mark.parametrize("error", [StopIteration("end"), ah.OutOfRangeError("end")], ids=repr)
async def test_the_end_of_input_in_a_thread_is_a_clean_end(error: Exception) -> None:
    """A plain method may end the session as plain code does, with `StopIteration`."""

    class Reads:
        def before_run(self, run_context: ah.SessionRunContext) -> None:
            raise error

    hook = RecordingHook()
    async with ah.AsyncMonitoredSession(double, [ah.BlockingHook(Reads()), hook]) as session:
        await session.run("loss")
        raise AssertionError("the run must not return")
    assert hook.phases()[-2:] == ["end", "close"]
    assert hook.closed_with == [None]


async def test_blocking_hooks_overlap() -> None:
    """Two hooks that wait for each other finish: they run in two threads at the same time."""

    class Meets:
        def __init__(self, barrier: threading.Barrier) -> None:
            self.barrier = barrier

        def before_run(self, run_context: ah.SessionRunContext) -> None:
            self.barrier.wait(HANG_SECS)

    barrier = threading.Barrier(2)
    async with ah.AsyncMonitoredSession(double, [ah.BlockingHook(Meets(barrier)) for _ in range(2)]) as session:
        assert await session.run("loss") == 2


async def test_a_cancel_waits_for_the_thread() -> None:
    """A cancelled run ends when the thread has ended: nothing of the hook continues after it."""

    class Blocks:
        entered, leave, left = threading.Event(), threading.Event(), threading.Event()

        def before_run(self, run_context: ah.SessionRunContext) -> None:
            self.entered.set()
            assert self.leave.wait(HANG_SECS)
            self.left.set()

    blocks = Blocks()
    async with ah.AsyncMonitoredSession(double, [ah.BlockingHook(blocks)]) as session:
        running = asyncio.create_task(session.run("loss"))
        await until_true(blocks.entered.is_set)
        running.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not running.done()
        blocks.leave.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert blocks.left.is_set()


async def test_attributes_of_the_object() -> None:
    """`order`, `timeout` and `on_error` of the object are the hook's; its repr names the object."""

    class Logs:
        order = -5
        timeout = 30.0
        on_error = "log"

        def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
            raise OSError("only logged")

        def __repr__(self) -> str:
            return "Logs()"

    hook = ah.BlockingHook(Logs())
    assert (hook.order, hook.timeout, hook.on_error) == (-5, 30.0, "log")
    assert repr(hook) == "BlockingHook(Logs())"
    async with ah.AsyncMonitoredSession(double, [hook]) as session:
        assert await session.run("loss") == 2
