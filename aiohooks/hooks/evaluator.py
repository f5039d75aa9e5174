"""Evaluating every so often: while the loop waits, or beside it on the values of that step."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from aiohooks._aio.cancel import TimeLimit, cancel_count, current_task, to_thread, wait_done
from aiohooks._aio.clock import Clock, current_clock
from aiohooks._aio.run_scope import RunScope, begin_run, current_run
from aiohooks._validate import check_callable, check_instance, check_mapping, check_secs
from aiohooks.errors import (
    AiohooksError,
    FetchError,
    HookCancelledError,
    HookTimeoutError,
    InvalidArgumentError,
    InvalidHookError,
    StopRequestedError,
    is_clean_end,
)
from aiohooks.graph.fetches import Leaves, canonical_feeds
from aiohooks.graph.graph import is_coroutine_function
from aiohooks.graph.plan import make_plan
from aiohooks.hooks.every import Every, EveryTimer
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """What is evaluated: the argument of the function given to an `EvaluatorHook`.

    Attributes:
        step: the global step after which it was due.
        variables: the values of the graph's variables as that step left them; the runs that follow do not change them.
        snapshot: what the `snapshot` function gave at that step, None without one.
        session: the raw session of the training, for its graph and step store; its variables are those of now.
    """

    step: int
    variables: Mapping[str, Any]
    snapshot: Any
    session: Session

    async def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Runs operations of the graph on the values of that step; no hooks are called, nothing of the training changes.

        Args:
            fetches: nodes or names, nested at will; the result has the same shape.
            feed_dict: values by node or name. Variables and the global step are fed already, unless they are among these.

        Raises:
            FetchError: the operations would change variables or advance the global step; or as `Session.run`.
            BaseException: what an operation raised.
        """
        graph = self.session.graph
        feeds = canonical_feeds(graph, feed_dict)
        for variable in graph.variables:
            feeds.setdefault(variable, self.variables[variable.name])
        feeds.setdefault(graph.global_step, self.step)
        leaves = Leaves(graph)
        leaves.build(fetches)
        plan = make_plan(graph, leaves.nodes, {node: node for node in feeds}, 0.0)
        if plan.changes_variables or plan.steps:
            raise FetchError(f"evaluating {fetches!r} would train; fetch what changes no variable and does not advance the step")
        return await self.session.run(fetches, feed_dict=feeds)


class Evaluate:
    """Calls a function with an `Evaluation`, within a time limit; its errors are never taken for the end of the training."""

    def __init__(self, fn: Callable[[Evaluation], Any], timeout_secs: float | None, thread: bool) -> None:
        """Takes the function; with `thread` a plain one that is called in a worker thread.

        Raises:
            InvalidArgumentError: it cannot be called, or the limit is no number of seconds.
            InvalidHookError: it is not a coroutine function, or with `thread` it is one.
        """
        check_callable(fn, "eval_fn")
        check_secs(timeout_secs, "timeout_secs", optional=True, positive=True)
        if is_coroutine_function(fn) and thread:
            raise InvalidHookError(
                f"eval_fn is {fn!r}, a coroutine function, which cannot run in a thread; leave out thread=True"
            )
        if not is_coroutine_function(fn) and not thread:
            raise InvalidHookError(
                f"eval_fn is {fn!r}, not a coroutine function; write it as `async def`, or give thread=True for one that blocks"
            )
        self._fn = fn
        self._timeout_secs = timeout_secs
        self._thread = thread

    async def __call__(self, evaluation: Evaluation) -> Any:
        """The result.

        Raises:
            HookTimeoutError: it took too long.
            HookCancelledError: something in it was cancelled, and not the caller.
            StopRequestedError: a wait inside it was ended by the session's stop.
            BaseException: what the function raised.
        """
        what = f"the evaluation at step {evaluation.step}"
        limit = TimeLimit(self._timeout_secs, what)
        base = cancel_count(current_task())
        try:
            with limit:
                if self._thread:
                    return await to_thread(self._fn, evaluation, grace_secs=evaluation.session.grace_secs)
                return await self._fn(evaluation)
        except asyncio.CancelledError as error:
            if current_task().cancelling() > base:
                raise
            raise HookCancelledError(f"{what} was cancelled, and not by its session") from error
        except StopRequestedError:
            raise
        except TimeoutError as error:
            if limit.expired:
                raise HookTimeoutError(f"{error}; give it more with timeout_secs=") from error
            raise
        except Exception as error:
            if is_clean_end(error):
                raise AiohooksError(
                    f"{what} ended with {error!r}: its input has ended; catch that in eval_fn and return what it has"
                ) from error
            raise

    def __repr__(self) -> str:
        return repr(self._fn)


