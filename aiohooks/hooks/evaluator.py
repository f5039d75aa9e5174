"""Evaluating during training: while the loop waits, or in the background with the values of the
step.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

from aiohooks._core.calls import Wait
from aiohooks._core.cancel import to_thread, wait_done
from aiohooks._core.clock import Clock, current_clock
from aiohooks._core.scope import RunScope, begin_run, current_run
from aiohooks._core.validate import (
    check_callable,
    check_choice,
    check_instance,
    check_mapping,
    checked_int,
    is_coroutine_function,
)
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import (
    AiohooksError,
    FetchError,
    InvalidHookError,
    StopRequestedError,
    is_clean_end,
    safe_repr,
)
from aiohooks.graph.plan import Leaves, Plan, canonical_feeds
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import logger, scalar
from aiohooks.hooks.every import Every, EveryTimer
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from aiohooks.session.status import session_events


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The argument of the function that an `EvaluatorHook` calls.

    Created by `EvaluatorHook`.

    Attributes:
        step: the global step after which the evaluation was due.
        variables: the values of the graph's variables after that step. Later runs do not change
            them.
        snapshot: the result of the `snapshot` function at that step, None without one.
        session: the raw session of the training, for its graph and step store. Its variables have
            their current values.
    """

    step: int
    variables: Mapping[str, Any]
    snapshot: Any
    session: Session

    async def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
    ) -> Any:
        """Run operations of the graph on the values of that step. No hooks are called, and the
        training is not changed.

        Args:
            fetches: nodes or names, nested at will. The result has the same shape.
            feed_dict: values by node or name. Variables and the global step are fed already, unless
                given here.

        Raises:
            FetchError: the operations would change variables or advance the global step, or as
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
                " advance the step",
            )
        return await self.session.run(fetches, feed_dict=feeds)


EvalFn = Callable[[Evaluation], Awaitable[Any]] | Callable[[Evaluation], Any]
OnResult = Callable[[int, Any], Any]
"""Called with a step and the result of its evaluation, plain, or a coroutine function."""


class EvaluatorHook(SessionRunHook):
    """Awaits `eval_fn(evaluation)` on each crossing of `every`, and at a clean end for the last
    step.

    With "inline", the loop waits for it. With "background", a task of the session's coordinator
    evaluates the values of the step at which it was due, one evaluation at a time and in order,
    while training continues. No evaluation is skipped because another was slow: at most
    `max_pending` may be unfinished, and a run at which one more is due waits. Each unfinished
    evaluation keeps its values in memory. Each runs in a task of its own, inline as well.

    The numbers of a result, if it is a mapping, are the metrics of the event `evaluated`. Saves
    wait for the evaluations of earlier steps, whose values a checkpoint does not have.

    An error of an evaluation is raised in the run in which it happened or in the next one, or at
    the end. After a recovery the unfinished evaluations are repeated. When a run is resumed, an
    evaluation that was due and unfinished when it was saved is repeated before the first run.
    """

    watched_as: ClassVar[str] = "evaluation"

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
        max_pending: int = 1,
        snapshot: Callable[[], Any] | None = None,
        on_result: OnResult | None = None,
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
            at_begin: evaluate before the first run too, unless a run is resumed that has been
                evaluated.
            at_end: evaluate the last step at a clean end, unless it has been evaluated.
            max_pending: how many evaluations may be unfinished in the background.
            snapshot: a plain function, called when an evaluation is due, for state outside the
                graph's variables, such as a copy of a model's parameters.
            on_result: called with each step and its result, such as `stopping.report`. An error of
                it is an error of the evaluation.
            max_results: how many results to keep, the newest ones.
            thread: call `eval_fn`, a plain function, in a worker thread, because it blocks.
            name: the name of its state in checkpoints, needed if a session has several of these
                hooks.

        Raises:
            InvalidArgumentError: an argument is invalid.
            InvalidHookError: `eval_fn` is not a coroutine function, or with `thread` it is one.
        """
        check_callable(eval_fn, "eval_fn")
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
        check_callable(snapshot, "snapshot", optional=True)
        check_callable(on_result, "on_result", optional=True)
        self._eval_fn = eval_fn
        self._every = every
        self._background = mode == "background"
        self._at_begin = at_begin
        self._at_end = at_end
        self._max_pending = checked_int(max_pending, "max_pending", 1)
        self._snapshot = snapshot
        self._on_result = on_result
        self._max_results = checked_int(max_results, "max_results", 1)
        self._thread = thread
        self.name: str = name or ""
        self._reset()

    def _reset(self) -> None:
        self.results: dict[int, Any] = {}
        """The results by step, in the order in which the evaluations ended."""
        self._clock: Clock = current_clock()
        self._timer: EveryTimer = self._every.timer()
        self._coord: Coordinator | None = None
        # The last step that was evaluated, and the step of an evaluation at the end that was not
        # due.
        self._evaluated_step: int | None = None
        self._extra_step: int | None = None
        # Whether a restored state has an unfinished evaluation.
        self._was_unfinished = False
        self._pending: deque[Evaluation] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._progressed = asyncio.Event()
        self._error: tuple[Evaluation, Exception] | None = None
        # The evaluation whose error was raised. A session that recovers from it evaluates again.
        self._failed: Evaluation | None = None

    @property
    def pending(self) -> tuple[int, ...]:
        """The steps whose evaluation has not ended yet."""
        return tuple(evaluation.step for evaluation in self._pending)

    async def begin(self) -> None:
        """Clear the results of an earlier session."""
        self._reset()
        session_events().saving.subscribe(self._finish_earlier)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Evaluate before the first run, with `at_begin`. After a recovery or a restart, repeat the
        unfinished ones.
        """
        is_first = self._coord is None
        self._coord = coord
        self._worker = None
        step = session.global_step.latest.step
        now = self._clock.now()
        if self._failed is not None:
            self._pending.appendleft(self._failed)
            self._failed = None
        # Later steps are lost, and will be run again.
        self._pending = deque(
            replace(evaluation, session=session)
            for evaluation in self._pending
            if evaluation.step <= step
        )
        self._timer.resume(step, now)
        is_repeated = self._was_unfinished and not self._pending
        self._was_unfinished = False
        is_beginning = self._at_begin and is_first and self._evaluated_step is None
        if is_repeated or is_beginning or self._timer.due(step, now):
            self._schedule(session, step)
        # In the background it starts with a run, and must not be waited for here.
        if not self._background:
            await self._finish_all()

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Raise the error of an evaluation in the background, if there is one."""
        # A recovery from its error would have called `after_create_session` first.
        self._failed = None
        self._raise_error()
        if self._background:
            self._ensure_worker()
        return None

    @only_if("_schedule_if_due")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Evaluate if it is due, or start it in the background. Raise its error."""
        if not self._schedule_if_due(run_context, run_values):
            return
        if not self._background:
            await self._finish_all()
        while len(self._pending) > self._max_pending:
            await self._wait_for_worker()
            self._raise_error()
        self._ensure_worker()

    def _schedule_if_due(
        self,
        run_context: SessionRunContext,
        run_values: SessionRunValues,
    ) -> bool:
        """Take the values of this step, which other sessions may change while the task of
        `after_run` starts. Return whether its evaluation is pending.
        """
        step = run_context.global_step
        if self._timer.due(step, self._clock.now()):
            self._schedule(run_context.session, step)
        return step in self.pending

    async def end(self, session: Session) -> None:
        """Wait for the unfinished evaluations, and evaluate the last step."""
        try:
            await self._finish_all()
        except Exception:
            await self._evaluate_last(session)
            raise
        await self._evaluate_last(session)

    async def close(self, exc: BaseException | None) -> None:
        """Log the evaluations that were not made, and an error that was not raised."""
        if self._error is not None:
            evaluation, error = self._error
            logger.error("the evaluation at step %d had failed", evaluation.step, exc_info=error)
        if self._pending:
            logger.warning(
                "not evaluated, because the session ended with %s: steps %s",
                safe_repr(exc),
                list(self.pending),
            )
        self._pending.clear()
        self._coord = None
        self._worker = None
        self._error = None

    def state_dict(self) -> dict[str, Any]:
        """Return the last evaluated step, when it was last due, and whether an evaluation is
        unfinished, not the results.
        """
        return {
            "evaluated_step": self._evaluated_step,
            "timer": self._timer.state_dict(),
            "unfinished": bool(self._pending) or self._error is not None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state: `after_create_session` repeats an unfinished evaluation."""
        check_mapping(state, "state", optional=False)
        self._evaluated_step = state["evaluated_step"]
        self._was_unfinished = state["unfinished"]
        self._timer.load_state_dict(state["timer"])

    async def _finish_earlier(self, step: int, checkpoint_dir: object = None) -> None:
        """Wait for the evaluations of earlier steps. The next run raises an error of one.

        A callback of the event `saving`.
        """
        if not self._background:
            return
        while self._error is None and self._pending and self._pending[0].step < step:
            await self._wait_for_worker()

    def _schedule(self, session: Session, step: int) -> None:
        """Queue the evaluation of this step, with its values."""
        if step != self._extra_step:
            self._timer.start(step, self._clock.now())
        snapshot = None
        if self._snapshot is not None:
            snapshot = self._snapshot()
        self._pending.append(Evaluation(step, session.variables.snapshot(), snapshot, session))

    async def _evaluate_last(self, session: Session) -> None:
        step = session.global_step.latest.step
        if self._at_end and self._evaluated_step != step:
            self._extra_step = step
            self._schedule(session, step)
        await self._finish_all()

    async def _finish_all(self) -> None:
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

    # -- the worker in the background

    async def _wait_for_worker(self) -> None:
        """Wait until one more evaluation in the background has ended."""
        self._progressed.clear()
        self._ensure_worker()
        await self._progressed.wait()

    def _ensure_worker(self) -> None:
        """Start the worker if evaluations are pending, and it has ended or was cancelled."""
        if not self._pending or self._coord is None:
            return
        if self._worker is None or self._worker.done():
            self._worker = self._coord.start_soon(self._work, current_run(), name="evaluation")
            # The callback is also called if the task is cancelled.
            self._worker.add_done_callback(lambda _: self._progressed.set())

    async def _work(self, run: RunScope | None) -> None:
        if run is not None:
            # Reject monitored runs in here, as inline: they could wait for a run that waits for
            # this task.
            begin_run(run.session, None)
        while self._pending and self._error is None:
            await self._evaluate_first()
            self._progressed.set()

    # -- one evaluation

    async def _evaluate_first(self) -> None:
        """Make the oldest pending evaluation. It stays pending if cancelled. An error is kept in
        `_error`.
        """
        evaluation = self._pending[0]
        step = evaluation.step
        began = self._clock.now()
        try:
            result = await self._call_eval_fn(evaluation)
            secs = self._clock.now() - began
            logger.info("evaluation at step %d: %s (%.3f sec)", step, result, secs)
            await self._keep_result(step, result)
        except StopRequestedError as stop:
            logger.warning("the evaluation at step %d was ended by the stop: %s", step, stop)
        except Exception as error:
            self._error = evaluation, error
        self._pending.popleft()

    async def _keep_result(self, step: int, result: Any) -> None:
        """Keep a result, and pass it to the other hooks and to `on_result`."""
        self._evaluated_step = step
        self.results.pop(step, None)
        self.results[step] = result
        if len(self.results) > self._max_results:
            del self.results[next(iter(self.results))]
        if self._coord is not None:
            is_extra = step == self._extra_step
            await self._coord.events.evaluated.emit(step, _numbers_of(result), is_extra)
        if self._on_result is not None:
            answer = self._on_result(step, result)
            if inspect.isawaitable(answer):
                await answer

    async def _call_eval_fn(self, evaluation: Evaluation) -> Any:
        """Return the result. No error of the function may be taken for the end of the training.

        A cancellation of something in it that is not from the caller raises `HookCancelledError`,
        and an error that means the end of input `AiohooksError`. `StopRequestedError` from a wait
        inside it passes.
        """
        what = f"the evaluation at step {evaluation.step}"
        grace_secs = evaluation.session.grace_secs
        call: Callable[[Evaluation], Any] = self._eval_fn
        if self._thread:
            call = functools.partial(to_thread, self._eval_fn, grace_secs=grace_secs)
        try:
            return await Wait[Any](what, grace_secs).result_of(call(evaluation))
        except StopRequestedError:
            raise
        except Exception as error:
            if not is_clean_end(error):
                raise
            raise AiohooksError(
                f"{what} ended with {safe_repr(error)}: its input has ended; "
                "catch that in eval_fn and return the result so far",
            ) from error

    def _raise_error(self) -> None:
        if self._error is not None:
            self._failed, error = self._error
            self._error = None
            raise error

    def __repr__(self) -> str:
        mode = "background" if self._background else "inline"
        return (
            f"EvaluatorHook({self._eval_fn!r}, {self._every}, {mode!r}, evaluated step"
            f" {self._evaluated_step})"
        )


def _numbers_of(result: Any) -> dict[str, float]:
    """Return the numbers of a result, or none if it is not a mapping."""
    numbers: dict[str, float] = {}
    if isinstance(result, Mapping):
        for tag, value in cast("Mapping[object, Any]", result).items():
            number = scalar(value)
            if number is not None:
                numbers[str(tag)] = float(number)
    return numbers
