"""Evaluating during training: while the loop waits, or in the background with the values of the
step.

due          the schedule selects the step for an evaluation
unfinished   an evaluation that was queued and has not ended, or has failed
extra        the evaluation of the last step, which was not due: the end of the session causes it
place        room in the queue of evaluations, for which a run waits while too many are unfinished
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from aiohooks._core.activity import RunOwner, begin_run, current_run, wait_log
from aiohooks._core.calls import Wait
from aiohooks._core.clock import Clock, current_clock
from aiohooks._core.queue import Queue
from aiohooks._core.validate import (
    check_callable,
    check_choice,
    check_instance,
    check_mapping,
    checked_int,
)
from aiohooks._core.waits import Waiters, until_stop, wait_done
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import (
    AiohooksError,
    FetchError,
    StopRequestedError,
    add_note,
    is_clean_end,
    safe_repr,
)
from aiohooks.graph.session import Leaves, Plan, Session, canonical_feeds
from aiohooks.hooks._observing import check_coroutine_function, logger, scalar
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
        # Feed the variables, so that the operations compute with the values of that step.
        for variable in graph.variables:
            feeds.setdefault(variable, self.variables[variable.name])
        feeds.setdefault(graph.global_step, self.step)
        leaves = Leaves(graph)
        leaves.build(fetches)
        # The plan shows what the fetches need to run, before anything is run.
        plan = Plan(graph, feeds)
        plan.fetch(leaves.nodes)
        if plan.changes or plan.steps:
            raise FetchError(
                f"evaluating {fetches!r} would train; fetch what changes no variable and does not"
                " advance the step"
            )
        return await self.session.run(fetches, feed_dict=feeds)


EvalFn = Callable[[Evaluation], Awaitable[Any]]
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

    # There are many options because they are independent: when to evaluate, how, on which values,
    # and where the result goes. Most programs give two of them.
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
            name: the name of its state in checkpoints, needed if a session has several of these
                hooks.

        Raises:
            InvalidArgumentError: an argument is invalid.
            InvalidHookError: `eval_fn` is not a coroutine function.
        """
        check_coroutine_function(eval_fn, "eval_fn")
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
        self.name: str = name or ""
        self._reset()

    def _reset(self) -> None:
        self.results: dict[int, Any] = {}
        """The results by step, in the order in which the evaluations ended."""
        self._clock: Clock = current_clock()
        self._timer: EveryTimer = self._every.timer()
        # The last step that was evaluated.
        self._evaluated_step: int | None = None
        # The step of the extra evaluation at the end, which was not due. Nothing is marked for it,
        # so that a resumed run is due when an uninterrupted one is.
        self._extra_step: int | None = None
        # Whether the restored checkpoint was saved while an evaluation of its step was unfinished.
        self._was_unfinished = False
        self._queue = _Evaluations(self._evaluate, self._max_pending, self._background)

    @property
    def pending(self) -> tuple[int, ...]:
        """The steps whose evaluation has not ended yet."""
        return tuple(evaluation.step for evaluation in self._queue.items)

    async def begin(self) -> None:
        """Clear the results of an earlier session."""
        self._reset()
        session_events().saving.subscribe(self._finish_earlier)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Evaluate before the first run, with `at_begin`. After a recovery or a restart, repeat
        unfinished evaluations.
        """
        # The queue has no coordinator before the first raw session.
        is_first = self._queue.coord is None
        step = session.global_step.latest.step
        self._queue.reopen(session, coord)
        self._timer.resume(step)
        # A resumed run repeats the evaluation that was unfinished when it was saved. After a
        # recovery, that evaluation itself is still in the queue.
        is_repeated = self._was_unfinished and not self._queue.items
        self._was_unfinished = False
        is_beginning = self._at_begin and is_first and self._evaluated_step is None
        if is_repeated or is_beginning or self._timer.due(step):
            self._schedule(session, step)
        # Inline, make the evaluations now. In the background, their task starts with the first run.
        if not self._background:
            await self._queue.drain()

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Raise the error of an evaluation in the background, if there is one."""
        self._queue.begin_run()
        return None

    @only_if("_schedule_if_due")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Evaluate if it is due, or start it in the background. Raise its error."""
        # Also here, for a subclass that overrides `after_run`: `only_if` does not apply to it.
        if not self._schedule_if_due(run_context, run_values):
            return
        if not self._background:
            await self._queue.drain()
            return
        # A stop ends the wait for room: `end` finishes all evaluations.
        with wait_log(self._queue.describe), contextlib.suppress(StopRequestedError):
            while self._queue.is_full:
                await until_stop(self._queue.wait_for_end(), current_run())
                self._queue.check()
        self._queue.start()

    def _schedule_if_due(
        self,
        run_context: SessionRunContext,
        run_values: SessionRunValues,
    ) -> bool:
        """Queue the evaluation of this step if it is due. Return whether it is pending.

        The session calls this right after the run, and then `after_run` in a task. It is not left
        to that task, because other sessions may change the values before the task has started.
        """
        step = run_context.global_step
        if self._timer.due(step):
            self._schedule(run_context.session, step)
        return step in self.pending

    async def end(self, session: Session) -> None:
        """Wait for the unfinished evaluations, and evaluate the last step."""
        try:
            await self._queue.drain()
        except Exception:
            # The last step is evaluated even if an earlier evaluation has failed.
            await self._evaluate_last(session)
            raise
        await self._evaluate_last(session)

    async def _evaluate_last(self, session: Session) -> None:
        """Evaluate the last step, with `at_end`, unless it has been evaluated."""
        step = session.global_step.latest.step
        if self._at_end and self._evaluated_step != step:
            self._extra_step = step
            self._schedule(session, step)
        await self._queue.drain()

    async def close(self, exc: BaseException | None) -> None:
        """Log the evaluations that were not made, and the errors that no run has raised."""
        for error in self._queue.take_failures():
            logger.error("an evaluation had failed", exc_info=error)
        if self._queue.items:
            logger.warning(
                "not evaluated, because the session ended with %s: steps %s",
                safe_repr(exc),
                list(self.pending),
            )
        self._queue.abandon()

    def state_dict(self) -> dict[str, Any]:
        """Return the last evaluated step, when an evaluation was last due, and whether one is
        unfinished. The results are not part of the state.
        """
        return {
            "evaluated_step": self._evaluated_step,
            "timer": self._timer.state_dict(),
            "unfinished": bool(self._queue.items or self._queue.failures),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state: `after_create_session` repeats an unfinished evaluation."""
        check_mapping(state, "state", optional=False)
        self._evaluated_step = state["evaluated_step"]
        self._was_unfinished = state["unfinished"]
        self._timer.load_state_dict(state["timer"])

    async def _finish_earlier(self, step: int, checkpoint_dir: object = None) -> None:
        """Wait for the evaluations of earlier steps. The next run raises an error of one.

        Called at the event `saving`: a restored checkpoint has only the values of its own step, so
        earlier evaluations could not be repeated.
        """
        # Inline, no evaluation is unfinished during a save.
        if not self._background:
            return
        queue = self._queue
        with wait_log(queue.describe):
            while queue.items and queue.items[0].step < step and not queue.failures:
                await queue.wait_for_end()

    def _schedule(
        self,
        session: Session,
        step: int,
    ) -> None:
        """Queue the evaluation of this step, with its values. Mark the timer unless it is extra."""
        if step != self._extra_step:
            self._timer.start(step)
        snapshot = None
        if self._snapshot is not None:
            snapshot = self._snapshot()
        self._queue.add(Evaluation(step, session.variables.snapshot(), snapshot, session))

    async def _evaluate(self, evaluation: Evaluation) -> None:
        """Make an evaluation, and keep its result.

        An error that means the end of input becomes an `AiohooksError`, because the input of an
        evaluation is not that of the training. A cancellation inside the function becomes a
        `HookCancelledError`, because the caller was not cancelled.
        """
        what = f"the evaluation at step {evaluation.step}"
        try:
            await Wait[None](what, evaluation.session.grace_secs).result_of(
                self._evaluate_and_keep(evaluation)
            )
        except StopRequestedError as stop:
            logger.warning("%s was ended by the stop: %s", what, stop)
        except Exception as error:
            if not is_clean_end(error):
                raise
            raise AiohooksError(
                f"{what} ended with {safe_repr(error)}: its input has ended; "
                "catch that in eval_fn and return the result so far"
            ) from error

    async def _evaluate_and_keep(self, evaluation: Evaluation) -> None:
        """Call `eval_fn`, keep its result, and pass it to the other hooks and to `on_result`."""
        step = evaluation.step
        began = self._clock.now()
        result = await self._eval_fn(evaluation)
        secs = self._clock.now() - began
        logger.info("evaluation at step %d: %s (%.3f sec)", step, result, secs)
        self._evaluated_step = step
        # A repeated evaluation moves to the end, because the results are in order of their ends.
        self.results.pop(step, None)
        self.results[step] = result
        if len(self.results) > self._max_results:
            del self.results[next(iter(self.results))]
        # After `close` there is no coordinator. An evaluation that ends then is not an event.
        if self._queue.coord is not None:
            is_extra = step == self._extra_step
            await self._queue.coord.events.evaluated.emit(step, _numbers_of(result), is_extra)
        if self._on_result is not None:
            answer = self._on_result(step, result)
            if inspect.isawaitable(answer):
                await answer

    def __repr__(self) -> str:
        step = self._evaluated_step
        return f"EvaluatorHook({self._eval_fn!r}, {self._every}, evaluated step {step})"


