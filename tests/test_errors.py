"""The error tree: every error pickles and copies, and a note never hides the error that it is
for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import dataclasses
import errno
import inspect
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

import aiohooks as ah
from aiohooks import errors
from aiohooks.errors import add_note, add_origin, copy_error, flattened, notes_of, printable
from tests.support.hooks import PhaseHook
from tests.support.sessions import run_once
from tests.support.waiting import forever, parked, raises_after

PUBLIC = [cls for cls in map(vars(errors).__getitem__, errors.__all__) if isinstance(cls, type)]
VALUES: dict[str, Any] = {
    "old": (0, 9),
    "new": (1, 0),
    "path": Path("checkpoints/step"),
    "exit_code": -9,
}
"""Attributes of errors that are no numbers."""


class PortError(ah.UnavailableError):
    """An error of a user, whose arguments are not those of `Exception`."""

    def __init__(self, port: int, *, host: str) -> None:
        super().__init__(f"nothing at {host}:{port}")
        self.address = (host, port)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An error that refuses every attribute, also its notes."""

    code: int = 7


class OddNotesError(Exception):
    """An error whose `__notes__` are its own affair."""

    def __init__(self) -> None:
        vars(self)["__notes__"] = "none"


class DeafError(Exception):
    """An error that refuses notes with an error of its own."""

    def add_note(self, note: str) -> NoReturn:
        raise LookupError(note)


def example(cls: type[Exception]) -> Exception:
    """Make an error with a value for every attribute, a note and a cause."""
    keywords = [
        one.name
        for one in inspect.signature(cls.__init__).parameters.values()
        if one.kind is one.KEYWORD_ONLY
    ]
    error = cls(
        "what happened",
        **{name: VALUES.get(name, number) for number, name in enumerate(keywords, 1)},
    )
    error.add_note("raised by a hook")
    return error


def pickled(error: Exception) -> Exception:
    copied: Exception = pickle.loads(pickle.dumps(error))
    return copied


def fail_with(error: Exception) -> NoReturn:
    raise error


