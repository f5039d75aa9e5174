"""Hooks, and what travels between a hook and its session.

The life of a hook, as its session calls it:

    begin()                                     once, before the session exists; may add to the graph
    after_create_session(session, coord)        after every creation, so again after a recovery
    loop:
        before_run(run_context)                 all hooks together; may ask for fetches and feeds
        ... the run ...
        after_run(run_context, run_values)      all hooks together, with what each asked for; not if the run failed
    end(session)                                once, on a clean end, while the session is still open
    close(exc)                                  once, however it ended, if `begin` was started
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohooks.dispatch.hook import Hook

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator


class SessionRunArgs(NamedTuple):
    """What a hook adds to the coming run, or what the caller of `run` asked for.

    `fetches` are nodes of the graph or their names, nested at will; None asks for nothing. `feed_dict` maps nodes or names
    to values. `options` is a mapping for the session's own `run`; where several give one, it
    is the larger number, either flag, the lists joined, or else the later value.
    """

    fetches: Any = None
    feed_dict: Mapping[Any, Any] | None = None
    options: Mapping[str, Any] | None = None


class SessionRunValues(NamedTuple):
    """What a hook gets after the run: results in the shape of its fetches, the merged options, and the run's metadata.

    `results` is None for a hook that asked for nothing. `run_metadata` is a dict shared by all hooks of a run for which
    somebody gave options, else None.
    """

    results: Any
    options: Mapping[str, Any] | None
    run_metadata: dict[str, Any] | None


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class SessionRunContext:
    """One attempt of one run, as its hooks see it; the same object in `before_run` and `after_run` of all hooks.

    Attributes:
        original_args: the arguments of `run`, the caller's own objects.
        session: the raw session: runs through it call no hooks.
        coord: its coordinator; without one (in a test) a stop is only recorded here.
        global_step: in `before_run` the step about to run, in `after_run` the committed step.
        attempt: 1, and one more after each recovery of this run.
    """

    original_args: SessionRunArgs
    session: Session
    coord: Coordinator | None = None
    _: dataclasses.KW_ONLY
    global_step: int = 0
    attempt: int = 1
    _requested: bool = dataclasses.field(default=False, init=False)

    @property
    def stop_requested(self) -> bool:
        """Whether a stop has been asked for, by this hook or by anybody."""
        return self._requested or (self.coord is not None and self.coord.should_stop())

    def request_stop(self, reason: str | None = None) -> None:
        """Asks the session to stop after this run; recorded at once, and the first reason is kept."""
        self._requested = True
        if self.coord is not None:
            self.coord.request_stop(reason)

    def __repr__(self) -> str:
        return f"<SessionRunContext step={self.global_step} attempt={self.attempt} stop_requested={self.stop_requested}>"


class SessionRunHook(Hook):
    """Base class of hooks: override the methods you need, as coroutines; those you leave are never called.

    `order`, `timeout` and `on_error` can be overridden in a subclass, or for one registration by `configure`. A hook that has
    the plain methods `state_dict` and `load_state_dict` (see `Stateful`) is kept in checkpoints: its state is loaded after
    `begin` and before `after_create_session`, at a restart as after a recovery.
    """

    async def begin(self) -> None:
        """Called once before the session is created; the default graph is the session's and may be added to."""

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Called after each creation of a session, so again after every recovery; the graph is finalized.

        Args:
            session: the raw session, open.
            coord: its coordinator, new for each created session; tasks started with it end with the session.
        """

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each attempt of a run, together with the other hooks'; returns what to add to the run, or None."""
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each successful run, together with the other hooks'; not called when the run failed."""

    async def end(self, session: Session) -> None:
        """Called once at a clean end, in registration order, with the session still open."""

    async def close(self, exc: BaseException | None) -> None:
        """Called exactly once if `begin` was started, however the session ended, in reverse order.

        It runs in a task of its own, shielded from cancellation and limited in time. `exc` is what ended the session, or
        None after a clean end.
        """


HOOK_METHODS: tuple[str, ...] = tuple(
    name for name, method in vars(SessionRunHook).items() if inspect.iscoroutinefunction(method)
)
"""The methods of a hook's life cycle, in the order in which they are first called."""
