"""Runs one random program and records what passed between the library and the program's own code.

Every call of the library, and every piece of the program that the library calls, is awaited under
`Execution.watch`, which notes the cancels that are thrown in and how it ended. Nothing is judged
here; that is the model's part.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import anyio

import aiohooks as ah
from aiohooks._core.waits import current_task
from aiohooks.errors import SessionClosedError
from aiohooks.testing import may_happen
from tests.fuzz.random_programs.programs import (
    CALLS,
    OPERATIONS,
    Action,
    HookSpec,
    Program,
    Script,
)
from tests.fuzz.random_programs.records import HARNESS, Record, Recorder, SessionRecord, TrackedTask

GRACE_SECS = 300.0
SEEN_BY_STEP = [contextvars.ContextVar[Any](f"hook_{number}", default=None) for number in range(8)]


class PlainError(Exception):
    """An error of the program."""


class RecoverableError(ah.AbortedError):
    """One that the session recovers from."""


class CleanEndError(ah.OutOfRangeError):
    """One that is a clean end."""


class NotelessError(Exception):
    """One that takes no note."""

    def add_note(self, note: str) -> None:
        raise TypeError("no notes")


class Place(NamedTuple):
    """Where a script runs."""

    session: SessionRecord | None
    raw: Any = None
    step: Any = None


class ScriptedHook(ah.SessionRunHook):
    """A hook that runs the scripts of its spec; subclasses override what the spec has."""

    def __init__(self, execution: Execution, session: SessionRecord, number: int) -> None:
        self.execution, self.record, self.number = execution, session, number
        self.spec = session.specs[number]
        self.scripts = dict(self.spec.methods)
        self.asked: tuple[int, int] | None = None

    async def call(
        self,
        name: str,
        raw: Any = None,
        token: int = 0,
        attempt: int = 0,
        rest: Callable[[], Awaitable[Any]] | None = None,
    ) -> Any:
        """Run a script, and then `rest`, if it is given; return the result of that."""
        queued = self.spec.background and name in ("after_run", "notify")
        record = Record(
            "queued" if queued else "hook",
            name,
            self.record,
            0 if queued else token,
            is_library=False,
        )
        record.hook, record.attempt = self, attempt

        async def script_and_rest() -> Any:
            await self.execution.run(self.scripts[name], Place(self.record, raw))
            return None if rest is None else await rest()

        return await self.execution.watch(record, script_and_rest())


class _Methods:
    async def begin(self: Any) -> None:
        await self.call("begin")

    async def after_create_session(self: Any, session: Any, coord: Any) -> None:
        await self.call("after_create_session", session)

    async def before_run(self: Any, context: Any) -> Any:
        token = context.original_args.feed_dict["token"]
        await self.call("before_run", context.session, token, context.attempt)
        self.asked = (token, context.attempt)
        if self.record.number == 0:
            SEEN_BY_STEP[self.number].set(self.asked)
        return ah.SessionRunArgs("a") if self.spec.fetches else None

    async def after_run(self: Any, context: Any, values: Any) -> None:
        token = context.original_args.feed_dict["token"]
        if (
            self.spec.fetches
            and self.asked == (token, context.attempt)
            and values.results != self.record.values.get(token)
        ):
            self.execution.wrong.append(
                f"hook {self.number} got {values.results!r}, not {self.record.values.get(token)!r}"
            )
        await self.call("after_run", context.session, token, context.attempt)

    async def end(self: Any, session: Any) -> None:
        await self.call("end", session)

    async def close(self: Any, exc: Any) -> None:
        await self.call("close")


class Watchers:
    """A lifecycle of its own, for a `HookGroup`."""

    async def notify(self, token: int) -> None:
        """Tell something."""

    @ah.point("all")
    async def ask(self, token: int) -> Any:
        """Ask something."""

    @ah.point(ah.chain(argument="numbers"))
    async def change(self, token: int, numbers: list[int]) -> Any:
        """Add something to a list."""

    @ah.point(ah.wrap(argument="call_next"))
    async def around(self, token: int, call_next: Any) -> Any:
        """Wrap a call."""


class _MemberMethods:
    async def __aenter__(self: Any) -> None:
        await self.call("__aenter__")

    async def __aexit__(self: Any, kind: Any, error: Any, traceback: Any) -> None:
        await self.call("__aexit__")

    async def notify(self: Any, token: int) -> None:
        await self.call("notify", token=token)

    async def ask(self: Any, token: int) -> Any:
        await self.call("ask", token=token)
        return self.number

    async def change(self: Any, token: int, numbers: list[int]) -> list[int]:
        await self.call("change", token=token)
        return [*numbers, self.number]

    async def around(self: Any, token: int, call_next: Any) -> list[int]:
        rest = functools.partial(call_next, token)
        return [self.number, *await self.call("around", token=token, rest=rest)]


class Member:
    """A hook of the group; subclasses have the methods of the spec."""

    __init__ = ScriptedHook.__init__
    call = ScriptedHook.call


@functools.cache
def overriding(base: type, methods: type, names: tuple[str, ...]) -> Any:
    """Return the subclass that has the named methods of `methods`."""
    return type(
        f"{base.__name__}_{'_'.join(names) or 'silent'}",
        (base,),
        {name: vars(methods)[name] for name in names},
    )


class Announced(ah.SessionRunHook):
    """The first hook of every session: it notes each raw session, and is in no run."""

    order = -100

    def __init__(self, session: SessionRecord) -> None:
        self.record = session

    async def after_create_session(self, *_: object) -> None:
        self.record.epoch += 1


Do = Callable[["Execution", Action, Place], Coroutine[Any, Any, None]]


def user(name: str) -> Callable[[Do], Do]:
    """Record that an action is something of the user's own which cancels tasks."""

    def add(do: Do) -> Do:
        async def recorded(self: Execution, action: Action, place: Place) -> None:
            await self.watch(
                Record("user", name, place.session, is_library=False), do(self, action, place)
            )

        return recorded

    return add


