"""Evaluating during training: while the loop waits, or in the background with the values of the
step.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from aiohooks._core.calls import Wait
from aiohooks._core.cancel import to_thread, wait_done
from aiohooks._core.clock import Clock, current_clock
from aiohooks._core.scope import RunScope, begin_run, current_run
from aiohooks._core.validate import (
    check_callable,
    check_choice,
    check_instance,
    check_mapping,
    check_secs,
    checked_int,
    is_coroutine_function,
)
from aiohooks.dispatch.calls import hook_timeout_error, only_if
from aiohooks.errors import (
    AiohooksError,
    FetchError,
    HookTimeoutError,
    InvalidArgumentError,
    InvalidHookError,
    StopRequestedError,
    is_clean_end,
    safe_repr,
)
from aiohooks.graph.plan import Leaves, Plan, canonical_feeds
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import logger
from aiohooks.hooks.every import Every, EveryTimer
from aiohooks.hooks.stopping import EarlyStoppingHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The argument of the function that an `EvaluatorHook` calls.

    Created by `EvaluatorHook`.

    Attributes:
        step: the global step after which the evaluation was due.
        variables: the values of the graph's variables after that step; later runs do not change
            them.
        snapshot: the result of the `snapshot` function at that step, None without one.
        session: the raw session of the training, for its graph and step store; its variables have
            their current values.
    """

    step: int
    variables: Mapping[str, Any]
    snapshot: Any
    session: Session

    async def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Run operations of the graph on the values of that step; no hooks are called, and the
        training is not changed.

        Args:
            fetches: nodes or names, nested at will; the result has the same shape.
            feed_dict: values by node or name. Variables and the global step are fed already, unless
                given here.

        Raises:
            FetchError: the operations would change variables or advance the global step; or as
                `Session.run`.
            BaseException: an operation failed.
        """
        graph = self.session.graph
        feeds = canonical_feeds(graph, feed_dict)
        for variable in graph.variables:
            feeds.setdefault(variable, self.variables[variable.name])
        feeds.setdefault(graph.global_step, self.step)
        leaves = Leaves(graph)
        leaves.build(fetches)
        plan = Plan(graph, feeds, self.session.grace_secs)
        plan.fetch(leaves.nodes)
        if plan.changes or plan.steps:
            raise FetchError(
                f"evaluating {fetches!r} would train; fetch what changes no variable and does not"
                " advance the step"
            )
        return await self.session.run(fetches, feed_dict=feeds)


EvalFn = Callable[[Evaluation], Awaitable[Any]] | Callable[[Evaluation], Any]
OnResult = Callable[[int, Any], Any]
"""Called with a step and the result of its evaluation; plain, or a coroutine function."""


class EvaluatorHook(SessionRunHook):
    """Awaits `eval_fn(evaluation)` on each crossing of `every`, and at a clean end for the last
    step.

    With "inline", the loop waits for it. With "background", a task of the session's coordinator
    evaluates the values of the step at which it was due, one evaluation at a time and in order,
    while training continues. No evaluation is skipped because another was slow: at most
    `max_pending` may be unfinished, and a run at which one more is due waits. Each unfinished
    evaluation keeps its values in memory. Each runs in a task of its own, inline as well.

    An error of an evaluation is raised in the run in which it happened or in the next one, or at
    the end. After a recovery the unfinished evaluations are repeated. When a run is resumed, an
    evaluation that was due and unfinished when it was saved is repeated before the first run.
    """

    # When, how, on what, and where the result goes: each is independent of the others, and most
    # programs give two.
    def __init__(
        self,
        eval_fn: EvalFn,
        *,
        every: Every,
        mode: Literal["inline", "background"] = "inline",
        at_begin: bool = False,
        at_end: bool = True,
        timeout_secs: float | None = None,
        max_pending: int = 1,
        snapshot: Callable[[], Any] | None = None,
        on_result: OnResult | Iterable[OnResult] = (),
        max_results: int = 1000,
        thread: bool = False,
        name: str | None = None,
    ) -> None:
        """Create the hook.

        Args:
            eval_fn: a coroutine function; gets an `Evaluation` and returns the result, usually a
                mapping of numbers.
            every: when to evaluate.
            mode: whether the loop waits for the evaluation.
            at_begin: evaluate before the first run too; not if a run is resumed that has been
                evaluated.
            at_end: evaluate the last step at a clean end, unless it has been evaluated.
            timeout_secs: how long one evaluation may take. One that ignores its cancellation for
                the session's grace period is left running, with a warning.
            max_pending: how many evaluations may be unfinished in the background.
            snapshot: a plain function, called when an evaluation is due; for state outside the
                graph's variables, such as a copy of a model's parameters.
            on_result: a function, or several, called with each step and its result in turn:
                `stopping.report`, a writer.
            max_results: how many results to keep, the newest ones.
            thread: call `eval_fn`, a plain function, in a worker thread, because it blocks.
            name: the name of its state in checkpoints; needed if a session has several of these
                hooks.

        Raises:
            InvalidArgumentError: an argument is invalid.
            InvalidHookError: `eval_fn` is not a coroutine function, or with `thread` it is one.
        """
        check_callable(eval_fn, "eval_fn")
        check_secs(timeout_secs, "timeout_secs", optional=True, positive=True)
        if is_coroutine_function(eval_fn) == bool(thread):
            hint = "a coroutine function, which cannot run in a thread; leave out thread=True"
            if not thread:
                hint = (
                    "not a coroutine function; write it as `async def`, or give thread=True for one"
                    " that blocks"
                )
            raise InvalidHookError(f"eval_fn is {eval_fn!r}, {hint}")
        check_instance(every, Every, "every")
        check_choice(mode, "mode", "inline", "background")
        max_pending = checked_int(max_pending, "max_pending", 1)
        max_results = checked_int(max_results, "max_results", 1)
        check_callable(snapshot, "snapshot", optional=True)
        if isinstance(on_result, Iterable):
            several: Iterable[OnResult] = on_result  # pyright: ignore[reportUnknownVariableType]
        else:
            several = (on_result,)
        self._listeners = tuple(several)
        for listener in self._listeners:
            check_callable(listener, "on_result")
        self._eval_fn = eval_fn
        self._every = every
        self._background = mode == "background"
        self._at_begin = at_begin
        self._at_end = at_end
        self._timeout_secs = timeout_secs
        self._max_pending = max_pending
        self._snapshot = snapshot
        self._max_results = max_results
        self._thread = thread
        self.name: str = name or ""
        self._reset()

    def _reset(self) -> None:
        self.results: dict[int, Any] = {}
        """The results by step, in the order in which the evaluations ended."""
        self.observers: list[Callable[[int, Any, bool], Awaitable[None]]] = []
        """Awaited with each step, its result, and whether it was due, before `on_result`: for hooks
        that keep results, as `CheckpointSaverHook` does. Those of a session are added in
        `after_create_session`.
        """
        self._clock: Clock = current_clock()
        self._extra: int | None = None  # the step of an evaluation at the end, which was not due
        self._coord: Coordinator | None = None
        self._timer: EveryTimer = self._every.timer()
        self._evaluated: int | None = None  # the last step that was evaluated
        self._unfinished = False  # by a restored state
        self._pending: deque[Evaluation] = deque()
        self._scheduled: int | None = None  # the step whose `after_run` is to be called for that
        self._worker: asyncio.Task[None] | None = None
        self._progressed = asyncio.Event()
        self._error: tuple[Evaluation, Exception] | None = None
        self._failed: Evaluation | None = (
            None  # its error was raised; evaluated again if the session recovers from it
        )

    @property
    def pending(self) -> tuple[int, ...]:
        """The steps whose evaluation has not ended yet."""
        return tuple(due.step for due in self._pending)

    async def begin(self) -> None:
        """Clear the results of an earlier session."""
        self._reset()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Evaluate before the first run, with `at_begin`; after a recovery or a restart, repeat the
        unfinished ones.
        """
        is_first, step, now = (
            self._coord is None,
            session.global_step.latest.step,
            self._clock.now(),
        )
        self._coord, self._worker = coord, None
        if self._failed is not None:
            self._pending.appendleft(self._failed)
            self._failed = None
        # Later steps are lost, and will be run again.
        self._pending = deque(
            replace(due, session=session) for due in self._pending if due.step <= step
        )
        self._timer.resume(step, now)
        repeats, self._unfinished = self._unfinished and not self._pending, False
        if (
            repeats
            or (self._at_begin and is_first and self._evaluated is None)
            or self._timer.due(step, now)
        ):
            self._schedule(session, step)
        if (
            not self._background
        ):  # in the background it starts with a run, and must not be waited for here
            await self._drain()

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Raise the error of an evaluation in the background, if there is one."""
        self._failed = (
            None  # a recovery from its error would have called `after_create_session` first
        )
        self._raise_error()
        if self._background:
            self._ensure_worker()
        return None

    @only_if("_schedule_if_due")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Evaluate if it is due, or start it in the background; raise its error, or
        `HookTimeoutError`.
        """
        if self._scheduled == run_context.global_step or self._schedule_if_due(
            run_context, run_values
        ):
            self._scheduled = None
            if not self._background:
                await self._drain()
            while len(self._pending) > self._max_pending:
                await self._wait_for_worker()
                self._raise_error()
            self._ensure_worker()

    def _schedule_if_due(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> bool:
        """Take the values of this step, which other sessions may change while the task of
        `after_run` starts.
        """
        is_due = self._timer.due(run_context.global_step, self._clock.now())
        if is_due:
            self._schedule(run_context.session, run_context.global_step)
            self._scheduled = run_context.global_step
        return is_due

    async def end(self, session: Session) -> None:
        """Wait for the unfinished evaluations, and evaluate the last step."""
        try:
            await self._drain()
        except Exception:
            await self._evaluate_last(session)
            raise
        await self._evaluate_last(session)

    async def close(self, exc: BaseException | None) -> None:
        """Log the evaluations that were not made, and an error that was not raised."""
        if self._error is not None:
            due, error = self._error
            logger.error("the evaluation at step %d had failed", due.step, exc_info=error)
        if self._pending:
            logger.warning(
                "not evaluated, because the session ended with %s: steps %s",
                safe_repr(exc),
                list(self.pending),
            )
        self._pending.clear()
        self._coord = self._worker = self._error = None

    def state_dict(self) -> dict[str, Any]:
        """Return the last evaluated step, when it was last due, and whether an evaluation is
        unfinished; not the results.
        """
        unfinished = bool(self._pending) or self._error is not None
        return {
            "evaluated_step": self._evaluated,
            "timer": self._timer.state_dict(),
            "unfinished": unfinished,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state: `after_create_session` repeats an unfinished evaluation."""
        check_mapping(state, "state", optional=False)
        try:
            self._evaluated, timer, self._unfinished = (
                state["evaluated_step"],
                state["timer"],
                state["unfinished"],
            )
        except KeyError as error:
            raise InvalidArgumentError(
                f"the state of an EvaluatorHook has no {error}; it has {state!r}"
            ) from None
        self._timer.load_state_dict(timer)

    async def finish_before(self, step: int) -> None:
        """Wait for the evaluations of steps before `step`, for a hook that saves that step; the
        next run raises an error.
        """
        while (
            self._background
            and self._error is None
            and self._pending
            and self._pending[0].step < step
        ):
            await self._wait_for_worker()

    def _schedule(self, session: Session, step: int) -> None:
        """Queue the evaluation of this step, with its values."""
        if step != self._extra:
            self._timer.start(step, self._clock.now())
        snapshot = None if self._snapshot is None else self._snapshot()
        self._pending.append(Evaluation(step, session.variables.snapshot(), snapshot, session))

    async def _evaluate_last(self, session: Session) -> None:
        step = session.global_step.latest.step
        if self._at_end and self._evaluated != step:
            with contextlib.suppress(InvalidHookError):  # equal names: then no checkpoint is saved
                for one in session.stateful_hooks().values():
                    if isinstance(one, EarlyStoppingHook):
                        one.end_run()
            self._extra = step
            self._schedule(session, step)
        await self._drain()

    async def _drain(self) -> None:
        """Make all pending evaluations, or wait until they are made."""
        while self._pending:
            if self._background:
                await self._wait_for_worker()
            else:
                await self._evaluate_first()
            self._raise_error()
        if self._worker is not None:
            await wait_done([self._worker], None)
        self._raise_error()

    async def _wait_for_worker(self) -> None:
        """Wait until one more evaluation in the background has ended."""
        self._progressed.clear()
        self._ensure_worker()
        await self._progressed.wait()

    def _ensure_worker(self) -> None:
        """Start the task that evaluates if evaluations are pending and it has ended or was
        cancelled.
        """
        if (
            self._pending
            and self._coord is not None
            and (self._worker is None or self._worker.done())
        ):
            self._worker = self._coord.start_soon(self._work, current_run(), name="evaluation")
            self._worker.add_done_callback(
                lambda _: self._progressed.set()
            )  # also called if it is cancelled

    async def _work(self, run: RunScope | None) -> None:
        if run is not None:
            # Refuse monitored runs in here, as inline: they could wait for a run that waits for
            # this task.
            begin_run(run.session, None)
        while self._pending and self._error is None:
            await self._evaluate_first()
            self._progressed.set()

    async def _evaluate_first(self) -> None:
        """Make the oldest pending evaluation. It stays pending if cancelled; an error is kept in
        `_error`.
        """
        due = self._pending[0]
        began = self._clock.now()
        try:
            result = await self._call_eval_fn(due)
            logger.info(
                "evaluation at step %d: %s (%.3f sec)",
                due.step,
                _text(result),
                self._clock.now() - began,
            )
            self._evaluated = due.step
            self.results.pop(due.step, None)
            self.results[due.step] = result
            while len(self.results) > self._max_results:
                del self.results[next(iter(self.results))]
            for observer in self.observers:
                await observer(due.step, result, due.step != self._extra)
            for listener in self._listeners:
                answer = listener(due.step, result)
                if inspect.isawaitable(answer):
                    await answer
        except StopRequestedError as stop:
            logger.warning("the evaluation at step %d was ended by the stop: %s", due.step, stop)
        except Exception as error:
            self._error = due, error
        self._pending.popleft()

    async def _call_eval_fn(self, evaluation: Evaluation) -> Any:
        """Return the result within the time limit; no error of the function may be taken for the
        end of the training.

        A cancellation of something in it that is not one of the caller raises `HookCancelledError`,
        and an error that means the end of input `AiohooksError`; `StopRequestedError` from a wait
        inside it passes.
        """
        what, grace_secs = (
            f"the evaluation at step {evaluation.step}",
            evaluation.session.grace_secs,
        )
        call = (
            functools.partial(to_thread, self._eval_fn, grace_secs=grace_secs)
            if self._thread
            else self._eval_fn
        )
        evaluating = _EvaluationWait(what, grace_secs, self._timeout_secs)
        try:
            evaluating.start(0, call, (evaluation,), what, self._timeout_secs)
            await evaluating.wait()
            return evaluating.results[0]
        except StopRequestedError:
            raise
        except Exception as error:
            if is_clean_end(error):
                raise AiohooksError(
                    f"{what} ended with {safe_repr(error)}: its input has ended; "
                    "catch that in eval_fn and return the result so far"
                ) from error
            raise

    def _raise_error(self) -> None:
        if self._error is not None:
            self._failed, error = self._error
            self._error = None
            raise error

    def __repr__(self) -> str:
        mode = "background" if self._background else "inline"
        return (
            f"EvaluatorHook({self._eval_fn!r}, {self._every}, {mode!r}, evaluated step"
            f" {self._evaluated})"
        )


class _EvaluationWait(Wait[Any]):
    """An evaluation in progress."""

    __slots__ = ("_secs",)

    def __init__(self, what: str, grace_secs: float, secs: float | None) -> None:
        super().__init__(what, grace_secs)
        self._secs = secs

    def timeout_error(self, number: int, task: asyncio.Task[Any]) -> HookTimeoutError:
        return hook_timeout_error(self.what, self._secs, task, "give it more with timeout_secs=")


def _text(result: Any) -> str:
    """Return a result as text for the log."""
    if isinstance(result, Mapping):
        values: Mapping[Any, Any] = result  # pyright: ignore[reportUnknownVariableType]
        return ", ".join(f"{key} = {_text(value)}" for key, value in values.items())
    return f"{result:.6g}" if isinstance(result, float) else str(result)
