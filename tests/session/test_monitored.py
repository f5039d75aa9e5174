"""The monitored session: a function as the step, the stop, the lock, the run context and the status."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import RecordingHook
from tests.support.checks import drop, refused
from tests.support.hooks import PhaseHook, RequestingHook, SessionRecorder
from tests.support.sessions import NO_BACKOFF, counting_graph, double, failing_step
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python


class ContextRecorder(ah.SessionRunHook):
    """Records what each run's context has in both phases."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int, bool]] = []

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        self._note("before", run_context)

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        self._note("after", run_context)

    def _note(self, phase: str, context: ah.SessionRunContext) -> None:
        self.seen.append((phase, context.global_step, context.attempt, context.stop_requested))


# -- a function as the step


async def test_a_coroutine_function_is_a_session() -> None:
    """A coroutine function is the step: fed by its parameters, fetched by the keys it returns or as a whole, one step a run."""
    async with ah.AsyncMonitoredSession(double) as session:
        assert await session.run("loss") == 2
        assert await session.run(["loss", "global_step"], {"batch": 5}) == [10, 1]
        assert await session.run("double", {"batch": 3}) == {"loss": 6, "batch": 3}
        assert session.global_step.latest.step == 3
        assert session.graph.step_operation is session.graph.nodes["double"]


async def test_an_object_or_a_method_may_be_the_step() -> None:
    """Anything called and awaited like a coroutine function is a step: a bound method, a callable object."""

    class Model:
        def __init__(self) -> None:
            self.weight = 2

        async def train(self, batch: int) -> dict[str, int]:
            return {"loss": batch * self.weight}

        async def __call__(self, batch: int) -> dict[str, int]:
            return {"loss": -batch}

    for source, loss in ((Model().train, 6), (Model(), -3)):
        async with ah.AsyncMonitoredSession(source) as session:
            assert await session.run("loss", {"batch": 3}) == loss


@pytest.mark.parametrize("hooks", [[], [RecordingHook()], [RecordingHook(fetches="loss")]], ids=["none", "silent", "fetching"])
async def test_every_run_runs_the_step(hooks: list[ah.SessionRunHook]) -> None:
    """Whatever is fetched, a run of a step function runs it once: nothing, a parameter, the global step."""

    async def step(batch: int = 1) -> dict[str, int]:
        return {"loss": 2 * batch}

    async with ah.AsyncMonitoredSession(step, hooks) as session:
        for _ in range(2):
            assert await session.run([]) == []
            assert await session.run({"a": ()}) == {"a": ()}
            assert await session.run("batch", {"batch": 5}) == 5
            assert await session.run(["batch"]) == [1]
        assert await session.run("global_step") == 8
        assert await session.run(["loss", "batch", "step"]) == [2, 1, {"loss": 2}]
        assert session.global_step.latest.step == 10


async def test_the_steps_of_a_step_function_need_no_fetches() -> None:
    """`steps()` runs it for each feed."""
    batches: list[int] = []

    async def step(batch: int) -> None:
        batches.append(batch)

    async with ah.AsyncMonitoredSession(step) as session:
        assert [values async for values in session.steps(feeds=[3, 4])] == [(), ()]
    assert batches == [3, 4]


async def test_a_raw_run_reads_the_global_step_without_a_step() -> None:
    """A hook may read it, or fetch nothing, by a raw run; also after a run with the same fetches."""
    async with ah.AsyncMonitoredSession(double, [recorder := SessionRecorder()]) as session:
        for fetches, value in (("global_step", 1), ((), ()), (["global_step"], [3])):
            await session.run(fetches)
            assert await recorder.sessions[0].run(fetches) == value
        assert session.global_step.latest.step == 3


async def collide(state: int = 0, *, global_step: int) -> dict[str, int]:
    """Return keys that are names of the graph too: a step."""
    return {"loss": 1, "state": state + 1, "global_step": 777, "collide": 2}


@pytest.mark.parametrize(
    ("name", "what"), [("state", "a parameter"), ("global_step", "the global step"), ("collide", "the function itself")]
)
@pytest.mark.parametrize("by_hook", [False, True], ids=["caller", "hook"])
async def test_a_name_that_may_mean_two_things_is_refused(name: str, what: str, by_hook: bool) -> None:
    """A key of the result that is also a parameter, the function or the global step cannot be fetched; nothing is committed."""
    hooks = [RequestingHook(name if by_hook else "loss"), RequestingHook()]
    async with ah.AsyncMonitoredSession(collide, hooks) as session:
        for fetches in (["loss"], "loss") if by_hook else (name, ["loss", name], {"a": name}):
            says = f"'{name}' is fetched, and is both {what} and a key of the result of step 'collide'; rename the key"
            with refused(ah.errors.FetchError, says) as caught:
                await session.run(fetches)
            assert ("fetched by RequestingHook#1.before_run" in caught.value.__notes__) == by_hook
        assert session.global_step.latest.step == 0


