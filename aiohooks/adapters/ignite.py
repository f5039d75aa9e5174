"""PyTorch-Ignite: the handlers of an engine as a hook of a session, and hooks in `engine.run`.

async with AsyncMonitoredSession(step, [IgniteHandlers(engine, ["loss"]), *hooks]) as session: ...

with HooksForIgnite(engine, hooks):
    engine.run(data)
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# The package is not where types are checked.
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from aiohooks._validate import check_instance
from aiohooks.adapters._callbacks import CallbacksHook, HooksInLoop
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import add_note, missing_extra
from aiohooks.hooks._observing import Values
from aiohooks.session.hook import SessionRunHook

try:
    import ignite.engine as _engine
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.ignite", "ignite") from _missing

__all__ = ["HooksForIgnite", "IgniteHandlers"]

_engine_class: Any = _engine.Engine
_events: Any = _engine.Events
_NEVER_FIRED = [
    *(_events.GET_BATCH_STARTED, _events.GET_BATCH_COMPLETED, _events.DATALOADER_STOP_ITERATION, _events.TERMINATE_SINGLE_EPOCH)
]


class IgniteHandlers(CallbacksHook):
    """The event handlers of an Ignite engine as a hook; see `CallbacksHook`.

    `engine.terminate()` and `engine.interrupt()` stop the session; the second one fires `INTERRUPT` and no other event then.

    The engine does not run: its events are fired by the session, and `engine.state` has the session's iteration, epoch, batch,
    output (the values) and metrics (`run_context.metrics`, and the results of evaluations). The session fetches batches, and
    decides which: `engine.terminate_epoch()` and handlers of `GET_BATCH_STARTED` and the like have no effect, which is logged.
    """

    def __init__(
        self, engine: Any, values: Values | None = None, *, steps_per_epoch: int | None = None, thread: bool = False
    ) -> None:
        """Create the hook.

        Args:
            engine: an `Engine` with handlers; its process function is not called.
            values: a mapping from a tag to a fetch, or several nodes or names: `state.output`.
            steps_per_epoch: how many steps are an epoch; left out, the whole training is one.
            thread: call the handlers in a worker thread, because they block.
        """
        super().__init__(values, steps_per_epoch, thread)
        check_instance(engine, _engine_class, "engine")
        self.engine: Any = engine

    def _has_asked_to_stop(self) -> bool:
        if self.engine.should_terminate_single_epoch:
            self.engine.should_terminate_single_epoch = False
            self._warn_once(
                "terminate_epoch() has no effect in a session, whose epochs are numbers of steps; end its feeds earlier"
            )
        return bool(self.engine.should_terminate or self.engine.should_interrupt)

    def _train_begin(self, step: int) -> None:
        never: list[str] = [event.name for event in _NEVER_FIRED if self.engine._event_handlers.get(event)]
        if never:
            self._warn_once(f"handlers of {', '.join(never)} are not called in a session, which fetches its batches itself")
        self.engine.should_terminate = self.engine.should_interrupt = self.engine.should_terminate_single_epoch = False
        self.engine.state.epoch_length = self._steps_per_epoch
        self.engine.state.iteration = step
        self.engine.state.epoch = 0 if self._steps_per_epoch is None else step // self._steps_per_epoch
        try:
            self.engine.fire_event(_events.STARTED)
        except TypeError as error:  # of a profiler, which makes room for all iterations
            add_note(error, "for the length of a session, give steps_per_epoch, and set engine.state.max_epochs before")
            raise

    def _epoch_begin(self, epoch: int) -> None:
        self.engine.state.epoch = epoch + 1
        self.engine.fire_event(_events.EPOCH_STARTED)

    def _step_begin(self, step: int, index: int, batch: Any) -> None:
        self.engine.state.iteration = step + 1
        self.engine.state.batch, self.engine.state.output = batch, None
        self.engine.fire_event(_events.ITERATION_STARTED)

    def _step_end(self, step: int, logs: dict[str, Any]) -> None:
        self.engine.state.output = logs
        self.engine.state.metrics.update(logs)
        self.engine.fire_event(_events.ITERATION_COMPLETED)

    def _evaluated(self, result: Mapping[str, Any]) -> None:
        self.engine.state.metrics.update(result)

    def _epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        is_cut = self._has_ended and self.engine.state.iteration % (self._steps_per_epoch or 1)
        if not is_cut and not self._has_asked_to_stop():  # an engine completes whole epochs only
            self.engine.fire_event(_events.EPOCH_COMPLETED)

    def _train_end(self, logs: dict[str, Any]) -> None:
        if self.engine.should_interrupt:
            self.engine.fire_event(_events.INTERRUPT)
            return
        if self.engine.should_terminate:
            self.engine.fire_event(_events.TERMINATE)
        if self.engine.should_terminate != "skip_completed":
            self.engine.fire_event(_events.COMPLETED)

    def _train_failed(self, error: BaseException) -> None:
        try:
            self.engine._fire_event(_events.EXCEPTION_RAISED, error)  # the public method passes no error
        except BaseException as raised:  # handlers raise what they do not swallow: it would be noted as raised here
            if raised is not error:
                raise

    def __repr__(self) -> str:
        return f"IgniteHandlers({self.engine!r})"


class HooksForIgnite(HooksInLoop):
    """Hooks in the run of an Ignite engine: `with HooksForIgnite(engine, hooks): engine.run(data)`; see `HooksInLoop`.

    They fetch the keys of `state.output`, or `output` if that is no mapping, and those of `state.metrics`.
    """

    _stop_flag = "should_terminate"

    def __init__(self, engine: Any, hooks: Iterable[SessionRunHook | HookRegistration]) -> None:
        """Take `hooks`; `engine` gets its handlers when the block is entered, and loses them when it is left."""
        super().__init__(hooks)
        check_instance(engine, _engine_class, "engine")
        self.engine: Any = engine

    def __enter__(self) -> Self:
        super().__enter__()
        handlers = {
            _events.STARTED: lambda: self._train(self.engine.state.iteration, self.engine),
            _events.ITERATION_STARTED: lambda: self._begin_step(self.engine),
            _events.ITERATION_COMPLETED: self._iteration_completed,
        }
        for event, handler in handlers.items():
            self._exits.enter_context(self.engine.add_event_handler(event, handler))
        return self

    def _iteration_completed(self) -> None:
        state = self.engine.state
        output = state.output if isinstance(state.output, Mapping) else {"output": state.output}
        self._end_step({**state.metrics, **output}, self.engine)