async def tell(listeners: tuple[Callable[[int, Any], Any], ...], step: int, result: Any) -> None:
    """Tells each in turn of a result; they are plain, or coroutine functions."""
    for listener in listeners:
        answer = listener(step, result)
        if inspect.isawaitable(answer):
            await answer


def text(result: Any) -> str:
    """A result as it stands in the log."""
    if isinstance(result, Mapping):
        values: Mapping[Any, Any] = result  # pyright: ignore[reportUnknownVariableType]
        return ", ".join(f"{key} = {text(value)}" for key, value in values.items())
    return f"{result:.6g}" if isinstance(result, float) else str(result)


_logger = logging.getLogger("aiohooks.hooks")

EvalFn = Callable[[Evaluation], Awaitable[Any]] | Callable[[Evaluation], Any]
OnResult = Callable[[int, Any], Any]
"""Is told of a step and of what the evaluation returned; plain, or a coroutine function."""


class _Due(NamedTuple):
    step: int
    variables: Mapping[str, Any]
    snapshot: Any


class EvaluatorHook(SessionRunHook):
    """Awaits `eval_fn(evaluation)` on each crossing of `every`, and at a clean end for the last step.

    "inline", the loop waits for it. In the "background" a task of the session's coordinator evaluates, in order and one at
    a time, the values of the step at which it was due, while training goes on. No evaluation is left out because another
    one was slow: so many as `max_pending` may be unfinished, and a run at which one more comes due waits for room. Every
    unfinished one keeps its values in memory.

    An error of an evaluation comes out of the run in which it happened or of the next one, or of the end. After a recovery
    what was unfinished is evaluated again. When a run is resumed, an evaluation that was due and not finished when it was
    saved is made up for before the first run.
    """

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
        """Takes what to evaluate and when.

        Args:
            eval_fn: a coroutine function; gets an `Evaluation` and returns the result, as a rule a mapping of numbers.
            every: when.
            mode: whether the loop waits for it.
            at_begin: whether to evaluate before the first run too; not where a run is resumed that has been evaluated.
            at_end: whether to evaluate the last step at a clean end, unless it was.
            timeout_secs: how long one evaluation may take.
            max_pending: how many may be unfinished in the background.
            snapshot: a plain function, called when an evaluation is due; for what is not in the graph's variables, such
                as a copy of a model's parameters.
            on_result: a function, or several, told of each step and its result in turn: `stopping.report`, a writer.
            max_results: how many results are kept, the newest ones.
            thread: whether `eval_fn` is a plain function to be called in a worker thread, because it blocks.
            name: what its state is called in checkpoints; needed where a session has several of these.

        Raises:
            InvalidArgumentError: a value that cannot be meant.
            InvalidHookError: `eval_fn` is not a coroutine function, or with `thread` it is one.
        """
        self._evaluate = Evaluate(eval_fn, timeout_secs, thread)
        check_instance(every, Every, "every")
        if mode not in ("inline", "background"):
            raise InvalidArgumentError(f'mode is {mode!r}; give "inline" or "background"')
        for what, count in (("max_pending", max_pending), ("max_results", max_results)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InvalidArgumentError(f"{what} is {count!r}; give a whole number, 1 or more")
        check_callable(snapshot, "snapshot", optional=True)
        several: Iterable[OnResult] = on_result if isinstance(on_result, Iterable) else (on_result,)  # pyright: ignore[reportUnknownVariableType]
        self._listeners = tuple(several)
        for listener in self._listeners:
            check_callable(listener, "on_result")
        self._every = every
        self._background = mode == "background"
        self._at_begin = at_begin
        self._at_end = at_end
        self._max_pending = max_pending
        self._snapshot = snapshot
        self._max_results = max_results
        self.name: str = name or ""
        self.results: dict[int, Any] = {}
        """What the evaluations returned, by step, in the order in which they ended."""
        self._reset()

    def _reset(self) -> None:
        self.results = {}
        self._clock: Clock = current_clock()
        self._session: Session | None = None
        self._coord: Coordinator | None = None
        self._timer: EveryTimer | None = None
        self._looked = 0, 0.0  # where it counts from: when it was last due, or the start
        self._evaluated: int | None = None  # the last step that was evaluated
        self._resumed: tuple[int | None, int, bool] | None = None
        self._pending: deque[_Due] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self._error: tuple[_Due, Exception] | None = None
        self._failed: _Due | None = None  # its error was raised; evaluated again if the session recovers from that

    @property
    def pending(self) -> tuple[int, ...]:
        """The steps whose evaluation has not ended yet."""
        return tuple(due.step for due in self._pending)

    # -- the life of the hook

    async def begin(self) -> None:
        """Forgets the results of an earlier session."""
        self._reset()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Evaluates before the first run if asked to; after a recovery or a restart, what was not finished."""
        self._session, self._coord, self._worker = session, coord, None
        step, now = session.global_step.latest.step, self._clock.now()
        if self._failed is not None:
            self._pending.appendleft(self._failed)
            self._failed = None
        # What lies behind this step is lost, and comes again.
        self._pending = deque(due for due in self._pending if due.step <= step)
        is_due = False
        if self._timer is None:
            self._timer = self._every.timer()
            self._looked = step, now
            is_due = self._at_begin
        if self._resumed is not None:
            self._evaluated, looked, unfinished = self._resumed
            self._resumed = None
            is_due = (is_due and self._evaluated is None) or (unfinished and not self._pending)
            self._looked = max([looked, *self.pending]), now
        self._looked = min(step, self._looked[0]), self._looked[1]
        self._timer.start(*self._looked)
        if is_due or self._timer.due(step, now):
            self._note(session, step)
        if not self._background:  # that begins with a run, which it must not wait for
            await self._finish()

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Raises the error of an evaluation in the background, if there is one."""
        self._failed = None  # there would have been a new session first, had it been recovered from
        self._raise_error()
        if self._background:
            self._working()
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Evaluates, or hands over to the background, when it is time.

        Raises:
            HookTimeoutError: it took longer than `timeout_secs`.
            BaseException: what the evaluation raised.
        """
        step = run_context.global_step
        if self._timer is not None and self._timer.due(step, self._clock.now()):
            self._note(run_context.session, step)
            await self._go_on()

    async def end(self, session: Session) -> None:
        """Waits for what is unfinished, and evaluates the last step."""
        try:
            await self._finish()
        except Exception:
            await self._evaluate_last(session)
            raise
        await self._evaluate_last(session)

    async def close(self, exc: BaseException | None) -> None:
        """Says what was not evaluated, and what went wrong that nobody has seen."""
        if self._error is not None:
            due, error = self._error
            _logger.error("the evaluation at step %d had failed", due.step, exc_info=error)
        if self._pending:
            _logger.warning("not evaluated, because the session ended with %r: steps %s", exc, list(self.pending))
        self._pending.clear()
        self._session = self._coord = self._worker = self._error = None

    def state_dict(self) -> dict[str, Any]:
        """Which step was evaluated last, where it counts from, and whether something is unfinished; not the results."""
        unfinished = bool(self._pending) or self._error is not None
        return {"evaluated_step": self._evaluated, "counted_from": self._looked[0], "unfinished": unfinished}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there: `after_create_session` makes up for what was due and not finished.

        Raises:
            InvalidArgumentError: it is not the state of such a hook.
        """
        check_mapping(state, "state", optional=False)
        try:
            self._resumed = state["evaluated_step"], state["counted_from"], state["unfinished"]
        except KeyError as error:
            raise InvalidArgumentError(f"the state of an EvaluatorHook has no {error}; it has {state!r}") from None

    # -- what is due, and who evaluates it

    def _note(self, session: Session, step: int) -> None:
        """Notes that this step is to be evaluated, with its values."""
        assert self._timer is not None
        self._looked = step, self._clock.now()
        self._timer.start(*self._looked)
        snapshot = None if self._snapshot is None else self._snapshot()
        self._pending.append(_Due(step, session.variables.snapshot(), snapshot))

    async def _go_on(self) -> None:
        if not self._background:
            await self._finish()
            return
        while len(self._pending) > self._max_pending:
            await self._progress()
        self._working()

    async def _evaluate_last(self, session: Session) -> None:
        step = session.global_step.latest.step
        if self._at_end and self._evaluated != step:
            self._note(session, step)
        await self._finish()

    async def _finish(self) -> None:
        """Evaluates all that is pending, or waits until it is."""
        while self._pending:
            if self._background:
                await self._progress()
            else:
                await self._evaluate_first()
                self._raise_error()
        if self._worker is not None:
            await wait_done([self._worker], None)
        self._raise_error()

    async def _progress(self) -> None:
        """Waits until one more evaluation in the background has ended."""
        self._moved.clear()
        worker = self._working()
        assert worker is not None
        worker.add_done_callback(self._has_moved)  # also if somebody has cancelled it
        try:
            await self._moved.wait()
        finally:
            worker.remove_done_callback(self._has_moved)
        self._raise_error()

    def _has_moved(self, _: object) -> None:
        self._moved.set()

    def _working(self) -> asyncio.Task[None] | None:
        """The task that evaluates; a new one if there is none, or it was cancelled by somebody."""
        if self._pending and self._coord is not None and (self._worker is None or self._worker.done()):
            self._worker = self._coord.start_soon(self._work, current_run(), name="evaluation")
        return self._worker

    async def _work(self, run: RunScope | None) -> None:
        if run is not None:
            # A monitored run in here is refused, as it is inline: it could wait for a run that waits for this task.
            begin_run(run.session, None)
        while self._pending and self._error is None:
            await self._evaluate_first()
            self._moved.set()

    async def _evaluate_first(self) -> None:
        """Evaluates what has been pending longest. It stays pending when cancelled; an error is kept in `_error`."""
        due, session = self._pending[0], self._session
        assert session is not None
        began = self._clock.now()
        try:
            result = await self._evaluate(Evaluation(due.step, due.variables, due.snapshot, session))
            _logger.info("evaluation at step %d: %s (%.3f sec)", due.step, text(result), self._clock.now() - began)
            self._evaluated = due.step
            self.results.pop(due.step, None)
            self.results[due.step] = result
            while len(self.results) > self._max_results:
                del self.results[next(iter(self.results))]
            await tell(self._listeners, due.step, result)
        except StopRequestedError as stop:
            _logger.warning("the evaluation at step %d was ended by the stop: %s", due.step, stop)
        except Exception as error:
            self._error = due, error
        self._pending.popleft()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._failed, error = self._error
            self._error = None
            raise error

    def __repr__(self) -> str:
        mode = "background" if self._background else "inline"
        return f"EvaluatorHook({self._evaluate!r}, {self._every}, {mode!r}, evaluated step {self._evaluated})"