@pytest.mark.parametrize("fetches", [[], (), {}, [(), {}]], ids=repr)
async def test_a_run_of_a_graph_that_fetches_nothing_is_refused(fetches: Any) -> None:
    """Unless a hook fetches something: nothing at all would run, and a loop of such runs would never end."""
    says = "neither the caller nor a hook fetches anything, so nothing would run; operations are: ['loss', 'train']"
    for hooks in ([], [RecordingHook()], [RecordingHook(fetches=[])]):
        async with ah.AsyncMonitoredSession(counting_graph(), hooks) as session:
            with refused(ah.errors.FetchError, says):
                await session.run(fetches)
            with refused(ah.errors.FetchError, says):
                await anext(session.steps(fetches))
    async with ah.AsyncMonitoredSession(counting_graph(), [RecordingHook(fetches="train")]) as session:
        assert await session.run(fetches) == fetches
        assert session.global_step.latest.step == 1


# -- the stop


async def test_a_stop_before_the_first_run_is_not_lost() -> None:
    """A stop requested before `async with`, in `begin`, or on creation ends the loop before its first run."""

    async def ask_in_begin() -> None:
        session.request_stop("in begin")

    async def ask_at_creation(raw: ah.Session, coord: ah.Coordinator) -> None:
        coord.request_stop("at the creation")

    for hook, reason in (
        (RecordingHook(), "before it"),
        (PhaseHook("begin", ask_in_begin), "in begin"),
        (PhaseHook("after_create_session", ask_at_creation), "at the creation"),
    ):
        session = ah.AsyncMonitoredSession(double, [hook])
        if isinstance(hook, RecordingHook):
            session.request_stop("before it")
        async with session:
            assert session.should_stop()
            assert [one async for one in session.steps("loss")] == []
        assert session.stop_reason == reason
        assert session.global_step.latest.step == 0


async def test_a_run_after_the_stop_is_a_clean_end() -> None:
    """A loop that does not ask `should_stop` also ends cleanly: `run` raises, and the block suppresses the error."""
    hook = RecordingHook()
    async with ah.AsyncMonitoredSession(double, [ah.StopAtStepHook(num_steps=2), hook]) as session:
        for _ in range(9):
            await session.run("loss")
        raise AssertionError("the third run must not return")
    assert session.global_step.latest.step == 2
    assert hook.phases()[-2:] == ["end", "close"]
    assert hook.closed_with == [None]


async def test_a_stop_of_a_failing_run_is_not_lost() -> None:
    """A stop requested in a run that fails is recorded, whichever hook failed."""

    async def ask(run_context: ah.SessionRunContext) -> None:
        run_context.request_stop("asked before it failed")
        raise OSError("broken")

    async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", ask)]) as session:
        with pytest.raises(OSError, match="broken"):
            await session.run("loss")
        assert session.should_stop()
        assert session.stop_reason == "asked before it failed"


async def test_a_stop_lets_the_run_finish() -> None:
    """The run during which a stop is requested, and its `after_run`s, are finished; a wait inside it ends."""
    gate = asyncio.Event()

    async def step() -> dict[str, int]:
        await gate.wait()
        return {"loss": 5}

    hook = RecordingHook()
    async with ah.AsyncMonitoredSession(step, [hook]) as session:
        running = asyncio.create_task(session.run("loss"))
        await ticks()
        session.request_stop("now")
        waiting = asyncio.create_task(session.until(gate.wait()))
        await ticks()
        assert not running.done()
        with refused(ah.StopRequestedError, "now"):
            await waiting
        gate.set()
        assert await running == 5
    assert hook.phases() == ["begin", "after_create_session", "before_run", "after_run", "end", "close"]