class _Evaluations(Queue[Evaluation]):
    """The evaluations that have not ended, the oldest first.

    In the background, a task makes them one after another. Inline, `drain` makes them.
    """

    def __init__(
        self,
        make: Callable[[Evaluation], Awaitable[None]],
        max_pending: int,
        background: bool,
    ) -> None:
        # The queue has a place more than `max_pending`, because a run adds its evaluation first,
        # and then waits until the queue is no longer full.
        super().__init__("queue of evaluations", max_pending + 1)
        self.coord: Coordinator | None = None
        """The coordinator of the session, which starts the task, or None before the first raw
        session and after `close`. The hook reads it as well: None means that a raw session is the
        first one, and that a result is no event any more.
        """
        # The evaluations that have failed since the last run began. They are no longer in `items`,
        # and a recovery repeats them.
        self._failed_items: list[Evaluation] = []
        self._make = make
        self._background = background
        self._task: asyncio.Task[None] | None = None
        self._progress = Waiters()

    def reopen(
        self,
        session: Session,
        coord: Coordinator,
    ) -> None:
        """Queue the failed and unfinished evaluations again, for a new raw session."""
        self.coord = coord
        # The task belonged to the raw session that was lost.
        self._task = None
        # Evaluations of later steps are dropped: the steps are lost, and will be run again.
        step = session.global_step.latest.step
        unfinished = [*self._failed_items, *self.items]
        repeated = [item for item in unfinished if item.step <= step]
        self.items = deque(replace(item, session=session) for item in repeated)
        self._failed_items = []
        # The recovery has handled the errors, so no run may raise them.
        self.take_failures()

    def abandon(self) -> None:
        """Drop all evaluations at the end of the session."""
        self.items.clear()
        self.coord = None

    def begin(self, item: Evaluation) -> None:
        """Do nothing for a queued item: `start` and `drain` begin the work."""

    def begin_run(self) -> None:
        """Raise the error of an evaluation. In the background, start the task if it has work."""
        self.check()
        # A recovery would have called `reopen` before this run. There was none, so the failed
        # evaluations are not repeated.
        self._failed_items.clear()
        if self._background:
            self.start()

    def start(self) -> None:
        """Start the task if there are evaluations, unless it is active."""
        is_active = self._task is not None and not self._task.done()
        if self.items and self.coord is not None and not is_active:
            self._task = self.coord.start_soon(self._work, self.coord.owner, name="evaluation")
            # Waiters must wake up even if the task is cancelled before it has made an evaluation.
            self._task.add_done_callback(lambda _: self._progress.wake())

    async def _work(self, session: RunOwner) -> None:
        """Make the evaluations, until one has failed."""
        # As in a hook, the session rejects `run` and `aclose` in `eval_fn` and `on_result`: they
        # could wait for a run that waits for this task.
        begin_run(session, None)
        while self.items and not self.failures:
            await self._make_first()

    async def _make_first(self) -> None:
        """Make the oldest evaluation, and keep its error. If this task is cancelled, the evaluation
        stays in the queue, so that it is repeated.
        """
        item = self.items[0]
        error: Exception | None = None
        try:
            await self._make(item)
        except Exception as raised:
            error = raised
            self._failed_items.append(item)
            add_note(error, f"raised by the evaluation at step {item.step}")
        self.ended([item], error)
        self._progress.wake()

    async def wait_for_end(self) -> None:
        """Wait until an evaluation of the task has ended."""
        self.start()
        await self._progress.wait()

    async def drain(self) -> None:
        """Make all evaluations, or wait until the task has made them; raise the error of one."""
        while self.items:
            if self._background:
                with wait_log(self.describe):
                    await self.wait_for_end()
            else:
                await self._make_first()
            self.check()
        # The queue is empty shortly before the task has ended.
        if self._task is not None:
            await wait_done([self._task], None)
        self.check()


def _numbers_of(result: Any) -> dict[str, float]:
    """Return the numbers of a result, or none if it is not a mapping."""
    if not isinstance(result, Mapping):
        return {}
    values = cast("Mapping[object, Any]", result)
    numbers = {str(tag): scalar(value) for tag, value in values.items()}
    return {tag: float(number) for tag, number in numbers.items() if number is not None}
