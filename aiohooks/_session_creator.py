"""Making sessions: how a chief initialises the variables, and how a worker waits for that."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

from aiohooks._checks import check_instance, check_mapping, check_secs
from aiohooks._errors import InvalidArgumentError, NotReadyError
from aiohooks._graph import Graph, is_coroutine_function
from aiohooks._restoring import restore_session
from aiohooks._session import Session
from aiohooks._stateful import Stateful, is_stateful
from aiohooks._variables import Variables
from aiohooks.checkpoint import Saver
from aiohooks.stores import MemoryStepStore, Reign, StepStore


class SessionCreator(Protocol):
    """Makes the sessions of a monitored session: the first one, and one more after each recovery."""

    @property
    def graph(self) -> Graph:
        """The graph that its sessions run."""
        ...

    async def create_session(self) -> Session:
        """Makes a session that is ready to run."""
        ...


SessionFn = Callable[[Session], Awaitable[Any]]
"""A coroutine function that gets the new session."""

_FIELDS = ("init_fn", "ready_for_local_init_fn", "local_init_fn", "ready_fn")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold:
    """What belongs to a graph besides its operations: how a session of it is initialised, when it is ready, what is saved.

    The functions are coroutine functions that get the raw session. The two `ready` functions return what is missing: None,
    True or something empty means ready; False, a name or several names mean not.

    Args:
        init_fn: called by the chief after the variables have their initial values; not if they were ready before, or restored.
        ready_for_local_init_fn: asked before `local_init_fn`.
        local_init_fn: called for each created session, of a chief or a worker.
        ready_fn: asked at the end.
        tracked: objects that change themselves, such as a torch module or a data loader, by name; their `state_dict` is saved in
            checkpoints, and given to their `load_state_dict` when a session is restored.
        copy_from_scaffold: another one, whose functions stand in where this one has none.
    """

    init_fn: SessionFn | None = None
    ready_for_local_init_fn: SessionFn | None = None
    local_init_fn: SessionFn | None = None
    ready_fn: SessionFn | None = None
    tracked: Mapping[str, Stateful] | None = None
    copy_from_scaffold: dataclasses.InitVar[Scaffold | None] = None

    def __post_init__(self, copy_from_scaffold: Scaffold | None) -> None:
        other: object = copy_from_scaffold
        if other is not None and not isinstance(other, Scaffold):
            raise InvalidArgumentError(f"copy_from_scaffold is {other!r}; give a Scaffold")
        for name in _FIELDS:
            if getattr(self, name) is None and other is not None:
                object.__setattr__(self, name, getattr(other, name))
            fn = getattr(self, name)
            if fn is not None and not is_coroutine_function(fn):
                raise InvalidArgumentError(f"{name} is {fn!r}; give a coroutine function (`async def`) that takes the session")
        if self.tracked is None and other is not None:
            object.__setattr__(self, "tracked", other.tracked)
        check_mapping(self.tracked, "tracked", optional=True)
        for name, one in (self.tracked or {}).items():
            if not isinstance(name, str) or not is_stateful(one):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgumentError(
                    f"tracked[{name!r}] is {one!r}; give a name and an object with state_dict() and load_state_dict(state)"
                )

    async def local_init(self, session: Session, what: str) -> None:
        """Initialises what is a session's own, and checks that everything is there then."""
        await _check(self.ready_for_local_init_fn, session, f"{what} did not make the model ready for local_init")
        if self.local_init_fn is not None:
            await self.local_init_fn(session)
        await _check(self.ready_fn, session, f"{what} did not make the model ready")


async def _check(ready_fn: SessionFn | None, session: Session, message: str) -> None:
    if ready_fn is None:
        return
    missing = await ready_fn(session)
    if missing is None or missing is True:
        return
    if not isinstance(missing, (bool, str, Collection)):
        raise InvalidArgumentError(f"{ready_fn!r} returned {missing!r}; return None, True, or the names of what is missing")
    if missing is False or len(missing) > 0:  # type: ignore[arg-type]
        raise NotReadyError(f"{message}; {ready_fn!r} says that this is missing: {missing or 'something'}")


def _check_parts(graph: object, scaffold: object, global_step: object, variables: object) -> None:
    check_instance(graph, Graph, "graph")
    check_instance(scaffold, Scaffold, "scaffold", optional=True)
    check_instance(global_step, StepStore, "global_step", optional=True)
    check_instance(variables, Variables, "variables", optional=True)


