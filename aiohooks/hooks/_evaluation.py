"""One evaluation: what is evaluated, and how its function is called."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohooks._checks import check_callable, check_secs
from aiohooks._errors import (
    AiohooksError,
    FetchError,
    HookCancelledError,
    HookTimeoutError,
    InvalidHookError,
    StopRequestedError,
    is_clean_end,
)
from aiohooks._fetches import Leaves, canonical_feeds
from aiohooks._graph import is_coroutine_function
from aiohooks._interrupt import TimeLimit, cancels_of, running_task
from aiohooks._plan import make_plan
from aiohooks._shield import in_thread

if TYPE_CHECKING:
    from aiohooks._session import Session


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
        base = cancels_of(running_task())
        try:
            with limit:
                if self._thread:
                    return await in_thread(self._fn, evaluation, grace_secs=evaluation.session.grace_secs)
                return await self._fn(evaluation)
        except asyncio.CancelledError as error:
            if running_task().cancelling() > base:
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
