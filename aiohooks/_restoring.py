"""Going on from a checkpoint: the variables, the tracked objects, the global step and the hooks get what was saved of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, cast

from aiohooks._errors import CheckpointMismatchError, did_you_mean
from aiohooks._session import Session

if TYPE_CHECKING:
    from aiohooks.checkpoint import Restored

_logger = logging.getLogger("aiohooks")


async def restore_session(session: Session, restored: Restored) -> None:
    """Puts the variables, the tracked objects and the global step as they were saved; the hooks come later.

    A step store that is behind is raised, so that its waiters go on; one that is ahead is reset, in a new epoch.

    Raises:
        CheckpointMismatchError: the graph's variables or the tracked objects are not those of the checkpoint.
    """
    what = f"checkpoint {restored.checkpoint.path}"
    state = restored.state
    variables, tracked, hooks = (_part(state, name, what) for name in ("variables", "tracked", "hooks"))
    wanted = {variable.name for variable in session.graph.variables}
    _check_names(what, "variable", wanted, variables)
    _check_names(what, "tracked object", session.tracked, tracked)
    own = session.variables.snapshot()
    for name in sorted(wanted):
        _check_shape(what, name, own[name], variables[name])
    store, step = session.global_step, restored.checkpoint.step
    latest = (await store.value()).step
    if latest < step:
        await store.raise_to(step)
    elif latest > step:
        await store.reset(step)
    session.variables.assign({name: variables[name] for name in wanted})
    session.committed_step = step
    for name, one in session.tracked.items():
        with _told(f"{what}: loading the state of the tracked object {name!r}"):
            one.load_state_dict(tracked[name])
    # Without the values: the first ones would be held as long as the session.
    session.restored = dataclasses.replace(restored, state={"hooks": hooks})


def restore_hooks(session: Session) -> None:
    """Puts the hooks' states as they were saved; a hook that is not in the checkpoint stays as it is, and this is logged."""
    restored = session.restored
    if restored is None:
        return
    what = f"checkpoint {restored.checkpoint.path}"
    states, hooks = _part(restored.state, "hooks", what), session.stateful_hooks()
    for name, hook in hooks.items():
        if name in states:
            with _told(f"{what}: loading the state of the hook {name}"):
                hook.load_state_dict(states[name])
        else:
            _logger.warning("%s has no state of the hook %s, which starts anew", what, name)
    for name in states:
        if name not in hooks:
            _logger.info("%s has the state of a hook %s, which is not in this session", what, name)


@contextlib.contextmanager
def _told(what: str) -> Generator[None]:
    """Adds what was going on to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def _part(state: Mapping[str, Any], name: str, what: str) -> Mapping[str, Any]:
    part: object = state.get(name)
    if not isinstance(part, dict):
        raise CheckpointMismatchError(f"{what} has no {name!r}; was it written by CheckpointSaverHook?")
    return cast("Mapping[str, Any]", part)


def _check_names(what: str, kind: str, wanted: Any, saved: Mapping[str, Any]) -> None:
    missing = [name for name in wanted if name not in saved]
    if missing:
        known = "; ".join(f"{name!r}: {did_you_mean(name, saved)}" for name in missing)
        raise CheckpointMismatchError(
            f"{what} has no {kind} {known}. Use the graph it was saved from, or start in another directory"
        )
    unknown = [name for name in saved if name not in wanted]
    if unknown:
        raise CheckpointMismatchError(
            f"{what} has the {kind} {', '.join(map(repr, unknown))}, which would be lost: there is none of that name now. "
            "Use the graph and scaffold it was saved from, or start in another directory"
        )


def _check_shape(what: str, name: str, own: Any, saved: Any) -> None:
    """What has a shape keeps it: a step that was written for another one would fail later, or broadcast."""
    shapes = getattr(own, "shape", None), getattr(saved, "shape", None)
    if shapes[0] is not None and shapes[0] != shapes[1]:
        raise CheckpointMismatchError(
            f"{what} has variable {name!r} with shape {shapes[1]}; here it has shape {shapes[0]}. Was the model changed?"
        )
