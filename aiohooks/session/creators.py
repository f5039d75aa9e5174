"""How the raw sessions of a monitored session are created, and when a recovery creates another one.

restore_session, restore_hooks              restore a raw session from a checkpoint
Scaffold                                    how a raw session is initialized
ChiefSessionCreator, WorkerSessionCreator   create raw sessions
creator_of                                  the creator for the first argument of a session
RecoveryPolicy                              after which errors, and how often, to recover
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from aiohooks import checkpoint
from aiohooks._core.activity import logger
from aiohooks._core.calls import close_unawaited
from aiohooks._core.validate import (
    InitRequired,
    check_choice,
    check_instance,
    check_mapping,
    check_secs,
    checked_int,
    is_coroutine_function,
)
from aiohooks._core.waits import DEFAULT_GRACE_SECS, Backoff
from aiohooks.checkpoint.stateful import Stateful, is_numbered, is_stateful
from aiohooks.errors import (
    AbortedError,
    CheckpointMismatchError,
    FeedsLostError,
    InvalidArgumentError,
    NotReadyError,
    PublisherFinishedError,
    UnavailableError,
    add_note,
    did_you_mean,
    is_clean_end,
)
from aiohooks.graph.graph import Graph, Variables, graph_of_step, values_of
from aiohooks.graph.session import Session
from aiohooks.stores._protocol import Term
from aiohooks.stores.base import MemoryStepStore, StepStore

if TYPE_CHECKING:
    from aiohooks.checkpoint import Restored


async def restore_session(session: Session, restored: Restored) -> None:
    """Restore the variables, the tracked objects and the global step of a new raw session.

    The hooks follow later, by `restore_hooks`: they are restored before `after_create_session`.

    The step begins a new epoch, even if the store has the same step already: data that the session
    had received before, such as the items of a version gate, are lost.

    Args:
        session: the raw session.
        restored: the checkpoint that was read.

    Raises:
        CheckpointMismatchError: the checkpoint is from another graph, or other tracked objects.
    """
    # All checks come first, so that a checkpoint that does not fit changes nothing.
    what = f"checkpoint {restored.checkpoint.path}"
    values = values_of(session.variables).by_name
    own = {variable.name: values[variable.name] for variable in session.graph.variables}
    variables = _saved_part(restored, "variables")
    _check_names(what, "variable", variables, own)
    tracked = _saved_part(restored, "tracked")
    _check_names(what, "tracked object", tracked, session.tracked)
    hooks = _saved_part(restored, "hooks")
    for name in sorted(own):
        shape = getattr(own[name], "shape", None)
        saved_shape = getattr(variables[name], "shape", None)
        # With a saved value of another shape, a step would fail later, or silently broadcast.
        if shape is not None and shape != saved_shape:
            raise CheckpointMismatchError(
                f"{what} has variable {name!r} with shape {saved_shape}; here it has shape"
                f" {shape}. Was the model changed?"
            )
    step = restored.checkpoint.step
    await session.global_step.reset(step)
    session.variables.assign(variables)
    session.committed_step = step
    for name, tracked_object in session.tracked.items():
        _load_state(tracked_object, tracked[name], what, f"tracked object {name!r}")
    # Keep only the part that `restore_hooks` needs: the restored values would stay in memory as
    # long as the session.
    session.restored = dataclasses.replace(restored, state={"hooks": hooks})


def restore_hooks(session: Session, restored: Restored) -> None:
    """Load the saved states of the hooks.

    Log each hook that has no saved state, and so keeps its own, and each state that has no hook.
    """
    what = f"checkpoint {restored.checkpoint.path}"
    states = _saved_part(restored, "hooks")
    hooks = session.stateful_hooks()
    for name, hook in hooks.items():
        if name in states:
            _load_state(hook, states[name], what, f"hook {name}")
        else:
            level = logging.INFO if is_numbered(hook) else logging.WARNING
            logger.log(level, "%s has no state of the hook %s, which starts anew", what, name)
    # If the session is saved, its next checkpoint does not have the states without a hook: they are
    # lost, which is worth a warning.
    is_saved = session.saver is not None and not session.saver.read_only
    level = logging.WARNING if is_saved else logging.INFO
    for name in sorted(states.keys() - hooks.keys()):
        logger.log(level, "%s has the state of a hook %s, which is not in this session", what, name)


def warn_if_not_saved(session: Session, graph: Graph) -> None:
    """Warn if a session that trains restores from a directory, and no hook saves there."""
    if session.saved or not graph.trains:
        return
    # The saver from which the session restores.
    saver = session.saver
    if saver is not None and not saver.read_only:
        logger.warning(
            "no checkpoint will be saved in %s, from which this session restores; add"
            " CheckpointSaverHook() to its hooks, or give Saver(..., read_only=True) as"
            " checkpoint_dir",
            saver.checkpoint_dir,
        )


def _load_state(stateful: Stateful, state: Any, checkpoint_name: str, name: str) -> None:
    """Load a saved state into an object. An error gets a note with the names."""
    try:
        stateful.load_state_dict(state)
    except Exception as error:
        add_note(error, f"{checkpoint_name}: loading the state of the {name}")
        raise


def _saved_part(restored: Restored, name: str) -> dict[str, Any]:
    """Return a part of a checkpoint: "variables", "tracked" or "hooks", each by name."""
    part: Any = restored.state.get(name)
    if not isinstance(part, dict):
        raise CheckpointMismatchError(
            f"checkpoint {restored.checkpoint.path} has no {name!r}; was it written by"
            " CheckpointSaverHook?"
        )
    return cast("dict[str, Any]", part)


def _check_names(what: str, kind: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint has exactly the wanted names.

    Args:
        what: the checkpoint, for messages.
        kind: the kind of the named things, for messages.
        saved: the things in the checkpoint, by name.
        wanted: the things to restore, by name.
    """
    missing = [name for name in wanted if name not in saved]
    if missing:
        similar = "; ".join(f"{name!r}: {did_you_mean(name, saved)}" for name in missing)
        raise CheckpointMismatchError(
            f"{what} has no {kind} {similar}. Use the graph it was saved from, or start in another"
            " directory"
        )
    unknown = [name for name in saved if name not in wanted]
    if unknown:
        raise CheckpointMismatchError(
            f"{what} has the {kind} {', '.join(map(repr, unknown))}, which would be lost: there is"
            " none of that name now. Use the graph and scaffold it was saved from, or start in"
            " another directory"
        )