class ChiefSessionCreator:
    """Creates sessions that initialise or restore the variables, unless they are there already.

    With a checkpoint directory the first session is restored from its newest good checkpoint, and so is the session that
    replaces one in a recovery; where there is none, a recovery goes on with the variables and the step as they are.

    Over processes it takes the lead of the step store (`StepStore.lead`), for as long as the monitored session is open, and
    tells the workers when all is initialised. A second chief of the run waits until the lead is free.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        scaffold: Scaffold | None = None,
        checkpoint_dir: str | os.PathLike[str] | Saver | None = None,
        global_step: StepStore | None = None,
        variables: Variables | None = None,
        lead: bool = True,
    ) -> None:
        """Keeps what all created sessions have in common.

        Args:
            graph: what the sessions run.
            scaffold: how they are initialised.
            checkpoint_dir: where they are restored from: a directory, or the `Saver` of one. `CheckpointSaverHook()` without a
                directory of its own writes there.
            global_step: where the global step is kept; one for all its sessions, if left out.
            variables: the values of the variables; likewise.
            lead: whether to take the lead of a step store over processes. False for peers without a chief.
        """
        _check_parts(graph, scaffold, global_step, variables)
        self.graph = graph
        self.global_step: StepStore = MemoryStepStore() if global_step is None else global_step
        self._scaffold = Scaffold() if scaffold is None else scaffold
        self._variables = Variables() if variables is None else variables
        self._saver = checkpoint_dir if checkpoint_dir is None or isinstance(checkpoint_dir, Saver) else Saver(checkpoint_dir)
        self._own_saver = self._saver is not checkpoint_dir
        self._created = False
        self._lead: contextlib.AbstractAsyncContextManager[Reign] | None = None
        self._leads = lead and not self.global_step.inline

    async def create_session(self) -> Session:
        """Makes a session: the checkpoint or `init_fn`, `ready_for_local_init_fn`, `local_init_fn`, `ready_fn`, in this order.

        Raises:
            NotReadyError: the scaffold says that something is missing in the end.
            CorruptCheckpointError: there are checkpoints, and none of them is good.
            CheckpointMismatchError: the checkpoint is of another graph, or of other tracked objects.
            CheckpointError: the checkpoints cannot be read, or another process writes there (`CheckpointBusyError`).
            StoreUnavailableError: the engine of the step store cannot be reached.
        """
        variables = self._variables
        if self._leads and self._lead is None:
            lead = self.global_step.lead()
            await lead.__aenter__()
            self._lead = lead
        await self.global_step.value()  # from here on its latest mark is known
        first = await variables.claim()
        session = Session(self.graph, global_step=self.global_step, variables=variables)
        session.tracked = self._scaffold.tracked or {}
        session.saver = self._saver
        try:
            if session.saver is not None and (first or self._created):
                restored = await session.saver.restore()
                if restored is not None:
                    await restore_session(session, restored)
            if first and session.restored is None and self._scaffold.init_fn is not None:
                await self._scaffold.init_fn(session)
            await self._scaffold.local_init(session, "initialisation")
        except BaseException:
            if first:
                variables.discard()
            await session.aclose()
            raise
        if first:
            variables.mark_ready()
        self._created = True
        if self._lead is not None:
            await self.global_step.mark_initialised()
        return session

    async def aclose(self) -> None:
        """Lets go of the checkpoint directory and the lead; called by the monitored session at its end.

        A given `Saver` stays as it is.
        """
        lead, self._lead = self._lead, None
        try:
            if self._saver is not None and self._own_saver:
                await self._saver.aclose()
        finally:
            if lead is not None:
                await lead.__aexit__(None, None, None)

    def gave_up(self, error: BaseException) -> None:
        """Tells the workers that wait for the variables that they will not come."""
        self._variables.fail(error)


class WorkerSessionCreator:
    """Creates sessions that wait until a chief has initialised the shared variables.

    A worker in another process than the chief has variables of its own, with a step store over processes: it waits until the
    chief has initialised its own ones, and begins with the initial values of the graph.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        scaffold: Scaffold | None = None,
        global_step: StepStore | None = None,
        variables: Variables | None = None,
        max_wait_secs: float | None = 1800.0,
    ) -> None:
        """Keeps what all created sessions have in common; like `ChiefSessionCreator`, and `max_wait_secs` (None: for ever).

        Raises:
            InvalidArgumentError: neither variables nor a store over processes: how would it hear of the chief?
        """
        _check_parts(graph, scaffold, global_step, variables)
        if variables is None and (global_step is None or global_step.inline):
            raise InvalidArgumentError(
                "a worker waits for a chief's variables: give both the same Variables(); or, in another process, "
                "a step store over processes as global_step"
            )
        check_secs(max_wait_secs, "max_wait_secs", optional=True)
        self.graph = graph
        self.global_step: StepStore = MemoryStepStore() if global_step is None else global_step
        self._scaffold = Scaffold() if scaffold is None else scaffold
        self._variables = variables
        self._own = Variables() if variables is None else None
        self._max_wait_secs = max_wait_secs

    async def create_session(self) -> Session:
        """Waits until the variables are ready, an awaited event, and makes a session.

        Raises:
            SessionNotReadyError: they were not ready within `max_wait_secs`.
            PublisherFailedError: the chief gave up.
            PublisherFinishedError: the chief has finished already.
            NotReadyError: the scaffold says that something is missing in the end.
        """
        if self._variables is not None:
            variables = self._variables
            await variables.wait_ready(self._max_wait_secs)
            missing = variables.missing(variable.name for variable in self.graph.variables)
            if missing:
                raise NotReadyError(f"the chief has not initialised {', '.join(missing)}; its graph must have the same variables")
        else:
            variables = self._own or Variables()
            await self.global_step.wait_initialised(self._max_wait_secs)
        await self.global_step.value()  # from here on its latest mark is known
        session = Session(self.graph, global_step=self.global_step, variables=variables)
        try:
            await self._scaffold.local_init(session, "the chief's initialisation")
        except BaseException:
            await session.aclose()
            raise
        return session