class Execution(Recorder):
    """One run of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.group_record = SessionRecord(program.members, -1, recovers=False, graph=False)
        self.group: Any = None
        self.entered_group: Any = None
        """The group, also when it has been left."""
        self.wrong: list[str] = []
        """What the program itself found wrong."""
        self.left: list[str] = []
        self.tasks: list[TrackedTask] = []
        self._tokens = itertools.count(1)
        self._failures: dict[int, int] = {}

    # -- running

    async def execute(self) -> None:
        """Run the program to its end; its callers may be cancelled meanwhile."""
        loop = asyncio.get_running_loop()
        self.events: list[asyncio.Future[None]] = [
            loop.create_future() for _ in self.program.events
        ]
        timers = [
            loop.call_later(secs, self.set_event, number)
            for number, secs in enumerate(self.program.events)
        ]
        with (
            may_happen(self._cancel_caller, "cancel of the first caller"),
            may_happen(self._cancel_last, "cancel of the last caller"),
        ):
            # In a task of its own: that of the exploration is waited for by nothing that could be
            # cancelled.
            root = TrackedTask(self._main(), loop=loop, name="caller 0")
            root.is_caller = True
            self.tasks.append(root)
            await asyncio.wait([root])
        for timer in timers:
            timer.cancel()
        if not root.cancelled():
            root.exception()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        self.left = [f"{task.get_name()} {_place(task)}" for task in others]
        for task in others:
            task.cancel()

    def _cancel_caller(self, number: int = 0) -> bool:
        return bool(self.tasks) and self.tasks[number].cancel(HARNESS)

    def _cancel_last(self) -> bool:
        return len(self.tasks) > 1 and self._cancel_caller(-1)

    async def _main(self) -> None:
        record = Record("main", "main", None, is_library=False)
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await self.watch(
                record,
                self._with_group(self.program) if self.program.members else self._use(self.program),
            )
        for task in self.tasks[1:]:
            await self._wait(task)

    async def _with_group(self, program: Program) -> None:
        members: list[Any] = []
        session = self.group_record
        for number, spec in enumerate(program.members):
            member = overriding(Member, _MemberMethods, spec.names)(self, session, number)
            members.append(_configured(member, spec))
        group = ah.HookGroup(Watchers, members, grace_secs=GRACE_SECS)

        async def enter_and_leave() -> None:
            async with group:
                self.group = self.entered_group = group
                session.body = Record("body", "body of the group", None, is_library=False)
                try:
                    await self.watch(session.body, self._use(program))
                finally:
                    self.group = None

        session.record = Record("group", "group", session, is_library=True)
        await self.watch(session.record, enter_and_leave())

    async def _use(self, program: Program) -> None:
        session = self.session(program.hooks, recovers=program.recovers, graph=program.graph)
        loop = asyncio.get_running_loop()

        async def other(number: int) -> None:
            record = Record("caller", f"caller {number}", session, is_library=False)
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await self.watch(record, self.run(program.callers[number], Place(session)))

        async def body() -> None:
            for number in range(1, len(program.callers)):
                context = contextvars.copy_context()
                self.tasks.append(
                    TrackedTask(other(number), loop=loop, name=f"caller {number}", context=context)
                )
                self.tasks[-1].is_caller = True
            await self.run(program.callers[0], Place(session))
            for task in self.tasks[1:] if program.joins else ():
                await asyncio.wait([task])

        await self.block(session, body())

    async def block(self, session: SessionRecord, body: Coroutine[Any, Any, Any]) -> None:
        """Enter the session, run `body` and leave the session."""

        async def enter_and_leave() -> None:
            try:
                async with session.session:
                    session.body = Record("body", "body", session, is_library=False)
                    try:
                        await self.watch(session.body, body)
                    finally:
                        session.closing = session.closing or next(self.count)
            finally:
                body.close()

        session.record = Record("session", f"session {session.number}", session, is_library=True)
        try:
            await self.watch(session.record, enter_and_leave())
        finally:
            if session.graph and session.session.global_step is not None:
                step = session.session.global_step.latest.step
                values = session.variables.snapshot()
                session.final = (values.get("v"), values.get("w"), step)

    async def _wait(self, task: asyncio.Task[Any]) -> None:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])

    # -- sessions

    def session(
        self, hooks: Sequence[HookSpec], *, recovers: bool, graph: bool, step: Script = ()
    ) -> SessionRecord:
        """Make a session and its record."""
        record = SessionRecord(hooks, len(self.sessions), recovers=recovers, graph=graph)
        self.sessions.append(record)
        registered: list[Any] = [Announced(record)]
        for number, spec in enumerate(hooks):
            hook = overriding(ScriptedHook, _Methods, spec.names)(self, record, number)
            registered.append(_configured(hook, spec))
        options: dict[str, Any] = {"stop_grace_period_secs": GRACE_SECS, "yield_secs": None}
        if graph:
            options["variables"] = record.variables
        source = self._graph(record) if graph else self._step(record, step)
        if recovers:
            policy = ah.RecoveryPolicy(max_attempts=2, backoff=ah.Backoff(1.0, 2.0, jitter=False))
            record.session = ah.AsyncMonitoredSession(
                source, registered, recovery=policy, **options
            )
        else:
            record.session = ah.session.AsyncSingularMonitoredSession(source, registered, **options)
        return record

    def _graph(self, session: SessionRecord) -> ah.Graph:
        graph = ah.Graph()
        graph.placeholder("token")
        graph.variable("v", 0)
        graph.variable("w", 0)

        @graph.operation
        async def a(token: int) -> Any:
            return await self.operation("a", session, token)

        @graph.operation
        async def b(token: int) -> Any:
            return await self.operation("b", session, token)

        @graph.operation
        async def raw(token: int) -> Any:
            return await self.operation("raw", session, token)

        @graph.operation(updates="w")
        async def replace(w: int, token: int) -> Any:
            await self.operation("replace", session, token)
            return w + 1

        @graph.train_op(adds_to="v")
        async def train(a: Any, b: Any, token: int) -> int:
            await self.operation("train", session, token)
            return 1

        return graph

    def _step(self, session: SessionRecord, script: Script) -> Any:
        async def step(token: int) -> dict[str, Any]:
            if script:
                return {"a": await self.operation("a", session, token, script), "b": 0, "train": 1}
            values: dict[str, Any] = {
                name: await self.operation(name, session, token) for name in ("a", "b", "train")
            }
            return values

        return step

    async def operation(
        self, name: str, session: SessionRecord, token: int, script: Script | None = None
    ) -> Any:
        record = Record("op", name, session, token, is_library=False)
        if script is None:
            script = self.program.operations[OPERATIONS.index(name)] if session.number == 0 else ()
        seen = [one.get() for one in SEEN_BY_STEP]
        await self.watch(record, self.run(script, Place(session)))
        record.value = seen
        if name == "a":
            session.values[token] = (token, next(self.count))
            return session.values[token]
        return 1

    # -- scripts

    async def run(self, script: Script, place: Place) -> None:
        """Run a script, action by action."""
        for action in script:
            await getattr(self, f"do_{action.kind}")(action, place)

    async def child(self, script: Script, place: Place) -> None:
        await self.watch(
            Record("child", "child", place.session, is_library=False), self.run(script, place)
        )

    async def do_turns(self, action: Action, place: Place) -> None:
        for _ in range(action.n):
            await asyncio.sleep(0)

    async def do_wait(self, action: Action, place: Place) -> None:
        await asyncio.sleep(action.n)

    async def do_event(self, action: Action, place: Place) -> None:
        event = self.events[action.n % len(self.events)]
        if not event.done():
            await asyncio.wait([event])

    async def do_set(self, action: Action, place: Place) -> None:
        self.set_event(action.n % len(self.events))

    def set_event(self, number: int) -> None:
        if not self.events[number].done():
            self.events[number].set_result(None)

    async def do_fail(self, action: Action, place: Place) -> None:
        """Raise an error of kind `n`, the first `m` times or always."""
        self._failures[id(action)] = count = self._failures.get(id(action), 0) + 1
        if action.m and count > action.m:
            return
        raise self.error(action.n)

    def error(self, kind: int) -> Exception:
        text = f"error {next(self.count)}#"
        if kind == 4:
            return ExceptionGroup(text, [self.error(0), self.error(1)])
        kinds: tuple[type[Exception], ...] = (
            PlainError,
            RecoverableError,
            CleanEndError,
            NotelessError,
        )
        return kinds[kind](text)

    @user("group")
    async def do_group(self, action: Action, place: Place) -> None:
        """`asyncio.TaskGroup`; with `m` its errors are handled."""
        group = asyncio.TaskGroup()
        await self._in_group(group, lambda fn, *args: group.create_task(fn(*args)), action, place)

    do_together = do_group

    @user("anyio task group")
    async def do_anyio_group(self, action: Action, place: Place) -> None:
        """The task group of anyio; with `m` its errors are handled."""
        group = anyio.create_task_group()
        await self._in_group(group, group.start_soon, action, place)

    async def _in_group(
        self, group: Any, start: Callable[..., Any], action: Action, place: Place
    ) -> None:
        try:
            async with group:
                for script in action.scripts[1:]:
                    start(self.child, (Action("turns", 1), *script), place)
                await self.run(action.scripts[0], place)
        except* Exception:
            if not action.m:
                raise

    @user("gather")
    async def do_gather(self, action: Action, place: Place) -> None:
        """`asyncio.gather` that leaves no task."""
        tasks = [asyncio.ensure_future(self.child(script, place)) for script in action.scripts]
        try:
            await asyncio.gather(*tasks, return_exceptions=bool(action.m))
        finally:
            for task in tasks:
                task.cancel()
            await _ended(tasks)

    @user("wait_for")
    async def do_wait_for(self, action: Action, place: Place) -> None:
        """`asyncio.wait_for`, whose time is never up, or with `m` always; its error is handled."""
        task = asyncio.ensure_future(self.child(action.scripts[0], place))
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(task, 0 if action.m else 3600)
        finally:
            # If it is cancelled, it may leave the task behind, and in Python 3.11 loses its error.
            await _ended([task])

    @user("shield")
    async def do_shield(self, action: Action, place: Place) -> None:
        """`asyncio.shield` that leaves no task."""
        task = asyncio.ensure_future(self.child(action.scripts[0], place))
        try:
            await asyncio.shield(task)
        finally:
            await _ended([task])

    @user("cleanup")
    async def do_cleanup(self, action: Action, place: Place) -> None:
        """The most usual end of a task, which may swallow a cancel of its own task."""
        task = asyncio.ensure_future(self.child(action.scripts[0], place))
        try:
            await asyncio.sleep(0)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
            await _ended([task])

    @user("swallow")
    async def do_swallow(self, action: Action, place: Place) -> None:
        """Swallow every cancel: of a hook or an operation only its own, never that of its
        caller.
        """
        with contextlib.suppress(asyncio.CancelledError):
            await self.run(action.scripts[0], place)

    async def do_timeout(self, action: Action, place: Place) -> None:
        """`asyncio.timeout` of `n` seconds; with `m` its error is handled."""
        try:
            await self._limited(action, place)
        except TimeoutError:
            if not action.m:
                raise

    @user("timeout")
    async def _limited(self, action: Action, place: Place) -> None:
        async with asyncio.timeout(action.n):
            await self.run(action.scripts[0], place)

    @user("scope")
    async def do_scope(self, action: Action, place: Place) -> None:
        """`anyio.move_on_after` of `n` seconds."""
        with anyio.move_on_after(action.n):
            await self.run(action.scripts[0], place)

    async def do_finally(self, action: Action, place: Place) -> None:
        try:
            await self.run(action.scripts[0], place)
        finally:
            await self.run(action.scripts[1], place)

    async def do_catch(self, action: Action, place: Place) -> None:
        with contextlib.suppress(Exception):
            await self.run(action.scripts[0], place)

    @user("stale")
    async def do_stale(self, action: Action, place: Place) -> None:
        """Absorb a cancel of one's own, and leave the count too high, as `async_timeout` 4 does."""
        task = current_task()
        count = task.cancelling()
        task.cancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if task.cancelling() > count + 1:
                if isinstance(task, TrackedTask):
                    # another cancel came at the same time; whose, is not known any more
                    task.excuse()
                raise

    async def do_cancelled(self, action: Action, place: Place) -> None:
        """Await something that was cancelled."""
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        if isinstance(task := current_task(), TrackedTask) and task.is_stale:
            task.excuse()  # by its count it was cancelled, and this is the error
        await future

    async def do_third_party(self, action: Action, place: Place) -> None:
        """Have one's own task cancelled by other code, at the next turn."""
        asyncio.get_running_loop().call_soon(current_task().cancel, HARNESS)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    # -- scripts that use the session

    async def library(
        self, what: str, place: Place, coro: Coroutine[Any, Any, Any], token: int = 0
    ) -> Any:
        record = Record(what, what, place.session, token, is_library=True)
        value = record.value = await self.watch(record, coro)
        return value

    async def do_until(self, action: Action, place: Place) -> None:
        assert place.session is not None
        awaited = Record("awaited", "awaited", place.session, is_library=False)
        record = Record("until", "until", place.session, is_library=True)
        record.value = awaited

        async def wait() -> None:
            await self.watch(awaited, self.run(action.scripts[0], place))

        await self.watch(record, place.session.session.until(wait()))

    async def do_background(self, action: Action, place: Place) -> None:
        session = place.session
        assert session is not None

        async def task() -> None:
            record = Record("background", "background task", session, is_library=False)
            await self.watch(record, self.run(action.scripts[0], Place(session)))

        with contextlib.suppress(SessionClosedError):
            session.session.start_soon(task)

    async def do_stop(self, action: Action, place: Place) -> None:
        session = place.session
        assert session is not None
        session.stop_asked = session.stop_asked or next(self.count)
        session.session.request_stop(f"stop {session.stop_asked}")
        if not session.session.should_stop():
            self.wrong.append("a stop was requested, and should_stop() is false")

    async def do_raw(self, action: Action, place: Place) -> None:
        session = place.session
        if place.raw is None or session is None or not session.graph:
            return
        token = next(self._tokens)
        fetches = ("raw", "train", "replace")[action.n]
        await self.library("raw", place, place.raw.run(fetches, {"token": token}), token)
        session.commits += action.n == 1
        session.replaced += action.n == 2

    async def do_session(self, action: Action, place: Place) -> None:
        """A session inside: two hooks of `before_run`, one of `after_run`, and a step."""
        first, second, third, step = (*action.scripts, (), (), (), ())[:4]
        specs = [
            HookSpec((("before_run", first),)),
            HookSpec((("before_run", second), ("after_run", third), ("close", ()))),
        ]
        session = self.session(specs, recovers=False, graph=False, step=(*step, Action("turns")))
        await self.block(session, self.run((Action("run"),), Place(session)))

    async def do_run(self, action: Action, place: Place) -> None:
        session = place.session
        assert session is not None
        await self._run_and_check("run", session.session.run, action.n % 3, place, session)

    async def _run_and_check(
        self, what: str, run: Callable[..., Any], which: int, place: Place, session: SessionRecord
    ) -> None:
        token = next(self._tokens)
        fetches: Any = ("train", ["train", "a"], {"a": "a", "b": "b"})[which]
        value = await self.library(what, place, run(fetches, {"token": token}), token)
        a = session.values.get(token)
        expected: Any = (1, [1, a], {"a": a, "b": 1})[which]
        if session.number == 0 and value != expected:
            self.wrong.append(f"run {token} returned {value!r}, not {expected!r}")
        session.commits += which != 2 or not session.graph

    async def do_step_fn(self, action: Action, place: Place) -> None:
        session = place.session
        assert session is not None

        async def fn(step: Any) -> None:
            await self.child(action.scripts[0], Place(session, step.session, step))

        await self.library("step_fn", place, session.session.run_step_fn(fn))

    async def do_hooked(self, action: Action, place: Place) -> None:
        session = place.session
        if place.step is None or session is None:
            await self.do_run(action, place)
            return
        await self._run_and_check("hooked", place.step.run_with_hooks, action.n % 3, place, session)

    async def do_call(self, action: Action, place: Place) -> None:
        """Call a method of the group."""
        group, session = self.group, self.group_record
        if group is None:
            return
        token = next(self._tokens)
        innermost_calls = 0

        async def innermost(token: int) -> list[int]:
            nonlocal innermost_calls
            innermost_calls += 1
            return []

        name = CALLS[action.n]
        arguments: dict[str, tuple[Any, ...]] = {"change": ([],), "around": (innermost,)}
        record = Record("call", name, session, token, is_library=True)
        call = getattr(group.hooks, name)(token, *arguments.get(name, ()))
        members = await self.watch(record, call)
        if name == "notify":
            return
        if name == "around" and innermost_calls != 1:
            self.wrong.append(f"around made the innermost call {innermost_calls} times")
        self._check_members(name, members)

    def _check_members(self, name: str, members: list[int | None]) -> None:
        """Check that a result is that of all members with the method, in their order.

        A member whose error is only logged has no result, or None.
        """
        specs = self.group_record.specs
        expected = [number for number, spec in enumerate(specs) if name in spec.names]
        expected.sort(key=lambda number: specs[number].order)
        if any(spec.on_error == "log" for spec in specs):
            expected = [number for number in expected if number in members]
            members = [number for number in members if number is not None]
        if members != expected:
            self.wrong.append(f"{name} returned {members}, not {expected}")

    async def do_aclose(self, action: Action, place: Place) -> None:
        session = place.session
        assert session is not None
        session.closing = session.closing or next(self.count)
        await self.library("aclose", place, session.session.aclose())


def _configured(hook: Any, spec: HookSpec) -> Any:
    registration = ah.configure(
        hook,
        order=spec.order,
        timeout=spec.timeout,
        on_error=spec.on_error,
        background=spec.background,
    )
    return ah.configure(registration, max_pending=2) if spec.background else registration


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for tasks to the end, whatever cancels come, and retrieve their errors."""
    while not all(task.done() for task in tasks):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(tasks)
    for task in tasks:
        task.cancelled() or task.exception()


def _place(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    return f"in {frames[-1].f_code.co_name}:{frames[-1].f_lineno}" if frames else "nowhere"