class SessionCreator(Protocol):
    """Creates the raw session of a monitored session, and a new one in each recovery."""

    @property
    def graph(self) -> Graph:
        """The graph that its sessions run."""
        ...

    async def create_session(self) -> Session:
        """Create a session that is ready to run."""
        ...


SessionFn = Callable[[Session], Awaitable[Any]]
"""A coroutine function that takes the new session."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold:
    """How a session of a graph is initialized, when it is ready, and which objects are saved in
    addition to its variables.

    The functions are coroutine functions that take the raw session. The two `ready` functions
    return the missing parts: None, True or an empty collection if nothing is missing, otherwise
    False, a name or several names.

    Args:
        init_fn: called by the chief after the variables got their initial values, unless they were
            already initialized or restored.
        ready_for_local_init_fn: called before `local_init_fn`.
        local_init_fn: called for each created session, of a chief or a worker.
        ready_fn: called last.
        tracked: objects to save, by name, such as a torch module, its optimizer, a data loader or a
            `RandomState`. Checkpoints contain their `state_dict()`, and a restored session passes
            it to their `load_state_dict`.
    """

    init_fn: SessionFn | None = None
    ready_for_local_init_fn: SessionFn | None = None
    local_init_fn: SessionFn | None = None
    ready_fn: SessionFn | None = None
    tracked: Mapping[str, Stateful] | None = None

    def __post_init__(self) -> None:
        for name in ("init_fn", "ready_for_local_init_fn", "local_init_fn", "ready_fn"):
            value = getattr(self, name)
            if value is not None and not is_coroutine_function(value):
                raise InvalidArgumentError(
                    f"{name} is {value!r}; give a coroutine function (`async def`) that takes the"
                    " session"
                )
        check_mapping(self.tracked, "tracked", optional=True)
        for name, value in (self.tracked or {}).items():
            if not isinstance(name, str) or not is_stateful(value):
                raise InvalidArgumentError(
                    f"tracked[{name!r}] is {value!r}; give a name and an object with state_dict()"
                    " and load_state_dict(state), such as checkpoint.RandomState(generator) for a"
                    " random generator"
                )


async def _check_ready(ready_fn: SessionFn | None, session: Session, message: str) -> None:
    """Raise `NotReadyError` if a `ready` function of the scaffold reports that parts are missing.

    The error begins with `message`.
    """
    if ready_fn is None:
        return
    missing = await ready_fn(session)
    if missing is None or missing is True:
        return
    if not isinstance(missing, (bool, str, Collection)):
        raise InvalidArgumentError(
            f"{ready_fn!r} returned {missing!r}; return None, True, or the names of the missing"
            " parts"
        )
    if missing is False or len(missing) > 0:  # type: ignore[arg-type]
        raise NotReadyError(f"{message}; missing, as {ready_fn!r} says: {missing or 'something'}")


class _Creator(InitRequired):
    """The common part of both creators: their raw sessions share the graph, the scaffold, the step
    store and the variables.
    """

    def __init__(
        self,
        graph: Graph | Callable[..., Awaitable[Any]],
        scaffold: Scaffold | None,
        global_step: StepStore | None,
        variables: Variables | None,
    ) -> None:
        """Check the arguments, and make new parts for those that are None."""
        check_instance(scaffold, Scaffold, "scaffold", optional=True)
        check_instance(global_step, StepStore, "global_step", optional=True)
        check_instance(variables, Variables, "variables", optional=True)
        self.graph: Graph = graph_of(graph)
        self.global_step: StepStore = MemoryStepStore() if global_step is None else global_step
        self._scaffold = scaffold or Scaffold()
        self._variables = Variables() if variables is None else variables

    async def _new_session(
        self, what: str, initialize: Callable[[Session], Awaitable[None]] | None = None
    ) -> Session:
        """Make a raw session, initialize it, and check that it is ready. If that fails, close it.

        Args:
            what: the initialization, for the message of a session that is not ready after it.
            initialize: initializes or restores the variables, if this creator does so.
        """
        session = Session(self.graph, global_step=self.global_step, variables=self._variables)
        try:
            if initialize is not None:
                await initialize(session)
            scaffold = self._scaffold
            message = f"{what} did not make the model ready"
            await _check_ready(
                scaffold.ready_for_local_init_fn, session, f"{message} for local_init"
            )
            if scaffold.local_init_fn is not None:
                await scaffold.local_init_fn(session)
            await _check_ready(scaffold.ready_fn, session, message)
        except BaseException:
            await session.aclose()
            raise
        return session


class ChiefSessionCreator(_Creator):
    """Creates sessions that initialize or restore the variables, unless these are already
    initialized.

    With a checkpoint directory, the first session and each session after a recovery are restored
    from the newest intact checkpoint. Without a directory, a recovery keeps the current variables
    and step. Each restore begins a new epoch of the step, and so does the first session of a chief
    that replaces another chief.

    With a step store for several processes, the creator is the chief of the run while the monitored
    session is open: it leads the run (`StepStore.lead`), and notifies the workers when everything
    is initialized. A second chief waits until the first has ended, and then leads in a new term.
    """

    def __init__(
        self,
        graph: Graph | Callable[..., Awaitable[Any]],
        *,
        scaffold: Scaffold | None = None,
        checkpoint_dir: str | os.PathLike[str] | checkpoint.Saver | None = None,
        global_step: StepStore | None = None,
        variables: Variables | None = None,
        lead: bool = True,
    ) -> None:
        """Check the arguments. `create_session` creates the sessions.

        Args:
            graph: the graph of the sessions, or a coroutine function that is the step.
            scaffold: how to initialize the sessions.
            checkpoint_dir: the directory to restore from, or its `Saver`. A `CheckpointSaverHook()`
                without a directory writes there.
            global_step: the store of the global step, by default a new one. All sessions of this
                creator share it.
            variables: the values of the variables, by default new ones, also shared.
            lead: whether to lead the run in a step store for several processes. False for peers
                without a chief.
        """
        super().__init__(graph, scaffold, global_step, variables)
        saver = checkpoint_dir
        # A saver that is made here is closed here.
        self._owns_saver = False
        if saver is not None and not isinstance(saver, checkpoint.Saver):
            saver = checkpoint.Saver(saver)
            self._owns_saver = True
        self._saver = saver
        # The latest session that was created, to know its step in a recovery.
        self._latest: Session | None = None
        # A store that is `inline` is in the memory of this process: no other process uses it.
        self._needs_lead = lead and not self.global_step.inline
        self._leadership = contextlib.AsyncExitStack()
        # The term in which this process leads the run, while it does.
        self._term: Term | None = None

    async def create_session(self) -> Session:
        """Create a session.

        It is restored from a checkpoint, or initialized by `init_fn`. The functions
        `ready_for_local_init_fn`, `local_init_fn` and `ready_fn` of the scaffold follow, in this
        order. The first call also takes the lead of the run, if this creator leads it.

        Raises:
            NotReadyError: `ready_fn` of the scaffold reports that something is missing.
            CorruptCheckpointError: there are checkpoints, and none of them is intact.
            CheckpointMismatchError: the checkpoint belongs to another graph or other tracked
                objects.
            CheckpointError: the checkpoints cannot be read, or another process writes there
                (`CheckpointBusyError`).
            StoreUnavailableError: the engine of the step store cannot be reached.
        """
        values = values_of(self._variables)
        if self._needs_lead and self._term is None:
            self._term = await self._leadership.enter_async_context(self.global_step.lead())
        # If the engine of the store has lost the steps of the run, allow writes again.
        has_lost_steps = self.global_step.acknowledge_loss() is not None
        # Ask the engine for the position, so that `global_step.latest` is up to date, too.
        position = await self.global_step.value()
        # If no session has initialized the variables yet, claim them: this one has to.
        is_first = await values.claim()
        initialize = functools.partial(
            self._initialize,
            is_first=is_first,
            has_lost_steps=has_lost_steps,
            store_step=position.step,
        )
        try:
            session = await self._new_session("initialization", initialize)
        except BaseException:
            if is_first:
                # Let another session claim the variables.
                values.discard()
            raise
        if is_first:
            values.mark_ready()
        self._latest = session
        if self._term is not None:
            await self.global_step.mark_initialised()
        return session

    async def _initialize(
        self,
        session: Session,
        *,
        is_first: bool,
        has_lost_steps: bool,
        store_step: int,
    ) -> None:
        """Restore a new session from the newest checkpoint, or else give it its step and variables.

        Args:
            session: the new session.
            is_first: whether its variables have never been initialized.
            has_lost_steps: whether the store has lost steps since the latest session.
            store_step: the step of the store.
        """
        session.tracked = self._scaffold.tracked or {}
        session.saver = self._saver
        latest = self._latest
        # In a first session of this creator that is not the first of the variables, another creator
        # has initialized these: they are newer than the checkpoint, so it is not restored.
        if self._saver is not None and (is_first or latest is not None):
            restored = await self._saver.restore()
            if restored is not None:
                await restore_session(session, restored)
                return
        if has_lost_steps and latest is not None and store_step < latest.committed_step:
            # The variables in memory still have the steps that the store has lost.
            await self.global_step.reset(latest.committed_step)
            session.committed_step = latest.committed_step
        elif is_first and self._term is not None and self._term.number > 1:
            # This chief replaces another one. As in `restore_session`, data that the other chief
            # had received are lost, so the step begins a new epoch.
            await self.global_step.reset(store_step)
        if is_first and self._scaffold.init_fn is not None:
            await self._scaffold.init_fn(session)

    async def aclose(self, *, grace_secs: float = DEFAULT_GRACE_SECS) -> None:
        """Close the saver, and then give up the lead of the run.

        The monitored session calls this at its end. A `Saver` that you have given stays open: only
        its pending copies to the mirror are awaited, at most `grace_secs`.
        """
        # The term of a chief ends with its lead.
        self._term = None
        # The end of this block gives up the lead. It comes after the last write to the checkpoint
        # directory, so that no other chief writes there meanwhile.
        async with self._leadership:
            if self._saver is None:
                return
            if self._owns_saver:
                await self._saver.aclose(grace_secs=grace_secs)
            else:
                await self._saver.flush_mirror(grace_secs)

    def fail_waiters(self, error: BaseException) -> None:
        """End the waits of workers for the variables, if no session can initialize these any more.

        The monitored session calls this when it ends with `error`.
        """
        values_of(self._variables).fail(error)


class WorkerSessionCreator(_Creator):
    """Creates sessions for workers, when a chief has initialized the variables.

    A worker in the process of the chief shares its variables. A worker in another process has its
    own variables, and a step store for several processes: it waits until the chief has initialized
    the run, and starts with the initial values of the graph.
    """

    def __init__(
        self,
        graph: Graph | Callable[..., Awaitable[Any]],
        *,
        scaffold: Scaffold | None = None,
        global_step: StepStore | None = None,
        variables: Variables | None = None,
        max_wait_secs: float | None = 1800.0,
    ) -> None:
        """Create no session yet.

        Args:
            graph: the graph of the sessions, or a coroutine function that is the step.
            scaffold: how to initialize them. A worker does not call its `init_fn`.
            global_step: the store of the global step.
            variables: the variables of the chief, if they are in this process.
            max_wait_secs: how long to wait for the chief. None sets no limit.

        Raises:
            InvalidArgumentError: there are neither shared variables nor a store for several
                processes.
        """
        super().__init__(graph, scaffold, global_step, variables)
        if variables is None and (global_step is None or global_step.inline):
            raise InvalidArgumentError(
                "a worker waits for a chief's variables: give both the same Variables(); or, in"
                " another process, a step store for several processes as global_step"
            )
        check_secs(max_wait_secs, "max_wait_secs", optional=True)
        self._shares_variables = variables is not None
        self._max_wait_secs = max_wait_secs

    async def create_session(self) -> Session:
        """Wait until the chief has initialized the variables, and create a session.

        If a chief in another process has finished already, the monitored session stops immediately:
        `Session.finished` has the reason.

        Raises:
            SessionNotReadyError: the chief was not ready within `max_wait_secs`.
            PublisherFailedError: the chief gave up.
            NotReadyError: the chief's graph has other variables, or `ready_fn` of the scaffold
                reports that something is missing.
        """
        finished = None
        if self._shares_variables:
            await self._wait_for_shared_variables()
        else:
            # If the engine has lost the steps of the run, this session begins after that.
            self.global_step.acknowledge_loss()
            try:
                await self.global_step.wait_initialised(self._max_wait_secs)
            except PublisherFinishedError as error:
                finished = error
        # Ask the engine for the position, so that `global_step.latest` is up to date.
        await self.global_step.value()
        session = await self._new_session("the chief's initialization")
        session.finished = finished
        return session

    async def _wait_for_shared_variables(self) -> None:
        """Wait until a chief in this process has initialized the variables.

        Raises:
            SessionNotReadyError: it was not ready within `max_wait_secs`.
            NotReadyError: it has not initialized all variables of this graph.
        """
        await self._variables.wait_ready(self._max_wait_secs)
        names = (variable.name for variable in self.graph.variables)
        missing = values_of(self._variables).missing(names)
        if missing:
            raise NotReadyError(
                f"the chief has not initialized {', '.join(missing)}; its graph must have the same"
                " variables"
            )


Source = Graph | SessionCreator | Callable[..., Awaitable[Any]]
"""The source of a monitored session: a graph, a creator of sessions, or a coroutine function as the
step.
"""


def creator_of(
    source: object, global_step: StepStore | None, variables: Variables | None
) -> SessionCreator:
    """Return a creator of raw sessions: the source itself, or one for its graph.

    Args:
        source: a `SessionCreator`, a graph, or a coroutine function that is the step.
        global_step: the store of the global step, or None for a new one.
        variables: the values of the variables, or None for new ones.
    """
    # A class is rejected below, by `graph_of`.
    if hasattr(source, "create_session") and not isinstance(source, type):
        if global_step is not None or variables is not None:
            raise InvalidArgumentError(
                "a SessionCreator has its own step store and variables; give them to it instead"
            )
        return cast("SessionCreator", source)
    graph = graph_of(source, wanted="a Graph, a SessionCreator")
    # Every process of a run may make such a session, and only one process may lead the run. So none
    # of these creators leads it.
    return ChiefSessionCreator(graph, global_step=global_step, variables=variables, lead=False)


def graph_of(source: object, *, wanted: str = "a Graph") -> Graph:
    """Return the graph of a source: itself, or the graph of a coroutine function.

    Raises:
        InvalidArgumentError: it is neither. `wanted` names for the message what else may be given.
    """
    if isinstance(source, Graph):
        return source
    if callable(source) and not isinstance(source, type):
        return graph_of_step(source)
    close_unawaited(source)
    raise InvalidArgumentError(
        f"{source!r} cannot be run; give {wanted} or an `async def` that is the step,"
        " without calling it"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """Which errors a session recovers from, and when it gives up.

    A run that had been committed, because `after_run` of a hook failed or a background task did
    meanwhile, is repeated and counts as another step, as in TensorFlow. In a loop whose feeds are
    tracked `run` returns its values instead, as each of their elements counts once, unless the new
    session was restored from before the commit. `run_step_fn` repeats its function in any case.

    Args:
        on: types of errors after which the session is replaced and the run repeated.
        max_attempts: recoveries without progress: until the step that failed, or a later one, is
            completed.
        backoff: the pauses before them.
        on_lost_feeds: what to do when going back has undone steps with feeds that do not come
            again, as they are not tracked in the `Scaffold`, or have no state. "log", the default:
            a warning says how many steps are gone. "raise": `FeedsLostError` ends the session.
    """

    on: tuple[type[BaseException], ...] = (AbortedError, UnavailableError)
    max_attempts: int = dataclasses.field(default=10, kw_only=True)
    backoff: Backoff = dataclasses.field(default=Backoff(), kw_only=True)
    on_lost_feeds: Literal["log", "raise"] = dataclasses.field(default="log", kw_only=True)

    def __post_init__(self) -> None:
        expected = "a whole number, 0 for never"
        number = checked_int(self.max_attempts, "max_attempts", expected=expected)
        object.__setattr__(self, "max_attempts", number)
        check_instance(self.backoff, Backoff, "backoff")
        check_choice(self.on_lost_feeds, "on_lost_feeds", "log", "raise")
        try:
            issubclass(Exception, self.on)
        except TypeError:
            raise InvalidArgumentError(
                f"on is {self.on!r}; give a type of exceptions, or a tuple of them"
            ) from None

    def recovers(self, error: BaseException) -> bool:
        """Return whether a session recovers from `error`.

        A group is recovered from if each member is recoverable or a clean end, and at least one is
        recoverable.
        """
        if isinstance(error, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", error)
            members = group.exceptions
            if not any(map(self.recovers, members)):
                return False
            return all(self.recovers(member) or is_clean_end(member) for member in members)
        if not isinstance(error, Exception) or isinstance(error, FeedsLostError):
            return False
        return isinstance(error, self.on)


NEVER = RecoveryPolicy((), max_attempts=0)
"""The policy of a session that never recovers."""
