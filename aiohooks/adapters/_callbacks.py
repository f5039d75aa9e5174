"""What the adapters of Keras, Lightning, Ignite and the Trainer of Hugging Face share.

CallbacksHook   a framework's callbacks as one hook: they are called at the steps and epochs of a session
HooksInLoop     hooks in a framework's loop: a session in a thread, whose runs are the steps of that loop
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from aiohooks._aio.cancel import retrieve_exception, to_thread
from aiohooks._validate import checked_int
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import SessionClosedError, StopRequestedError
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import Values, checked_values
from aiohooks.hooks.every import ResettingHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from aiohooks.session.monitored import AsyncSingularMonitoredSession
from aiohooks.stores.memory import MemoryStepStore

_logger = logging.getLogger("aiohooks.adapters")


class CallbacksHook(ResettingHook):
    """Base of the hooks that call the callbacks of a framework, one after the other in the order of their list.

    The callbacks get the chosen values and `run_context.metrics`: the hook is called after the others (it has order 90), so it
    has what they added. An epoch is a number of steps, or the whole training. A training that a recovery set back begins its
    epoch again. A callback that asks the framework to stop requests a stop of the session.

    The methods of a framework's own hook say how its callbacks are called; they count steps and epochs from 0.
    """

    order: ClassVar[int] = 90

    def __init__(self, values: Values | None, steps_per_epoch: int | None, thread: bool) -> None:
        self._steps_per_epoch = checked_int(steps_per_epoch, "steps_per_epoch", 1, optional=True)
        fetches = checked_values(values, may_be_empty=True)
        self._request = SessionRunArgs(fetches) if fetches else None
        self._thread = thread
        self._reset()

    def _reset(self) -> None:
        self._coord: Coordinator | None = None
        self._stopped_by: str | None = None
        self._epoch: int | None = None
        self._logs: dict[str, Any] = {}
        self._results: list[Mapping[str, Any]] = []
        self._state_at_end: dict[str, Any] | None = None
        self._warned: set[str] = set()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Begin the training, the first time."""
        is_first, self._coord, self._epoch = self._coord is None, coord, None
        if is_first:
            await self._call(self._train_begin, session.global_step.latest.step)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Begin the step, and the epoch with its first one; fetch the values."""
        fed = run_context.original_args.feed_dict or {}
        batch = next(iter(fed.values())) if len(fed) == 1 else fed
        await self._call(self._begin, run_context.global_step - 1, batch)
        return self._request

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """End the step, and the epoch with its last one."""
        self._logs = {**run_context.metrics, **self._means(run_values.results or {})}
        await self._call(self._end, run_context.global_step - 1)

    async def end(self, session: Session) -> None:
        """End the epoch, if it is not over, and the training."""
        self._state_at_end = copy.deepcopy(self._state())
        await self._call(self._end_all)

    async def close(self, exc: BaseException | None) -> None:
        """Let the callbacks know that the training failed, where the framework has a call for that."""
        if exc is not None and self._coord is not None:
            await self._call(self._train_failed, exc)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the callbacks; after `end` that from before it, as a resumed run continues its epoch."""
        return self._state() if self._state_at_end is None else self._state_at_end

    def report(self, step: int, result: Mapping[str, Any]) -> None:
        """Pass on the result of an evaluation, at the end of the step: `EvaluatorHook(..., on_result=callbacks.report)`.

        The evaluator comes before this hook in the list, as it evaluates once more when the session ends.
        """
        if self._has_ended:
            _logger.warning(
                "callbacks do not get the evaluation of step %d, as %s has ended the training; "
                "put the evaluator before it in the list of hooks",
                *(step, type(self).__name__),
            )
        self._results.append(result)

    @property
    def _has_ended(self) -> bool:
        return self._state_at_end is not None

    def _warn_once(self, problem: str) -> None:
        """Log that something which a callback or an argument asks for has no effect in a session."""
        if problem not in self._warned:
            self._warned.add(problem)
            _logger.warning("%s: %s", type(self).__name__, problem)

    async def _call(self, fn: Callable[..., None], *args: Any) -> None:
        if self._thread:
            await to_thread(fn, *args)
        else:
            fn(*args)
        if self._coord is not None and self._has_asked_to_stop():
            self._coord.request_stop(f"{self._stopped_by or f'a callback of {type(self).__name__}'} has requested it")

    def _call_each(self, callbacks: Iterable[Any], method: str, *args: Any) -> None:
        """Call a method of each callback in turn; remember the one that asked to stop."""
        for callback in callbacks:
            getattr(callback, method)(*args)
            if self._stopped_by is None and self._has_asked_to_stop():
                self._stopped_by = type(callback).__name__

    def _begin(self, step: int, batch: Any) -> None:
        epoch, index = (0, step) if self._steps_per_epoch is None else divmod(step, self._steps_per_epoch)
        if epoch != self._epoch:
            self._end_epoch()  # also where another worker made its last step
            self._epoch = epoch
            self._epoch_begin(epoch)
        self._step_begin(step, index, batch)

    def _end(self, step: int) -> None:
        self._step_end(step, self._logs)
        self._pass_results()
        if self._steps_per_epoch is not None and (step + 1) % self._steps_per_epoch == 0:
            self._end_epoch()

    def _end_epoch(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            self._epoch_end(epoch, self._logs)

    def _end_all(self) -> None:
        self._pass_results()
        self._end_epoch()
        self._train_end(self._logs)

    def _pass_results(self) -> None:
        while self._results:
            self._evaluated(self._results.pop(0))

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint has of the callbacks, for a hook with `load_state_dict`."""
        return {}

    def _means(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the logs for the values of a step, where a framework's are others."""
        return values

    def _has_asked_to_stop(self) -> bool:
        raise NotImplementedError

    def _train_begin(self, step: int) -> None:
        """Begin a training of which `step` steps were made before."""

    def _epoch_begin(self, epoch: int) -> None: ...

    def _step_begin(self, step: int, index: int, batch: Any) -> None:
        """Begin a step, which has this index in its epoch."""

    def _step_end(self, step: int, logs: dict[str, Any]) -> None: ...

    def _evaluated(self, result: Mapping[str, Any]) -> None: ...

    def _epoch_end(self, epoch: int, logs: dict[str, Any]) -> None: ...

    def _train_end(self, logs: dict[str, Any]) -> None: ...

    def _train_failed(self, error: BaseException) -> None:
        """Most frameworks have no call for this."""


class HooksInLoop:
    """Base of what runs hooks in the loop of a framework: `with HooksFor...(hooks) as callback:` around the call that trains.

    The hooks are in a session, which lives in an event loop in a thread. It is opened when the training begins and counts its
    steps from there. Each step of the framework is a run of the session: the framework waits for `before_run` of all hooks, makes
    its step, and waits for `after_run`. What it logs can be fetched by name. Tasks of the hooks continue while it computes.
    An error of a hook is raised in the framework's own call. A stop of the session stops the framework; a step that it still
    makes is no run. The session ends when the block is left, with the error of the training if there was one: the framework
    need not call anything then. Nothing is repeated: a session like this does not recover.
    """

    _stop_flag: ClassVar[str]
    """The attribute of an object of the framework, the `owner`, by which it stops."""

    def __init__(self, hooks: Iterable[SessionRunHook | HookRegistration]) -> None:
        """Take `hooks`, or registrations of them; nothing is started."""
        super().__init__()  # a callback of the framework
        # A list, as each block needs all of them. The session refuses what is none.
        self._hooks = [*hooks] if isinstance(hooks, Iterable) else hooks  # pyright: ignore[reportUnnecessaryIsInstance]
        self._exits = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None
        self._session: AsyncSingularMonitoredSession | None = None
        self._run: asyncio.Task[Any] | None = None
        self._begun: asyncio.Future[None]
        self._made: asyncio.Future[Mapping[str, Any]]

    def __enter__(self) -> Self:
        """Start the event loop."""
        self._portal = self._exits.enter_context(start_blocking_portal())
        return self

    def __exit__(self, *exc: Any) -> bool | None:
        """End the session and the event loop; an error that is a clean end of a session is swallowed."""
        self._portal = self._session = None
        return self._exits.__exit__(*exc)

    def _train(self, step: int, owner: Any) -> None:
        """Open the session, unless it is open, after `step` steps; stop the framework, by its `owner`, if it is to stop."""
        if self._portal is None:
            name = type(self).__name__
            raise SessionClosedError(f"{name} is used outside of its block; train in `with {name}(...)`")
        if self._session is None:
            session = AsyncSingularMonitoredSession(self._framework_step, self._hooks, global_step=MemoryStepStore(step))
            self._exits.enter_context(self._portal.wrap_async_context_manager(session))
            self._exits.callback(self._portal.call, self._drop_run)
            self._session = session
        self._stop_if(self._session.should_stop(), owner)

    def _begin_step(self, owner: Any) -> None:
        """Begin a run, unless the framework is to stop. A step that was begun before and has not ended is no run."""
        portal, session = self._opened()
        portal.call(self._begin_run, session)
        self._stop_if(self._run is None, owner)  # a stop that is requested before a run does not end it

    def _end_step(self, values: Mapping[str, Any], owner: Any) -> None:
        """End the run, if there is one, with the values that hooks fetch; stop the framework if it is to stop."""
        portal, session = self._opened()
        if self._run is not None:
            portal.call(self._end_run, self._run, dict(values))
        self._stop_if(session.should_stop(), owner)

    def _opened(self) -> tuple[BlockingPortal, AsyncSingularMonitoredSession]:
        if self._portal is None or self._session is None:
            raise SessionClosedError(f"{type(self).__name__} has not seen the beginning of the training")
        return self._portal, self._session

    def _stop_if(self, stops: bool, owner: Any) -> None:
        if stops:
            setattr(owner, self._stop_flag, True)

    # In the event loop.

    async def _framework_step(self) -> Mapping[str, Any]:
        if not self._begun.done():  # a hook may make raw runs
            self._begun.set_result(None)
        return await self._made

    async def _begin_run(self, session: AsyncSingularMonitoredSession) -> None:
        await self._drop_run()
        if session.should_stop():
            return
        loop = asyncio.get_running_loop()
        self._begun, self._made = loop.create_future(), loop.create_future()
        self._run = run = loop.create_task(session.run(()), name="step of a framework")
        await asyncio.wait([run, self._begun], return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            await self._end_run(run, {})

    async def _end_run(self, run: asyncio.Task[Any], values: Mapping[str, Any]) -> None:
        if not self._made.done():
            self._made.set_result(values)
        await asyncio.wait([run])
        self._run = None
        with contextlib.suppress(StopRequestedError):  # the session has stopped: the framework is to do so as well
            run.result()

    async def _drop_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.cancel()
            await asyncio.wait([run])
            retrieve_exception(run)
