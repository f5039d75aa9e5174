"""What a monitored session can run, and the creator of sessions that each of these comes to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohooks._checks import check_instance
from aiohooks._errors import InvalidArgumentError
from aiohooks._graph import Graph, graph_of_step, is_coroutine_function
from aiohooks._session_creator import ChiefSessionCreator, SessionCreator
from aiohooks._variables import Variables
from aiohooks.stores import StepStore

Source = Graph | SessionCreator | Callable[..., Awaitable[Any]]
"""What a monitored session runs: a graph, what creates sessions of one, or a coroutine function as the step."""


def creator_of(source: object, global_step: StepStore | None, variables: Variables | None) -> SessionCreator:
    """The creator of a session's sessions.

    Raises:
        InvalidArgumentError: not a source; or a store or variables beside a creator, which has its own.
    """
    check_instance(global_step, StepStore, "global_step", optional=True)
    check_instance(variables, Variables, "variables", optional=True)
    if hasattr(source, "create_session") and not isinstance(source, type):
        creator: Any = source
        if not is_coroutine_function(creator.create_session):
            raise InvalidArgumentError(f"create_session of {source!r} is not a coroutine function; write it as `async def`")
        if not isinstance(getattr(creator, "graph", None), Graph):
            raise InvalidArgumentError(f"{source!r} has no `graph`; a SessionCreator says which Graph its sessions run")
        if global_step is not None or variables is not None:
            raise InvalidArgumentError("the step store and variables are those of the SessionCreator's sessions; give them to it")
        return cast("SessionCreator", creator)
    graph = graph_of(source, "a Graph, a SessionCreator,")
    return ChiefSessionCreator(graph, global_step=global_step, variables=variables, lead=False)  # every process makes one


def graph_of(source: object, wanted: str = "a Graph") -> Graph:
    """The graph that a source is, or that a coroutine function comes to.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if isinstance(source, Graph):
        return source
    if callable(source) and not isinstance(source, type):
        return graph_of_step(source)
    raise InvalidArgumentError(f"{source!r} cannot be run; give {wanted} or an `async def` that is the step")
