"""The base class of hooks, and the objects exchanged between a hook and its session.

The life of a hook, as its session calls it:

    begin()                                     once, before the session exists; may add to the
                                                graph
    after_create_session(session, coord)        after each creation, so again after a recovery
    loop:
        before_run(run_context)                 all hooks concurrently; may add fetches and feeds
        ... the run ...
        after_run(run_context, run_values)      all hooks concurrently, each gets its own results;
                                                not if the run failed
    end(session)                                once, on a clean end, while the session is still
                                                open
    close(exc)                                  once, however it ended, if `begin` was started
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

from aiohooks._core.activity import current_run
from aiohooks.dispatch.hook import Hook
from aiohooks.errors import EffectError
from aiohooks.graph.graph import T_co

if TYPE_CHECKING:
    from aiohooks.graph.session import RunRequest, Session
    from aiohooks.session.coordinator import Coordinator
    from aiohooks.session.status import EffectRecorder


class SessionRunArgs(NamedTuple):
    """The arguments of a run: from the caller of `run`, or added by a hook.

    Attributes:
        fetches: nodes of the graph or their names, nested as you like. None fetches nothing.
        feed_dict: values by node or name.
        options: a mapping for a session's own `run`. Values of one option are merged: the larger
            number, either flag, lists joined, otherwise the later value.
    """

    fetches: Any = None
    feed_dict: Mapping[Any, Any] | None = None
    options: Mapping[str, Any] | None = None


class SessionRunValues(NamedTuple, Generic[T_co]):
    """The results of a run for a hook. Annotate `SessionRunValues[float]` if the hook fetches a
    node of floats.

    Attributes:
        results: the values in the shape of the hook's fetches, or None if it fetched nothing.
        options: the merged options of the run, or None.
        run_metadata: a dict shared by all hooks of a run that has options, otherwise None.
    """

    results: T_co
    options: Mapping[str, Any] | None
    run_metadata: dict[str, Any] | None


class SessionRunContext:
    """An attempt of a run, as its hooks see it. `before_run` and `after_run` of all hooks get the
    same object.

    Attributes:
        original_args: the arguments of `run`, the caller's own objects.
        session: the raw session: runs through it call no hooks.
        coord: its coordinator. Without one (in a test) a stop is only recorded here.
        global_step: in `before_run` the step about to run, in `after_run` the committed step.
        attempt: 1, and one more after each recovery of this run.
        effect_recorder: the `EffectsHook` of the session, or None without one.
        effects: the effects recorded so far: kind, payload and recorder of each.
        effects_before_run: how many of them were recorded in `before_run`.
        accepts_effects: whether `effect` may still be called.
        committed: whether the run is committed, also while `after_run` of its hooks fails.
    """

    _requested = False
    effects_before_run: int = 0
    accepts_effects: bool = True
    committed: bool = False

    def __init__(
        self,
        original_args: SessionRunArgs | RunRequest,
        session: Session,
        coord: Coordinator | None = None,
        *,
        global_step: int = 0,
        attempt: int = 1,
        effect_recorder: EffectRecorder | None = None,
    ) -> None:
        self._original_args = original_args
        self.session: Session = session
        self.coord: Coordinator | None = coord
        self.global_step: int = global_step
        self.attempt: int = attempt
        self.effects: list[tuple[str, Any, str]] = []
        self.effect_recorder: EffectRecorder | None = effect_recorder

    @property
    def original_args(self) -> SessionRunArgs:
        """The arguments of `run`, the caller's own objects."""
        args = self._original_args
        return SessionRunArgs(args.fetches, args.feed_dict, args.options)

    @property
    def metrics(self) -> dict[str, Any]:
        """Numbers about this attempt by name. Every hook may add numbers.

        Hooks with a higher `order` see the metrics that hooks with a lower order added, and
        `after_run` sees what `before_run` added.
        """
        # Atomic: a hook in a thread (`BlockingHook`) may ask for them at the same time as another.
        metrics: dict[str, Any] = vars(self).setdefault("_metrics", {})
        return metrics

    def effect(self, kind: str, payload: Any = None, *, recorder: str | None = None) -> None:
        """Record an effect of this run. See `aiohooks.effect`."""
        if self.effect_recorder is None:
            raise EffectError(
                f"effect({kind!r}) was called in a session that delivers none; add"
                " EffectsHook({kind: handler}, run=...) to its hooks"
            )
        self.effect_recorder.record(self, kind, payload, recorder)

    def take_effects(self) -> list[tuple[str, Any, str]]:
        """Return the effects recorded so far, and forget them: for the `EffectsHook`."""
        effects = self.effects
        self.effects = []
        return effects

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested, by this hook or elsewhere."""
        return self._requested or (self.coord is not None and self.coord.should_stop())

    def request_stop(self, reason: str | None = None) -> None:
        """Request a stop of the session after this run. It takes effect immediately, and the first
        reason is kept.
        """
        self._requested = True
        if self.coord is not None:
            self.coord.request_stop(reason)

    def __repr__(self) -> str:
        return (
            f"<SessionRunContext step={self.global_step} attempt={self.attempt}"
            f" stop_requested={self.stop_requested}>"
        )


def effect(kind: str, payload: Any = None, *, recorder: str | None = None) -> None:
    """Record an effect of the current run: in a step, an operation or a hook.

    The effect is not delivered yet. A run that fails before its commit leaves no effects, a
    committed run leaves all of them. Recording never waits. You may also record in threads of
    `asyncio.to_thread`.

    Args:
        kind: the name of a handler of the session's `EffectsHook`.
        payload: data that a checkpoint can hold. It is copied.
        recorder: a name that is part of the key (run, step, recorder and a number), by default the
            kind. If concurrent hooks or operations record the same kind, give each its own name, so
            that their order changes no key.

    Raises:
        EffectError: the code is not part of an attempt of a run, the session has no `EffectsHook`,
            or it is too late in the run.
        InvalidArgumentError: the kind has no handler, or a checkpoint cannot hold the payload.
    """
    run = current_run()
    if run is None or run.attempt is None:
        raise EffectError(
            f"effect({kind!r}) was called outside of a run with an EffectsHook; record effects in a"
            " step, in before_run or in after_run of a hook without background=True, and in threads"
            " of asyncio.to_thread"
        )
    run.attempt.effect(kind, payload, recorder=recorder)


class SessionRunHook(Hook):
    """The base class of hooks. Override the methods that you need, as coroutines. The others are
    never called.

    Set `order`, `timeout` and `on_error` in your subclass, or for a single registration with
    `configure`. If your hook has the plain methods `state_dict` and `load_state_dict` (see
    `Stateful`), checkpoints contain its state. The state is loaded after `begin` and before
    `after_create_session`, both at a restart and after a recovery. In all methods the session's
    graph is the default graph (`get_default_graph`).
    """

    ends_last: ClassVar[bool] = False
    """Whether `after_run` and `end` are called after the methods of all other hooks, whatever their
    `order`: a hook that saves the session saves their state.
    """

    async def begin(self) -> None:
        """Called once before the session is created. Nodes may be added to the default graph."""

    async def after_create_session(self, session: Session, coord: Coordinator, /) -> None:
        """Called after each creation of a session, so again after each recovery. The graph is
        finalized.

        Args:
            session: the raw session, open.
            coord: its coordinator, new for each created session. Tasks started with it end with the
                session.
        """

    async def before_run(self, run_context: SessionRunContext, /) -> SessionRunArgs | None:
        """Called before each attempt of a run, concurrently with the other hooks. Return fetches
        and feeds to add, or None.
        """
        return None

    async def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues, /
    ) -> None:
        """Called after each successful run, concurrently with the other hooks."""

    async def end(self, session: Session, /) -> None:
        """Called once at a clean end, in `order`, with the session still open."""

    async def close(self, exc: BaseException | None, /) -> None:
        """Called exactly once if `begin` was started, however the session ended, in reverse order.

        It runs in a separate task, shielded from cancellation and with a time limit. It gets no
        session, as there may be none: the opening may have failed before. The session of the latest
        `after_create_session` is closed, and stays readable: `session.global_step.latest.step` is
        the last step, `session.variables.snapshot()` has the values.

        Args:
            exc: the error that ended the session, or None after a clean end.
        """


HOOK_METHODS: tuple[str, ...] = tuple(
    name for name, method in vars(SessionRunHook).items() if inspect.iscoroutinefunction(method)
)
"""The methods of a hook's life cycle, in the order of their first calls."""