async def test_a_wait_of_a_hook_ends_with_the_stop() -> None:
    """A hook that waits through its coordinator is ended by the stop, and the run is a clean end."""

    class Waits(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            self.coord = coord

        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            await self.coord.until(asyncio.Event().wait())

    hook = RecordingHook()
    async with ah.AsyncMonitoredSession(double, [Waits(), hook]) as session:
        asyncio.get_running_loop().call_soon(session.request_stop, "enough")
        await session.run("loss")
        raise AssertionError("the run must not return")
    assert hook.phases()[-2:] == ["end", "close"]
    assert session.stop_reason == "enough"


async def test_the_reason_of_a_wait_that_cannot_end_is_the_stops() -> None:
    """A session that ends because no publisher is left to reach the step says so in its `stop_reason`."""
    steps = ah.MemoryStepStore()
    with steps.publisher("chief"):
        await steps.advance(3)
    async with ah.AsyncMonitoredSession(double, [ah.GlobalStepWaiterHook(5)], global_step=steps, name="worker") as session:
        assert [loss async for loss in session.steps("loss")] == []
    assert session.stop_reason == "chief finished at step 3, wanted 5"


# -- turns


async def test_runs_take_turns_in_order() -> None:
    """Runs of several tasks do not overlap; they run in the order of the calls."""
    order: list[tuple[str, int]] = []

    async def step(number: int) -> dict[str, int]:
        order.append(("begins", number))
        await ticks(3)
        order.append(("ends", number))
        return {"done": number}

    async with ah.AsyncMonitoredSession(step) as session:
        runs = [asyncio.create_task(session.run("done", {"number": number})) for number in range(4)]
        await ticks(2)
        assert session.status().queued == 3
        runs[1].cancel()
        assert await asyncio.gather(*runs[:1], *runs[2:]) == [0, 2, 3]
        assert runs[1].cancelled()
        assert await session.run("done", {"number": 9}) == 9
    assert order == [(what, number) for number in (0, 2, 3, 9) for what in ("begins", "ends")]


async def test_a_queued_run_that_finds_a_stop_does_not_begin() -> None:
    """A run that waited for the lock while a stop came is not begun; the lock passes to the next one."""
    async with ah.AsyncMonitoredSession(double, [ah.StopAtStepHook(last_step=1)]) as session:
        runs = [asyncio.create_task(session.run("loss")) for _ in range(4)]
        results = await asyncio.gather(*runs, return_exceptions=True)
    assert results[0] == 2
    assert [type(result) for result in results[1:]] == [ah.StopRequestedError] * 3
    assert session.global_step.latest.step == 1


async def test_a_step_function_is_one_turn() -> None:
    """`run_step_fn` holds the lock once however many runs it makes; others wait for it as a whole."""
    order: list[str] = []

    async def step_fn(context: ah.session.StepContext) -> str:
        for _ in range(2):
            order.append(f"with hooks {await context.run_with_hooks('loss')}")
            await ticks()
            order.append(f"raw {await context.session.run('loss')}")
        return "done"

    hook = RecordingHook()
    async with ah.AsyncMonitoredSession(double, [hook]) as session:
        running = asyncio.create_task(session.run_step_fn(step_fn))
        await ticks(1)
        order.append(f"run {await session.run('loss')}")
        assert await running == "done"
    assert order == ["with hooks 2", "raw 2", "with hooks 2", "raw 2", "run 2"]
    assert hook.phases().count("before_run") == 3
    assert session.global_step.latest.step == 5


# -- the run context


async def test_the_context_of_a_run() -> None:
    """`global_step` is the step to come, then the committed one; `stop_requested` is the session's."""
    contexts = ContextRecorder()
    async with ah.AsyncMonitoredSession(counting_graph(), [contexts], global_step=ah.MemoryStepStore(10)) as session:
        await session.run("train")
        await session.run("loss")
        session.request_stop()
    assert contexts.seen == [("before", 11, 1, False), ("after", 11, 1, False), ("before", 12, 1, False), ("after", 11, 1, False)]


async def test_the_committed_step_is_the_runs_own() -> None:
    """`after_run` gets the step that its own run committed, also when another session has advanced it since."""
    steps, contexts = ah.MemoryStepStore(), ContextRecorder()

    async def elsewhere(*_: object) -> None:
        await steps.advance(100)

    hooks: list[ah.SessionRunHook | ah.dispatch.HookRegistration] = [
        contexts,
        ah.configure(PhaseHook("after_run", elsewhere), order=-1),
    ]
    async with ah.AsyncMonitoredSession(double, hooks, global_step=steps) as session:
        await session.run("loss")
    assert contexts.seen == [("before", 1, 1, False), ("after", 1, 1, False)]


# -- status


def counts(status: ah.session.SessionStatus) -> tuple[object, ...]:
    """Return the first fields of a status; the others are in test_status.py."""
    return tuple(getattr(status, field.name) for field in dataclasses.fields(status)[:8])


async def test_the_status_of_a_session() -> None:
    """`status()` has the session's state, at every stage of its life."""
    gate = asyncio.Event()

    async def step() -> None:
        await gate.wait()

    session = ah.AsyncMonitoredSession(step, [RecordingHook(), RecordingHook()])
    assert counts(session.status()) == ("new", None, 0, False, 0, None, 0, None)
    assert repr(session) == "<AsyncMonitoredSession new, <hooks: RecordingHook#1, RecordingHook#2>>"
    async with session:
        runs = [asyncio.create_task(session.run("step")) for _ in range(3)]
        await ticks()
        assert counts(session.status()) == ("open", 0, 1, True, 2, None, 0, None)
        gate.set()
        await asyncio.gather(*runs)
        session.request_stop("enough")
        assert counts(session.status()) == ("open", 3, 3, False, 0, "enough", 0, None)
    assert session.status().state == "closed"
    assert session.global_step.latest.step == 3
    assert repr(ah.AsyncSingularMonitoredSession(step)) == "<AsyncSingularMonitoredSession new, <hooks: none>>"


async def test_the_repr_of_a_context() -> None:
    """The context's repr has what a person debugging needs."""
    context = ah.SessionRunContext(ah.SessionRunArgs("loss"), ah.Session(counting_graph()), global_step=5, attempt=2)
    assert repr(context) == "<SessionRunContext step=5 attempt=2 stop_requested=False>"
    context.request_stop("in a test")
    assert context.stop_requested
    assert context.original_args == ah.SessionRunArgs("loss")


class MetricsHook(ah.SessionRunHook):
    """Copies what the others have added to the metrics, and adds a number of its own, in both phases."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[dict[str, Any]] = []

    def add(self, context: ah.SessionRunContext, phase: str) -> None:
        self.seen.append(dict(context.metrics))
        context.metrics[f"{self.name} {phase}"] = context.global_step

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        self.add(run_context, "before")

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        self.add(run_context, "after")


async def test_hooks_add_to_the_metrics_of_a_run_in_order() -> None:
    """A hook sees what those with a lower order added in the phase, and all of the phase before; a run begins with none."""
    last, first = MetricsHook("last"), MetricsHook("first")
    hooks: list[Any] = [ah.configure(last, order=1), first]
    async with ah.AsyncMonitoredSession(double, hooks) as session:
        for _ in range(2):
            await session.run("loss")
    before = {step: {"first before": step, "last before": step} for step in (1, 2)}
    assert first.seen == [{}, before[1], {}, before[2]]
    assert last.seen == [each for step in (1, 2) for each in ({"first before": step}, {**before[step], "first after": step})]


async def test_each_attempt_of_a_run_has_its_own_metrics() -> None:
    """What hooks added to an attempt that failed is not in the next one."""
    hook = MetricsHook("hook")
    async with ah.AsyncMonitoredSession(failing_step(ah.AbortedError("once")), [hook], recovery=NO_BACKOFF) as session:
        await session.run("loss")
    assert hook.seen == [{}, {}, {"hook before": 1}]


class BlockingMetrics:
    """Adds to the metrics in a thread."""

    def __init__(self, together: threading.Barrier, name: str) -> None:
        self.together, self.name = together, name

    def before_run(self, run_context: ah.SessionRunContext) -> None:
        self.together.wait()
        run_context.metrics[self.name] = 1


async def test_threads_add_to_the_same_metrics() -> None:
    """Of hooks in several threads that are the first to ask for the metrics, at the same time, none gets its own."""
    together = threading.Barrier(4)
    names = [f"thread {number}" for number in range(4)]
    last = MetricsHook("last")
    hooks: list[Any] = [*(ah.BlockingHook(BlockingMetrics(together, name)) for name in names), ah.configure(last, order=1)]
    async with ah.AsyncMonitoredSession(double, hooks) as session:
        await session.run("loss")
    assert set(last.seen[0]) == set(names)


@pytest.mark.may_leak
async def test_a_dropped_session_warns() -> None:
    """A session that was entered and never closed warns when it is collected, and names its hooks."""
    opened = [await ah.AsyncMonitoredSession(double, [RecordingHook()]).__aenter__()]
    with pytest.warns(ResourceWarning, match=r"open, <hooks: RecordingHook>> was never closed; use `async with`"):
        drop(opened)