@pytest.mark.parametrize("way", [pickled, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("cls", PUBLIC)
def test_every_public_error_pickles_and_copies(
    cls: type[Exception], way: Callable[[Exception], Exception]
) -> None:
    """The class, the message, the attributes and the notes of an error survive."""
    error = example(cls)
    twin = way(error)
    assert type(twin) is cls
    assert twin is not error
    assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("way", [pickled, copy.copy])
def test_errors_with_more_than_a_message_pickle_and_copy(way: Callable[[Any], Any]) -> None:
    """So do those with an `errno` and a file name, and a user's own with arguments that Python
    cannot pass again.
    """
    full = way(errors.CheckpointError(errno.ENOSPC, "no space left", "manifest"))
    assert (full.errno, full.strerror, full.filename) == (errno.ENOSPC, "no space left", "manifest")
    away = way(PortError(80, host="example"))
    assert (type(away), str(away), away.address) == (
        PortError,
        "nothing at example:80",
        ("example", 80),
    )


def test_every_public_error_comes_out_of_a_process_pool() -> None:
    """An error of a worker process reaches the caller as itself, and the pool stays usable."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        raised = {cls: pool.submit(fail_with, example(cls)).exception() for cls in PUBLIC}
        assert [type(error) for error in raised.values()] == PUBLIC
        assert pool.submit(int, "3").result() == 3


def test_a_copy_for_another_caller_has_no_notes_of_the_first() -> None:
    """It has the attributes and the cause, and another message if one is given; the original is
    unchanged.
    """
    error = ah.errors.StepTimeoutError("late", wanted=5, seen=3, waited_secs=1.0)
    error.__cause__ = cause = OSError("down")
    add_note(error, "raised by a hook")
    twin = copy_error(error, "late, wanted 5")
    assert (str(twin), twin.wanted, twin.__cause__, notes_of(twin)) == (
        "late, wanted 5",
        5,
        cause,
        [],
    )
    assert (str(error), notes_of(error)) == ("late", ["raised by a hook"])


@pytest.mark.parametrize("error", [ValueError("bad"), FrozenError()])
def test_notes_are_added_in_order(error: Exception) -> None:
    """Also to an error that refuses attributes; an origin is added once."""
    for _ in range(2):
        add_origin(error, "A.before_run")
        add_note(error, "and then: another")
    assert notes_of(error) == ["raised by A.before_run", "and then: another", "and then: another"]


@pytest.mark.parametrize("error", [OddNotesError(), DeafError()])
def test_an_error_that_takes_no_note_stays_itself(error: Exception) -> None:
    """Adding a note or an origin never raises, and leaves `__notes__` that are no list as they
    are.
    """
    notes = getattr(error, "__notes__", None)
    add_origin(error, "A.before_run")
    add_note(error, "and then: another")
    assert notes is None or getattr(error, "__notes__") is notes  # noqa: B009


async def test_a_forgotten_call_of_the_base_class_is_noted() -> None:
    """A hook whose `__init__` skips that of its base class fails with a note that names it."""

    class Skips(ah.NanHook):
        def __init__(self) -> None:
            self.own = 1

    class Mistyped(ah.NanHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            _ = self._vlaue  # type: ignore[attr-defined]

    with pytest.raises(AttributeError) as skipped:
        await run_once([Skips()])
    assert notes_of(skipped.value)[1:] == ["Skips.__init__ does not call super().__init__()"]
    with pytest.raises(AttributeError) as mistyped:
        await run_once([Mistyped("loss")])
    assert notes_of(mistyped.value) == ["raised by Mistyped.after_run at step 1"]


class SkippedSession(ah.AsyncMonitoredSession):
    def __init__(self) -> None:
        pass


class SkippedGroup(ah.HookGroup[Any]):
    def __init__(self) -> None:
        self.own = 1


class SkippedStore(ah.MemoryStepStore):
    def __init__(self) -> None:
        pass


class SkippedGraph(ah.Graph):
    def __init__(self) -> None:
        pass


class SkippedCreator(ah.ChiefSessionCreator):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    "use",
    [
        lambda: SkippedSession().request_stop("enough"),
        lambda: SkippedSession().status(),
        lambda: SkippedGroup().hooks,
        lambda: SkippedGroup().status(),
        lambda: SkippedStore().latest,
        lambda: SkippedGraph().placeholder("x"),
        lambda: SkippedCreator().graph,
    ],
)
def test_a_forgotten_call_of_the_base_class_is_noted_everywhere(use: Callable[[], object]) -> None:
    """Sessions, groups, stores, graphs and creators have the same note as hooks."""
    with pytest.raises(AttributeError) as raised:
        use()
    (note,) = notes_of(raised.value)
    assert note.startswith("Skipped")
    assert note.endswith(".__init__ does not call super().__init__()")


def test_a_missing_attribute_of_a_complete_object_has_no_note() -> None:
    """A class with an `__init__` of its own that calls the one of its base class."""

    class Complete(ah.MemoryStepStore):
        def __init__(self) -> None:
            super().__init__(run="r")

    with pytest.raises(AttributeError, match="'Complete' object has no attribute 'lates'") as error:
        _ = Complete().lates  # type: ignore[attr-defined]
    assert notes_of(error.value) == []


def test_flattened_groups_leave_their_notes_to_their_members() -> None:
    """Each error has its own notes, then those of its group, then those of the groups around that,
    each once.
    """
    inner = ExceptionGroup("inner", [ValueError("in"), FrozenError()])
    outer = ExceptionGroup("outer", [inner, KeyError("out")])
    add_origin(inner.exceptions[0], "A")
    for group, note in ((inner, "in file rows.csv"), (outer, "raised by A"), (outer, "attempt 1")):
        add_note(group, note)
    assert [(str(error), notes_of(error)) for error in flattened([OSError("alone"), outer])] == [
        ("alone", []),
        ("in", ["raised by A", "in file rows.csv", "attempt 1"]),
        ("", ["in file rows.csv", "raised by A", "attempt 1"]),
        ("'out'", ["raised by A", "attempt 1"]),
    ]


REFUSING: Any = [FrozenError, OddNotesError, DeafError]


@pytest.mark.every_python
@pytest.mark.parametrize("make", REFUSING)
async def test_an_error_that_refuses_attributes_beside_another_one(
    make: Callable[[], Exception],
) -> None:
    """A cancellation that wins over it has it as its context; an error that wins over it stays
    itself.
    """
    errors = [make(), make()]

    async def fail_in_cleanup(*_: object) -> None:
        try:
            await forever()
        finally:
            raise errors[0]

    task = await parked(run_once([PhaseHook("before_run", fail_in_cleanup)]), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    assert cancelled.value.__context__ is errors[0]
    with pytest.raises(type(errors[1])) as caught:
        await run_once(
            [
                PhaseHook("close", raises_after(1, errors[0])),
                PhaseHook("before_run", raises_after(1, errors[1])),
            ]
        )
    assert caught.value is errors[1]


def test_the_contexts_of_errors_make_no_circle() -> None:
    """A context that leads back to the error is cut there, and no other link: whoever follows the
    contexts comes to an end.
    """
    first, second, third = ValueError("first"), KeyError("second"), OSError("third")
    errors.set_context(first, second)
    errors.set_context(second, third)
    errors.set_context(third, first)
    assert errors.contexts(third) == [third, first, second]
    errors.set_context(third, third)
    assert errors.contexts(third) == [third]


def test_printable_text() -> None:
    """It is one line, without control characters, and of limited length."""
    assert printable("a\x1b[31m\n\u202eb\ud800") == "a\\x1b[31m\\n\\u202eb\\ud800"
    assert printable("x" * 200) == "x" * 200
    assert printable("x" * 201) == "x" * 197 + "..."
    assert printable("\n" * 60, 100) == "\\n" * 48 + "\\..."
